//! `Watcher`: the object that the loop notifies when a watched descriptor is ready. `Target`: the file object with
//! which the descriptor was registered.

use std::ffi::{c_int, c_void};
use std::ptr;

use grapeshot_core::sys::poller::Interest;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::event_loop::handle::HandleRef;
use crate::event_loop::source::WaiterRef;

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

/// The argument of `add_reader` or `add_writer`: a file object (an owned reference), or null for a number. The file
/// object identifies the registration after the file is closed, as in `selectors`.
#[derive(Clone, Copy)]
pub(crate) struct Target(*mut ffi::PyObject);

impl Target {
    pub(crate) fn new(target: &Bound<'_, PyAny>) -> Self {
        if target.is_instance_of::<PyInt>() {
            Self(ptr::null_mut())
        } else {
            Self(target.clone().into_ptr())
        }
    }

    fn to_bound(self, py: Python<'_>) -> Option<Bound<'_, PyAny>> {
        // SAFETY: null, or alive for as long as the watcher that it belongs to.
        unsafe { Bound::from_borrowed_ptr_or_opt(py, self.0) }
    }
}

/// The object to notify when a descriptor is ready. Its references are owned.
#[derive(Clone, Copy)]
pub(crate) enum Watcher {
    /// A handle from `add_reader` or `add_writer`, queued at each event.
    Handle(HandleRef, Target),
    /// An object that one event wakes; that event ends the wait.
    Once(WaiterRef),
}

impl Watcher {
    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        match self {
            Self::Handle(handle, _) => handle.as_ptr(),
            Self::Once(waiter) => waiter.as_ptr(),
        }
    }

    /// Drops the reference of a replaced watcher; a handle is cancelled, as in asyncio.
    pub(crate) fn end(self, py: Python<'_>) {
        if let Self::Handle(handle, _) = self {
            handle.cancel(py);
        }
        self.release(py);
    }

    pub(crate) fn release(self, py: Python<'_>) {
        match self {
            Self::Handle(handle, target) => {
                handle.release(py);
                // SAFETY: the watcher's reference, or null, moves into the result.
                drop(unsafe { Bound::from_owned_ptr_or_opt(py, target.0) });
            }
            Self::Once(waiter) => waiter.release(py),
        }
    }

    /// The file object that was passed to `add_reader` or `add_writer`.
    pub(crate) fn target(self, py: Python<'_>) -> Option<Bound<'_, PyAny>> {
        match self {
            Self::Handle(_, target) => target.to_bound(py),
            Self::Once(_) => None,
        }
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`, for a watcher that is in its cell.
    pub(super) unsafe fn traverse(self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        if let Self::Handle(_, Target(target)) = self
            && !target.is_null()
        {
            // SAFETY: the watcher holds a reference; visit and arg are the collector's.
            let result = unsafe { visit(target, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above.
        unsafe { visit(self.as_ptr(), arg) }
    }
}
