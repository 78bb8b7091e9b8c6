//! The transport's part in `loop.sendfile`: other writes are refused, and the sender is told when the socket takes
//! more. The loop around the system call (`transports/files.rs`) is Python (`_sendfile.py`): once per buffer of the
//! kernel its cost does not show.
//!
//! ```text
//!   _start_sendfile(future) --> out-buffer empty? future done --> _send_file --> would block: _wait_writable(future)
//!                                                                     ^                           |
//!                                                                     '------- writable ----------'
//!   _end_sendfile() in any case; a connection that is lost meanwhile ends the wait with ConnectionError
//! ```

use pyo3::exceptions::{PyConnectionError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{Flags, Stream, sync_interest, writing};
use crate::binding::names::{Kept, names};

/// `_start_sendfile(future)`: the transport refuses writes until `end`; the future is done once all that was written
/// before has left.
pub(super) fn start(this: Stream<'_>, future: Bound<'_, PyAny>) -> PyResult<()> {
    if this.flags.has(Flags::SENDFILE) {
        return Err(PyRuntimeError::new_err("another sendfile is in progress"));
    }
    writing::uncork(this)?;
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

/// `_wait_writable(future)`: done once the socket takes data.
pub(super) fn wait_writable(this: Stream<'_>, future: Bound<'_, PyAny>) -> PyResult<()> {
    check_connected(this)?;
    this.waiter.set(future);
    sync_interest(this)
}

/// `_end_sendfile()`. Idempotent.
pub(super) fn end(this: Stream<'_>) -> PyResult<()> {
    this.flags.clear(Flags::SENDFILE);
    drop(this.waiter.take(this.py()));
    sync_interest(this)
}

/// The descriptor is writable, and what the transport itself had to write has been tried.
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

/// The connection is over.
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

fn settle(future: &Bound<'_, PyAny>, method: Kept, value: Bound<'_, PyAny>) -> PyResult<()> {
    let py = future.py();
    let name = |kept: Kept| kept.bind(py).cast_into::<PyString>();
    if !future.call_method0(name(names(py).done)?)?.is_truthy()? {
        future.call_method1(name(method)?, (value,))?;
    }
    Ok(())
}
