//! Runs the function of a coro, from the first instruction on its stack to the handling of its outcome.
//!
//! `run_on_stack` and the functions it calls run on the coro's stack; `finish` runs on the thread's own stack.

use std::cell::UnsafeCell;
use std::ffi::c_void;

use grapeshot_core::arch;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::coroutine::{Coro, Outcome, Status};
use super::hooks;
use super::interruption::raise_pending;
use super::notifier::{self, report};
use super::runtime::{Runtime, with_runtime};
use crate::binding::errors;
use crate::binding::native_type::{This, with_critical_section};
use crate::event_loop::coroutine::raised;
use crate::event_loop::pyloop::LoopObject;

/// The outermost function on a coro's stack. Like `suspension::wait_at_boundary`, it keeps almost nothing on the stack
/// while the coro's function runs.
pub(super) unsafe extern "C" fn run_on_stack(argument: *mut c_void) -> ! {
    // SAFETY: the scheduler switches here attached, with the coro for which `Runtime::build` prepared the stack. The
    // arguments are a tuple, and a dict or null; the coro keeps them, and the runtime keeps the coro.
    unsafe {
        let coro: Coro<'static> = This::new(Python::assume_attached(), argument.cast());
        if begin(coro) {
            let result = ffi::PyObject_Call(coro.function.as_ptr(), coro.args.as_ptr(), coro.kwargs.as_ptr());
            end(coro, result);
        }
        let main_sp = with_runtime(|runtime| runtime.main_sp.get());
        let unused = UnsafeCell::new(0);
        // `main_sp` is where the thread's own stack was left. Nothing switches back to the coro's stack.
        arch::switch(unused.get(), main_sp);
    }
    std::process::abort()
}

/// Enters the coro's context. If the function must not be called, for example because an exception was pending before
/// the first run, this records the outcome and returns false.
#[inline(never)]
fn begin(coro: Coro<'static>) -> bool {
    record_outcome(coro, || {
        let py = coro.py();
        drop(coro.wake_value.take(py));
        if !coro.context.is_set() {
            return Err(PyRuntimeError::new_err("the coro has lost its context"));
        }
        // SAFETY: a live context. `leave_context` exits the context on the same stack. No other context has been
        // entered on this stack before.
        if unsafe { ffi::PyContext_Enter(coro.context.as_ptr()) } != 0 {
            return Err(PyErr::fetch(py));
        }
        if let Err(error) = raise_pending(coro) {
            return leave_context(coro, Err(error)).map(Some);
        }
        if coro.function.is_set() && coro.args.is_set() {
            return Ok(None);
        }
        let lost = PyRuntimeError::new_err("the coro has lost its function");
        leave_context(coro, Err(lost)).map(Some)
    })
}

/// Records the outcome of the function. `result` is its result, or null if it raised.
#[inline(never)]
fn end(coro: Coro<'static>, result: *mut ffi::PyObject) {
    record_outcome(coro, || {
        let py = coro.py();
        // SAFETY: a new reference, or null with an exception set.
        let result = unsafe { Bound::from_owned_ptr_or_err(py, result) };
        // The function and its arguments are dropped here, on the coro's stack, so that their finalizers may still
        // wait.
        drop(with_critical_section(coro, || {
            (coro.function.take(py), coro.args.take(py), coro.kwargs.take(py))
        }));
        leave_context(coro, result).map(Some)
    });
}

/// Tells the exception notifier of an error, leaves the coro's context, and returns the outcome of the function.
fn leave_context<'py>(coro: Coro<'py>, outcome: Outcome<'py>) -> Outcome<'py> {
    let outcome = outcome.map_err(|error| notifier::tell(coro, raised(coro.py(), error)));
    if !coro.context.is_set() {
        return Err(PyRuntimeError::new_err("the coro has lost its context"));
    }
    // SAFETY: entered in `begin` on this stack. No exception is set now: if there was one, `outcome` holds it.
    if unsafe { ffi::PyContext_Exit(coro.context.as_ptr()) } != 0 {
        return Err(PyErr::fetch(coro.py()));
    }
    outcome
}

/// Runs a part of the coro's outermost function and turns a panic into an exception. If the part returns None, the coro
/// goes on, and this returns true. Otherwise this records the part's result or exception as the outcome, marks the coro
/// as done, and returns false.
#[inline(always)]
fn record_outcome<'py, F>(coro: Coro<'py>, part: F) -> bool
where
    F: FnOnce() -> PyResult<Option<Bound<'py, PyAny>>>,
{
    let outcome = match errors::caught(part) {
        Ok(None) => return true,
        Ok(Some(value)) => Ok(value),
        Err(error) => Err(error),
    };
    store(coro, outcome);
    coro.status.set(Status::Done);
    false
}

/// Stores the outcome in the coro. If this is called on the coro's stack, `run_on_stack` then leaves that stack for
/// good. So the callers must not leave a value with a destructor there: it would never be dropped.
pub(super) fn store(coro: Coro<'_>, outcome: PyResult<Bound<'_, PyAny>>) {
    match outcome {
        Ok(value) => coro.result.set(value),
        Err(error) => {
            let py = coro.py();
            coro.is_unseen.set(!coro.is_notified.get());
            // `take_outcome` restores the traceback from `result`, which is otherwise unused after an error.
            if let Some(traceback) = error.traceback(py) {
                coro.result.set(traceback.into_any());
            }
            coro.exception.set(error.into_value(py).into_bound(py).into_any());
        }
    }
}

/// Cleans up after a coro that has ended, on the thread's own stack. Schedules the coro's callbacks, as a Future does
/// when it is done. Returns Err only for an exception that must leave the loop.
pub(super) fn finish(runtime: &Runtime, coro: Coro<'_>) -> PyResult<()> {
    let py = coro.py();
    runtime.dismantle(coro);
    let is_child = runtime.is_forked.replace(false);
    let kept = runtime.leave(coro);
    // Other threads may read the coro's attributes now.
    let (context, callbacks) =
        with_critical_section(coro, || (coro.context.take(py), coro.callbacks.take(py)));
    drop(context);
    let event_loop = coro.event_loop.get(py);
    let leaving = coro.exception.get(py).and_then(|exception| {
        let error = PyErr::from_value(exception);
        errors::leaves_loop(py, &error).then_some(error)
    });
    let has_listeners = !is_child || hooks::end_child(&kept, leaving.is_some())?;
    if has_listeners
        && let Some(callbacks) = callbacks
        && let Some(event_loop) = &event_loop
        && !LoopObject::of(event_loop).reactor().is_closed()
        && let Err(error) = schedule_callbacks(coro, &callbacks, event_loop)
    {
        report(coro, error)?;
    }
    drop(kept);
    match leaving {
        Some(error) => {
            coro.is_unseen.set(false);
            Err(error)
        }
        None => Ok(()),
    }
}

/// Schedules `callback(coro)` for each callback in order, each in its own context.
fn schedule_callbacks(
    coro: Coro<'_>,
    callbacks: &Bound<'_, PyAny>,
    event_loop: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (event_loop, has_failed) = (LoopObject::of(event_loop), coro.exception.is_set());
    for entry in callbacks.cast::<PyList>()?.iter() {
        let entry = entry.cast_into::<PyTuple>()?;
        let (callback, context) = (entry.get_item(0)?, entry.get_item(1)?);
        if has_failed {
            event_loop.soon(&callback, &[coro.as_ptr()], &context)?;
        } else {
            event_loop.soon_after_wait(&callback, coro.as_ptr(), &context)?;
        }
    }
    Ok(())
}
