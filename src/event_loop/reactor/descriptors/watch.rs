//! The watchers of one descriptor, and what the loop knows about its socket: see `waiting`.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use grapeshot_core::queue::read_size::ReadSize;
use grapeshot_core::sys::poller::{Event, Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use super::watcher::{Direction, WatcherCell};
use crate::binding::object_cell::ObjectCell;
use crate::event_loop::source::DeferredCall;

/// The next stamp of a watch.
static STAMPS: AtomicU64 = AtomicU64::new(1);

/// The watchers of one descriptor.
pub(super) struct Watch {
    reader: WatcherCell,
    writer: WatcherCell,
    /// The interest that the poller has registered.
    pub(super) armed: Cell<Interest>,
    /// A weak reference to the socket object of the last `wait_once`; empty if there was none.
    socket: ObjectCell,
    /// Identifies the content of `socket`; 0 if that is empty. The stamp changes whenever `socket` does, and no two
    /// watches of the process have the same stamp, except 0. Comparing stamps is cheaper than upgrading the weak
    /// reference.
    pub(super) stamp: Cell<u64>,
    /// Whether an event of the socket reported more than ordinary data, such as the end of the stream.
    pub(super) has_more: Cell<bool>,
    /// Whether the socket was reported as readable since the last `note_short_read`. The object that the event woke may
    /// have left the data unread, and the poller does not report the same data again.
    pub(super) is_reported: Cell<bool>,
    /// Predicts the size of the next read from the socket.
    read_size: ReadSize,
}

impl Watch {
    pub(super) fn side(&self, direction: Direction) -> &WatcherCell {
        match direction {
            Direction::Read => &self.reader,
            Direction::Write => &self.writer,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.reader.is_set() && !self.writer.is_set()
    }

    /// Whether the watch stays although it has no watcher, because the next wait on the same socket may use the
    /// poller's registration.
    pub(super) fn keeps_idle(&self) -> bool {
        self.socket.is_set() && self.armed.get().is_on_change()
    }

    /// The directions that have a watcher: level-triggered if one of the watchers is a handle, otherwise
    /// edge-triggered.
    pub(super) fn waited_for(&self) -> Interest {
        let mut interest = Interest::NONE;
        let mut has_handle = false;
        for direction in Direction::BOTH {
            let side = self.side(direction);
            if side.is_set() {
                interest = interest.with(direction.interest());
                has_handle |= side.has_handle();
            }
        }
        if has_handle {
            interest
        } else {
            interest.on_change()
        }
    }

    /// The interest that the poller should have: the directions with a watcher, and the directions of earlier waits on
    /// the same socket.
    pub(super) fn wanted(&self) -> Interest {
        let waited_for = self.waited_for();
        if waited_for.is_on_change() && self.keeps_idle() {
            waited_for.with(self.armed.get())
        } else {
            waited_for
        }
    }

    /// Whether the last wait was on exactly this object. If it was on another object, this drops a reference to that
    /// object, which may run a finalizer (see `socket_alive`).
    pub(super) fn belongs_to(&self, socket: &Bound<'_, PyAny>) -> bool {
        self.socket_alive(socket.py())
            .is_some_and(|known| known.is(socket))
    }

    /// The socket object of the last `wait_once`, if it still exists. Without a GIL, another thread may drop its
    /// reference to the object at any time. Then dropping the result runs a finalizer, which may remove the watch. So
    /// the caller keeps the result until it no longer uses the watch.
    fn socket_alive<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.socket
            .get(py)?
            .cast_into::<PyWeakrefReference>()
            .ok()?
            .upgrade()
    }

    /// The fast path of `dispatch_watch`: takes out the object that waits to read, if the event concerns nothing else
    /// and the poller's registration stays as it is. Nearly all events of sockets are like that.
    #[inline]
    pub(super) fn take_only_reader(&self, event: Event) -> Option<DeferredCall> {
        let is_usual = event.readiness == Readiness::READ
            && self.armed.get() == Interest::READ.on_change()
            && self.socket.is_set()
            && !self.writer.is_set();
        if !is_usual {
            return None;
        }
        let waiter = self.reader.take_once()?;
        self.is_reported.set(true);
        Some(waiter)
    }

    /// Remembers the socket object of a new wait. `socket` is a weak reference to it; None if the object does not
    /// support weak references.
    pub(super) fn note_socket(&self, py: Python<'_>, socket: Option<Bound<'_, PyWeakrefReference>>) {
        self.read_size.reset();
        self.has_more.set(false);
        self.is_reported.set(false);
        match socket {
            Some(reference) => {
                self.socket.set(reference.into_any());
                self.stamp.set(STAMPS.fetch_add(1, Ordering::Relaxed));
            }
            None => self.forget_socket(py),
        }
    }

    pub(super) fn forget_socket(&self, py: Python<'_>) {
        self.stamp.set(0);
        drop(self.socket.take(py));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: a watch holds references, so the thread that drops it is attached (see `ObjectRef`).
        let py = unsafe { Python::assume_attached() };
        drop(self.socket.take(py));
    }
}

/// The entry of the fd table, which owns the watch. It is not a `Box`, because a `Box` must not move while a pointer to
/// its content is in use, and the table moves its entries when it grows.
pub(crate) struct OwnedWatch(NonNull<Watch>);

impl OwnedWatch {
    pub(super) fn new() -> Self {
        let watch = Watch {
            reader: WatcherCell::empty(),
            writer: WatcherCell::empty(),
            armed: Cell::new(Interest::NONE),
            socket: ObjectCell::empty(),
            stamp: Cell::new(0),
            has_more: Cell::new(false),
            is_reported: Cell::new(false),
            read_size: ReadSize::new(),
        };
        Self(NonNull::from(Box::leak(Box::new(watch))))
    }

    /// The watch. The caller runs no other code while it uses the result.
    #[inline]
    pub(super) fn get(&self) -> WatchRef {
        WatchRef(self.0)
    }
}

impl Drop for OwnedWatch {
    fn drop(&mut self) {
        // SAFETY: `new` has made the pointer. The entry is out of the table and owns the watch alone. No `WatchRef` is
        // in use: it may be used only until other code runs, and this drop is such code.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A watch that was looked up in the fd table: valid while its entry exists and no other code runs.
#[derive(Clone, Copy)]
pub(crate) struct WatchRef(NonNull<Watch>);

impl WatchRef {
    pub(super) fn get(&self) -> &Watch {
        // SAFETY: no other code has run since the entry was looked up. So the entry, which owns the watch, exists.
        unsafe { self.0.as_ref() }
    }

    /// The number of bytes to allocate for the next read of at most `len` bytes; 0 if the read should go through the
    /// scratch buffer. The size that earlier reads predict is used only if `is_after_event` (see `Reactor::receive`).
    #[inline]
    pub(crate) fn read_capacity(self, len: usize, is_after_event: bool) -> usize {
        let size = &self.get().read_size;
        let steady = if is_after_event {
            size.capacity().min(len)
        } else {
            0
        };
        if steady == 0 && size.suits(len) {
            len
        } else {
            steady
        }
    }

    /// Records a read of `len_bytes` into `capacity` bytes.
    #[inline]
    pub(crate) fn note_read(self, len_bytes: usize, capacity: usize) {
        self.get().read_size.note(len_bytes, capacity);
    }

    /// The directions that have a watcher.
    pub(crate) fn waited_for(self) -> Interest {
        self.get().waited_for()
    }

    /// The interest that the poller has registered.
    pub(super) fn armed(self) -> Interest {
        self.get().armed.get()
    }

    /// If the socket object of the last wait no longer exists, records that the poller watches nothing. Otherwise
    /// returns this object, which the caller must keep until it no longer uses the watch (see `socket_alive`).
    #[must_use]
    pub(super) fn check_armed(self, py: Python<'_>) -> Option<Bound<'_, PyAny>> {
        let watch = self.get();
        let socket = watch.socket_alive(py);
        if socket.is_none() {
            watch.armed.set(Interest::NONE);
        }
        socket
    }

    /// The file objects that the callbacks were registered with, for reading and for writing.
    pub(super) fn targets(self, py: Python<'_>) -> [Option<Bound<'_, PyAny>>; 2] {
        let watch = self.get();
        Direction::BOTH.map(|direction| watch.side(direction).target(py))
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`, for an entry of the table.
    pub(super) unsafe fn traverse(self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let watch = self.get();
        for side in [&watch.reader, &watch.writer] {
            // SAFETY: visit and arg are the collector's.
            let result = unsafe { side.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: visit and arg are the collector's.
        unsafe { watch.socket.traverse(visit, arg) }
    }
}
