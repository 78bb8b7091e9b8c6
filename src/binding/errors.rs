//! The one place that converts errors: `io::Error` becomes `OSError`, and a Rust panic becomes `RuntimeError` or
//! `MemoryError`. It also passes exceptions in callbacks to the loop's exception handler. Runs on any attached thread.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError, PyOSError, PyRuntimeError, PySystemExit};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An `OSError` (or the subclass that CPython chooses for the errno) with errno and the system's message.
#[cold]
pub(crate) fn os_error(error: &io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(errno) => {
            let text = io_message(errno);
            PyOSError::new_err((errno, text))
        }
        None => PyOSError::new_err(error.to_string()),
    }
}

/// `os_error` with the path of the failed call.
#[cold]
pub(crate) fn os_error_at(error: &io::Error, path: &Bound<'_, PyAny>) -> PyErr {
    match error.raw_os_error() {
        Some(errno) => PyOSError::new_err((errno, io_message(errno), path.clone().unbind())),
        None => PyOSError::new_err(error.to_string()),
    }
}

/// The text that CPython's `PyErr_SetFromErrno` gives an error: `strerror(errno)`, without Rust's " (os error N)".
fn io_message(errno: i32) -> String {
    if errno == 0 {
        return "Error".to_owned(); // a function has failed without telling why
    }
    let text = io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// True for `KeyboardInterrupt` and `SystemExit`, which leave `run_forever` instead of going to the exception handler.
#[cold]
pub(crate) fn leaves_loop(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyKeyboardInterrupt>(py) || error.is_instance_of::<PySystemExit>(py)
}

/// Runs `body` at the C boundary. An error becomes the current Python exception, and a panic becomes `RuntimeError` or
/// `MemoryError`. After an error or a panic, the result is `failure`.
#[inline]
pub(crate) fn at_boundary<R>(py: Python<'_>, failure: R, body: impl FnOnce() -> PyResult<R>) -> R {
    match caught(body) {
        Ok(value) => value,
        Err(error) => {
            raise(py, error);
            failure
        }
    }
}

/// Runs `body`. A panic becomes an error, for callers that have to clean up after it.
#[inline]
pub(crate) fn caught<R>(body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panic_error(&*payload)))
}

/// Makes `error` the current exception. If there is no memory for that, `MemoryError` becomes the current exception
/// instead.
///
/// The exception is restored inside `try_attach`, so that pyo3 counts the thread as attached. Otherwise pyo3 would
/// release a dropped reference only when it attaches the next time. Until then, that reference could keep the
/// exception's value alive.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: PyErr) {
    let mut error = Some(error);
    let restored = catch_unwind(AssertUnwindSafe(|| {
        Python::try_attach(|py| {
            if let Some(error) = error.take() {
                error.restore(py);
            }
        });
        // pyo3 does not attach while the interpreter shuts down or the collector traverses.
        if let Some(error) = error.take() {
            error.restore(py);
        }
    }));
    // SAFETY: attached. The exception that is raised for lack of memory was made in advance.
    unsafe {
        if restored.is_err() || ffi::PyErr_Occurred().is_null() {
            ffi::PyErr_NoMemory();
        }
    }
}

/// The text with which pyo3 panics if CPython had no memory for a new object (`panic_on_null`).
const NO_MEMORY: &str = "PyObject pointer is null";

/// The text of a panic, if it has one.
fn panic_text(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
}

/// The exception for a Rust panic: `MemoryError` if pyo3 panicked because there was no memory, `RuntimeError` for every
/// other panic.
#[cold]
pub(crate) fn panic_error(payload: &(dyn Any + Send)) -> PyErr {
    match panic_text(payload) {
        Some(NO_MEMORY) => PyMemoryError::new_err(()),
        text => PyRuntimeError::new_err(format!(
            "internal error in grapeshot: {}",
            text.unwrap_or("no message")
        )),
    }
}

/// Installs a panic hook that prints nothing for a panic that becomes a `MemoryError`.
pub(crate) fn silence_memory_errors() {
    let others = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if panic_text(info.payload()) != Some(NO_MEMORY) {
            others(info);
        }
    }));
}

/// Passes `error` to `loop.call_exception_handler`, in a context with asyncio's keys: `message`, `exception`, and the
/// keys in `details`. Returns `KeyboardInterrupt` and `SystemExit` as Err instead.
#[cold]
pub(crate) fn report(
    event_loop: &Bound<'_, PyAny>,
    message: &str,
    error: PyErr,
    details: &[(&str, &Bound<'_, PyAny>)],
) -> PyResult<()> {
    let py = event_loop.py();
    if leaves_loop(py, &error) {
        return Err(error);
    }
    let context = PyDict::new(py);
    context.set_item("message", message)?;
    context.set_item("exception", error.into_value(py).into_bound(py))?;
    for (key, value) in details {
        context.set_item(*key, value)?;
    }
    handle_report(event_loop, &context)
}

/// Calls `loop.call_exception_handler(context)`. A broken handler must not stop the loop, so an exception from that
/// call goes to `sys.unraisablehook`, except for the two exceptions that leave the loop.
#[cold]
pub(crate) fn handle_report(event_loop: &Bound<'_, PyAny>, context: &Bound<'_, PyDict>) -> PyResult<()> {
    let py = event_loop.py();
    match event_loop.call_method1("call_exception_handler", (context,)) {
        Ok(_) => Ok(()),
        Err(error) if leaves_loop(py, &error) => Err(error),
        Err(error) => {
            error.write_unraisable(py, Some(event_loop));
            Ok(())
        }
    }
}
