//! A pipe from `connection_made` to `connection_lost`, and everything that ends it.
//!
//! ```text
//!   open --> connection_made --> registered --close(), EOF--> [buffer drains] --finish--> connection_lost --> closed
//!                                     '-------- abort(), fault -----------------^
//! ```
//! `connection_lost` is called exactly once, or not at all if the loop is closed first. It is always queued, and
//! never called from within the call that ends the transport. The descriptor leaves the poller before `connection_lost`
//! is queued, and the pipe object is closed after `connection_lost` has run.
//!
//! An exception in the protocol is reported but does not end the transport, as with asyncio's pipes.

use std::os::fd::RawFd;

use grapeshot_core::sys::pipe::{self, FileKind};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use super::{Pipe, PipeBody, PipeEnd, new_body};
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::{errors, log};
use crate::event_loop::pyloop::LoopObject;
use crate::transports::ending::fatal_error;
use crate::transports::object;

/// Makes the transport of `pipe`, takes the pipe over, and queues `start`, which calls `connection_made` and then
/// completes `waiter`. After an error the pipe still belongs to the caller. ValueError unless the pipe is a FIFO, a
/// socket or a character device.
pub(super) fn open<'py, E: PipeEnd>(
    event_loop: &Bound<'py, PyAny>,
    pipe: &Bound<'py, PyAny>,
    protocol: &Bound<'py, PyAny>,
    waiter: Option<Bound<'py, PyAny>>,
    extra: Option<Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    let fd: RawFd = pipe
        .call_method0(names(py).fileno.bind(py).cast_into::<PyString>()?)?
        .extract()?;
    let kind = pipe::file_kind(fd).map_err(|error| errors::os_error(&error))?;
    if kind == FileKind::Other {
        return Err(PyValueError::new_err(E::REFUSAL));
    }
    pipe::set_nonblocking(fd).map_err(|error| errors::os_error(&error))?;
    // A terminal may be read and written through one descriptor, but the poller accepts a descriptor only once.
    let descriptors = &LoopObject::of(event_loop).reactor().descriptors;
    let is_taken = descriptors.source(fd).is_some();
    let duplicate = if is_taken {
        Some(pipe::duplicate(fd).map_err(|error| errors::os_error(&error))?)
    } else {
        None
    };
    let body = new_body::<E>(pipe, fd, kind, duplicate, protocol)?;
    let transport = object::make(E::kind(), event_loop, body)?;
    let this = pipe_of::<E>(&transport);
    if let Some(extra) = extra {
        object::set_extra(this, extra);
    }
    object::extra_dict(this)?.set_item("pipe", pipe)?;
    if let Some(waiter) = waiter {
        this.waiter.set(waiter);
    }
    this.reactor().ready.defer(transport.clone(), start::<E>);
    Ok(transport)
}

fn pipe_of<'py, E: PipeEnd>(transport: &Bound<'py, PyAny>) -> Pipe<'py, E> {
    // SAFETY: called only with an object that `open` has just made for this end.
    unsafe { object::object_of(transport) }
}

/// Calls `connection_made`, begins to wait for readiness, and completes the waiter.
unsafe fn start<E: PipeEnd>(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `open` with a transport of this type, to which the queue holds a reference.
    let this: Pipe<'_, E> = unsafe { This::new(py, object) };
    let own = this.to_bound();
    // Even an exception that ends the loop's run does not end the transport, which continues in the next run.
    let made = match this.calls.call(py, names(py).connection_made, &[&own]) {
        Ok(_) => Ok(()),
        Err(error) => object::report(this, error, "Exception in callback protocol.connection_made()"),
    };
    let mut entered = Ok(());
    if !this.is_finished.get() {
        let wanted = E::wanted_interest(&this);
        if let Err(error) = this.registration.enter(this, this.reactor(), wanted) {
            entered = fatal_error(this, errors::os_error(&error), "Fatal error on pipe transport");
        }
    }
    made.and(entered).and(object::wake(py, &this.waiter))
}

/// Logs in debug mode that the other end was closed.
pub(super) fn log_closed_by_peer<E: PipeEnd>(this: Pipe<'_, E>) -> PyResult<()> {
    if !this.reactor().probe.is_debug() {
        return Ok(());
    }
    log::info(this.py(), "%r was closed by peer", &[this.to_bound()])
}

/// Closes the pipe object. Does nothing the second time.
pub(super) fn close_pipe<E>(py: Python<'_>, body: &PipeBody<E>) -> PyResult<()> {
    let Some(pipe) = body.pipe.take(py) else {
        return Ok(());
    };
    body.registration.take_fd();
    drop(body.duplicate.take());
    let name = names(py).close.bind(py).cast_into::<PyString>()?;
    pipe.call_method0(name).map(drop)
}
