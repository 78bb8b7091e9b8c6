//! `StreamTransport`: the transport of connected stream sockets (TCP and Unix), for Protocol and BufferedProtocol.
//!
//! - `lifecycle`: from `connection_made` to `connection_lost`
//! - `reading`, `writing`: the two directions; `sendfile`: what the transport does for `loop.sendfile`
//! - `methods`: what Python sees
//!
//! The object belongs to the loop's thread. It owns its descriptor, closes it exactly once, and is entered in the
//! loop's fd table while it waits for anything. All fields are cells: a call into Python may re-enter every method.

mod lifecycle;
mod methods;
mod reading;
mod sendfile;
mod writing;

use std::cell::{Cell, OnceCell};
use std::ffi::{CStr, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::outgoing::Outgoing;
use super::protocol::ProtocolCalls;
use super::socket_object;
use crate::event_loop::errors;
use crate::event_loop::names::names;
use crate::event_loop::native_type::{NativeType, This, new_type, slot};
use crate::event_loop::object_cell::ObjectCell;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Reactor;
use crate::event_loop::source::Source;
use crate::sys::poller::{Interest, Readiness, Token};
use crate::sys::socket::{self, Address};

pub(super) use lifecycle::accept;
pub(super) use methods::{loop_methods, register};
pub(crate) use reading::WritableBuffer;

mod flag {
    /// `pause_reading()` is in force.
    pub(super) const PAUSED: u16 = 1;
    /// `close()` or `abort()` was called, or the connection failed.
    pub(super) const CLOSING: u16 = 1 << 1;
    /// `write_eof()` was called.
    pub(super) const EOF_WRITTEN: u16 = 1 << 2;
    /// The peer has ended its side and the protocol wants to go on writing.
    pub(super) const EOF_RECEIVED: u16 = 1 << 3;
    /// The protocol's own callback runs: writes are corked until it returns.
    pub(super) const CORKED: u16 = 1 << 4;
    /// The out-buffer waits for the descriptor to become writable.
    pub(super) const BLOCKED: u16 = 1 << 5;
    /// In the loop's fd table.
    pub(super) const REGISTERED: u16 = 1 << 6;
    /// `connection_made` was called, so `connection_lost` must be.
    pub(super) const MADE: u16 = 1 << 7;
    /// `loop.sendfile` writes to the socket, and nobody else may.
    pub(super) const SENDFILE: u16 = 1 << 8;
}

/// The object behind `StreamTransport`: the header of `asyncio.BaseTransport`, then our own fields.
#[repr(C)]
pub(super) struct StreamObject {
    base: ffi::PyObject,
    /// The slot `_extra` of asyncio.BaseTransport: a dict, made when first needed.
    extra: ObjectCell,
    body: ManuallyDrop<StreamBody>,
    is_body_live: Cell<bool>,
}

pub(super) struct StreamBody {
    weakrefs: Cell<*mut ffi::PyObject>,
    event_loop: ObjectCell,
    /// The server that accepted the connection.
    server: ObjectCell,
    /// The `socket.socket` that owns the descriptor, if there is one; else the transport owns it itself.
    socket: ObjectCell,
    /// The Future of whoever waits for the connection to be set up, later of `loop.sendfile`.
    waiter: ObjectCell,
    /// What `connection_lost` will be called with.
    exception: ObjectCell,
    calls: ProtocolCalls,
    outgoing: Outgoing,
    peer: Option<Address>,
    /// The local address, kept when the descriptor is closed.
    local: OnceCell<Box<Address>>,
    token: Cell<Token>,
    /// The open descriptor; once closed its complement (`!fd`), which is negative.
    fd: Cell<RawFd>,
    flags: Cell<u16>,
    /// What the poller waits for now.
    interest: Cell<Interest>,
    /// 0 while connected; then the number of writes after the connection was given up, plus one.
    lost_writes: Cell<u8>,
    /// The size of the `bytes` that would have suited the last read, 0 if it was small or very large.
    suitable_read_len: Cell<u32>,
    /// How many reads in a row it has suited (saturating).
    steady_reads: Cell<u8>,
}

impl Deref for StreamObject {
    type Target = StreamBody;

    #[inline]
    fn deref(&self) -> &StreamBody {
        &self.body
    }
}

type Stream<'py> = This<'py, StreamObject>;

static STREAM_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl StreamBody {
    #[inline]
    fn has(&self, flag: u16) -> bool {
        self.flags.get() & flag != 0
    }

    #[inline]
    fn raise_flag(&self, flag: u16) {
        self.flags.set(self.flags.get() | flag);
    }

    #[inline]
    fn lower_flag(&self, flag: u16) {
        self.flags.set(self.flags.get() & !flag);
    }

    #[inline]
    fn reactor(&self) -> &Reactor {
        // SAFETY: the transport holds a reference to its loop from its creation to its deallocation (tp_clear leaves
        // it), and the loop's layout is LoopObject (checked where transports are made).
        unsafe { (*self.event_loop.as_ptr().cast::<LoopObject>()).reactor() }
    }

    /// The interest that follows from the state.
    fn wanted_interest(&self) -> Interest {
        let flags = self.flags.get();
        let read = flags & (flag::PAUSED | flag::CLOSING | flag::EOF_RECEIVED) == 0;
        let write = flags & flag::BLOCKED != 0 || (flags & flag::SENDFILE != 0 && self.waiter.is_set());
        match (read, write) {
            (true, true) => Interest::BOTH,
            (true, false) => Interest::READ,
            (false, true) => Interest::WRITE,
            (false, false) => Interest::NONE,
        }
    }

    /// Brings the poller in line with the state.
    fn sync_interest(&self) -> PyResult<()> {
        if !self.has(flag::REGISTERED) {
            return Ok(());
        }
        let (old, new) = (self.interest.get(), self.wanted_interest());
        if old != new {
            self.reactor()
                .set_interest(self.fd.get(), self.token.get(), old, new)
                .map_err(|error| errors::os_error(&error))?;
            self.interest.set(new);
        }
        Ok(())
    }
}

impl Source for StreamObject {
    #[inline]
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()> {
        if readiness.is_readable() && this.interest.get().has_read() {
            if this.wanted_interest().has_read() {
                reading::on_readable(this)?;
            } else {
                // Paused since the poller was told: only now is it worth a system call.
                this.sync_interest()?;
            }
        }
        if readiness.is_writable() {
            if this.has(flag::BLOCKED) {
                writing::on_writable(this)?;
            }
            if this.has(flag::SENDFILE) {
                sendfile::on_writable(this)?;
            }
        }
        Ok(())
    }
}

impl NativeType for StreamObject {
    const NAME: &'static CStr = c"grapeshot._core.StreamTransport";
    const DOC: &'static CStr =
        c"The transport of a connected stream socket; the interface of asyncio.Transport.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;

    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's, here and below.
        let result = unsafe { self.extra.traverse(visit, arg) };
        if result != 0 || !self.is_body_live.get() {
            return result;
        }
        for cell in [
            &self.event_loop,
            &self.server,
            &self.socket,
            &self.waiter,
            &self.exception,
        ] {
            // SAFETY: as above.
            let result = unsafe { cell.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above. The out-buffer holds only bytes, which cannot be part of a cycle.
        unsafe { self.calls.traverse(visit, arg) }
    }

    fn exclusively<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::exclusively_for(this.py(), &this.event_loop, body)
    }

    fn clear(this: This<'_, Self>) {
        let py = this.py();
        drop(this.extra.take(py));
        if this.is_body_live.get() {
            this.calls.drop_all(py);
            drop(this.server.take(py));
            drop(this.waiter.take(py));
            drop(this.exception.take(py));
        }
    }
}

/// Makes the object around an open descriptor that it takes over (`fd` itself, or `socket` if that owns it).
fn new_stream<'py>(
    event_loop: &Bound<'py, PyAny>,
    fd: RawFd,
    socket: Option<Bound<'py, PyAny>>,
    calls: ProtocolCalls,
    peer: Option<Address>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    let body = StreamBody {
        weakrefs: Cell::new(ptr::null_mut()),
        event_loop: ObjectCell::empty(),
        server: ObjectCell::empty(),
        socket: ObjectCell::empty(),
        waiter: ObjectCell::empty(),
        exception: ObjectCell::empty(),
        calls,
        outgoing: Outgoing::new(),
        peer,
        local: OnceCell::new(),
        token: Cell::new(Token(0)),
        fd: Cell::new(fd),
        flags: Cell::new(0),
        interest: Cell::new(Interest::NONE),
        lost_writes: Cell::new(0),
        suitable_read_len: Cell::new(0),
        steady_reads: Cell::new(0),
    };
    body.event_loop.set(event_loop.clone());
    if let Some(socket) = socket {
        body.socket.set(socket);
    }
    // SAFETY: the type is made by `register` for this layout; the allocation comes zeroed, so the object is valid
    // for the collector before the body is in.
    unsafe {
        let object = ffi::PyType_GenericAlloc(STREAM_TYPE.load(Ordering::Relaxed), 0);
        if object.is_null() {
            let error = errors::fetch(py);
            body.calls.drop_all(py);
            drop(body.event_loop.take(py));
            drop(body.socket.take(py));
            return Err(error);
        }
        let stream = object.cast::<StreamObject>();
        ptr::write(&raw mut (*stream).body, ManuallyDrop::new(body));
        (*stream).is_body_live.set(true);
        Ok(Bound::from_owned_ptr(py, object))
    }
}

/// True for a `StreamTransport`.
pub(crate) fn is_stream(transport: &Bound<'_, PyAny>) -> bool {
    transport.get_type_ptr() == STREAM_TYPE.load(Ordering::Relaxed)
}

/// `transport.write(data)` for native users of a transport for which `is_stream` holds.
#[inline]
pub(crate) fn write(transport: &Bound<'_, PyAny>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
    debug_assert!(is_stream(transport));
    writing::write(lifecycle::stream_of(transport), data.as_ptr())
}

/// Ends a transport for which `is_stream` holds at once, with `exception` (or None) for its `connection_lost`.
pub(crate) fn abort_with(transport: &Bound<'_, PyAny>, exception: Option<Bound<'_, PyAny>>) -> PyResult<()> {
    debug_assert!(is_stream(transport));
    lifecycle::abort_with(lifecycle::stream_of(transport), exception)
}

/// A transport dropped while its descriptor is open: a ResourceWarning, and the descriptor is closed here, while a
/// socket object that belongs to the same garbage is still whole.
unsafe extern "C" fn finalize(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize attached with an object of this type; the current exception is kept aside
    // as PEP 442 asks.
    unsafe {
        let py = Python::assume_attached();
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            let this = Stream::new(py, slf);
            if this.is_body_live.get() && this.fd.get() >= 0 {
                let text = methods::describe(this);
                let category = py.get_type::<pyo3::exceptions::PyResourceWarning>();
                let message = format!("unclosed transport {text}");
                let warned = names()
                    .warn
                    .bind(py)
                    .call1((message, category, 1, this.to_bound()));
                if let Err(error) = warned {
                    error.write_unraisable(py, Some(&this.to_bound()));
                }
                lifecycle::close_descriptor(py, &this);
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached with an unreferenced transport; the finalizer may revive it, then nothing
    // more is done; otherwise the fields are dropped in place and the memory goes back to the allocator.
    unsafe {
        if ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let stream = slf.cast::<StreamObject>();
        if (*stream).is_body_live.get() {
            let body = &(*stream).body;
            if !body.weakrefs.get().is_null() {
                ffi::PyObject_ClearWeakRefs(slf);
            }
            lifecycle::close_descriptor(py, body);
            body.calls.drop_all(py);
            for cell in [
                &body.server,
                &body.socket,
                &body.waiter,
                &body.exception,
                &body.event_loop,
            ] {
                drop(cell.take(py));
            }
            ManuallyDrop::drop(&mut (*stream).body);
        }
        drop((*stream).extra.take(py));
        let kind = ffi::Py_TYPE(slf);
        ffi::PyObject_GC_Del(slf.cast());
        ffi::Py_DECREF(kind.cast());
    }
}

/// Makes the type on top of `asyncio.Transport`, so that `isinstance()` holds.
fn make_type(module: &Bound<'_, PyModule>, slots: &[ffi::PyType_Slot]) -> PyResult<()> {
    let py = module.py();
    let base = names().transport_type.bind(py);
    let base_size: usize = base.getattr("__basicsize__")?.extract()?;
    if base_size != std::mem::offset_of!(StreamObject, body) {
        return Err(PyImportError::new_err(format!(
            "asyncio.Transport has objects of {base_size} bytes here, which this build of grapeshot does not know"
        )));
    }
    let mut all = vec![
        slot(ffi::Py_tp_finalize, finalize as *mut c_void),
        slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
    ];
    all.extend(slots.iter().map(|entry| slot(entry.slot, entry.pfunc)));
    // SAFETY: the functions are those of this layout, which starts with the base's (checked above).
    let kind = unsafe { new_type::<StreamObject>(module, Some(&PyTuple::new(py, [base])?), &all)? };
    // What start_tls() asks of a transport.
    kind.setattr("_start_tls_compatible", true)?;
    // What asyncio's `loop.sendfile` asks of a transport.
    let mode = py.import("asyncio.constants")?.getattr("_SendfileMode")?;
    kind.setattr("_sendfile_compatible", mode.getattr("TRY_NATIVE")?)?;
    module.add("StreamTransport", &kind)?;
    STREAM_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}

/// The local address, from the descriptor while it is open.
fn local_address(body: &StreamBody) -> Option<Address> {
    match body.local.get() {
        Some(address) => Some((**address).clone()),
        None if body.fd.get() >= 0 => socket::local_address(body.fd.get()).ok(),
        None => None,
    }
}

/// The socket object behind the transport, made now if the transport owned the bare descriptor until here.
fn socket_of(this: Stream<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = this.py();
    if let Some(socket) = this.socket.get(py) {
        return Ok(Some(socket));
    }
    if this.fd.get() < 0 {
        return Ok(None);
    }
    let socket = socket_object::adopt(py, this.fd.get())?;
    this.socket.set(socket.clone());
    Ok(Some(socket))
}
