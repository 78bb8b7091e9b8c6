//! The exception notifier (`coro.set_exception_notifier`): one function for the process, called with each exception
//! that ends a coro, except for cancellations and exceptions that leave the loop (`KeyboardInterrupt` and
//! `SystemExit`). It is called in the coro, while the coro's stack and context still exist. So it is not called for a
//! coro that gets no stack and ends with `MemoryError`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{mem, ptr};

use pyo3::exceptions::{PyKeyboardInterrupt, PySystemExit};
use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::errors::{ErrorClass, is_a};
use crate::binding::errors;

/// The function. Code that holds the lock only exchanges the value, or takes a reference to it.
static NOTIFIER: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

fn notifier() -> MutexGuard<'static, Option<Py<PyAny>>> {
    // A panic cannot leave the value half written.
    NOTIFIER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets or removes the function, and returns the previous one.
pub(super) fn exchange<'py>(py: Python<'py>, new: Option<Bound<'py, PyAny>>) -> Option<Bound<'py, PyAny>> {
    let old = mem::replace(&mut *self::notifier(), new.map(Bound::unbind));
    old.map(|old| old.into_bound(py))
}

/// Calls the notifier with `error`, the exception that ends the running coro `coro`. The notifier is not called for a
/// `CancelledError` or an exception that leaves the loop. Returns the error that the coro ends with: usually `error`.
/// If the notifier, or the handler that gets the notifier's errors, has raised an exception that leaves the loop, the
/// coro ends with that exception instead.
#[cold]
pub(super) fn tell(coro: Coro<'_>, error: PyErr) -> PyErr {
    let py = coro.py();
    let notifier = notifier()
        .as_ref()
        .map(|notifier| notifier.clone_ref(py).into_bound(py));
    let Some(notifier) = notifier else {
        return error;
    };
    // `into_value` sets the traceback, which a fetched error keeps separately on 3.11.
    let exception = error.clone_ref(py).into_value(py).into_bound(py);
    if is_a(&exception, ErrorClass::Cancelled) || errors::leaves_loop(py, &error) {
        return error;
    }
    coro.is_notified.set(true);
    // Inside the notifier, `sys.exception()` returns this exception, and `compact_traceback()` describes it.
    // SAFETY: attached; the setter takes its own reference. No other exception was being handled: the coro has no code
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

/// Reports an error of the scheduler itself to the loop's exception handler.
#[cold]
pub(super) fn report(coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    match coro.event_loop.get(coro.py()) {
        Some(event_loop) => errors::report(
            &event_loop,
            "Error while switching to a coro",
            error,
            &[("coro", &coro.to_bound())],
        ),
        None => Ok(()),
    }
}
