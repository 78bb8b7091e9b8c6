//! asyncio's current task while a coro runs is the coro itself, which has the interface of a task.
//!
//! From 3.14 on asyncio keeps the current task in the thread state, and `PyState::swap` swaps it. Before 3.14 it is in
//! a dict by loop, which the scheduler changes at each switch. The task that is current when the coro is suspended is
//! current again when it goes on.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::coroutine::Coro;
use super::fiber::Fiber;
use super::pystate::SWAPS_TASK;

/// `asyncio.tasks._current_tasks`, to 3.13.
static CURRENT_TASKS: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// `asyncio._get_running_loop`.
static RUNNING_LOOP: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

pub(super) fn set_up(py: Python<'_>) -> PyResult<()> {
    let running = py.import("_asyncio")?.getattr("_get_running_loop")?;
    RUNNING_LOOP.store(running.into_ptr(), Ordering::Release);
    if !SWAPS_TASK {
        let tasks = py.import("_asyncio")?.getattr("_current_tasks")?;
        CURRENT_TASKS.store(
            tasks.cast_into::<PyDict>()?.into_any().into_ptr(),
            Ordering::Release,
        );
    }
    Ok(())
}

/// The set inside the weak set in which asyncio keeps the tasks that are not its own, for `asyncio.all_tasks()`. Null:
/// asyncio's functions are called instead.
static REGISTRY: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// `asyncio._register_task` and `asyncio._unregister_task`.
static REGISTER: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
static UNREGISTER: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// `_coro_set_registry(set or None, register, unregister)`: how `asyncio.all_tasks()` gets to know coros.
pub(super) fn set_registry(
    registry: Option<Bound<'_, PyAny>>,
    register: Bound<'_, PyAny>,
    unregister: Bound<'_, PyAny>,
) {
    // The earlier objects are never freed: this runs once, and in tests.
    REGISTER.store(register.into_ptr(), Ordering::Release);
    UNREGISTER.store(unregister.into_ptr(), Ordering::Release);
    let registry = registry.map_or(ptr::null_mut(), Bound::into_ptr);
    REGISTRY.store(registry, Ordering::Release);
}

/// Adds the coro to `asyncio.all_tasks()`, as `asyncio._register_task` does, but without running its Python code.
#[inline]
pub(super) fn register(coro: Coro<'_>) -> PyResult<()> {
    let registry = REGISTRY.load(Ordering::Relaxed);
    if registry.is_null() {
        return tell(coro, &REGISTER);
    }
    // SAFETY: attached; a set that is never freed. The reference object is the one that every weak reference without
    // a callback shares, so `unregister` finds it again. It needs no callback: the coro lives until then.
    unsafe {
        let reference =
            Bound::from_owned_ptr_or_err(coro.py(), ffi::PyWeakref_NewRef(coro.as_ptr(), ptr::null_mut()))?;
        if ffi::PySet_Add(registry, reference.as_ptr()) != 0 {
            return Err(PyErr::fetch(coro.py()));
        }
    }
    Ok(())
}

/// The coro has ended.
#[inline]
pub(super) fn unregister(coro: Coro<'_>) {
    let registry = REGISTRY.load(Ordering::Relaxed);
    let result = if registry.is_null() {
        tell(coro, &UNREGISTER)
    } else {
        // SAFETY: as above.
        unsafe {
            Bound::from_owned_ptr_or_err(coro.py(), ffi::PyWeakref_NewRef(coro.as_ptr(), ptr::null_mut()))
                .and_then(
                    |reference| match ffi::PySet_Discard(registry, reference.as_ptr()) {
                        -1 => Err(PyErr::fetch(coro.py())),
                        _ => Ok(()),
                    },
                )
        }
    };
    // asyncio skips tasks that are done, so a coro that could not be removed does no harm.
    drop(result);
}

#[cold]
fn tell(coro: Coro<'_>, function: &AtomicPtr<ffi::PyObject>) -> PyResult<()> {
    // SAFETY: attached; null or a function that is never freed.
    match unsafe { Bound::from_borrowed_ptr_or_opt(coro.py(), function.load(Ordering::Relaxed)) } {
        Some(function) => function.call1((coro.to_bound(),)).map(drop),
        None => Ok(()),
    }
}

/// The coro becomes the running task of a fiber that has not run yet.
pub(super) fn begin(fiber: &mut Fiber, coro: Coro<'_>) {
    *fiber.state.task() = coro.to_bound().into_ptr();
}

/// Before the switch to the coro.
#[inline(always)]
pub(super) fn enter(fiber: *mut Fiber, coro: Coro<'_>) {
    if SWAPS_TASK {
        return;
    }
    // SAFETY: attached; the dict is never freed, the loop and the task are references of the coro's; a failure
    // leaves the coro without a current task.
    unsafe {
        let task = *(*fiber).state.task();
        if ffi::PyDict_SetItem(
            CURRENT_TASKS.load(Ordering::Relaxed),
            coro.event_loop.as_ptr(),
            task,
        ) != 0
        {
            ffi::PyErr_Clear();
        }
    }
}

/// After the switch back.
#[inline(always)]
pub(super) fn leave(fiber: *mut Fiber, coro: Coro<'_>) {
    if SWAPS_TASK {
        return;
    }
    // SAFETY: as above; the reference in the fiber is exchanged for one to what is in the dict now.
    unsafe {
        let tasks = CURRENT_TASKS.load(Ordering::Relaxed);
        let now = ffi::PyDict_GetItemWithError(tasks, coro.event_loop.as_ptr());
        let place = (*fiber).state.task();
        if now != *place && !now.is_null() {
            let before = std::mem::replace(place, ffi::Py_NewRef(now));
            ffi::Py_XDECREF(before);
        }
        if now.is_null() || ffi::PyDict_DelItem(tasks, coro.event_loop.as_ptr()) != 0 {
            ffi::PyErr_Clear();
        }
    }
}

/// The fiber has ended.
pub(super) fn end(fiber: &mut Fiber, _: Python<'_>) {
    let task = std::mem::replace(fiber.state.task(), ptr::null_mut());
    // SAFETY: attached; the reference was the fiber's.
    unsafe { ffi::Py_XDECREF(task) };
}

/// The running loop of this thread, or None.
pub(super) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let function = RUNNING_LOOP.load(Ordering::Relaxed);
    if function.is_null() {
        // A primitive that is made without the package.
        return Ok(py.None().into_bound(py));
    }
    // SAFETY: set up before any coro can be made, never freed.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyObject_CallNoArgs(function)) }
}
