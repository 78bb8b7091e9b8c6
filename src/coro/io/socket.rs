//! The objects of the native socket type: the data that they have in addition to the fields of `socket.socket`.
//!
//! ```text
//!   _socket.socket:   descriptor, family, type, protocol, and a timeout that is always 0 while the object is open
//!   socket.socket:    the slots of the Python class
//!   Extra:            the program's timeout, the waiting coros, whether the last read emptied the stream
//! ```
//! `Extra` follows the fields of the base, whose size is known only at run time.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::wait::{self, Waiting};
use crate::binding::{base_socket, current_thread};
use crate::coro::scheduler;
use crate::coro::sync::Limit;
use crate::event_loop::reactor::{Direction, Reactor};

/// If all bytes are zero, the socket blocks without a limit, like a new Python socket. The only owned references are in
/// `waiting`. The collector does not see them, which does no harm: the runtime keeps a waiting coro alive anyway.
#[repr(C)]
pub(super) struct Extra {
    pub(super) waiting: Waiting,
    timeout_s: Cell<f64>,
    limit: Cell<LimitKind>,
    /// The last read returned less than it could, so the stream was empty then. If data has arrived since, the loop
    /// will report it with an event, unless that event has already come (`is_reported`) or the socket is no longer
    /// registered.
    pub(super) is_drained: Cell<bool>,
    /// The Python class holds data that was received and then put back (`_put_back`).
    pub(super) has_unread: Cell<bool>,
    stream: Cell<StreamKind>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum LimitKind {
    Endless = 0,
    AtOnce = 1,
    For = 2,
}

/// The kind of stream, which determines what a short read means.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum StreamKind {
    Unknown = 0,
    /// TCP: a short read means that nothing is left.
    Internet = 1,
    /// Another stream: data may be left after a short read. On a unix socket, a read stops before data that was sent
    /// with descriptors.
    Other = 2,
    /// Not a stream: the length of a read does not show whether more is left.
    NoStream = 3,
}

/// The offset of `Extra` in an object.
static OFFSET: AtomicUsize = AtomicUsize::new(0);
pub(super) static SOCKET_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// Stores the type and the offset of `Extra`. Called once, when the type is made.
pub(super) fn set_type(kind: *mut ffi::PyTypeObject, offset: usize) {
    OFFSET.store(offset, Ordering::Relaxed);
    SOCKET_TYPE.store(kind, Ordering::Release);
}

/// An object of the native socket type or of a subclass, which is kept alive while this value exists.
pub(super) struct Socket<'py> {
    object: Bound<'py, PyAny>,
}

impl<'py> Socket<'py> {
    /// # Safety
    /// `object` is a live object of the native socket type or of a subclass.
    #[inline]
    pub(super) unsafe fn new(py: Python<'py>, object: *mut ffi::PyObject) -> Self {
        Self {
            // SAFETY: by the contract.
            object: unsafe { Bound::from_borrowed_ptr(py, object) },
        }
    }

    /// None for an object of another type.
    pub(super) fn from_object(object: &Bound<'py, PyAny>) -> Option<Self> {
        let kind = SOCKET_TYPE.load(Ordering::Acquire);
        // SAFETY: attached; the object is alive, and the type is null or never freed.
        let is_socket = !kind.is_null() && unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), kind) } != 0;
        is_socket.then(|| Self {
            object: object.clone(),
        })
    }

    #[inline]
    pub(super) fn py(&self) -> Python<'py> {
        self.object.py()
    }

    #[inline]
    pub(super) fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    #[inline]
    pub(super) fn extra(&self) -> &Extra {
        // SAFETY: at that offset, an object of the type has an aligned `Extra`, which was zeroed when the object was
        // made. Its fields are cells.
        unsafe {
            &*self
                .object
                .as_ptr()
                .byte_add(OFFSET.load(Ordering::Relaxed))
                .cast::<Extra>()
        }
    }

    /// The descriptor; -1 once the socket is closed.
    #[inline]
    pub(super) fn descriptor(&self) -> PyResult<RawFd> {
        base_socket::descriptor(&self.object)
    }

    /// Whether the socket is a stream, whose reads may return any part of the data.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self.stream(), StreamKind::Internet | StreamKind::Other)
    }

    #[inline]
    fn stream(&self) -> StreamKind {
        let known = self.extra().stream.get();
        if known != StreamKind::Unknown {
            return known;
        }
        let found = self.find_stream().unwrap_or(StreamKind::NoStream);
        self.extra().stream.set(found);
        found
    }

    #[cold]
    fn find_stream(&self) -> PyResult<StreamKind> {
        let [family, kind, _] = base_socket::shape(&self.object)?;
        let (family, kind): (i32, i32) = (family.extract()?, kind.extract()?);
        Ok(if kind != libc::SOCK_STREAM {
            StreamKind::NoStream
        } else if matches!(family, libc::AF_INET | libc::AF_INET6) {
            StreamKind::Internet
        } else {
            StreamKind::Other
        })
    }

    /// Records that a read from `fd` returned `len_bytes` of at most `capacity` bytes. `reactor` belongs to the
    /// loop of the running coro; it is None if no coro runs.
    #[inline]
    pub(super) fn note_read(&self, reactor: Option<&Reactor>, fd: RawFd, len_bytes: usize, capacity: usize) {
        let is_drained = len_bytes > 0
            && len_bytes < capacity
            && self.stream() == StreamKind::Internet
            && reactor.is_some_and(|reactor| reactor.descriptors.note_short_read(fd));
        self.extra().is_drained.set(is_drained);
    }

    /// Ends the waits on this socket, because its descriptor is about to be closed or taken from it.
    pub(super) fn end_waits(&self) -> PyResult<()> {
        let py = self.py();
        self.extra().is_drained.set(false);
        self.extra().waiting.close();
        for direction in [Direction::Read, Direction::Write] {
            let Some(object) = self.extra().waiting.get(py, direction) else {
                continue;
            };
            let coro = scheduler::coro_of(&object);
            if coro.thread.get() == current_thread() {
                let kept = self.extra().waiting.take(py, direction);
                // Use the recorded number, because another thread may have closed the object's descriptor already.
                wait::forget(coro, self.extra().waiting.fd(), direction);
                wait::end_closed(coro);
                drop(kept);
            } else if let Some(event_loop) = coro.event_loop.get(py) {
                // The coro's own thread ends the wait, if the coro still waits then.
                let end = py.import("grapeshot._core")?.getattr("_coro_end_closed_wait")?;
                let is_write = direction == Direction::Write;
                let told =
                    event_loop.call_method1("call_soon_threadsafe", (end, &self.object, is_write, &object));
                if let Err(error) = told {
                    // The loop is closed, so it has no waits any more.
                    drop(error);
                }
            }
        }
        Ok(())
    }
}

impl Extra {
    #[inline]
    pub(super) fn limit(&self) -> Limit {
        match self.limit.get() {
            LimitKind::Endless => Limit::Endless,
            LimitKind::AtOnce => Limit::AtOnce,
            LimitKind::For => Limit::For {
                timeout_s: self.timeout_s.get(),
            },
        }
    }

    #[inline]
    pub(super) fn is_at_once(&self) -> bool {
        self.limit.get() == LimitKind::AtOnce
    }

    /// The timeout as `gettimeout()` returns it.
    pub(super) fn timeout_s(&self) -> Option<f64> {
        match self.limit() {
            Limit::Endless => None,
            Limit::AtOnce => Some(0.0),
            Limit::For { timeout_s } => Some(timeout_s),
        }
    }

    /// Called when `__init__` has set the descriptor: sets the timeout, and resets what was known about an earlier
    /// descriptor (`__init__` can be called more than once).
    pub(super) fn begin(&self, timeout_s: Option<f64>) {
        self.is_drained.set(false);
        self.waiting.forget_stamp();
        self.stream.set(StreamKind::Unknown);
        self.set_timeout_s(timeout_s);
    }

    pub(super) fn set_timeout_s(&self, timeout_s: Option<f64>) {
        self.limit.set(match timeout_s {
            None => LimitKind::Endless,
            Some(timeout_s) if timeout_s <= 0.0 => LimitKind::AtOnce,
            Some(_) => LimitKind::For,
        });
        self.timeout_s.set(timeout_s.unwrap_or_default());
    }
}
