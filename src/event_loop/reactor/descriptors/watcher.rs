//! `Watcher`: the object that the loop notifies when a watched descriptor is ready. `WatcherCell`: the place in which a
//! `Watch` keeps one.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::{mem, ptr};

use grapeshot_core::sys::poller::Interest;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::binding::object_ref::ObjectRef;
use crate::event_loop::handle::HandleRef;
use crate::event_loop::source::DeferredCall;

/// Reading or writing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Read, Self::Write];

    pub(super) fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }

    pub(super) fn interest(self) -> Interest {
        match self {
            Self::Read => Interest::READ,
            Self::Write => Interest::WRITE,
        }
    }
}

/// The object to notify when a descriptor is ready. Dropping it may run any code.
pub(crate) enum Watcher {
    /// A handle from `add_reader` or `add_writer`. It goes to the ready queue at every event. The second field is the
    /// file object that the handle was registered with, or None if it was registered with a number. The file object
    /// identifies the registration after the file is closed, as in `selectors`.
    Handle(HandleRef, Option<ObjectRef>),
    /// An object that waits for one event. The object's function only queues further work, and calls no code of the
    /// program.
    Once(DeferredCall),
}

impl Watcher {
    /// A watcher for a handle, registered with a file object or a number.
    pub(crate) fn with_target(handle: HandleRef, target: &Bound<'_, PyAny>) -> Self {
        let is_number = target.is_instance_of::<PyInt>();
        Self::Handle(handle, (!is_number).then(|| ObjectRef::new(target.clone())))
    }

    fn as_ptr(&self) -> *mut ffi::PyObject {
        match self {
            Self::Handle(handle, _) => handle.as_ptr(),
            Self::Once(waiter) => waiter.as_ptr(),
        }
    }

    /// Drops a watcher that was replaced or removed; a handle is cancelled first, as in asyncio.
    pub(crate) fn end(self, py: Python<'_>) {
        if let Self::Handle(handle, _) = &self {
            handle.this(py).cancel();
        }
    }
}

/// The watcher of one direction of a descriptor, or none.
///
/// No method that is visible to other modules returns a reference to the watcher, or runs other code while it looks at
/// the watcher.
pub(super) struct WatcherCell(UnsafeCell<Option<Watcher>>);

impl WatcherCell {
    pub(super) const fn empty() -> Self {
        Self(UnsafeCell::new(None))
    }

    /// The watcher, for the methods below: they use the result before they run other code.
    #[inline]
    fn look(&self) -> Option<&Watcher> {
        // SAFETY: a cell is not `Sync`, and while a method uses the result, no other method of this cell is called.
        unsafe { &*self.0.get() }.as_ref()
    }

    /// Replaces the watcher and returns the old one.
    #[inline]
    pub(super) fn replace(&self, watcher: Option<Watcher>) -> Option<Watcher> {
        // SAFETY: no result of `look` is in use, and nothing is dropped here, so no other code runs.
        mem::replace(unsafe { &mut *self.0.get() }, watcher)
    }

    #[inline]
    pub(super) fn take(&self) -> Option<Watcher> {
        self.replace(None)
    }

    /// Stores a watcher in a cell that is known to be empty.
    #[inline]
    pub(super) fn put_new(&self, watcher: Watcher) {
        debug_assert!(!self.is_set());
        // SAFETY: no result of `look` is in use. The cell is empty, so there is no old watcher to drop.
        unsafe { self.0.get().write(Some(watcher)) };
    }

    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.look().is_some()
    }

    /// Whether the watcher is a handle.
    #[inline]
    pub(super) fn has_handle(&self) -> bool {
        matches!(self.look(), Some(Watcher::Handle(..)))
    }

    /// The handle, unless it is cancelled.
    pub(super) fn pending_handle(&self) -> Option<HandleRef> {
        match self.look() {
            Some(Watcher::Handle(handle, _)) if !handle.is_cancelled() => Some(handle.new_ref()),
            _ => None,
        }
    }

    /// Takes out the watcher if it waits for one event.
    #[inline]
    pub(super) fn take_once(&self) -> Option<DeferredCall> {
        if !matches!(self.look(), Some(Watcher::Once(_))) {
            return None;
        }
        match self.take() {
            Some(Watcher::Once(waiter)) => Some(waiter),
            _ => None,
        }
    }

    /// The object that is notified, as a borrowed pointer; null if the cell is empty.
    pub(super) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.look().map_or(ptr::null_mut(), Watcher::as_ptr)
    }

    /// The file object that was passed to `add_reader` or `add_writer`.
    pub(super) fn target<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match self.look() {
            Some(Watcher::Handle(_, Some(target))) => Some(target.to_bound(py)),
            _ => None,
        }
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Some(watcher) = self.look() else { return 0 };
        if let Watcher::Handle(_, Some(target)) = watcher {
            // SAFETY: the watcher holds a reference; visit and arg are the collector's.
            let result = unsafe { visit(target.as_ptr(), arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above.
        unsafe { visit(watcher.as_ptr(), arg) }
    }
}
