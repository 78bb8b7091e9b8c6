//! `StreamTransport`: the transport of connected stream sockets (TCP and Unix), for Protocol and BufferedProtocol.
//!
//! - `lifecycle`: from `connection_made` to `connection_lost`
//! - `reading`, `writing`: the two directions; `sendfile`: the transport's part in `loop.sendfile`
//! - `methods`: the Python methods and attributes
//!
//! The object is used on the loop's thread only, except that any thread may call `close`, `abort` and `is_closing`. The
//! object closes its descriptor exactly once. It enters the loop's fd table when it starts, and leaves the table when
//! all I/O stops. All fields that change are cells, because a call into Python may re-enter every method.

mod lifecycle;
mod methods;
mod reading;
mod sendfile;
mod writing;

use std::cell::{Cell, OnceCell};
use std::ffi::CStr;
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::queue::read_size::ReadSize;
use grapeshot_core::sys::poller::{Interest, Readiness};
use grapeshot_core::sys::socket::{self, Address};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::ending::{self, Ending};
use super::object::{self, Body, TransportObject};
use super::outgoing::Outgoing;
use super::protocol::ProtocolCalls;
use super::registration::Registration;
use crate::binding::attributes::OwnMethods;
use crate::binding::errors;
use crate::binding::flags::FlagCell;
use crate::binding::native_type::{NativeType, This};
use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::Source;

pub(super) use lifecycle::accept;
pub(super) use methods::{loop_methods, register};

bitflags::bitflags! {
    #[derive(Clone, Copy)]
    pub(super) struct Flags: u16 {
        /// `pause_reading()` is in force.
        const PAUSED = 1;
        /// `close()` or `abort()` was called, or the connection failed.
        const CLOSING = 1 << 1;
        /// `write_eof()` was called.
        const EOF_WRITTEN = 1 << 2;
        /// The peer has ended its side, and the protocol wants to continue writing.
        const EOF_RECEIVED = 1 << 3;
        /// A callback of the transport's own protocol is running: writes are corked until it returns.
        const CORKED = 1 << 4;
        /// The out-buffer waits for the descriptor to become writable.
        const BLOCKED = 1 << 5;
        /// `connection_made` was called, so `connection_lost` must be called too.
        const MADE = 1 << 6;
        /// `loop.sendfile` writes to the socket, and all other writes are refused.
        const SENDFILE = 1 << 7;
        /// The transport is on the loop's list of the transports that hold data (`flush_policy`).
        const HELD = 1 << 8;
        /// The loop counts the transport among its open connections.
        const COUNTED = 1 << 9;
    }
}

pub(super) struct StreamBody {
    /// The server that accepted the connection.
    server: ObjectCell,
    /// The `socket.socket` that owns the descriptor; empty while the transport itself owns the descriptor.
    socket: ObjectCell,
    /// The Future to complete when the connection is set up; later a Future of `loop.sendfile`.
    waiter: ObjectCell,
    /// The exception to pass to `connection_lost`; empty for None.
    exception: ObjectCell,
    calls: ProtocolCalls,
    outgoing: Outgoing,
    peer: Option<Address>,
    /// The local address, stored before the descriptor is closed.
    local: OnceCell<Box<Address>>,
    registration: Registration,
    flags: FlagCell<Flags>,
    /// 0 while connected. Afterwards 1 plus the number of writes since the connection ended, at most 255.
    lost_writes: Cell<u8>,
    read_size: ReadSize,
}

pub(super) type StreamObject = TransportObject<StreamBody>;
type Stream<'py> = This<'py, StreamObject>;

static STREAM_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static OWN_METHODS: OwnMethods = OwnMethods::new();

impl StreamBody {
    /// The descriptor, negative once it is closed.
    #[inline]
    fn fd(&self) -> RawFd {
        self.registration.fd()
    }

    /// The descriptor, for a system call that follows at once. EBADF if it is closed, whether by the transport or by
    /// other code.
    #[inline]
    fn usable_fd(&self, py: Python<'_>) -> io::Result<RawFd> {
        self.registration.usable_fd(py)
    }

    /// The events to wait for, derived from the transport's state.
    fn wanted_interest(&self) -> Interest {
        let read = !self
            .flags
            .has(Flags::PAUSED | Flags::CLOSING | Flags::EOF_RECEIVED);
        let write =
            self.flags.has(Flags::BLOCKED) || (self.flags.has(Flags::SENDFILE) && self.waiter.is_set());
        match (read, write) {
            (true, true) => Interest::BOTH,
            (true, false) => Interest::READ,
            (false, true) => Interest::WRITE,
            (false, false) => Interest::NONE,
        }
    }
}

/// Makes the poller wait for the events that the transport's state requires. A failure ends the connection.
fn sync_interest(this: Stream<'_>) -> PyResult<()> {
    match this
        .registration
        .sync(this.py(), this.reactor(), this.wanted_interest())
    {
        Ok(()) => Ok(()),
        Err(error) => ending::fatal_error(this, errors::os_error(&error), "Fatal error on socket transport"),
    }
}

impl Source for StreamObject {
    #[inline]
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()> {
        if readiness.is_readable() && this.registration.interest().has_read() {
            if this.wanted_interest().has_read() {
                reading::on_readable(this)?;
            } else {
                // Reading was paused, but the poller still waits for data. Changing that costs a system call, which
                // only pays off now that data has come.
                sync_interest(this)?;
            }
        }
        if readiness.is_writable() {
            if this.flags.has(Flags::BLOCKED) {
                writing::on_writable(this)?;
            }
            if this.flags.has(Flags::SENDFILE) {
                sendfile::on_writable(this)?;
            }
        }
        Ok(())
    }

    fn interest(&self) -> Interest {
        self.registration.interest()
    }

    fn has_descriptor(this: This<'_, Self>) -> bool {
        this.usable_fd(this.py()).is_ok()
    }

    fn on_displaced(this: This<'_, Self>) {
        ending::on_displaced(this);
    }
}

impl Ending for StreamBody {
    const FAULT: &'static str = "Fatal error on socket transport";
    const LOST_FAILED: &'static str = "Fatal error: protocol.connection_lost() call failed.";
    const CLOSE_FAILED: &'static str = "Exception in callback socket.close()";

    fn registration(&self) -> &Registration {
        &self.registration
    }

    fn exception(&self) -> &ObjectCell {
        &self.exception
    }

    fn mark_finished(&self) -> bool {
        self.flags.set(Flags::CLOSING);
        let is_first = self.lost_writes.get() == 0;
        if is_first {
            self.lost_writes.set(1);
        }
        is_first
    }

    fn drop_buffer(&self) {
        writing::drop_buffer(self);
    }

    fn close_owned(&self, py: Python<'_>) -> PyResult<()> {
        lifecycle::close_descriptor(py, self);
        Ok(())
    }

    fn was_made(&self) -> bool {
        self.flags.has(Flags::MADE)
    }

    fn on_stopped(this: Stream<'_>) -> PyResult<()> {
        if this.flags.has(Flags::SENDFILE) {
            return sendfile::on_lost(this);
        }
        Ok(())
    }

    fn on_closed(this: Stream<'_>) -> PyResult<()> {
        uncount(&this);
        match this.event_loop.get(this.py()) {
            Some(event_loop) => LoopObject::of(&event_loop).resume_listeners(this.py()),
            None => Ok(()),
        }
    }

    fn take_server<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.server.take(py)
    }
}

impl Body for StreamBody {
    const NAME: &'static CStr = c"grapeshot._core.StreamTransport";
    const DOC: &'static CStr =
        c"The transport of a connected stream socket; the interface of asyncio.Transport.";

    fn describe(this: Stream<'_>) -> String {
        methods::describe(this)
    }

    fn is_open(&self) -> bool {
        self.fd() >= 0
    }

    fn close(&self, py: Python<'_>) {
        lifecycle::close_descriptor(py, self);
    }

    fn on_freed(object: &StreamObject) {
        uncount(object);
    }

    fn calls(&self) -> &ProtocolCalls {
        &self.calls
    }

    /// The out-buffer is left out, because it holds only `bytes` objects, which cannot be part of a cycle.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        let owner = self.registration.owner().cell();
        [&self.server, &self.socket, &self.waiter, &self.exception, owner]
    }

    fn clear(&self, py: Python<'_>) {
        for cell in [&self.server, &self.waiter, &self.exception] {
            drop(cell.take(py));
        }
    }
}

/// Makes the transport of the open descriptor `fd`. If there is a `socket`, it owns the descriptor, and the transport
/// takes over the socket object. Without a `socket`, the transport itself owns the descriptor.
fn new_stream<'py>(
    event_loop: &Bound<'py, PyAny>,
    fd: RawFd,
    socket: Option<Bound<'py, PyAny>>,
    calls: ProtocolCalls,
    peer: Option<Address>,
) -> PyResult<Bound<'py, PyAny>> {
    let body = StreamBody {
        server: ObjectCell::empty(),
        socket: ObjectCell::empty(),
        waiter: ObjectCell::empty(),
        exception: ObjectCell::empty(),
        calls,
        outgoing: Outgoing::new(),
        peer,
        local: OnceCell::new(),
        registration: Registration::new(fd),
        flags: FlagCell::new(),
        lost_writes: Cell::new(0),
        read_size: ReadSize::new(),
    };
    if let Some(socket) = socket {
        set_socket(&body, socket);
    }
    let transport = object::make(&STREAM_TYPE, event_loop, body)?;
    let this = lifecycle::stream_of(&transport);
    this.flags.set(Flags::COUNTED);
    this.reactor().limits.connection_opened();
    Ok(transport)
}

/// Removes the transport from the loop's count of open connections, if it is counted.
fn uncount(object: &StreamObject) {
    if object.flags.has(Flags::COUNTED) {
        object.flags.clear(Flags::COUNTED);
        object.reactor().limits.connection_closed();
    }
}

/// True for a `StreamTransport`.
pub(crate) fn is_stream(transport: &Bound<'_, PyAny>) -> bool {
    transport.get_type_ptr() == STREAM_TYPE.load(Ordering::Relaxed)
}

/// A copy of the context of a transport for which `is_stream` has returned true; None once its connection is lost.
pub(crate) fn copied_context<'py>(transport: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    debug_assert!(is_stream(transport));
    lifecycle::stream_of(transport)
        .calls
        .copied_context(transport.py())
}

/// True if nobody has replaced the transport's methods `write`, `_force_close` and `is_closing`. Only then may native
/// code use the functions below instead of the methods. Requires that `is_stream` has returned true for the transport.
#[inline]
pub(crate) fn has_own_methods(transport: &Bound<'_, PyAny>) -> bool {
    OWN_METHODS.are_in_force(transport, &lifecycle::stream_of(transport).dict)
}

/// `transport.write(data)`, for a transport for which `has_own_methods` has returned true.
#[inline]
pub(crate) fn write_as_method(transport: &Bound<'_, PyAny>, data: *mut ffi::PyObject) -> PyResult<()> {
    debug_assert!(is_stream(transport));
    let this = lifecycle::stream_of(transport);
    StreamObject::with_access(this, || writing::write(this, data))
}

/// `transport.is_closing()`, for a transport for which `has_own_methods` has returned true.
#[inline]
pub(crate) fn is_closing(transport: &Bound<'_, PyAny>) -> PyResult<bool> {
    debug_assert!(is_stream(transport));
    let this = lifecycle::stream_of(transport);
    StreamObject::with_access(this, || Ok(this.flags.has(Flags::CLOSING)))
}

/// `transport.write(data)` for native callers. Requires that `has_own_methods` has returned true for the transport.
/// Native callers have already collected all data that belongs together. So the data is sent at once, unless a callback
/// of the transport's own protocol is running.
#[inline]
pub(crate) fn write(transport: &Bound<'_, PyAny>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
    debug_assert!(is_stream(transport));
    writing::write_collected(lifecycle::stream_of(transport), data.as_ptr())
}

/// Ends the connection at once, with `exception` (or None) for `connection_lost`. Requires that `has_own_methods` has
/// returned true for the transport.
pub(crate) fn abort_with(transport: &Bound<'_, PyAny>, exception: Option<Bound<'_, PyAny>>) -> PyResult<()> {
    debug_assert!(is_stream(transport));
    lifecycle::abort_with(lifecycle::stream_of(transport), exception)
}

/// The local address: the stored one, or else the address that the descriptor is bound to.
fn local_address(py: Python<'_>, body: &StreamBody) -> Option<Address> {
    if let Some(address) = body.local.get() {
        return Some((**address).clone());
    }
    socket::local_address(body.usable_fd(py).ok()?).ok()
}

/// Stores the local address, which can no longer be determined once the descriptor is closed.
fn keep_local_address(py: Python<'_>, body: &StreamBody) {
    if body.local.get().is_none()
        && let Some(address) = local_address(py, body)
    {
        // If Python code that ran in `local_address` has already stored a value, that value stays, because it is the
        // same address.
        let _ = body.local.set(Box::new(address));
    }
}

/// Makes `socket` the owner of the descriptor: from now on any code that has a reference to the socket may close the
/// descriptor.
fn set_socket(body: &StreamBody, socket: Bound<'_, PyAny>) {
    keep_local_address(socket.py(), body);
    body.registration.set_owner(&socket);
    body.socket.set(socket);
}

/// The socket object of the transport. If the transport has owned the bare descriptor so far, the object is made now.
fn socket_of(this: Stream<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = this.py();
    if let Some(socket) = this.socket.get(py) {
        return Ok(Some(socket));
    }
    let fd = this.fd();
    if fd < 0 {
        return Ok(None);
    }
    let socket = socket_object::adopt(py, fd)?;
    if this.fd() != fd || this.socket.is_set() {
        // Other code has run in `adopt`, and has closed the descriptor or made the socket object itself.
        socket_object::disown(socket)?;
        return Ok(this.socket.get(py));
    }
    set_socket(&this, socket.clone());
    Ok(Some(socket))
}
