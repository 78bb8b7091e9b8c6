//! `WaitQueue`: the coros that wait for the same thing, in the order in which they came.
//!
//! The list runs through the coros themselves. So waiting needs no memory, and a coro can leave from any position by
//! changing four pointers:
//!
//! ```text
//!   WaitQueue      first ------.                                   .------ last
//!                              v                                   v
//!   coros                    [ A ] <---next, previous---> [ B ] <---> [ C ]      WaitNode.queue: back to the WaitQueue
//! ```
//!
//! A coro is in at most one queue, and only while it waits. Whoever makes it ready removes it
//! (`scheduler::make_ready`), and so does an interruption. So a queue contains waiting coros only, and its length is
//! right at any time. Belongs to the thread of the coros. It must not know what they wait for.

use std::cell::Cell;
use std::ptr;

use pyo3::prelude::*;

use super::coroutine::{Coro, CoroObject};
use crate::binding::native_type::This;

/// Does not move while a coro is in it: it is part of an object, and each waiting coro keeps that object alive by the
/// frame on its stack.
pub(super) struct WaitQueue {
    first: Cell<*mut CoroObject>,
    last: Cell<*mut CoroObject>,
    len: Cell<usize>,
}

/// The position of a coro in a queue. All zeroes: the coro is in no queue.
pub(super) struct WaitNode {
    queue: Cell<*const WaitQueue>,
    next: Cell<*mut CoroObject>,
    previous: Cell<*mut CoroObject>,
    /// What the coro asks for; the primitive defines the unit.
    pub(super) request: Cell<i64>,
    /// The coro got what it waited for. If it is interrupted before it runs, it has to give that back.
    pub(super) is_granted: Cell<bool>,
    /// The timeout was over before that.
    pub(super) is_late: Cell<bool>,
}

impl WaitQueue {
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
        // SAFETY: a queued coro waits, and the runtime keeps it until it has ended.
        Some(unsafe { This::new(py, first.cast()) })
    }

    /// Appends a coro that is about to wait.
    #[inline]
    pub(super) fn push(&self, coro: Coro<'_>, request: i64) {
        let node = &coro.wait_node;
        debug_assert!(!node.is_queued());
        let (object, last) = (coro.as_ptr().cast::<CoroObject>(), self.last.get());
        node.queue.set(self);
        node.previous.set(last);
        node.next.set(ptr::null_mut());
        node.request.set(request);
        node.is_granted.set(false);
        node.is_late.set(false);
        if last.is_null() {
            self.first.set(object);
        } else {
            // SAFETY: queued, so alive.
            unsafe { (*last).wait_node.next.set(object) };
        }
        self.last.set(object);
        self.len.set(self.len.get() + 1);
    }

    /// Removes all coros, which go on waiting.
    pub(super) fn clear(&self) {
        while let Some(first) = ptr::NonNull::new(self.first.get()) {
            // SAFETY: queued, so alive.
            unsafe { first.as_ref() }.wait_node.unlink();
        }
    }
}

impl WaitNode {
    #[inline]
    pub(super) fn is_queued(&self) -> bool {
        !self.queue.get().is_null()
    }

    /// The address of the queue, which lies in the object that the coro waits for; 0 if it is in none.
    pub(super) fn queue_address(&self) -> usize {
        self.queue.get().addr()
    }

    /// Removes the coro from its queue, if it is in one.
    #[inline]
    pub(super) fn unlink(&self) {
        let queue = self.queue.replace(ptr::null());
        if queue.is_null() {
            return;
        }
        let (previous, next) = (
            self.previous.replace(ptr::null_mut()),
            self.next.replace(ptr::null_mut()),
        );
        // SAFETY: the queue lives as long as a coro is in it, and its neighbours are in it too.
        unsafe {
            let queue = &*queue;
            if previous.is_null() {
                queue.first.set(next);
            } else {
                (*previous).wait_node.next.set(next);
            }
            if next.is_null() {
                queue.last.set(previous);
            } else {
                (*next).wait_node.previous.set(previous);
            }
            queue.len.set(queue.len.get() - 1);
        }
    }
}

impl Drop for WaitQueue {
    fn drop(&mut self) {
        // The queue is empty when no frame references its object. An interpreter that ends may take the frames away
        // first; then this keeps the coros from pointing to freed memory.
        self.clear();
    }
}
