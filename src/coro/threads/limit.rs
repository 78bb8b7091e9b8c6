//! Checks the arguments `blocking` (or `block`) and `timeout`. For locks and `SimpleQueue`, the error messages are the
//! ones of `_thread` and `_queue`.

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyFloat;

use crate::coro::sync::limit::Limit;

/// `PY_TIMEOUT_MAX` in seconds.
const LONGEST_S: f64 = 9_223_372_036.854_775;
/// A number of seconds above this is not a valid time in CPython.
const NO_TIME_S: f64 = 9_223_372_036.854_776;

/// Reads seconds as CPython does: from a float, or from an object with `__index__`.
fn seconds(timeout: &Bound<'_, PyAny>) -> PyResult<f64> {
    let seconds = if let Ok(float) = timeout.cast::<PyFloat>() {
        float.value()
    } else {
        // An integer that does not fit into an `i64` raises `OverflowError`.
        timeout.extract::<i64>()? as f64
    };
    if seconds.is_nan() {
        return Err(PyValueError::new_err("Invalid value NaN (not a number)"));
    }
    if seconds.abs() > NO_TIME_S {
        return Err(PyOverflowError::new_err(
            "timestamp out of range for platform time_t",
        ));
    }
    Ok(seconds)
}

fn limited(timeout_s: f64) -> PyResult<Limit> {
    if timeout_s > LONGEST_S {
        return Err(PyOverflowError::new_err("timeout value is too large"));
    }
    Ok(if timeout_s > 0.0 {
        Limit::For { timeout_s }
    } else {
        Limit::AtOnce
    })
}

/// The limit for the arguments of `acquire(blocking=True, timeout=-1)`.
pub(super) fn of_acquire(
    blocking: Option<Bound<'_, PyAny>>,
    timeout: Option<Bound<'_, PyAny>>,
) -> PyResult<Limit> {
    let is_blocking = blocking.map_or(Ok(true), |blocking| blocking.is_truthy())?;
    let timeout_s = timeout.map_or(Ok(-1.0), |timeout| seconds(&timeout))?;
    let is_limited = timeout_s != -1.0;
    if !is_blocking {
        if is_limited {
            return Err(PyValueError::new_err(
                "can't specify a timeout for a non-blocking call",
            ));
        }
        return Ok(Limit::AtOnce);
    }
    if !is_limited {
        return Ok(Limit::Endless);
    }
    if timeout_s < 0.0 {
        return Err(PyValueError::new_err(
            "timeout value must be a non-negative number",
        ));
    }
    limited(timeout_s)
}

/// The limit for the arguments `block=True, timeout=None`. `limit_of` converts a timeout that is not None.
fn of_block_and_timeout<'py>(
    block: Option<Bound<'py, PyAny>>,
    timeout: Option<Bound<'py, PyAny>>,
    limit_of: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Limit>,
) -> PyResult<Limit> {
    if !block.map_or(Ok(true), |block| block.is_truthy())? {
        return Ok(Limit::AtOnce);
    }
    match timeout.filter(|timeout| !timeout.is_none()) {
        Some(timeout) => limit_of(&timeout),
        None => Ok(Limit::Endless),
    }
}

fn not_negative(timeout_s: f64) -> PyResult<f64> {
    if timeout_s < 0.0 {
        return Err(PyValueError::new_err("'timeout' must be a non-negative number"));
    }
    Ok(timeout_s)
}

/// The limit of a shared queue's method. A timeout above `LONGEST_S` means that there is no limit.
pub(super) fn of_shared_queue(
    block: Option<Bound<'_, PyAny>>,
    timeout: Option<Bound<'_, PyAny>>,
) -> PyResult<Limit> {
    of_block_and_timeout(block, timeout, |timeout| {
        let timeout_s: f64 = timeout.extract()?;
        if timeout_s.is_nan() {
            return Err(PyValueError::new_err("'timeout' must not be NaN"));
        }
        if not_negative(timeout_s)? > LONGEST_S {
            return Ok(Limit::Endless);
        }
        limited(timeout_s)
    })
}

/// The limit of `get` of `_queue.SimpleQueue`.
pub(super) fn of_get(block: Option<Bound<'_, PyAny>>, timeout: Option<Bound<'_, PyAny>>) -> PyResult<Limit> {
    of_block_and_timeout(block, timeout, |timeout| {
        limited(not_negative(seconds(timeout)?)?)
    })
}
