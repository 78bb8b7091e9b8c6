//! An endpoint from `connection_made` to `connection_lost`, and everything that ends it.
//!
//! ```text
//!   open --> connection_made --> registered --close()--> [buffer drains] --finish--> connection_lost --> closed
//!                                     '------- abort(), fault ------------------^
//! ```
//! `connection_lost` is called exactly once, or not at all if the loop is closed first. It is always queued, and
//! never called from within the call that ends the transport. The descriptor leaves the poller before `connection_lost`
//! is queued, and the socket is closed after `connection_lost` has run.
//!
//! An OSError while a datagram is sent or received does not end the transport: the protocol gets the error through
//! `error_received`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket::{self, Address, AddressView};
use pyo3::exceptions::PyOSError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::methods::DATAGRAM_TYPE;
use super::senders::Senders;
use super::{Datagram, DatagramBody, Family, Flags, Peer, sync_interest};
use crate::binding::errors;
use crate::binding::flags::FlagCell;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::none;
use crate::binding::socket_object;
use crate::transports::ending::{closed_error, fatal_error, finish};
use crate::transports::flow::Watermarks;
use crate::transports::object;
use crate::transports::protocol::ProtocolCalls;
use crate::transports::registration::Registration;

/// Makes the transport of a non-blocking socket object, takes the socket over, and queues the start, which calls
/// `connection_made` and then completes `waiter`. If `remote` is given, nothing can be sent to any other address.
pub(super) fn open<'py>(
    event_loop: &Bound<'py, PyAny>,
    socket: &Bound<'py, PyAny>,
    protocol: &Bound<'py, PyAny>,
    remote: Option<Bound<'py, PyAny>>,
    waiter: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let name = names(event_loop.py())
        .fileno
        .bind(event_loop.py())
        .cast_into::<PyString>()?;
    let fd: RawFd = socket.call_method0(name)?.extract()?;
    if fd < 0 {
        return Err(closed_error());
    }
    // The call fails if the descriptor is not a socket. In that case, the first attempt to send or receive reports the
    // error.
    let _ = socket::suppress_sigpipe(fd);
    let (local, peer) = (socket::local_address(fd).ok(), socket::peer_address(fd).ok());
    let body = new_body(socket, fd, local.as_ref(), peer.as_ref(), protocol)?;
    let transport = object::make(&DATAGRAM_TYPE, event_loop, body)?;
    // SAFETY: the object was made just above with this body.
    let this: Datagram<'_> = unsafe { object::object_of(&transport) };
    if let Some(remote) = remote {
        this.remote.set(remote);
    }
    let extra = object::extra_dict(this)?;
    extra.set_item("sockname", shown(this, socket, "getsockname", local)?)?;
    extra.set_item("peername", shown(this, socket, "getpeername", peer)?)?;
    extra.set_item("socket", socket_object::guarded(socket)?)?;
    if let Some(waiter) = waiter {
        this.waiter.set(waiter);
    }
    this.reactor().ready.defer(transport.clone(), start);
    Ok(transport)
}

fn new_body(
    socket: &Bound<'_, PyAny>,
    fd: RawFd,
    local: Option<&Address>,
    peer: Option<&Address>,
    protocol: &Bound<'_, PyAny>,
) -> PyResult<DatagramBody> {
    let body = DatagramBody {
        socket: ObjectCell::empty(),
        waiter: ObjectCell::empty(),
        exception: ObjectCell::empty(),
        remote: ObjectCell::empty(),
        calls: ProtocolCalls::for_datagrams(protocol)?,
        registration: Registration::new(fd),
        fileno: fd,
        family: match local.map_or(libc::AF_UNSPEC, Address::family) {
            family @ (libc::AF_INET | libc::AF_INET6) => Family::Internet(family),
            libc::AF_UNIX => Family::Unix,
            _ => Family::Other,
        },
        peer: match peer.map(Address::view) {
            None => Peer::None,
            Some(AddressView::Unnamed) => Peer::Unnamed,
            Some(_) => Peer::Named,
        },
        senders: Senders::new(),
        pending: RefCell::new(VecDeque::new()),
        outgoing: RefCell::new(VecDeque::new()),
        outgoing_len: Cell::new(0),
        watermarks: Watermarks::new(),
        flags: FlagCell::new(),
        lost_writes: Cell::new(0),
    };
    body.registration.set_owner(socket);
    body.socket.set(socket.clone());
    Ok(body)
}

/// The value of an address for `get_extra_info`; None if there is no address.
fn shown<'py>(
    this: Datagram<'py>,
    socket: &Bound<'py, PyAny>,
    method: &str,
    address: Option<Address>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = this.py();
    if this.family != Family::Other {
        return address.map_or_else(
            || Ok(none(py)),
            |address| socket_object::address_object(py, &address),
        );
    }
    match socket.call_method0(method) {
        Err(error) if error.is_instance_of::<PyOSError>(py) => Ok(none(py)),
        answer => answer,
    }
}

/// Calls `connection_made`, begins to receive datagrams, and completes the waiter.
unsafe fn start(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `open` with a transport of this type, to which the queue holds a reference.
    let this: Datagram<'_> = unsafe { This::new(py, object) };
    let own = this.to_bound();
    // If an exception leaves the loop, the transport does not end: it continues when the loop runs again.
    let made = match this.calls.call(py, names(py).connection_made, &[&own]) {
        Ok(_) => Ok(()),
        Err(error) => object::report(this, error, "Exception in callback protocol.connection_made()"),
    };
    let mut entered = Ok(());
    if !this.is_finished() {
        let wanted = this.wanted_interest();
        if let Err(error) = this.registration.enter(this, this.reactor(), wanted) {
            let message = "Fatal error on datagram transport";
            entered = fatal_error(this, errors::os_error(&error), message);
        }
    }
    made.and(entered).and(object::wake(py, &this.waiter))
}

/// `close()`: sends the queued datagrams, then ends the transport.
pub(super) fn close(this: Datagram<'_>) -> PyResult<()> {
    if this.flags.has(Flags::CLOSING) {
        return Ok(());
    }
    this.flags.set(Flags::CLOSING);
    if this.flags.has(Flags::BLOCKED) {
        if this.registration.usable_fd(this.py()).is_err() {
            // Other code has closed the descriptor, so the queue would never drain.
            return fatal_error(this, closed_error(), "Fatal error on datagram transport");
        }
        return sync_interest(this);
    }
    finish(this, None)
}

/// Closes the socket object. Does nothing the second time.
pub(super) fn close_socket(py: Python<'_>, body: &DatagramBody) -> PyResult<()> {
    let Some(socket) = body.socket.take(py) else {
        return Ok(());
    };
    body.registration.take_fd();
    let name = names(py).close.bind(py).cast_into::<PyString>()?;
    socket.call_method0(name).map(drop)
}
