//! Who hears of an exception that ends a coro: one function for the process (`coro.set_exception_notifier`), called in
//! the coro while its stack and context are still there.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyKeyboardInterrupt, PySystemExit};
use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::errors::{ErrorClass, is_a};
use crate::binding::errors;

/// An owned reference, null for none. Read and exchanged only while attached to an interpreter with the GIL.
static NOTIFIER: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// Sets the function, or none; returns the one before.
pub(super) fn exchange<'py>(
    py: Python<'py>,
    notifier: Option<Bound<'py, PyAny>>,
) -> Option<Bound<'py, PyAny>> {
    let new = notifier.map_or(ptr::null_mut(), Bound::into_ptr);
    let old = NOTIFIER.swap(new, Ordering::AcqRel);
    // SAFETY: the static owned the reference, which goes to the caller.
    unsafe { Bound::from_owned_ptr_or_opt(py, old) }
}

/// Tells the notifier of `error`, with which `coro` (the running one) ends; the error that it ends with then.
#[cold]
pub(super) fn tell(coro: Coro<'_>, error: PyErr) -> PyErr {
    let py = coro.py();
    // SAFETY: attached, and nobody exchanges the notifier between the load and the new reference.
    let notifier = unsafe { Bound::from_borrowed_ptr_or_opt(py, NOTIFIER.load(Ordering::Acquire)) };
    let Some(notifier) = notifier else {
        return error;
    };
    // With its traceback, which a fetched error of 3.11 has beside it.
    let exception = error.clone_ref(py).into_value(py).into_bound(py);
    if is_a(&exception, ErrorClass::Cancelled) || errors::leaves_loop(py, &error) {
        return error;
    }
    coro.is_notified.set(true);
    // It is the exception being handled, for `sys.exception()` and `compact_traceback()` in the notifier.
    // SAFETY: attached; the setter takes a reference of its own, and the one before is none: nothing of the coro is
    // left on its stack.
    let told = unsafe {
        ffi::PyErr_SetHandledException(exception.as_ptr());
        let told = notifier.call1((coro.to_bound(), &exception));
        ffi::PyErr_SetHandledException(ptr::null_mut());
        told
    };
    match told {
        Ok(_) => error,
        Err(own)
            if own.is_instance_of::<PySystemExit>(py) || own.is_instance_of::<PyKeyboardInterrupt>(py) =>
        {
            own
        }
        Err(own) => {
            let reported = match coro.event_loop.get(py) {
                Some(event_loop) => errors::report(
                    &event_loop,
                    "Error in the exception notifier of coros",
                    own,
                    &[("coro", &coro.to_bound())],
                ),
                None => Ok(()),
            };
            reported.err().unwrap_or(error)
        }
    }
}

/// An error of the scheduler's own: to the loop's exception handler.
#[cold]
pub(super) fn report(coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    match coro.event_loop.get(coro.py()) {
        Some(event_loop) => errors::report(
            &event_loop,
            "Error on switching to a coro",
            error,
            &[("coro", &coro.to_bound())],
        ),
        None => Ok(()),
    }
}
