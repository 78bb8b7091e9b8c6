//! Logging: records on the `asyncio` logger for everything that asyncio's own loop and transports log, and the events
//! of `GRAPESHOT_DEBUG` on loggers of their own.
//!
//! If a filter or handler raises, only the record is lost, and `sys.unraisablehook` gets the exception. Err is only for
//! exceptions that must leave the loop.

use std::sync::atomic::{AtomicU8, Ordering};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::errors;

/// The topics that `GRAPESHOT_DEBUG` can switch on here. Each has a logger of its own, which gets a line per event.
#[derive(Clone, Copy)]
pub(crate) enum Topic {
    /// `grapeshot.io`
    Io = 1,
    /// `grapeshot.tls`
    Tls = 2,
}

static TOPICS: AtomicU8 = AtomicU8::new(0);

/// Whether the events of a topic are logged.
#[inline(always)]
pub(crate) fn is_on(topic: Topic) -> bool {
    TOPICS.load(Ordering::Relaxed) & topic as u8 != 0
}

/// Logs an event if its topic is on. `what` returns the object that the event is about, and a text. An exception from
/// the logger goes to `sys.unraisablehook`, except for `KeyboardInterrupt`, which is raised again later.
#[inline(always)]
pub(crate) fn event<'py>(py: Python<'py>, topic: Topic, what: impl FnOnce() -> (Bound<'py, PyAny>, String)) {
    if is_on(topic) {
        let (object, text) = what();
        log_event(py, topic, &object, &text);
    }
}

#[cold]
#[inline(never)]
fn log_event(py: Python<'_>, topic: Topic, object: &Bound<'_, PyAny>, text: &str) {
    let name = match topic {
        Topic::Io => "grapeshot.io",
        Topic::Tls => "grapeshot.tls",
    };
    let logged = py
        .import("logging")
        .and_then(|logging| logging.call_method1("getLogger", (name,)))
        .and_then(|logger| logger.call_method1("debug", ("%r %s", object, text)));
    if let Err(error) = logged {
        if error.is_instance_of::<PyKeyboardInterrupt>(py) {
            // SAFETY: callable at any time. Ctrl-C is raised again later, in the user's code.
            unsafe { ffi::PyErr_SetInterrupt() };
        } else {
            error.write_unraisable(py, Some(object));
        }
    }
}

/// `_log_topics(io, tls)`: sets which topics are logged.
#[pyfunction(name = "_log_topics")]
pub(crate) fn log_topics(io: bool, tls: bool) {
    let bit = |is_on: bool, topic: Topic| if is_on { topic as u8 } else { 0 };
    TOPICS.store(bit(io, Topic::Io) | bit(tls, Topic::Tls), Ordering::Relaxed);
}

/// Logs a DEBUG record of `format % args`. Callers must be in debug mode.
#[cold]
pub(crate) fn debug(py: Python<'_>, format: &str, args: &[Bound<'_, PyAny>]) -> PyResult<()> {
    record(py, "debug", format, args, None)
}

/// Like `debug`, with the traceback of `exception`.
#[cold]
pub(crate) fn debug_exception(
    py: Python<'_>,
    format: &str,
    args: &[Bound<'_, PyAny>],
    exception: &Bound<'_, PyAny>,
) -> PyResult<()> {
    record(py, "debug", format, args, Some(exception))
}

/// Logs an INFO record of `format % args`. Callers must be in debug mode.
#[cold]
pub(crate) fn info(py: Python<'_>, format: &str, args: &[Bound<'_, PyAny>]) -> PyResult<()> {
    record(py, "info", format, args, None)
}

/// Logs a WARNING record of `format % args`.
#[cold]
pub(crate) fn warning(py: Python<'_>, format: &str, args: &[Bound<'_, PyAny>]) -> PyResult<()> {
    record(py, "warning", format, args, None)
}

fn record(
    py: Python<'_>,
    level: &str,
    format: &str,
    args: &[Bound<'_, PyAny>],
    exception: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    match try_record(py, level, format, args, exception) {
        Err(error) if !errors::leaves_loop(py, &error) => {
            error.write_unraisable(py, None);
            Ok(())
        }
        result => result,
    }
}

fn try_record(
    py: Python<'_>,
    level: &str,
    format: &str,
    args: &[Bound<'_, PyAny>],
    exception: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let mut call = vec![format.into_pyobject(py)?.into_any()];
    call.extend(args.iter().cloned());
    let options = PyDict::new(py);
    if let Some(exception) = exception {
        options.set_item("exc_info", exception)?;
    }
    py.import("asyncio.log")?.getattr("logger")?.call_method(
        level,
        PyTuple::new(py, call)?,
        Some(&options),
    )?;
    Ok(())
}
