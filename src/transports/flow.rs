//! Write-side flow control: the watermarks of `asyncio.Transport.set_write_buffer_limits`, and the calls that pause and
//! resume the protocol.

use std::cell::Cell;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::protocol::ProtocolCalls;
use crate::binding::names::{Kept, names};
use crate::binding::object_cell::ObjectCell;
use crate::binding::{errors, log};

const DEFAULT_HIGH: usize = 64 * 1024;

/// The high and the low watermark in bytes, and whether the protocol has been told to pause.
pub(crate) struct Watermarks {
    high: Cell<usize>,
    low: Cell<usize>,
    default_high: u32,
    is_paused: Cell<bool>,
}

impl Watermarks {
    pub(crate) fn new() -> Self {
        Self::with_default(DEFAULT_HIGH)
    }

    /// Watermarks with a default of `high` bytes for the high one and a quarter of that for the low one.
    pub(crate) fn with_default(high: usize) -> Self {
        Self {
            high: Cell::new(high),
            low: Cell::new(high / 4),
            default_high: high as u32,
            is_paused: Cell::new(false),
        }
    }

    #[inline]
    pub(crate) fn high(&self) -> usize {
        self.high.get()
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.get()
    }

    pub(crate) fn limits(&self) -> (usize, usize) {
        (self.low.get(), self.high.get())
    }

    /// Sets the watermarks from the arguments of `set_write_buffer_limits`. Raises the exceptions of `buffer_limits`.
    pub(crate) fn set(&self, arguments: [Option<Bound<'_, PyAny>>; 2]) -> PyResult<()> {
        let (high, low) = buffer_limits(arguments, self.default_high as usize)?;
        self.high.set(high);
        self.low.set(low);
        Ok(())
    }

    /// True if a buffer of `len_bytes` requires `pause_writing` now. If so, the caller must call `pause_writing`: the
    /// watermarks count the protocol as paused from here on.
    #[inline]
    pub(crate) fn must_pause(&self, len_bytes: usize) -> bool {
        len_bytes > self.high.get() && !self.is_paused.replace(true)
    }

    /// True if a buffer of `len_bytes` requires `resume_writing` now. If so, the caller must call `resume_writing`: the
    /// watermarks count the protocol as resumed from here on.
    #[inline]
    pub(crate) fn must_resume(&self, len_bytes: usize) -> bool {
        self.is_paused.get() && len_bytes <= self.low.get() && self.is_paused.replace(false)
    }
}

/// The high and the low limit, in bytes, that the Python arguments `high` and `low` ask for. If `high` is None or
/// absent, the high limit is four times `low`, or `default_high` if `low` is missing too. If `low` is None or absent,
/// the low limit is a quarter of the high one. asyncio does the same.
///
/// `TypeError` if an argument is neither an integer nor None; `OverflowError` beyond 64 bits; `ValueError` unless
/// high >= low >= 0.
pub(crate) fn buffer_limits(
    [high, low]: [Option<Bound<'_, PyAny>>; 2],
    default_high: usize,
) -> PyResult<(usize, usize)> {
    let number = |value: Option<Bound<'_, PyAny>>| match value {
        Some(value) if !value.is_none() => value.extract::<i64>().map(Some),
        _ => Ok(None),
    };
    let (high, low) = (number(high)?, number(low)?);
    let high = match (high, low) {
        (Some(high), _) => high,
        (None, None) => default_high as i64,
        (None, Some(low)) => low.saturating_mul(4),
    };
    let low = low.unwrap_or(high.div_euclid(4));
    if high < low || low < 0 {
        return Err(PyValueError::new_err(format!(
            "high ({high}) must be >= low ({low}) must be >= 0"
        )));
    }
    Ok((high as usize, low as usize))
}

/// The warning that asyncio logs for a write to a lost socket connection.
pub(crate) const SEND_FAILED: &str = "socket.send() raised exception.";

/// asyncio's `LOG_THRESHOLD_FOR_CONNLOST_WRITES`: once the count of lost writes has reached this value, each further
/// write logs a warning. Some transports count the loss of the connection as the first lost write.
const QUIET_LOST_WRITES: u8 = 5;

/// Counts a write after the loss of the connection. Logs `warning` if the count was already at least
/// `QUIET_LOST_WRITES`.
#[cold]
pub(crate) fn note_lost_write(py: Python<'_>, count: &Cell<u8>, warning: &str) -> PyResult<()> {
    if count.get() >= QUIET_LOST_WRITES {
        log::warning(py, warning, &[])?;
    }
    count.set(count.get().saturating_add(1));
    Ok(())
}

/// Calls `protocol.pause_writing()`, after `must_pause` has returned true.
#[cold]
pub(crate) fn pause(
    event_loop: &ObjectCell,
    calls: &ProtocolCalls,
    transport: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let failure = "protocol.pause_writing() failed";
    tell(
        event_loop,
        calls,
        transport,
        names(transport.py()).pause_writing,
        failure,
    )
}

/// Calls `protocol.resume_writing()`, after `must_resume` has returned true.
#[cold]
pub(crate) fn resume(
    event_loop: &ObjectCell,
    calls: &ProtocolCalls,
    transport: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let failure = "protocol.resume_writing() failed";
    tell(
        event_loop,
        calls,
        transport,
        names(transport.py()).resume_writing,
        failure,
    )
}

/// Calls a method of the protocol and reports what it raises. As in asyncio, the method runs in the current context:
/// `pause_writing` runs in the context of the code that writes.
fn tell(
    event_loop: &ObjectCell,
    calls: &ProtocolCalls,
    transport: &Bound<'_, PyAny>,
    method: Kept,
    failure: &str,
) -> PyResult<()> {
    let py = transport.py();
    let Some(protocol) = calls.get(py) else {
        return Ok(());
    };
    let name = method.bind(py).cast_into::<PyString>()?;
    let Err(error) = protocol.call_method0(name) else {
        return Ok(());
    };
    let Some(event_loop) = event_loop.get(py) else {
        return Ok(());
    };
    let details = [("transport", transport), ("protocol", &protocol)];
    errors::report(&event_loop, failure, error, &details)
}
