//! Logging: makes records on the `asyncio` logger, the one that asyncio's own loop and transports use.
//!
//! If a filter or handler raises, only the record is lost, and `sys.unraisablehook` gets the exception. Err is only for
//! exceptions that must leave the loop.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::errors;

/// Logs a DEBUG record of `format % args`. Callers must check that the loop is in debug mode.
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

/// Logs an INFO record of `format % args`. Callers must check that the loop is in debug mode.
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
