//! Coros that run long without a yield: a warning on asyncio's logger, as for slow callbacks.
//!
//! A run is timed by a clock that costs next to nothing and ticks every few milliseconds. Belongs to the coro's thread.

use pyo3::prelude::*;

use super::coroutine::Coro;
use super::scheduler;
use crate::event_loop::log;

/// The limit of a new thread.
pub(super) const DEFAULT_LIMIT_NS: u64 = 200_000_000;

/// Warns of a coro that has run for `took_ns` before it yielded or ended. Err is only for what must leave the loop.
#[cold]
pub(super) fn warn(coro: Coro<'_>, took_ns: u64) -> PyResult<()> {
    let py = coro.py();
    let seconds = (took_ns as f64 / 1e9).into_pyobject(py)?.into_any();
    let name = coro.to_bound().getattr("name")?;
    match place(coro) {
        Ok(Some([file, line, function])) => log::warning(
            py,
            "coro %r ran for %.3f seconds without a yield, until %s:%s in %s",
            &[name, seconds, file, line, function],
        ),
        Ok(None) => log::warning(
            py,
            "coro %r ran for %.3f seconds without a yield, until it ended",
            &[name, seconds],
        ),
        Err(error) => {
            error.write_unraisable(py, Some(&coro.to_bound()));
            Ok(())
        }
    }
}

/// File, line and function where the coro is suspended; None if it has ended.
fn place(coro: Coro<'_>) -> PyResult<Option<[Bound<'_, PyAny>; 3]>> {
    let Some(frame) = scheduler::frame(coro)? else {
        return Ok(None);
    };
    let code = frame.getattr("f_code")?;
    Ok(Some([
        code.getattr("co_filename")?,
        frame.getattr("f_lineno")?,
        code.getattr("co_qualname")?,
    ]))
}
