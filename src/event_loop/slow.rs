//! Debug mode's slow-callback log, with the same sentence as asyncio on the same logger.
//!
//! Runs on the loop's thread, and only in debug mode.

use grapeshot_core::sys::clock;
use pyo3::prelude::*;

use super::handle::HandleRef;
use super::pyloop::LoopObject;
use crate::binding::log;

/// Runs `handle` and logs it if it took at least `limit_s` seconds.
#[cold]
pub(crate) fn run_handle(
    py: Python<'_>,
    event_loop: &LoopObject,
    handle: HandleRef,
    limit_s: f64,
) -> PyResult<()> {
    if handle.is_cancelled(py) {
        return Ok(());
    }
    // `default_exception_handler` shows where the running handle was created.
    let own_loop = event_loop.to_bound(py);
    own_loop.setattr("_current_handle", handle.this(py).to_bound())?;
    let started_ns = clock::now_ns();
    let result = handle.run_and_keep(py);
    own_loop.setattr("_current_handle", py.None().into_bound(py))?;
    let took_s = elapsed_s(started_ns);
    if took_s >= limit_s && result.is_ok() {
        let own = handle.this(py).to_bound();
        let logged = py
            .import("asyncio.base_events")
            .and_then(|events| events.call_method1("_format_handle", (&own,)))
            .and_then(|text| warn(py, &text, took_s));
        if let Err(error) = logged {
            error.write_unraisable(py, Some(&own_loop));
        }
    }
    handle.forget_call_unless_kept(py);
    result
}

/// Logs a transport whose event or queued step took at least `limit_s` seconds since `started_ns`.
#[cold]
pub(crate) fn check_source(source: &Bound<'_, PyAny>, started_ns: u64, limit_s: f64) {
    let took_s = elapsed_s(started_ns);
    if took_s < limit_s {
        return;
    }
    let py = source.py();
    if let Err(error) = source.repr().and_then(|text| warn(py, text.as_any(), took_s)) {
        error.write_unraisable(py, Some(source));
    }
}

fn elapsed_s(started_ns: u64) -> f64 {
    clock::now_ns().saturating_sub(started_ns) as f64 / 1e9
}

fn warn(py: Python<'_>, what: &Bound<'_, PyAny>, took_s: f64) -> PyResult<()> {
    log::warning(
        py,
        "Executing %s took %.3f seconds",
        &[what.clone(), took_s.into_pyobject(py)?.into_any()],
    )
}
