//! `DatagramTransport`: the transport of datagram sockets (UDP, Unix, and any other family that Python can open).
//!
//! - `lifecycle`: from `connection_made` to `connection_lost`
//! - `receiving`, `sending`: the two directions
//! - `senders`: the Python objects for the addresses of senders
//! - `methods`: the Python methods and attributes
//!
//! The object is used on the loop's thread only, except for `close`, `abort` and `is_closing`. It owns the socket
//! object, which owns the descriptor and is closed exactly once. All fields that change are cells or atomics, because a
//! call into Python may re-enter any method.

mod lifecycle;
mod methods;
mod receiving;
mod senders;
mod sending;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::RawFd;

use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;

use super::ending::{self, Ending};
use super::flow::Watermarks;
use super::object::{Body, TransportObject};
use super::protocol::ProtocolCalls;
use super::registration::Registration;
use crate::binding::flags::FlagCell;
use crate::binding::native_type::{This, traverse_cells};
use crate::binding::object_cell::ObjectCell;
use crate::event_loop::source::Source;

use receiving::Inbound;
use senders::Senders;
use sending::Outbound;

pub(super) use methods::{loop_methods, register};

/// Up to Python 3.12 asyncio ignores empty datagrams. From 3.13 on it sends them.
const HAS_EMPTY_DATAGRAMS: bool = cfg!(Py_3_13);
/// From Python 3.13 on, the buffer size includes the length of a header for each queued datagram.
const HEADER_LEN: usize = if HAS_EMPTY_DATAGRAMS { 8 } else { 0 };

bitflags::bitflags! {
    #[derive(Clone, Copy)]
    struct Flags: u16 {
        /// `close()` or `abort()` was called, or the transport failed.
        const CLOSING = 1;
        /// `pause_reading()` is in force.
        const PAUSED = 1 << 1;
        /// Datagrams wait for the descriptor to become writable.
        const BLOCKED = 1 << 2;
    }
}

/// The destination of a datagram that is sent without an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// None: the datagram must have an address.
    None,
    /// The socket's peer, which has no name. A datagram that is sent with an address goes to that address.
    Unnamed,
    /// The socket's peer. A datagram that is sent with an address goes to the peer, too.
    Named,
}

/// What the transport must know about the address family.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// `AF_INET`, `AF_INET6`: handled natively, with datagrams of up to 64 KiB.
    Internet(i32),
    /// `AF_UNIX`: handled natively, with datagrams of any size.
    Unix,
    /// Any other family: only the socket module understands its addresses, so the socket object receives and sends.
    Other,
}

pub(super) struct DatagramBody {
    /// The `socket.socket`; empty once it is closed.
    socket: ObjectCell,
    /// The Future to complete when the endpoint is set up.
    waiter: ObjectCell,
    /// The exception to pass to `connection_lost`; empty for None.
    exception: ObjectCell,
    /// The remote address that the endpoint was made with.
    remote: ObjectCell,
    calls: ProtocolCalls,
    registration: Registration,
    /// The descriptor, kept for `repr()`.
    fileno: RawFd,
    family: Family,
    peer: Peer,
    senders: Senders,
    /// Datagrams of a batch that were received but not delivered, because the protocol has paused the transport or has
    /// raised an exception that left the loop.
    pending: RefCell<VecDeque<Inbound>>,
    /// Datagrams that the kernel has not taken yet.
    outgoing: RefCell<VecDeque<Outbound>>,
    /// The size of `outgoing` as `get_write_buffer_size()` counts it.
    outgoing_len: Cell<usize>,
    watermarks: Watermarks,
    flags: FlagCell<Flags>,
    /// 0 while the transport is open. The end of the transport sets this to 1. After that, each call of
    /// `flow::note_lost_write` adds 1.
    lost_writes: Cell<u8>,
}

type DatagramObject = TransportObject<DatagramBody>;
type Datagram<'py> = This<'py, DatagramObject>;

impl DatagramBody {
    /// Whether all I/O has stopped.
    #[inline]
    fn is_finished(&self) -> bool {
        self.lost_writes.get() != 0
    }

    /// The events to wait for, derived from the transport's state.
    fn wanted_interest(&self) -> Interest {
        let read = if self.flags.has(Flags::PAUSED | Flags::CLOSING) {
            Interest::NONE
        } else {
            Interest::READ
        };
        if self.flags.has(Flags::BLOCKED) {
            read.with(Interest::WRITE)
        } else {
            read
        }
    }
}

/// Makes the poller wait for the events that the transport's state requires. If other code has closed the socket, the
/// transport leaves the loop's fd table and the protocol gets the error.
fn sync_interest(this: Datagram<'_>) -> PyResult<()> {
    let py = this.py();
    match this.registration.sync(py, this.reactor(), this.wanted_interest()) {
        Ok(()) => Ok(()),
        Err(error) => receiving::lose_descriptor(this, &error),
    }
}

impl Source for DatagramObject {
    #[inline]
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()> {
        if readiness.is_readable() && this.registration.interest().has_read() {
            receiving::on_readable(this)?;
        }
        if readiness.is_writable() && this.flags.has(Flags::BLOCKED) {
            sending::on_writable(this)?;
        }
        Ok(())
    }

    fn interest(&self) -> Interest {
        self.registration.interest()
    }

    fn has_descriptor(this: This<'_, Self>) -> bool {
        this.registration.usable_fd(this.py()).is_ok()
    }

    fn on_displaced(this: This<'_, Self>) {
        ending::on_displaced(this);
    }
}

impl Ending for DatagramBody {
    const FAULT: &'static str = "Fatal error on datagram transport";
    const LOST_FAILED: &'static str = "Exception in callback protocol.connection_lost()";
    const CLOSE_FAILED: &'static str = "Exception in callback socket.close()";

    fn registration(&self) -> &Registration {
        &self.registration
    }

    fn exception(&self) -> &ObjectCell {
        &self.exception
    }

    fn mark_finished(&self) -> bool {
        self.flags.set(Flags::CLOSING);
        let is_first = !self.is_finished();
        if is_first {
            self.lost_writes.set(1);
        }
        is_first
    }

    fn drop_buffer(&self) {
        sending::drop_buffer(self);
    }

    fn close_owned(&self, py: Python<'_>) -> PyResult<()> {
        lifecycle::close_socket(py, self)
    }
}

impl Body for DatagramBody {
    const NAME: &'static CStr = c"grapeshot._core.DatagramTransport";
    const DOC: &'static CStr =
        c"The transport of a datagram socket; the interface of asyncio.DatagramTransport.";

    /// `<DatagramTransport fd=7 read=polling write=<idle, bufsize=0>>`, in the words that asyncio's own transports use.
    fn describe(this: Datagram<'_>) -> String {
        if !this.is_open() {
            return format!("<DatagramTransport closed fd={}>", this.fileno);
        }
        let state = if this.flags.has(Flags::CLOSING) {
            " closing"
        } else {
            ""
        };
        let interest = this.registration.interest();
        let word = |is_polled| if is_polled { "polling" } else { "idle" };
        format!(
            "<DatagramTransport{state} fd={} read={} write=<{}, bufsize={}>>",
            this.fileno,
            word(interest.has_read()),
            word(interest.has_write()),
            this.outgoing_len.get()
        )
    }

    fn is_open(&self) -> bool {
        self.socket.is_set()
    }

    fn close(&self, py: Python<'_>) {
        if let Err(error) = lifecycle::close_socket(py, self) {
            error.write_unraisable(py, None);
        }
    }

    fn calls(&self) -> &ProtocolCalls {
        &self.calls
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.socket,
            &self.waiter,
            &self.exception,
            &self.remote,
            self.senders.cell(),
            self.registration.owner().cell(),
        ]
    }

    /// An address that only the socket module understands may be any object, so the collector must see it. Everything
    /// else that is queued is bytes, which cannot be part of a cycle.
    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Ok(outgoing) = self.outgoing.try_borrow() else {
            return 0;
        };
        // SAFETY: visit and arg are the collector's.
        unsafe { traverse_cells(outgoing.iter().filter_map(Outbound::address_object), visit, arg) }
    }

    fn clear(&self, py: Python<'_>) {
        for cell in [&self.waiter, &self.exception, &self.remote] {
            drop(cell.take(py));
        }
        sending::drop_buffer(self);
    }
}
