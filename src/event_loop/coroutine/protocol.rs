//! The coroutine protocol: the step, the three ways to take it (`send`, `am_send` for tasks, and `tp_iternext` for
//! `await`), `throw` and `close`.

use std::ptr;

use pyo3::exceptions::{PyBaseException, PyRuntimeError, PyStopIteration, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::Steps;
use super::object::{Coroutine, CoroutineObject, CoroutineState, end, finish};
use crate::binding::args::Args;
use crate::binding::native_type::{NativeType, This};
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::{errors, new_objects};
use crate::event_loop::progress::{CoroutineStep, Progress};
use crate::event_loop::waiter;

impl<'py> CoroutineStep<'py> {
    /// The result of the method `send`.
    pub(crate) fn into_send(self) -> ObjectResult<'py> {
        match self {
            Progress::MustWait(yielded) => Ok(yielded),
            Progress::Done(value) => Err(stop(value)),
        }
    }

    /// The result of `am_send`.
    #[inline]
    pub(crate) fn into_am_send(self) -> (*mut ffi::PyObject, ffi::PySendResult) {
        match self {
            Progress::MustWait(yielded) => (yielded.into_ptr(), ffi::PySendResult::PYGEN_NEXT),
            Progress::Done(value) => (value.into_ptr(), ffi::PySendResult::PYGEN_RETURN),
        }
    }

    /// The result of `tp_iternext`. Null without an exception means that the coroutine has returned None.
    #[inline]
    pub(crate) fn into_iternext(self) -> PyResult<*mut ffi::PyObject> {
        match self {
            Progress::MustWait(yielded) => Ok(yielded.into_ptr()),
            Progress::Done(value) if value.is_none() => Ok(ptr::null_mut()),
            // `PyErr_SetObject` would use the items of a tuple as the arguments of the `StopIteration`, and could use
            // an exception as the `StopIteration` itself.
            Progress::Done(value)
                if value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyBaseException>() =>
            {
                Err(stop(value))
            }
            Progress::Done(value) => {
                // SAFETY: attached, as the value proves; the value is alive during the call.
                unsafe { ffi::PyErr_SetObject(ffi::PyExc_StopIteration, value.as_ptr()) };
                Ok(ptr::null_mut())
            }
        }
    }
}

/// `StopIteration(value)`, with which an iterator returns a value.
fn stop(value: Bound<'_, PyAny>) -> PyErr {
    match new_objects::tuple(value.py(), [value].into_iter()) {
        Ok(args) => PyStopIteration::new_err(args.unbind()),
        Err(error) => error,
    }
}

/// Takes a step: checks that the previous step's wait is over, and makes an attempt.
#[inline]
fn step<S: Steps>(this: Coroutine<'_, S>, value: *mut ffi::PyObject) -> PyResult<CoroutineStep<'_>> {
    match this.state.get() {
        CoroutineState::Created => {}
        CoroutineState::Suspended => resume(this)?,
        CoroutineState::Running => return Err(PyValueError::new_err("coroutine already executing")),
        CoroutineState::Closed => {
            return Err(PyRuntimeError::new_err("cannot reuse already awaited coroutine"));
        }
    }
    this.state.set(CoroutineState::Running);
    let attempt = errors::caught(|| S::attempt(this, value));
    if let Ok(Progress::MustWait(_)) = &attempt {
        this.has_waited.set(true);
        this.state.set(CoroutineState::Suspended);
    } else {
        finish(this);
    }
    attempt.map_err(|error| raised(this.py(), error))
}

/// The exception that a coroutine or a coro raises after `error` was raised in it. `StopIteration` becomes a
/// `RuntimeError`, because code that awaits the coroutine or coro would take it for the result (PEP 479).
#[cold]
pub(crate) fn raised(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyStopIteration>(py) {
        return error;
    }
    let instead = PyRuntimeError::new_err("coroutine raised StopIteration");
    instead.set_context(py, Some(error.clone_ref(py)));
    instead.set_cause(py, Some(error));
    instead
}

/// Yields a waiter from `Steps::attempt`. The next step calls `resume`, which checks that the wait is over, and raises
/// the waiter's exception if it has one.
#[inline]
pub(crate) fn yield_waiter<'py, S: Steps>(
    this: Coroutine<'py, S>,
    waiter: Bound<'py, PyAny>,
) -> CoroutineStep<'py> {
    this.waiter.set(waiter.clone());
    Progress::MustWait(waiter)
}

/// Called at the start of a step of a suspended coroutine. Raises the exception of the waiter, or `RuntimeError` if the
/// wait is not over, which happens if something other than a task drives the coroutine.
fn resume<S: Steps>(this: Coroutine<'_, S>) -> PyResult<()> {
    let Some(yielded) = this.waiter.get(this.py()) else {
        return Ok(());
    };
    let waiter = waiter::waiter_of(&yielded);
    if waiter.is_pending() {
        return Err(PyRuntimeError::new_err("await wasn't used with future"));
    }
    drop(this.waiter.take(this.py()));
    waiter::check_outcome(waiter).inspect_err(|_| finish(this))
}

/// Raises TypeError for a value that is sent before the first step.
fn check_sent<S: Steps>(this: Coroutine<'_, S>, value: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: only the address of None is compared.
    if this.state.get() == CoroutineState::Created && value != unsafe { ffi::Py_None() } {
        return Err(PyTypeError::new_err(
            "can't send non-None value to a just-started coroutine",
        ));
    }
    Ok(())
}

pub(super) unsafe extern "C" fn am_send<S: Steps>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    result: *mut *mut ffi::PyObject,
) -> ffi::PySendResult {
    // SAFETY: CPython calls am_send, attached, with an object of this type and a place for the result.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        let (object, outcome) =
            errors::at_boundary(py, (ptr::null_mut(), ffi::PySendResult::PYGEN_ERROR), || {
                let taken = CoroutineObject::<S>::with_access(this, || {
                    check_sent(this, value)?;
                    step(this, value)
                });
                taken.map(CoroutineStep::into_am_send)
            });
        *result = object;
        outcome
    }
}

pub(super) unsafe extern "C" fn am_await<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_await, attached, with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Coroutine<'_, S> = This::new(py, slf);
            CoroutineObject::<S>::with_access(this, || match this.state.get() {
                CoroutineState::Suspended | CoroutineState::Running => {
                    Err(PyRuntimeError::new_err("coroutine is being awaited already"))
                }
                CoroutineState::Created | CoroutineState::Closed => Ok(ffi::Py_NewRef(slf)),
            })
        })
    }
}

pub(super) unsafe extern "C" fn iternext<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_iternext, attached, with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        errors::at_boundary(py, ptr::null_mut(), || {
            CoroutineObject::<S>::with_access(this, || step(this, ffi::Py_None()))?.into_iternext()
        })
    }
}

pub(super) fn send<'py, S: Steps>(this: Coroutine<'py, S>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let value = args.positional()[0];
    check_sent(this, value)?;
    step(this, value)?.into_send()
}

/// `throw(exception)` or `throw(type, value, traceback)`. A native coroutine catches nothing, so the exception comes
/// out again, unless a coroutine that this one drives catches it.
pub(super) fn throw<'py, S: Steps>(this: Coroutine<'py, S>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if args.only_positional().is_none_or(|values| values.len() > 3) {
        return Err(args.wrong_count("from 1 to 3 positional", None));
    }
    let given = |index: usize| args.get(index).filter(|value| !value.is_none());
    let Some(kind) = args.get(0) else {
        return Ok(none(this.py()));
    };
    let value = given(1);
    let error = match (kind.is_instance_of::<pyo3::types::PyType>(), value) {
        (false, Some(_)) => {
            return Err(PyTypeError::new_err(
                "instance exception may not have a separate value",
            ));
        }
        (true, Some(value)) if !value.is_instance(&kind)? => kind.call1((value,))?,
        (true, None) => kind.call0()?,
        (_, Some(value)) => value,
        (false, None) => kind,
    };
    if let Some(traceback) = given(2) {
        error.setattr("__traceback__", traceback)?;
    }
    match this.state.get() {
        CoroutineState::Running => Err(PyValueError::new_err("coroutine already executing")),
        CoroutineState::Closed => Err(PyRuntimeError::new_err("cannot reuse already awaited coroutine")),
        CoroutineState::Created | CoroutineState::Suspended => throw_in(this, error),
    }
}

fn throw_in<'py, S: Steps>(this: Coroutine<'py, S>, error: Bound<'py, PyAny>) -> ObjectResult<'py> {
    let before = this.state.replace(CoroutineState::Running);
    match S::throw_inside(this, &error) {
        Some(Ok(yielded)) => {
            this.state.set(CoroutineState::Suspended);
            Ok(yielded)
        }
        Some(Err(error)) => {
            // StopIteration means that the inner coroutine has caught the exception and returned, so this one returns.
            finish(this);
            Err(error)
        }
        None => {
            this.state.set(before);
            end(this);
            Err(raised(this.py(), PyErr::from_value(error)))
        }
    }
}

pub(super) fn close<'py, S: Steps>(this: Coroutine<'py, S>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.state.get() == CoroutineState::Running {
        return Err(PyValueError::new_err("coroutine already executing"));
    }
    let before = this.state.replace(CoroutineState::Running);
    let closed = S::close_inside(this);
    this.state.set(before);
    end(this);
    closed.map_err(|error| raised(this.py(), error))?;
    Ok(none(this.py()))
}
