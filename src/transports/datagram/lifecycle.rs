//! An endpoint from `connection_made` to `connection_lost`, and everything that ends it.
//!
//! ```text
//!   open --> connection_made --> registered --close()--> [buffer drains] --finish--> connection_lost --> closed
//!                                     '------- abort(), fault ------------------^
//! ```
//! `connection_lost` is always queued, never called inside the call that ends the transport, and comes once. The
//! descriptor leaves the poller before it is queued, and the socket is closed after it has run.
//!
//! An OSError of the socket ends nothing: the protocol hears of it through `error_received`, and the transport goes on.

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
use crate::binding::names::names;
use crate::binding::native_type::{This, none};
use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;
use crate::transports::ending::{closed_error, fatal_error, finish};
use crate::transports::flags::FlagCell;
use crate::transports::flow::Watermarks;
use crate::transports::object;
use crate::transports::protocol::ProtocolCalls;
use crate::transports::registration::Registration;

/// Makes the transport of a nonblocking socket object, which it takes over, and queues its start: `connection_made`,
/// then `waiter`. With `remote` nothing can be sent to any other address.
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
    // This fails for what is no socket. The first datagram will fail then, too.
    let _ = socket::suppress_sigpipe(fd);
    let (local, peer) = (socket::local_address(fd).ok(), socket::peer_address(fd).ok());
    let body = new_body(socket, fd, local.as_ref(), peer.as_ref(), protocol)?;
    let transport = object::make(&DATAGRAM_TYPE, event_loop, body)?;
    // SAFETY: made just above with this body.
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
    this.reactor().defer(transport.clone(), start);
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

/// What `get_extra_info` shows of an address: None if there is none.
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

/// `connection_made`, then datagrams are received, then the waiter is told.
unsafe fn start(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `open` with a transport of this type, whose reference the queue holds.
    let this: Datagram<'_> = unsafe { This::new(py, object) };
    let own = this.to_bound();
    // An exception that leaves the loop does not end the transport, which goes on in the next run.
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

/// `close()`: what is buffered still leaves, then the transport ends.
pub(super) fn close(this: Datagram<'_>) -> PyResult<()> {
    if this.flags.has(Flags::CLOSING) {
        return Ok(());
    }
    this.flags.set(Flags::CLOSING);
    if this.flags.has(Flags::BLOCKED) {
        if this.registration.usable_fd(this.py()).is_err() {
            // The wait would never end.
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
