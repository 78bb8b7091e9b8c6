//! The read side: each time the socket is ready, a batch of datagrams is received (on Linux with one system call), and
//! each datagram is delivered separately. For families other than internet and Unix, the batch is one datagram.
//!
//! ```text
//!   recv_batch --> the first ----------------------> datagram_received for each; the context is entered once
//!              '-> the others --> pending --> each --^
//!                                    '-- kept there after pause_reading(), or if an exception leaves the loop
//! ```
//! An exception in the protocol is reported but does not end the transport, as with asyncio's datagram transports.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket::Address;
use grapeshot_core::sys::socket::datagram::{self, INTERNET_SLOT_LEN, MAX_BATCH};
use pyo3::exceptions::{PyBlockingIOError, PyInterruptedError, PyOSError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use super::{Datagram, Family, Flags, sync_interest};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::transports::ending;
use crate::transports::object;
use crate::transports::outgoing::Chunk;

/// The maximum length of a received datagram, as in asyncio. (Datagrams of internet sockets are shorter anyway.)
const MAX_DATAGRAM_LEN: usize = 256 * 1024;
/// The number of Unix datagrams to receive at once: as many as fit into the memory for a batch of internet datagrams.
const UNIX_BATCH: usize = MAX_BATCH * INTERNET_SLOT_LEN / MAX_DATAGRAM_LEN;

/// A datagram and its sender.
pub(super) struct Inbound {
    data: Chunk,
    sender: Address,
}

#[inline]
pub(super) fn on_readable(this: Datagram<'_>) -> PyResult<()> {
    if !this.pending.borrow().is_empty() {
        return deliver(this, None);
    }
    let fd = match this.registration.usable_fd(this.py()) {
        Ok(fd) => fd,
        Err(error) => return lose_descriptor(this, &error),
    };
    match this.family {
        Family::Internet(_) => receive(this, fd, INTERNET_SLOT_LEN, MAX_BATCH),
        Family::Unix => receive(this, fd, MAX_DATAGRAM_LEN, UNIX_BATCH),
        Family::Other => receive_by_object(this),
    }
}

/// Called when other code has closed the socket. The protocol gets the error. The transport leaves the loop's fd table:
/// if a duplicate of the descriptor is still open, the poller would otherwise continue to report events.
#[cold]
pub(super) fn lose_descriptor(this: Datagram<'_>, error: &io::Error) -> PyResult<()> {
    this.registration.leave(this, this.reactor());
    on_read_error(this, error)
}

/// Receives up to `limit` datagrams of up to `slot_len` bytes each, and delivers them.
#[inline]
fn receive(this: Datagram<'_>, fd: RawFd, slot_len: usize, limit: usize) -> PyResult<()> {
    let py = this.py();
    let mut first = None;
    let mut fault = None;
    let received = this.reactor().scratch.with_len(slot_len * limit, |scratch| {
        let mut pending = this.pending.borrow_mut();
        datagram::recv_batch(fd, scratch, slot_len, limit, |data, sender| {
            // SAFETY: attached; making a bytes object copies the data and runs no Python code.
            let made = unsafe {
                let len_bytes = data.len() as ffi::Py_ssize_t;
                Bound::from_owned_ptr_or_err(
                    py,
                    ffi::PyBytes_FromStringAndSize(data.as_ptr().cast(), len_bytes),
                )
            };
            match made {
                Err(error) => fault = Some(error),
                Ok(data) => {
                    let inbound = Inbound {
                        data: Chunk::new(data),
                        sender,
                    };
                    if first.is_none() {
                        first = Some(inbound);
                    } else {
                        pending.push_back(inbound);
                    }
                }
            }
        })
    });
    let (delivered, after) = match received {
        Ok(batch) if first.is_some() => (deliver(this, first), batch.error),
        Ok(batch) => (Ok(()), batch.error),
        Err(error) => (Ok(()), Some(error)),
    };
    let reported = match (fault, after) {
        (Some(error), _) => ending::fatal_error(this, error, "Fatal read error on datagram transport"),
        (None, Some(error)) => on_read_error(this, &error),
        (None, None) => Ok(()),
    };
    // If the delivery and the read have both failed, return the error of the delivery: the datagrams were received
    // before the read failed.
    delivered.and(reported)
}

/// Delivers `first` and then the pending datagrams, until the protocol pauses or closes the transport.
#[inline]
fn deliver(this: Datagram<'_>, first: Option<Inbound>) -> PyResult<()> {
    let py = this.py();
    let delivered = this.calls.in_context(py, || {
        let mut next = first.or_else(|| this.pending.borrow_mut().pop_front());
        while let Some(Inbound { data, sender }) = next {
            let sender = this.senders.object_of(py, sender)?;
            if let Err(error) = this.calls.datagram_received(py, &data.to_bound(py), &sender) {
                object::report(this, error, "Exception in callback protocol.datagram_received()")?;
            }
            next = if this.flags.has(Flags::PAUSED | Flags::CLOSING) {
                None
            } else {
                this.pending.borrow_mut().pop_front()
            };
        }
        Ok(())
    });
    if !this.pending.borrow().is_empty() {
        keep_for_later(this, delivered.is_err());
    }
    match delivered {
        Ok(()) => Ok(()),
        Err(error) => ending::fatal_error(
            this,
            error,
            "Fatal error: protocol.datagram_received() call failed.",
        ),
    }
}

/// Decides what happens to datagrams that were received but not delivered. A closed transport drops them. A paused one
/// keeps them until `resume_reading()`. If an exception of the protocol has left the loop, the datagrams are delivered
/// when the loop runs again.
#[cold]
fn keep_for_later(this: Datagram<'_>, has_failed: bool) {
    if this.flags.has(Flags::CLOSING) {
        this.pending.borrow_mut().clear();
    } else if has_failed {
        this.reactor().ready.defer(this.to_bound(), deliver_pending);
    }
}

unsafe fn deliver_pending(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued with a transport of this type, to which the queue holds a reference.
    let this: Datagram<'_> = unsafe { This::new(py, object) };
    if this.flags.has(Flags::PAUSED | Flags::CLOSING) || this.pending.borrow().is_empty() {
        return Ok(());
    }
    deliver(this, None)
}

/// `pause_reading()`: delivers nothing until `resume`.
pub(super) fn pause(this: Datagram<'_>) -> PyResult<()> {
    if this.flags.has(Flags::PAUSED | Flags::CLOSING) {
        return Ok(());
    }
    this.flags.set(Flags::PAUSED);
    sync_interest(this)?;
    object::log_change(this, "%r pauses reading")
}

pub(super) fn resume(this: Datagram<'_>) -> PyResult<()> {
    if this.flags.has(Flags::CLOSING) || !this.flags.has(Flags::PAUSED) {
        return Ok(());
    }
    this.flags.clear(Flags::PAUSED);
    if !this.pending.borrow().is_empty() {
        this.reactor().ready.defer(this.to_bound(), deliver_pending);
    }
    sync_interest(this)?;
    object::log_change(this, "%r resumes reading")
}

#[cold]
fn on_read_error(this: Datagram<'_>, error: &io::Error) -> PyResult<()> {
    if error.kind() == io::ErrorKind::WouldBlock || this.flags.has(Flags::CLOSING) {
        return Ok(());
    }
    tell_error(this, errors::os_error(error))
}

/// Calls `error_received(error)` in the transport's context and reports what it raises.
#[cold]
pub(super) fn tell_error(this: Datagram<'_>, error: PyErr) -> PyResult<()> {
    let py = this.py();
    let exception = error.into_value(py).into_bound(py).into_any();
    match this.calls.call(py, names(py).error_received, &[&exception]) {
        Ok(_) => Ok(()),
        Err(error) => object::report(this, error, "Exception in callback protocol.error_received()"),
    }
}

/// Receives through the socket object, for families whose addresses only the socket module understands.
#[cold]
fn receive_by_object(this: Datagram<'_>) -> PyResult<()> {
    let py = this.py();
    let Some(socket) = this.socket.get(py) else {
        return Ok(());
    };
    let received = names(py)
        .recvfrom
        .bind(py)
        .cast_into::<PyString>()
        .map_err(PyErr::from)
        .and_then(|name| socket.call_method1(name, (MAX_DATAGRAM_LEN,)))
        .and_then(|received| Ok(received.cast_into::<PyTuple>()?));
    let delivered = match received {
        Ok(pair) => this.calls.in_context(py, || {
            this.calls
                .datagram_received(py, &pair.get_item(0)?, &pair.get_item(1)?)
        }),
        Err(error) if is_temporary(py, &error) => return Ok(()),
        Err(error) if error.is_instance_of::<PyOSError>(py) => return tell_error(this, error),
        Err(error) => {
            return ending::fatal_error(this, error, "Fatal read error on datagram transport");
        }
    };
    match delivered {
        Ok(()) => Ok(()),
        Err(error) => object::report(this, error, "Exception in callback protocol.datagram_received()"),
    }
}

/// True for the exceptions with which a socket object asks for the call to be repeated later.
pub(super) fn is_temporary(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyBlockingIOError>(py) || error.is_instance_of::<PyInterruptedError>(py)
}
