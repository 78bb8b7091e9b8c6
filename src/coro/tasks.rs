//! asyncio's running loop and current task while a coro runs.
//!
//! While a coro runs, the current task is the coro itself, which has the interface of a task. From 3.14 on asyncio
//! keeps the current task in the thread state, and `PyState::swap` swaps it. Before 3.14 asyncio keeps it in a dict
//! whose keys are the loops, and the scheduler updates this dict at each switch. If other code has set another current
//! task by the time the coro is suspended, that task is current again when the coro continues.
//!
//! A coro that hides the loop sees what an ordinary thread sees: no running loop and no current task. For such a coro,
//! each switch exchanges the thread's running loop with `Fiber::running_loop`. While the coro is suspended, this field
//! holds the running loop that the coro sees (usually null). While the coro runs, the field holds the thread's running
//! loop. `visibility` hides and shows the loop.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::coroutine::Coro;
use super::fiber::Fiber;
use super::pystate::{self, SWAPS_TASK};
use crate::binding::names::names;

/// `asyncio.tasks._current_tasks`, up to 3.13.
static CURRENT_TASKS: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// `asyncio.current_task`.
static CURRENT_TASK: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

pub(super) fn set_up(py: Python<'_>) -> PyResult<()> {
    let current = py.import("asyncio")?.getattr("current_task")?;
    CURRENT_TASK.store(current.into_ptr(), Ordering::Release);
    if !SWAPS_TASK {
        let tasks = py.import("_asyncio")?.getattr("_current_tasks")?;
        CURRENT_TASKS.store(
            tasks.cast_into::<PyDict>()?.into_any().into_ptr(),
            Ordering::Release,
        );
    }
    Ok(())
}

/// Makes the coro the current task of its new fiber, unless the coro hides the loop.
pub(super) fn begin(fiber: &mut Fiber, coro: Coro<'_>) {
    if !coro.hides_loop.get() {
        *fiber.state.task() = coro.to_bound().into_ptr();
    }
}

/// Called before the switch to the coro: installs its view of the current task and the running loop.
#[inline(always)]
pub(super) fn enter(fiber: *mut Fiber, coro: Coro<'_>) {
    // SAFETY: called by `scheduler::run`: the fiber is the coro's, and the thread is attached, on its own stack.
    if coro.hides_loop.get() && unsafe { enter_hiding(fiber, coro) } {
        return;
    }
    if SWAPS_TASK {
        return;
    }
    // SAFETY: as above; the fiber holds a reference to the task, unless the coro has none (`show` with None).
    unsafe {
        let task = *(*fiber).state.task();
        if !task.is_null() {
            set_current(coro, task);
        }
    }
}

/// Sets the current task of the coro's loop, up to 3.13. If this fails, the coro has no current task.
///
/// # Safety
/// Attached; `task` is a live object.
unsafe fn set_current(coro: Coro<'_>, task: *mut ffi::PyObject) {
    // SAFETY: attached; the dict is never freed, and the coro holds a reference to the loop.
    unsafe {
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

/// Takes the current task of the coro's loop out of the dict, up to 3.13. Returns a new reference, or null.
///
/// # Safety
/// Attached.
unsafe fn take_current(coro: Coro<'_>) -> *mut ffi::PyObject {
    // SAFETY: attached; the dict is never freed, and the coro holds a reference to the loop.
    unsafe {
        let tasks = CURRENT_TASKS.load(Ordering::Relaxed);
        let now = ffi::PyDict_GetItemWithError(tasks, coro.event_loop.as_ptr());
        let now = if now.is_null() { now } else { ffi::Py_NewRef(now) };
        if now.is_null() || ffi::PyDict_DelItem(tasks, coro.event_loop.as_ptr()) != 0 {
            ffi::PyErr_Clear();
        }
        now
    }
}

/// Sets the thread's running loop to the one that the coro sees while it hides its own loop (usually none). Returns
/// false if that fails; from then on, the coro sees its own loop.
///
/// # Safety
/// Attached, on the thread's own stack; the fiber is the coro's.
#[cold]
#[inline(never)]
unsafe fn enter_hiding(fiber: *mut Fiber, coro: Coro<'_>) -> bool {
    // SAFETY: by the contract, no other code uses the fiber.
    let fiber = unsafe { &mut *fiber };
    let Err(error) = exchange_loop(coro.py(), &mut fiber.running_loop) else {
        return true;
    };
    error.write_unraisable(coro.py(), Some(&coro.to_bound()));
    coro.hides_loop.set(false);
    let task = fiber.state.task();
    if task.is_null() {
        *task = coro.to_bound().into_ptr();
    }
    false
}

/// Restores the thread's running loop after a coro that hides its loop has run.
///
/// # Safety
/// As for `enter_hiding`.
#[cold]
#[inline(never)]
unsafe fn leave_hiding(fiber: *mut Fiber, coro: Coro<'_>) {
    // SAFETY: by the contract, no other code uses the fiber.
    if let Err(error) = exchange_loop(coro.py(), unsafe { &mut (*fiber).running_loop }) {
        error.write_unraisable(coro.py(), Some(&coro.to_bound()));
    }
}

/// Exchanges the running loop that asyncio sees in this thread with `place`, which holds an owned reference or null. If
/// this fails, nothing has changed. It never drops a last reference, so it runs no Python code.
fn exchange_loop(py: Python<'_>, place: &mut *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: attached; both places have an owned reference or null.
    unsafe {
        if let Some(running) = pystate::running_loop_place() {
            ptr::swap(running, place);
            return Ok(());
        }
    }
    let now = running_loop(py)?;
    // SAFETY: attached; the function is never freed; the place has an owned reference or null.
    unsafe {
        let next = if place.is_null() { ffi::Py_None() } else { *place };
        let set = names(py).set_running_loop.as_ptr();
        drop(Bound::from_owned_ptr_or_err(
            py,
            ffi::PyObject_CallOneArg(set, next),
        )?);
        ffi::Py_XDECREF(*place);
    }
    *place = if now.is_none() {
        ptr::null_mut()
    } else {
        now.into_ptr()
    };
    Ok(())
}

/// Hides the loop from the running coro, which must not have hidden it already. Returns the task that was current, or
/// None.
pub(super) fn hide(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    let py = coro.py();
    // SAFETY: the fiber of the running coro; the scheduler does not use it while the coro runs.
    let Some(fiber) = (unsafe { coro.fiber.get().as_mut() }) else {
        return Err(PyRuntimeError::new_err("the coro has no stack"));
    };
    exchange_loop(py, &mut fiber.running_loop)?;
    coro.hides_loop.set(true);
    // SAFETY: attached; the place has an owned reference or null, and so has the result.
    unsafe {
        let task = match pystate::running_task_place() {
            Some(place) => ptr::replace(place, ptr::null_mut()),
            None => take_current(coro),
        };
        Ok(Bound::from_owned_ptr_or_opt(py, task).unwrap_or_else(|| py.None().into_bound(py)))
    }
}

/// Shows the loop again to the running coro, which must be hiding it, and makes `task` the current task (None: there is
/// no current task).
pub(super) fn show<'py>(coro: Coro<'py>, task: &Bound<'py, PyAny>) -> PyResult<()> {
    let py = coro.py();
    if !running_loop(py)?.is_none() {
        return Err(PyRuntimeError::new_err(
            "another event loop runs in this coro: use its own functions to wait here",
        ));
    }
    // SAFETY: as in `hide`.
    let Some(fiber) = (unsafe { coro.fiber.get().as_mut() }) else {
        return Err(PyRuntimeError::new_err("the coro has no stack"));
    };
    exchange_loop(py, &mut fiber.running_loop)?;
    coro.hides_loop.set(false);
    let task = if task.is_none() {
        ptr::null_mut()
    } else {
        task.as_ptr()
    };
    // SAFETY: attached; the place gets its own reference, and the old one is dropped last.
    unsafe {
        if let Some(place) = pystate::running_task_place() {
            ffi::Py_XDECREF(ptr::replace(place, ffi::Py_XNewRef(task)));
        } else if !task.is_null() {
            set_current(coro, task);
        }
    }
    Ok(())
}

/// Called after the switch back: saves the coro's current task and restores the thread's view.
#[inline(always)]
pub(super) fn leave(fiber: *mut Fiber, coro: Coro<'_>) {
    if coro.hides_loop.get() {
        // SAFETY: as in `enter`.
        return unsafe { leave_hiding(fiber, coro) };
    }
    if SWAPS_TASK {
        return;
    }
    // SAFETY: as above; the fiber's reference is exchanged for one to the task that is in the dict now.
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

/// Drops the references of a fiber whose coro has ended.
pub(super) fn end(fiber: &mut Fiber, _: Python<'_>) {
    let task = std::mem::replace(fiber.state.task(), ptr::null_mut());
    let running_loop = std::mem::replace(&mut fiber.running_loop, ptr::null_mut());
    // SAFETY: attached; the references were the fiber's.
    unsafe {
        ffi::Py_XDECREF(task);
        ffi::Py_XDECREF(running_loop);
    }
}

/// The running loop that asyncio sees in this thread, or None.
pub(super) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    if CURRENT_TASK.load(Ordering::Relaxed).is_null() {
        // `set_up` has not been called: the native module is in use without the Python package.
        return Ok(py.None().into_bound(py));
    }
    names(py).read_running_loop.bind(py).call0()
}

/// `asyncio.current_task()`: a task, a coro or None.
#[cold]
pub(super) fn current(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: null, or a function that is never freed.
    match unsafe { Bound::from_borrowed_ptr_or_opt(py, CURRENT_TASK.load(Ordering::Relaxed)) } {
        Some(function) => function.call0(),
        None => Ok(py.None().into_bound(py)),
    }
}
