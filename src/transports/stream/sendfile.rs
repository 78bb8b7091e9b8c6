//! The transport's part in `loop.sendfile`: it refuses other writes and tells the sender when the socket can take more
//! data. The sender is Python code (`_loop/sendfile.py`) that calls `_send_file` (`transports/files.rs`) again and
//! again. Each call sends up to 1 MiB, or what the kernel's buffer takes, so the cost of the Python code is negligible.
//!
//! ```text
//!   _start_sendfile(future) --> out-buffer empty: future done --> _send_file --> would block: _wait_writable(future)
//!                                                                     ^                           |
//!                                                                     '------- writable ----------'
//!   _end_sendfile() follows in any case; if the connection is lost, the wait ends with ConnectionError
//! ```

use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{Flags, Stream, sync_interest, writing};
use crate::binding::names::{Kept, names};

/// `_start_sendfile(future)`: from now until `end` the transport refuses writes. The future is completed once all data
/// that was written before has been sent.
pub(super) fn start(this: Stream<'_>, future: Bound<'_, PyAny>) -> PyResult<()> {
    if this.flags.has(Flags::SENDFILE) {
        return Err(PyRuntimeError::new_err("another sendfile is in progress"));
    }
    writing::send_collected(this)?;
    check_connected(this)?;
    this.flags.set(Flags::SENDFILE);
    if this.flags.has(Flags::BLOCKED) {
        this.waiter.set(future);
        return Ok(());
    }
    settle(
        &future,
        names(this.py()).set_result,
        this.py().None().into_bound(this.py()),
    )
}

/// `_wait_writable(future)`: completes the future once the socket can take data.
pub(super) fn wait_writable(this: Stream<'_>, future: Bound<'_, PyAny>) -> PyResult<()> {
    check_connected(this)?;
    this.waiter.set(future);
    sync_interest(this)
}

/// `_end_sendfile()`: allows writes again. May be called more than once.
pub(super) fn end(this: Stream<'_>) -> PyResult<()> {
    this.flags.clear(Flags::SENDFILE);
    drop(this.waiter.take(this.py()));
    sync_interest(this)
}

/// Called when the socket is writable, after the transport has tried to send its own data.
pub(super) fn on_writable(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) {
        return Ok(());
    }
    let Some(future) = this.waiter.take(this.py()) else {
        return Ok(());
    };
    sync_interest(this)?;
    settle(
        &future,
        names(this.py()).set_result,
        this.py().None().into_bound(this.py()),
    )
}

/// Called when the connection has ended: fails the Future that the sender waits for, if there is one.
pub(super) fn on_lost(this: Stream<'_>) -> PyResult<()> {
    match this.waiter.take(this.py()) {
        Some(future) => {
            let error = closed_error().into_value(this.py()).into_bound(this.py());
            settle(&future, names(this.py()).set_exception, error.into_any())
        }
        None => Ok(()),
    }
}

fn check_connected(this: Stream<'_>) -> PyResult<()> {
    if this.lost_writes.get() == 0 {
        return Ok(());
    }
    Err(closed_error())
}

fn closed_error() -> PyErr {
    PyConnectionError::new_err("Connection is closed by peer")
}

/// Calls `future.<method>(value)`, unless the future is done already.
fn settle(future: &Bound<'_, PyAny>, method: Kept, value: Bound<'_, PyAny>) -> PyResult<()> {
    let py = future.py();
    let name = |kept: Kept| kept.bind(py).cast_into::<PyString>();
    if !future.call_method0(name(names(py).done)?)?.is_truthy()? {
        future.call_method1(name(method)?, (value,))?;
    }
    Ok(())
}
