//! The write side. `sendto` sends a datagram at once. If the kernel does not take the datagram, it is queued until the
//! socket is writable, and later datagrams are queued behind it. The watermarks decide at which sizes of the queue the
//! protocol's `pause_writing` and `resume_writing` are called.
//!
//! Datagrams that a protocol sends while it handles received ones are not collected for one `sendmmsg`. Measurements
//! showed that collecting them saves nothing, and errors would be reported later than in asyncio.

use std::io;

use grapeshot_core::sys::socket::{self, Address, datagram};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{
    Datagram, DatagramBody, Family, Flags, HAS_EMPTY_DATAGRAMS, HEADER_LEN, Peer, receiving, sync_interest,
};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;
use crate::transports::ending;
use crate::transports::flow;
use crate::transports::outgoing::{Chunk, Data};

/// The destination of a datagram.
enum Target {
    /// The peer that the socket is connected to.
    Peer,
    Address(Address),
    /// An address that only the socket object understands, so the socket object sends the datagram.
    Object(AddressObject),
}

/// A Python object that may be an address.
struct AddressObject(ObjectCell);

impl Drop for AddressObject {
    fn drop(&mut self) {
        // SAFETY: targets live on the stack of native methods and inside transports, and are dropped there only while
        // the thread is attached.
        drop(self.0.take(unsafe { Python::assume_attached() }));
    }
}

/// A datagram that the kernel has not taken yet.
pub(super) struct Outbound {
    data: Chunk,
    target: Target,
}

impl Outbound {
    /// The address, if it is an arbitrary Python object.
    pub(super) fn address_object(&self) -> Option<&ObjectCell> {
        match &self.target {
            Target::Object(address) => Some(&address.0),
            _ => None,
        }
    }

    /// The number of bytes that the datagram adds to the size of the write buffer.
    fn counted_len(&self) -> usize {
        self.data.as_ref().len() + HEADER_LEN
    }
}

/// The result of an attempt to send a datagram.
enum Sent {
    /// The kernel has taken the datagram, or the socket is gone and the datagram is lost.
    Done,
    /// The kernel has no space for it now.
    Blocked,
    /// The call failed with an OSError, which must be passed to the protocol's `error_received`.
    Refused(PyErr),
    /// The call failed with another exception, for instance because the address has the wrong type.
    Failed(PyErr),
}

/// `sendto(data, addr)`. Err is for wrong arguments, for exceptions that the protocol's `error_received` raises, and
/// for exceptions that must leave the loop.
#[inline]
pub(super) fn send_to(this: Datagram<'_>, data: &Bound<'_, PyAny>, to: &Bound<'_, PyAny>) -> PyResult<()> {
    let data = Data::new(data)?;
    if !HAS_EMPTY_DATAGRAMS && data.as_slice().is_empty() {
        return Ok(());
    }
    check_remote(this, to)?;
    if this.is_finished() && (this.remote.is_set() || !this.socket.is_set()) {
        return flow::note_lost_write(this.py(), &this.lost_writes, flow::SEND_FAILED);
    }
    let target = target_of(this, to);
    if this.flags.has(Flags::BLOCKED) {
        return wait_writable(this, &data, target);
    }
    let sent = match &target {
        Target::Object(address) => send_by_object(this, data.object(), address),
        native => send_native(this, data.as_slice(), native),
    };
    match sent {
        Sent::Done => Ok(()),
        Sent::Blocked => wait_writable(this, &data, target),
        Sent::Refused(error) => tell_sender(this, error),
        Sent::Failed(error) => ending::fatal_error(this, error, "Fatal write error on datagram transport"),
    }
}

/// ValueError if the endpoint was made with a remote address and `to` is a different one.
#[inline]
fn check_remote(this: Datagram<'_>, to: &Bound<'_, PyAny>) -> PyResult<()> {
    if to.is_none() {
        return Ok(());
    }
    match this.remote.get(this.py()) {
        Some(remote) if !to.is(&remote) && !to.eq(&remote)? => Err(PyValueError::new_err(format!(
            "Invalid address: must be None or {}",
            remote.str()?
        ))),
        _ => Ok(()),
    }
}

#[inline]
fn target_of(this: Datagram<'_>, to: &Bound<'_, PyAny>) -> Target {
    if this.peer == Peer::Named || (this.peer == Peer::Unnamed && to.is_none()) {
        return Target::Peer;
    }
    let remote = this.remote.get(this.py());
    let to = remote.as_ref().unwrap_or(to);
    let family = match this.family {
        Family::Internet(family) => family,
        Family::Unix => libc::AF_UNIX,
        Family::Other => libc::AF_UNSPEC,
    };
    let address = this.senders.address_of(to.as_ptr());
    if let Some(address) = address.or_else(|| socket_object::native_address(family, to)) {
        return Target::Address(address);
    }
    let address = ObjectCell::empty();
    address.set(to.clone());
    Target::Object(AddressObject(address))
}

#[inline]
fn send_native(this: Datagram<'_>, data: &[u8], target: &Target) -> Sent {
    let sent = this
        .registration
        .usable_fd(this.py())
        .and_then(|fd| match target {
            Target::Address(address) => datagram::send_to(fd, data, address),
            _ => socket::send(fd, data).map(drop),
        });
    match sent {
        Ok(()) => {
            this.reactor().probe.counters.note_write(data.len());
            Sent::Done
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Blocked,
        Err(error) => Sent::Refused(errors::os_error(&error)),
    }
}

/// Calls `socket.sendto(data, address)`.
#[cold]
fn send_by_object(this: Datagram<'_>, data: &Bound<'_, PyAny>, address: &AddressObject) -> Sent {
    let py = this.py();
    let (Some(socket), Some(address)) = (this.socket.get(py), address.0.get(py)) else {
        return Sent::Done;
    };
    let name = names(py)
        .sendto
        .bind(py)
        .cast_into::<PyString>()
        .map_err(PyErr::from);
    match name.and_then(|name| socket.call_method1(name, (data, address))) {
        Ok(_) => Sent::Done,
        Err(error) if receiving::is_temporary(py, &error) => Sent::Blocked,
        Err(error) if error.is_instance_of::<PyOSError>(py) => Sent::Refused(error),
        Err(error) => Sent::Failed(error),
    }
}

/// Calls `error_received(error)` from within `sendto`: in the context of the code that called `sendto`. That code also
/// gets any exception that `error_received` raises.
#[cold]
fn tell_sender(this: Datagram<'_>, error: PyErr) -> PyResult<()> {
    let py = this.py();
    let Some(protocol) = this.calls.get(py) else {
        return Ok(());
    };
    let name = names(py).error_received.bind(py).cast_into::<PyString>()?;
    protocol.call_method1(name, (error.into_value(py),)).map(drop)
}

/// Queues a datagram until the socket is writable. Drops it if the transport has ended.
#[cold]
fn wait_writable(this: Datagram<'_>, data: &Data<'_, '_>, target: Target) -> PyResult<()> {
    if this.is_finished() {
        return Ok(());
    }
    let outbound = Outbound {
        data: data.to_chunk(0)?,
        target,
    };
    this.outgoing_len
        .set(this.outgoing_len.get() + outbound.counted_len());
    this.outgoing.borrow_mut().push_back(outbound);
    if !this.flags.has(Flags::BLOCKED) {
        this.flags.set(Flags::BLOCKED);
        sync_interest(this)?;
    }
    maybe_pause(this)
}

/// Called when the socket is writable again: sends queued datagrams.
#[cold]
pub(super) fn on_writable(this: Datagram<'_>) -> PyResult<()> {
    let py = this.py();
    while let Some(outbound) = pop(this) {
        let sent = match &outbound.target {
            Target::Object(address) => send_by_object(this, &outbound.data.to_bound(py), address),
            native => send_native(this, outbound.data.as_ref(), native),
        };
        match sent {
            Sent::Done => {}
            Sent::Blocked => {
                push_front(this, outbound);
                break;
            }
            Sent::Refused(error) => {
                // The remaining datagrams are sent when the poller reports the socket as writable again.
                return receiving::tell_error(this, error);
            }
            Sent::Failed(error) => {
                return ending::fatal_error(this, error, "Fatal write error on datagram transport");
            }
        }
    }
    if this.watermarks.must_resume(this.outgoing_len.get()) {
        flow::resume(&this.event_loop, &this.calls, &this.to_bound())?;
    }
    if this.is_finished() || !this.outgoing.borrow().is_empty() {
        return Ok(());
    }
    this.flags.clear(Flags::BLOCKED);
    if this.flags.has(Flags::CLOSING) {
        return ending::finish(this, None);
    }
    sync_interest(this)
}

fn pop(this: Datagram<'_>) -> Option<Outbound> {
    let outbound = this.outgoing.borrow_mut().pop_front()?;
    this.outgoing_len
        .set(this.outgoing_len.get() - outbound.counted_len());
    Some(outbound)
}

/// Puts a datagram back at the front of the queue, unless the transport has ended in the meantime.
fn push_front(this: Datagram<'_>, outbound: Outbound) {
    if this.is_finished() {
        return;
    }
    this.outgoing_len
        .set(this.outgoing_len.get() + outbound.counted_len());
    this.outgoing.borrow_mut().push_front(outbound);
}

/// Discards the datagrams that have not been sent.
pub(super) fn drop_buffer(body: &DatagramBody) {
    drop(body.outgoing.take());
    body.outgoing_len.set(0);
    body.flags.clear(Flags::BLOCKED);
}

/// Calls `pause_writing` if the size of the queue has risen above the high watermark.
pub(super) fn maybe_pause(this: Datagram<'_>) -> PyResult<()> {
    if this.watermarks.must_pause(this.outgoing_len.get()) {
        return flow::pause(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}
