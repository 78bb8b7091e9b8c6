//! Lets the garbage collector see pending handles while the loop does not run. While it runs, all of them are reachable
//! from the running loop, and tracking them would only cost time: see `handle`.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::HAS_GIL;
use crate::event_loop::handle::{Handle, HandleRef};

/// A reference to the newest handle that was made while the loop did not run.
///
/// The collector must track a handle only if the program keeps a reference to it: for a handle that only a queue holds,
/// the loop reports the referents (see `handle`). Whether the program keeps a new handle is not known yet, because the
/// handle's creator still holds a reference. Therefore the collector tracks the newest handle. When the next one takes
/// its place here, the old one stays tracked only if the program has kept a reference to it. So the collector sees
/// every cycle through a pending handle of an abandoned loop.
pub(super) struct NewestHandle(Cell<Option<HandleRef>>);

impl NewestHandle {
    pub(super) const fn new() -> Self {
        Self(Cell::new(None))
    }

    /// Called for each handle that is made while the loop does not run. A queue and the caller each hold a reference to
    /// the handle.
    pub(super) fn set(&self, handle: Handle<'_>) {
        handle.track();
        if let Some(last) = self.0.replace(Some(HandleRef::of(handle))) {
            // 2: the references of the queue and of this function.
            last.this(handle.py()).untrack_unless_kept(2);
        }
    }

    pub(super) fn forget(&self) {
        drop(self.0.take());
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let handle = self.0.take();
        let result = match &handle {
            // SAFETY: this cell's reference keeps the handle alive; visit and arg are the collector's.
            Some(handle) => unsafe { visit(handle.as_ptr(), arg) },
            None => 0,
        };
        self.0.set(handle);
        result
    }
}

/// Makes the collector track each handle that has a reference from outside its queue. Called before the loop stops
/// running. Tracking runs no code, so the queue may be borrowed.
pub(super) fn track_kept<'a>(py: Python<'a>, handles: impl Iterator<Item = &'a HandleRef>) {
    if !HAS_GIL {
        // In builds without a GIL, every handle is tracked from the start.
        return;
    }
    for handle in handles.map(|handle| handle.this(py)) {
        if handle.is_kept() {
            handle.track();
        }
    }
}
