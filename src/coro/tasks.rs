//! The running task that asyncio sees while a coro runs: the coro itself, which has the interface of a task.
//!
//! From 3.14 on asyncio keeps it in the thread state, and `PyState::swap` takes it along. Before, it is a dict by loop,
//! which the scheduler changes at each switch. Whatever the coro has there when it is suspended comes back with it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::coroutine::Coro;
use super::machine::Machine;
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

/// The coro becomes the running task of a machine that has not run yet.
pub(super) fn begin(machine: &mut Machine, coro: Coro<'_>) {
    *machine.state.task() = coro.to_bound().into_ptr();
}

/// Before the switch to the coro.
#[inline(always)]
pub(super) fn enter(machine: *mut Machine, coro: Coro<'_>) {
    if SWAPS_TASK {
        return;
    }
    // SAFETY: attached; the dict is never freed, the loop and the task are references of the coro's; a failure
    // leaves the coro without a current task.
    unsafe {
        let task = *(*machine).state.task();
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
pub(super) fn leave(machine: *mut Machine, coro: Coro<'_>) {
    if SWAPS_TASK {
        return;
    }
    // SAFETY: as above; the reference in the machine is exchanged for one to what is in the dict now.
    unsafe {
        let tasks = CURRENT_TASKS.load(Ordering::Relaxed);
        let now = ffi::PyDict_GetItemWithError(tasks, coro.event_loop.as_ptr());
        let place = (*machine).state.task();
        if now != *place && !now.is_null() {
            let before = std::mem::replace(place, ffi::Py_NewRef(now));
            ffi::Py_XDECREF(before);
        }
        if now.is_null() || ffi::PyDict_DelItem(tasks, coro.event_loop.as_ptr()) != 0 {
            ffi::PyErr_Clear();
        }
    }
}

/// The machine has ended.
pub(super) fn end(machine: &mut Machine, _: Python<'_>) {
    let task = std::mem::replace(machine.state.task(), ptr::null_mut());
    // SAFETY: attached; the reference was the machine's.
    unsafe { ffi::Py_XDECREF(task) };
}

/// The running loop of this thread, or None.
pub(super) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let function = RUNNING_LOOP.load(Ordering::Relaxed);
    // SAFETY: set up before any coro can be made, never freed.
    unsafe { crate::event_loop::errors::owned(py, ffi::PyObject_CallNoArgs(function)) }
}
