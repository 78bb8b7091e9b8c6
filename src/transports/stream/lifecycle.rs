//! A connection from `connection_made` to `connection_lost`, and everything that ends it.
//!
//! ```text
//!   accept/open --> connection_made --> registered --close()--> [buffer drains] --finish--> connection_lost --> closed
//!                                            '------- abort(), fault ------------------^
//! ```
//! `connection_lost` is called once, or not at all if `connection_made` was never called or the loop is closed first.
//! It is always queued, and never called from within the call that ends the connection. The descriptor leaves the
//! poller before `connection_lost` is queued, and is closed after `connection_lost` has run.

use std::os::fd::{IntoRawFd, OwnedFd, RawFd};

use grapeshot_core::sys::poller::Interest;
use grapeshot_core::sys::socket::{self, Address};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{Flags, Stream, StreamBody, keep_local_address, new_stream, sync_interest, writing};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::event_loop::probe::Mode;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::flush_policy;
use crate::transports::ending::{closed_error, fatal_error, finish};
use crate::transports::object;
use crate::transports::protocol::{ProtocolCalls, Receiver, run_in};

/// Sets up an accepted connection: makes the protocol and the transport and calls `connection_made`. The factory and
/// `connection_made` run in `context`, which belongs to this connection alone. Err is only for exceptions that must
/// leave the loop; every other fault is reported and closes only this connection.
///
/// asyncio does this in a task and queues `connection_made`. The difference is visible only if the factory,
/// `connection_made` or another thread queues something in the meantime. Two measures keep asyncio's behaviour in that
/// case. First, if something is queued while the protocol and the transport are made, `connection_made` is queued
/// behind it. Second, until the queued work has run, there is a task whose cancellation closes the connection, as in
/// asyncio.
pub(in crate::transports) fn accept(
    event_loop: &Bound<'_, PyAny>,
    fd: OwnedFd,
    peer: Address,
    factory: &Bound<'_, PyAny>,
    server: &Bound<'_, PyAny>,
    context: Bound<'_, PyAny>,
) -> PyResult<()> {
    let reactor = LoopObject::of(event_loop).reactor();
    let queued = reactor.ready.len();
    let protocol = run_in(&context, || factory.call0());
    let calls = protocol.and_then(|protocol| ProtocolCalls::with_context(&protocol, context));
    let made = calls.and_then(|calls| {
        let fd = fd.into_raw_fd();
        let made = new_stream(event_loop, fd, None, calls, Some(peer));
        if made.is_err() {
            close_raw(fd);
        }
        made
    });
    let transport = match made {
        Ok(transport) => transport,
        Err(error) => {
            let message = "Error on transport creation for incoming connection";
            return errors::report(event_loop, message, error, &[]);
        }
    };
    let this = stream_of(&transport);
    this.server.set(server.clone());
    if let Err(error) = server.call_method1(
        names(server.py())
            ._attach
            .bind(server.py())
            .cast_into::<PyString>()?,
        (&transport,),
    ) {
        return fatal_error(this, error, "Error on transport creation for incoming connection");
    }
    if matches!(this.calls.receiver(), Receiver::Native) {
        // A TLS connection does not need `accepting`: its factory has made a task that lasts until the handshake is
        // complete.
        return start(this);
    }
    if reactor.ready.len() != queued {
        return start_later(this, server);
    }
    start(this)?;
    if reactor.ready.len() != queued && this.lost_writes.get() == 0 {
        return accepting(this, server, false).map(drop);
    }
    Ok(())
}

/// Queues `connection_made` of an accepted connection.
#[cold]
fn start_later(this: Stream<'_>, server: &Bound<'_, PyAny>) -> PyResult<()> {
    // Enter the transport into the fd table now, so that a search for the server's connections finds it.
    if let Err(error) = this.registration.enter(this, this.reactor(), Interest::NONE) {
        return fatal_error(this, errors::os_error(&error), "Fatal error on socket transport");
    }
    this.reactor().ready.defer(this.to_bound(), start_queued);
    if let Some(waiter) = accepting(this, server, true)? {
        this.waiter.set(waiter);
    }
    Ok(())
}

/// Calls `server._accepting(transport, is_waiting)`, which makes a task like the one in which asyncio accepts a
/// connection. If `is_waiting` is true, returns the Future that the task waits for.
fn accepting<'py>(
    this: Stream<'py>,
    server: &Bound<'py, PyAny>,
    is_waiting: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let name = names(this.py())
        ._accepting
        .bind(this.py())
        .cast_into::<PyString>()?;
    match server.call_method1(name, (this.to_bound(), is_waiting)) {
        Ok(waiter) => Ok(Some(waiter).filter(|waiter| !waiter.is_none())),
        Err(error) => {
            fatal_error(this, error, "Error on transport creation for incoming connection")?;
            Ok(None)
        }
    }
}

/// Makes the transport of a connected socket object and queues its start, which calls `connection_made` and then
/// completes `waiter`.
pub(super) fn open<'py>(
    event_loop: &Bound<'py, PyAny>,
    socket: &Bound<'py, PyAny>,
    protocol: &Bound<'py, PyAny>,
    waiter: Option<Bound<'py, PyAny>>,
    server: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let fd: RawFd = socket.call_method0("fileno")?.extract()?;
    if fd < 0 {
        return Err(closed_error());
    }
    let reactor = LoopObject::of(event_loop).reactor();
    if let Some(reached) = reactor.limits.connections_reached() {
        return Err(reached.error(event_loop.py()));
    }
    let peer = socket::peer_address(fd).ok();
    if peer.as_ref().is_none_or(|peer| peer.family() != libc::AF_UNIX) {
        // The call fails for sockets that are not TCP, which have no timer that delays small segments anyway.
        let _ = socket::set_nodelay(fd);
    }
    let transport = new_stream(
        event_loop,
        fd,
        Some(socket.clone()),
        ProtocolCalls::new(protocol)?,
        peer,
    )?;
    let this = stream_of(&transport);
    if let Some(waiter) = waiter {
        this.waiter.set(waiter);
    }
    if let Some(server) = server {
        server.call_method1(
            names(server.py())
                ._attach
                .bind(server.py())
                .cast_into::<PyString>()?,
            (&transport,),
        )?;
        this.server.set(server);
    }
    this.reactor().ready.defer(transport.clone(), start_queued);
    Ok(transport)
}

/// The native side of a transport object.
pub(super) fn stream_of<'py>(transport: &Bound<'py, PyAny>) -> Stream<'py> {
    // SAFETY: called only with objects that `new_stream` has made.
    unsafe { object::object_of(transport) }
}

unsafe fn start_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `open` or `start_later` with a transport, to which the queue holds a reference.
    let this: Stream<'_> = unsafe { This::new(py, object) };
    let started = start(this);
    started.and(object::wake(py, &this.waiter))
}

/// Calls `connection_made` and begins to wait for data. Err is an exception that leaves the loop. The connection stays
/// open nevertheless, and continues in the next run of the loop.
fn start(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    if this.lost_writes.get() != 0 {
        // The connection was aborted before it began, and `lose` is queued. `lose` will not call connection_lost,
        // because connection_made was never called.
        return Ok(());
    }
    this.flags.set(Flags::MADE);
    let own = this.to_bound();
    this.reactor().probe.log_event(py, Mode::LOG_IO, || {
        let is_accepted = this.server.is_set();
        (
            this.to_bound(),
            if is_accepted { "was accepted" } else { "is open" }.to_owned(),
        )
    });
    let result = flush_policy::corked(this, || this.calls.call(py, names(py).connection_made, &[&own]));
    let failed = match result {
        Err(leaving) => Err(leaving),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => fatal_error(
            this,
            error,
            "Fatal error: protocol.connection_made() call failed.",
        ),
    };
    failed.and(register(this))
}

/// Enters the transport into the loop's fd table, unless the connection has ended already.
fn register(this: Stream<'_>) -> PyResult<()> {
    if this.lost_writes.get() != 0 {
        return Ok(());
    }
    if this.registration.is_entered() {
        return sync_interest(this);
    }
    let wanted = this.wanted_interest();
    match this.registration.enter(this, this.reactor(), wanted) {
        Ok(()) => Ok(()),
        Err(error) => fatal_error(this, errors::os_error(&error), "Fatal error on socket transport"),
    }
}

/// `close()`: sends the buffered data, then ends the connection.
pub(super) fn close(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::CLOSING) {
        return Ok(());
    }
    writing::send_collected(this)?;
    if this.flags.has(Flags::CLOSING) {
        return Ok(());
    }
    this.flags.set(Flags::CLOSING);
    if this.flags.has(Flags::BLOCKED) {
        // The buffer drains only if the transport is registered with the poller, so register it now if necessary.
        register(this)?;
        if this.usable_fd(this.py()).is_err() {
            // Other code has closed the descriptor, so the buffer would never drain.
            return fatal_error(this, closed_error(), "Fatal error on socket transport");
        }
        return sync_interest(this);
    }
    finish(this, None)
}

/// `abort()`: ends the connection now. Corked and held data is still sent, because a transport that does not collect
/// writes would have sent it already. All data that the kernel does not take is discarded.
pub(super) fn abort(this: Stream<'_>) -> PyResult<()> {
    abort_with(this, None)
}

/// `abort()` with an exception for `connection_lost`.
pub(super) fn abort_with(this: Stream<'_>, exception: Option<Bound<'_, PyAny>>) -> PyResult<()> {
    writing::send_collected(this)?;
    finish(this, exception)
}

/// Closes the descriptor, or the socket object that owns it. Does nothing the second time.
pub(super) fn close_descriptor(py: Python<'_>, body: &StreamBody) {
    let fd = body.fd();
    if fd < 0 {
        return;
    }
    keep_local_address(py, body);
    body.registration.take_fd();
    match body.socket.get(py) {
        None => close_raw(fd),
        Some(socket) => {
            let name = names(py).close.bind(py);
            let closed = name
                .cast_into::<PyString>()
                .map_err(PyErr::from)
                .and_then(|name| socket.call_method0(name));
            if let Err(error) = closed {
                error.write_unraisable(py, Some(&socket));
            }
        }
    }
}

fn close_raw(fd: RawFd) {
    // SAFETY: the caller owned the descriptor and does not use it again. An error is ignored, since nothing could be
    // done about it: Linux has released the descriptor in any case (close(2)).
    unsafe { libc::close(fd) };
}
