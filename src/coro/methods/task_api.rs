//! The part of a task's interface that asyncio uses often: the outcome, the callbacks, and `await`.
//!
//! The rest of `asyncio.Task`'s interface is in Python (`grapeshot/coro/_coroutine.py`). If a Python method raised the
//! exception that a coro keeps, the exception's traceback would keep the method's frame, and the frame would keep the
//! coro: a reference cycle. The methods here are native, so they have no Python frames.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coro::check_thread;
use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, new_type, slot, with_critical_section};
use crate::binding::new_objects;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{methods_slot, row};
use crate::coro::coroutine::{Coro, Status};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::runtime::current;
use crate::coro::{scheduler, visibility};
use crate::event_loop::progress::{CoroutineStep, Progress};
use crate::event_loop::pyloop::LoopObject;

// ---- the outcome ---------------------------------------------------------------------------------------------

/// The result of a coro that has ended, or its exception with the traceback that it had when the coro ended. Each
/// caller that the exception passes through adds its frames to the traceback, so the frames of earlier callers are
/// removed here.
fn take_outcome(this: Coro<'_>) -> ObjectResult<'_> {
    match take_exception(this) {
        Some(exception) => Err(PyErr::from_value(exception)),
        None => Ok(this.result.get(this.py()).unwrap_or_else(|| none(this.py()))),
    }
}

fn take_exception(this: Coro<'_>) -> Option<Bound<'_, PyAny>> {
    let py = this.py();
    let exception = this.exception.get(py)?;
    this.is_unseen.set(false);
    let traceback = this.result.get(py).unwrap_or_else(|| none(py));
    // SAFETY: an exception, and a traceback or None.
    unsafe { ffi::PyException_SetTraceback(exception.as_ptr(), traceback.as_ptr()) };
    Some(exception)
}

/// Like `take_outcome`, for `result()` and `exception()`. If the caller is a coro and this coro was cancelled, the
/// caller gets `CoroCancelled`: the original exception would look as if the caller itself were cancelled, and would end
/// the caller silently. Other callers get the outcome that asyncio expects of a task.
fn take_visible_outcome(this: Coro<'_>) -> ObjectResult<'_> {
    let Some(exception) = take_exception(this) else {
        return take_outcome(this);
    };
    let py = this.py();
    if current(py).is_none() || !coro_errors::is_a(&exception, ErrorClass::Cancelled) {
        return Err(PyErr::from_value(exception));
    }
    let how = if coro_errors::is_a(&exception, ErrorClass::Shutdown) {
        "shut down"
    } else if coro_errors::is_exactly(&exception, ErrorClass::Cancelled) {
        "cancelled"
    } else {
        "interrupted"
    };
    let name = this.to_bound().getattr("name")?;
    let message = format!("coro {} was {how}", name.repr()?);
    let error = coro_errors::new(py, ErrorClass::CoroCancelled, &message);
    error.set_cause(py, Some(PyErr::from_value(exception)));
    Err(error)
}

/// The result or the exception of the coro, or None if the coro was cancelled.
fn outcome<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    match this.exception.get(py) {
        Some(exception) if coro_errors::is_a(&exception, ErrorClass::Cancelled) => Ok(none(py)),
        _ => take_outcome(this),
    }
}

/// The result or the exception that `await` gives, as for an asyncio task.
fn task_outcome<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    take_outcome(this)
}

fn result<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if !this.is_done() {
        return Err(coro_errors::new(
            this.py(),
            ErrorClass::InvalidState,
            "Result is not set.",
        ));
    }
    with_critical_section(this, || take_visible_outcome(this))
}

fn exception<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    if !this.is_done() {
        return Err(coro_errors::new(
            py,
            ErrorClass::InvalidState,
            "Exception is not set.",
        ));
    }
    with_critical_section(this, || match this.exception.get(py) {
        Some(exception) if coro_errors::is_a(&exception, ErrorClass::Cancelled) => take_visible_outcome(this),
        Some(exception) => {
            this.is_unseen.set(false);
            Ok(exception)
        }
        None => Ok(none(py)),
    })
}

// ---- callbacks -----------------------------------------------------------------------------------------------

/// Adds a callback: `callback(coro)` is called in `context` when the coro has ended.
fn append_callback<'py>(
    this: Coro<'py>,
    callback: Bound<'py, PyAny>,
    context: Bound<'py, PyAny>,
) -> PyResult<()> {
    let py = this.py();
    let entry = new_objects::tuple(py, [callback, context].into_iter())?;
    if let Some(callbacks) = this.callbacks.get(py) {
        return callbacks.cast::<PyList>()?.append(entry);
    }
    let callbacks = new_objects::list(py)?;
    callbacks.append(entry)?;
    this.callbacks.set(callbacks.into_any());
    Ok(())
}

/// Like `asyncio.Future.add_done_callback`: the callback runs in a copy of the caller's context, unless a context is
/// given.
fn add_done_callback<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [callback, context] = args.bind()?;
    check_thread(this)?;
    let py = this.py();
    let Some(callback) = callback else {
        return Ok(none(py));
    };
    let context = match context.filter(|context| !context.is_none()) {
        Some(context) => context,
        // SAFETY: attached; a new reference, or null with an exception set.
        None => unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())? },
    };
    if !this.is_done() {
        append_callback(this, callback, context)?;
    } else if let Some(event_loop) = this.event_loop.get(py) {
        LoopObject::of(&event_loop).soon(&callback, &[this.as_ptr()], &context)?;
    }
    Ok(none(py))
}

/// Removes the callbacks that are equal to `fn`, and returns how many there were.
fn remove_done_callback<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let (Some(callbacks), Some(callback)) = (this.callbacks.get(py), args.get(0)) else {
        return Ok(0_usize.into_pyobject(py)?.into_any());
    };
    let callbacks = callbacks.cast_into::<PyList>()?;
    let mut equal = Vec::new();
    // The comparison may run Python code that waits, and other code may then change the list. So the entries of a copy
    // are compared.
    for entry in callbacks.get_slice(0, callbacks.len()).iter() {
        if entry.get_item(0)?.eq(&callback)? {
            equal.push(entry);
        }
    }
    let mut removed = 0_usize;
    for index in (0..callbacks.len()).rev() {
        let entry = callbacks.get_item(index)?;
        if equal.iter().any(|other| other.is(&entry)) {
            callbacks.del_item(index)?;
            removed += 1;
        }
    }
    Ok(removed.into_pyobject(py)?.into_any())
}

// ---- await ---------------------------------------------------------------------------------------------------

/// The iterator of `await co`: yields the coro once, unless it has ended, and then returns the outcome.
#[repr(C)]
struct AwaitObject {
    base: ffi::PyObject,
    /// Empty once the outcome was returned.
    coro: ObjectCell,
    has_yielded: Cell<bool>,
}

static AWAIT_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for AwaitObject {
    const NAME: &'static CStr = c"grapeshot._core._CoroAwait";
    const DOC: &'static CStr = c"The iterator with which await waits for a coro.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.coro]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

/// `tp_as_async.am_await` and `tp_iter` of a coro.
pub(super) unsafe extern "C" fn am_await(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_await, attached, with a coro; the allocation comes zeroed.
    unsafe {
        let made = ffi::PyType_GenericAlloc(AWAIT_TYPE.load(Ordering::Relaxed), 0);
        if !made.is_null() {
            (*made.cast::<AwaitObject>()).coro.put_new(ffi::Py_NewRef(slf));
        }
        made
    }
}

fn step(this: This<'_, AwaitObject>) -> PyResult<CoroutineStep<'_>> {
    let py = this.py();
    let Some(object) = this.coro.get(py) else {
        return Err(PyRuntimeError::new_err(
            "cannot reuse the iterator of an awaited coro",
        ));
    };
    let coro = scheduler::coro_of(&object);
    if coro.is_done() {
        drop(this.coro.take(py));
        return take_outcome(coro).map(Progress::Done);
    }
    if coro.status.get() == Status::New && coro.event_loop.as_ptr() == visibility::running_loop(py)?.as_ptr()
    {
        return Err(coro_errors::new(
            py,
            ErrorClass::NotStarted,
            "the coro was not started, so waiting for it would never end",
        ));
    }
    if this.has_yielded.replace(true) {
        return Err(PyRuntimeError::new_err("await wasn't used with future"));
    }
    if current(py).is_some_and(|running| running.as_ptr() == object.as_ptr()) {
        let message = format!("Task cannot await on itself: {}", object.repr()?);
        return Err(PyRuntimeError::new_err(message));
    }
    coro.is_blocking.set(1);
    Ok(Progress::MustWait(object))
}

/// Calls `step` while no other thread can use the iterator.
fn step_alone(this: This<'_, AwaitObject>) -> PyResult<CoroutineStep<'_>> {
    with_critical_section(this, || step(this))
}

unsafe extern "C" fn iternext(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_iternext, attached, with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            step_alone(This::new(py, slf))?.into_iternext()
        })
    }
}

unsafe extern "C" fn am_send(
    slf: *mut ffi::PyObject,
    _value: *mut ffi::PyObject,
    result: *mut *mut ffi::PyObject,
) -> ffi::PySendResult {
    // SAFETY: CPython calls am_send, attached, with an object of this type and a place for the result.
    unsafe {
        let py = Python::assume_attached();
        let (object, outcome) =
            errors::at_boundary(py, (ptr::null_mut(), ffi::PySendResult::PYGEN_ERROR), || {
                step_alone(This::new(py, slf)).map(CoroutineStep::into_am_send)
            });
        *result = object;
        outcome
    }
}

fn send<'py>(this: This<'py, AwaitObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    step(this)?.into_send()
}

// ---- registration --------------------------------------------------------------------------------------------

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            outcome,
            Coro._outcome,
            "Return the result, or raise the exception. None if the coro was cancelled."
        ),
        row!(
            method,
            task_outcome,
            Coro._task_outcome,
            "Return the result, or raise the exception."
        ),
        row!(
            threadsafe_method,
            result,
            Coro.result,
            "Return the result, or raise the exception. Raises asyncio.InvalidStateError before the end."
        ),
        row!(
            threadsafe_method,
            exception,
            Coro.exception,
            "\
                Return the exception, or None. Raises InvalidStateError before the end.\n\n\
                If the coro was cancelled, raises CancelledError, or CoroCancelled if the caller is a coro."
        ),
        row!(
            method,
            add_done_callback,
            Coro.add_done_callback,
            "Make the loop call fn(self) when the coro has ended."
        ),
        row!(
            method,
            remove_done_callback,
            Coro.remove_done_callback,
            "Remove the callbacks that are equal to fn. Return how many there were."
        ),
    ]
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![row!(
        method,
        send,
        "send(value, /)",
        "Run the next step. The value is ignored."
    )];
    // SAFETY: the functions are for this layout; the table of methods is leaked.
    let kind = unsafe {
        new_type::<AwaitObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_iter, ffi::PyObject_SelfIter as *mut c_void),
                slot(ffi::Py_tp_iternext, iternext as *mut c_void),
                slot(ffi::Py_am_send, am_send as *mut c_void),
                methods_slot(methods),
            ],
        )?
    };
    AWAIT_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
