//! Coros in line: who waits for the same thing, in the order in which they came.
//!
//! A line runs through the coros themselves, so that standing in it costs no memory, and leaving it from any place is a
//! matter of four pointers:
//!
//! ```text
//!   Line           first ------.                                   .------ last
//!                              v                                   v
//!   coros                    [ A ] <---next, previous---> [ B ] <---> [ C ]        Place.line: back to the Line
//! ```
//!
//! A coro stands in at most one line, and only while it is waiting: whoever makes it ready, an interruption included,
//! takes it out (`scheduler::make_ready`). So a line never shows a coro that would not wait, and its length is right at
//! any time. Belongs to the thread of the coros. It must not know what they wait for.

use std::cell::Cell;
use std::ptr;

use pyo3::prelude::*;

use super::coroutine::{Coro, CoroObject};
use crate::binding::native_type::This;

/// The line. It does not move while anybody stands in it: it is part of an object that each of them keeps, by the frame
/// on its stack which waits.
pub(super) struct Line {
    first: Cell<*mut CoroObject>,
    last: Cell<*mut CoroObject>,
    len: Cell<usize>,
}

/// Where a coro stands. Zeroes are the state of one that stands nowhere.
pub(super) struct Place {
    line: Cell<*const Line>,
    next: Cell<*mut CoroObject>,
    previous: Cell<*mut CoroObject>,
    /// What it asks for, in the units of what it waits for.
    pub(super) request: Cell<i64>,
    /// It was given what it stood in line for. If it is interrupted before it runs, it has to give that back.
    pub(super) is_granted: Cell<bool>,
    /// Its time was over before that.
    pub(super) is_late: Cell<bool>,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.len.get()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first.get().is_null()
    }

    /// The coro that has waited longest.
    #[inline]
    pub(super) fn first<'py>(&self, py: Python<'py>) -> Option<Coro<'py>> {
        let first = self.first.get();
        if first.is_null() {
            return None;
        }
        // SAFETY: a coro in line waits, and the runtime keeps it until it has ended.
        Some(unsafe { This::new(py, first.cast()) })
    }

    /// Puts a coro that is about to wait at the end.
    #[inline]
    pub(super) fn join(&self, coro: Coro<'_>, request: i64) {
        let place = &coro.place_in_line;
        debug_assert!(!place.is_in_line());
        let (object, last) = (coro.as_ptr().cast::<CoroObject>(), self.last.get());
        place.line.set(self);
        place.previous.set(last);
        place.next.set(ptr::null_mut());
        place.request.set(request);
        place.is_granted.set(false);
        place.is_late.set(false);
        if last.is_null() {
            self.first.set(object);
        } else {
            // SAFETY: in line, so alive.
            unsafe { (*last).place_in_line.next.set(object) };
        }
        self.last.set(object);
        self.len.set(self.len.get() + 1);
    }
}

impl Place {
    #[inline]
    pub(super) fn is_in_line(&self) -> bool {
        !self.line.get().is_null()
    }

    /// Leaves the line, from whatever place in it.
    #[inline]
    pub(super) fn leave(&self) {
        let line = self.line.replace(ptr::null());
        if line.is_null() {
            return;
        }
        let (previous, next) = (
            self.previous.replace(ptr::null_mut()),
            self.next.replace(ptr::null_mut()),
        );
        // SAFETY: the line is there as long as anybody stands in it, and the neighbours stand in it.
        unsafe {
            let line = &*line;
            if previous.is_null() {
                line.first.set(next);
            } else {
                (*previous).place_in_line.next.set(next);
            }
            if next.is_null() {
                line.last.set(previous);
            } else {
                (*next).place_in_line.previous.set(previous);
            }
            line.len.set(line.len.get() - 1);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Nobody stands in line where the object that it belongs to is not referenced by any frame. Should an
        // interpreter that ends take the frames away first, then at least nobody points to this memory.
        while let Some(first) = ptr::NonNull::new(self.first.get()) {
            // SAFETY: in line, so alive.
            unsafe { first.as_ref() }.place_in_line.leave();
        }
    }
}
