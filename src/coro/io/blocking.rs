//! Waits for a thread in which no coro runs: the thread blocks, without the GIL.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::clock::now_ns;
use grapeshot_core::sys::readiness;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::errors;
use crate::coro::sync::Limit;
use crate::event_loop::reactor::Direction;

/// When a wait has to end, on the clock of `now_ns`. The largest number means never.
#[derive(Clone, Copy)]
pub(super) struct End(u64);

impl End {
    /// The end of waits that begin now.
    pub(super) fn new(limit: Limit) -> Self {
        Self(match limit {
            Limit::Endless => u64::MAX,
            Limit::AtOnce => 0,
            // The cast saturates: a limit of centuries is as good as no limit.
            Limit::For { timeout_s } => now_ns().saturating_add((timeout_s * 1e9).ceil() as u64),
        })
    }
}

/// Blocks until the descriptor is ready or the end is reached. Returns whether it is ready. Python signal handlers run
/// during the wait; an exception from one ends the wait.
pub(super) fn wait_ready(py: Python<'_>, fd: RawFd, direction: Direction, end: End) -> PyResult<bool> {
    let is_write = direction == Direction::Write;
    let end_ns = (end.0 != u64::MAX).then_some(end.0);
    loop {
        match py.detach(|| readiness::wait_ready(fd, is_write, end_ns)) {
            Ok(is_ready) => return Ok(is_ready),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                // SAFETY: attached.
                if unsafe { ffi::PyErr_CheckSignals() } != 0 {
                    return Err(PyErr::fetch(py));
                }
            }
            Err(error) => return Err(errors::os_error(&error)),
        }
    }
}
