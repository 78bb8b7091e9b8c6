//! The end of a transport, the same for streams, datagrams and pipes: a fault ends it, all I/O stops, and
//! `connection_lost` is called.
//!
//! ```text
//!   fatal_error --> finish --> (queued) lose: connection_lost, then the descriptor is closed
//!   close, abort ----^
//! ```
//! `connection_lost` is always queued, never called inside the call that ends the transport, and comes once. The
//! descriptor leaves the poller before the call is queued, and is closed after it has run.

use std::io;

use pyo3::exceptions::PyOSError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::object::{self, Body, TransportObject};
use super::registration::Registration;
use crate::binding::errors;
use crate::binding::log::{self, Topic};
use crate::binding::names::names;
use crate::binding::native_type::{This, none};
use crate::binding::object_cell::ObjectCell;

/// What the ends of the transports differ in.
pub(super) trait Ending: Body {
    /// What is reported if the descriptor was closed by somebody else.
    const FAULT: &'static str;
    /// What is reported if `connection_lost` raises, and if closing does.
    const LOST_FAILED: &'static str;
    const CLOSE_FAILED: &'static str;

    fn registration(&self) -> &Registration;

    /// What `connection_lost` will be called with.
    fn exception(&self) -> &ObjectCell;

    /// Marks the transport as closing and finished. False if it was finished already.
    fn mark_finished(&self) -> bool;

    /// Discards what has not been sent.
    fn drop_buffer(&self);

    /// Closes what the transport owns. Does nothing the second time.
    fn close_owned(&self, py: Python<'_>) -> PyResult<()>;

    /// Whether an error of this kind is part of normal operation: debug mode logs it, nothing reports it.
    fn is_ordinary(error: &PyErr, py: Python<'_>) -> bool {
        error.is_instance_of::<PyOSError>(py)
    }

    /// Whether `connection_made` was called, so that `connection_lost` must be.
    fn was_made(&self) -> bool {
        true
    }

    /// All I/O has stopped. Err is only for what must leave the loop.
    fn on_stopped(_: This<'_, TransportObject<Self>>) -> PyResult<()> {
        Ok(())
    }

    /// The descriptor is closed, after `connection_lost`. Err is only for what must leave the loop.
    fn on_closed(_: This<'_, TransportObject<Self>>) -> PyResult<()> {
        Ok(())
    }

    /// Takes the server that counts the transport, if there is one.
    fn take_server<'py>(&self, _: Python<'py>) -> Option<Bound<'py, PyAny>> {
        None
    }
}

/// EBADF.
pub(super) fn closed_error() -> PyErr {
    errors::os_error(&io::Error::from_raw_os_error(libc::EBADF))
}

/// Ends the transport with `error` after a fault. Reports it, unless it is ordinary. Err is only for what must leave
/// the loop.
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

/// `Source::on_displaced` of all these transports. What they report runs later: nothing may be called here.
pub(super) fn on_displaced<B: Ending>(this: This<'_, TransportObject<B>>) {
    this.registration().displace();
    this.reactor().defer(this.to_bound(), lose_descriptor::<B>);
}

/// Somebody else has closed the descriptor, and its number belongs to another transport now.
///
/// # Safety
/// The loop calls this with a transport of this type, whose reference its queue holds.
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
    log::event(this.py(), Topic::Io, || {
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
        // Nothing will run any more. At least the descriptor does not leak.
        this.close(this.py());
        return Ok(());
    }
    this.reactor().defer(own, lose::<B>);
    Ok(())
}

/// Calls `connection_lost`, then closes the descriptor.
///
/// # Safety
/// As for `lose_descriptor`.
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
    let detached = server.map_or(Ok(()), |server| detach(this, &server));
    let told = B::on_closed(this);
    detached?;
    told?;
    lost.and(closed)
}

/// `server._detach(transport)`.
fn detach<B: Ending>(this: This<'_, TransportObject<B>>, server: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = this.py();
    let name = names(py)._detach.bind(py).cast_into::<pyo3::types::PyString>()?;
    let Err(error) = server.call_method1(name, (this.to_bound(),)) else {
        return Ok(());
    };
    match this.event_loop.get(py) {
        Some(event_loop) => errors::report(
            &event_loop,
            "Error on detaching a connection from its server",
            error,
            &[],
        ),
        None => Ok(()),
    }
}
