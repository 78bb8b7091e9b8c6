//! How a transport ends, for streams, datagrams and pipes alike: after a fault or a close, all I/O stops and
//! `connection_lost` is called.
//!
//! ```text
//!   fatal_error --> finish --> (queued) lose: connection_lost, then the descriptor is closed
//!   close, abort ----^
//! ```
//! `connection_lost` is called once, or not at all if `connection_made` was never called or the loop is closed first.
//! It is always queued, and never called from within the call that ends the transport. The descriptor leaves the poller
//! before `connection_lost` is queued, and is closed after `connection_lost` has run.

use std::io;

use pyo3::exceptions::PyOSError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::object::{self, Body, TransportObject};
use super::registration::Registration;
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::none;
use crate::event_loop::probe::Mode;

/// The steps of a transport's end that each kind of transport implements itself.
pub(super) trait Ending: Body {
    /// The message to report if other code has closed the descriptor.
    const FAULT: &'static str;
    /// The message to report if `connection_lost` raises.
    const LOST_FAILED: &'static str;
    /// The message to report if closing the descriptor raises.
    const CLOSE_FAILED: &'static str;

    fn registration(&self) -> &Registration;

    /// The exception to pass to `connection_lost`; empty for None.
    fn exception(&self) -> &ObjectCell;

    /// Marks the transport as closing and finished. Returns false if it was finished already.
    fn mark_finished(&self) -> bool;

    /// Discards the data that has not been sent.
    fn drop_buffer(&self);

    /// Closes the descriptor, or the object that owns it. Does nothing the second time.
    fn close_owned(&self, py: Python<'_>) -> PyResult<()>;

    /// Whether an error is part of normal operation. If so, it is logged in debug mode only; all other errors go to the
    /// exception handler.
    fn is_ordinary(error: &PyErr, py: Python<'_>) -> bool {
        error.is_instance_of::<PyOSError>(py)
    }

    /// Whether `connection_made` was called. If it was not, `connection_lost` is not called either.
    fn was_made(&self) -> bool {
        true
    }

    /// Called when all I/O has stopped. Err is only for exceptions that must leave the loop.
    fn on_stopped(_: This<'_, TransportObject<Self>>) -> PyResult<()> {
        Ok(())
    }

    /// Called after `connection_lost` has run and the descriptor is closed. Err is only for exceptions that must leave
    /// the loop.
    fn on_closed(_: This<'_, TransportObject<Self>>) -> PyResult<()> {
        Ok(())
    }

    /// Takes the reference to the server that counts this transport among its connections, if there is one.
    fn take_server<'py>(&self, _: Python<'py>) -> Option<Bound<'py, PyAny>> {
        None
    }
}

/// The `OSError` with EBADF.
pub(super) fn closed_error() -> PyErr {
    errors::os_error(&io::Error::from_raw_os_error(libc::EBADF))
}

/// Ends the transport after a fault: `connection_lost` gets `error`. The error is also reported, unless it is ordinary.
/// Err is only for exceptions that must leave the loop. If `error` itself is one of these, the transport stays open.
#[cold]
pub(super) fn fatal_error<B: Ending>(
    this: This<'_, TransportObject<B>>,
    error: PyErr,
    message: &str,
) -> PyResult<()> {
    let py = this.py();
    if errors::leaves_loop(py, &error) {
        return Err(error);
    }
    let exception = error.clone_ref(py).into_value(py).into_bound(py).into_any();
    if B::is_ordinary(&error, py) {
        object::log_fault(this, message, &exception)?;
    } else {
        object::report(this, error, message)?;
    }
    finish(this, Some(exception))
}

/// `Source::on_displaced` for all transports that implement `Ending`. No Python code may run here, so the fault is
/// queued and reported later.
pub(super) fn on_displaced<B: Ending>(this: This<'_, TransportObject<B>>) {
    this.registration().displace();
    this.reactor().ready.defer(this.to_bound(), lose_descriptor::<B>);
}

/// Ends the transport because other code has closed the descriptor, whose number may belong to another file now.
///
/// # Safety
/// The loop calls this with a transport of this type, and its queue holds a reference to the transport.
unsafe fn lose_descriptor<B: Ending>(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: This<'_, TransportObject<B>> = unsafe { This::new(py, object) };
    fatal_error(this, closed_error(), B::FAULT)
}

/// Stops all I/O and queues `connection_lost(exception)`. Does nothing the second time.
pub(super) fn finish<B: Ending>(
    this: This<'_, TransportObject<B>>,
    exception: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    if !this.mark_finished() {
        return Ok(());
    }
    let own = this.to_bound();
    this.reactor().probe.log_event(this.py(), Mode::LOG_IO, || {
        let why = match &exception {
            None => "is closed".to_owned(),
            Some(exception) => format!("is lost: {exception:?}"),
        };
        (this.to_bound(), why)
    });
    this.drop_buffer();
    this.registration().leave(this, this.reactor());
    B::on_stopped(this)?;
    if let Some(exception) = exception {
        this.exception().set(exception);
    }
    if this.reactor().is_closed() {
        // Nothing that is queued will run any more. Close the descriptor now, so that at least it does not leak.
        this.close(this.py());
        return Ok(());
    }
    this.reactor().ready.defer(own, lose::<B>);
    Ok(())
}

/// Calls `connection_lost`, then closes the descriptor.
///
/// # Safety
/// The same as for `lose_descriptor`.
unsafe fn lose<B: Ending>(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: This<'_, TransportObject<B>> = unsafe { This::new(py, object) };
    let argument = this.exception().take(py).unwrap_or_else(|| none(py));
    let lost = if this.was_made() {
        this.calls()
            .call(py, names(py).connection_lost, &[&argument])
            .map(drop)
    } else {
        Ok(())
    };
    let closed = this.close_owned(py);
    let server = this.take_server(py);
    let lost = lost.or_else(|error| object::report(this, error, B::LOST_FAILED));
    let closed = closed.or_else(|error| object::report(this, error, B::CLOSE_FAILED));
    this.calls().drop_all(py);
    let detached = server.map_or(Ok(()), |server| leave_server(this, &server));
    let told = B::on_closed(this);
    detached?;
    told?;
    lost.and(closed)
}

/// Calls `server._detach(transport)` and reports what it raises.
fn leave_server<B: Ending>(this: This<'_, TransportObject<B>>, server: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = this.py();
    let name = names(py)._detach.bind(py).cast_into::<pyo3::types::PyString>()?;
    let Err(error) = server.call_method1(name, (this.to_bound(),)) else {
        return Ok(());
    };
    match this.event_loop.get(py) {
        Some(event_loop) => errors::report(
            &event_loop,
            "Error while detaching a connection from its server",
            error,
            &[],
        ),
        None => Ok(()),
    }
}
