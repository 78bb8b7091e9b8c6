//! `WaitQueue`: the coros that wait for the same thing, in order of arrival.
//!
//! The list links the coro objects themselves. So waiting needs no memory, and a coro can leave from any position by
//! changing a few pointers:
//!
//! ```text
//!   WaitQueue      first ------.                                   .------ last
//!                              v                                   v
//!   coros                    [ A ] <---next, previous---> [ B ] <---> [ C ]      WaitNode.queue: back to the WaitQueue
//! ```
//!
//! A coro is in at most one queue, and only while it waits. It is removed when it is made ready
//! (`scheduler::make_ready`) or interrupted. So a queue contains only waiting coros, and its length is always right.
//!
//! A queue of a `sync` primitive is used by one thread only. A queue of `threads` is *shared*: any thread may take a
//! coro out of it. The GIL orders these accesses; in a free-threaded build, one lock for all shared queues orders them
//! (`WaitQueue::exclusive`). A thread that takes a coro out of a shared queue also sets the coro's status, while it
//! holds the lock (`scheduler::claim`). So if two threads want to wake the same coro, the second one finds that the
//! coro is ready already.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::prelude::*;

use super::coroutine::{Coro, CoroObject};
use crate::binding::native_type::This;
use crate::binding::spin_lock::SpinLock;

/// A queue must not move while a coro is in it. It is a field of a Python object, and each waiting coro keeps that
/// object alive through a frame on its stack.
pub(super) struct WaitQueue {
    first: Cell<*mut CoroObject>,
    last: Cell<*mut CoroObject>,
    /// Changed only inside of `exclusive`, read anywhere.
    len: AtomicUsize,
    /// Whether any thread may take coros out of the queue.
    is_shared: Cell<bool>,
}

/// A coro's position in a queue. If all bytes are zero, the coro is in no queue.
pub(super) struct WaitNode {
    /// Only the coro's own thread stores a queue here. If the queue is shared, any thread may store null.
    queue: AtomicPtr<WaitQueue>,
    next: Cell<*mut CoroObject>,
    previous: Cell<*mut CoroObject>,
    /// A number whose meaning each primitive defines, such as an amount, the kind of the waiter, or its ticket.
    pub(super) request: Cell<i64>,
    /// Whether the coro was granted its request. If the coro is interrupted before it runs, it has to pass the grant on
    /// or give it back.
    pub(super) is_granted: Cell<bool>,
    /// Whether the timeout expired before the request was granted.
    pub(super) is_late: Cell<bool>,
}

/// Gives a value a cache line of its own. Otherwise, threads that contend for the value would also slow down accesses
/// to other data in its cache line.
#[repr(align(128))]
struct Alone<T>(T);

/// The lock of all shared queues.
static SHARED: Alone<SpinLock> = Alone(SpinLock::new());

impl WaitQueue {
    /// Called while the queue is empty: from now on, any thread may take coros out of it.
    pub(super) fn share(&self) {
        self.is_shared.set(true);
    }

    /// Runs `body` while no other thread changes this queue or the status of a coro in it. `body` must obey the rules
    /// of `SpinLock::with`.
    #[inline]
    pub(super) fn exclusive<R>(&self, body: impl FnOnce() -> R) -> R {
        if self.is_shared.get() {
            SHARED.0.with(body)
        } else {
            body()
        }
    }

    /// The number of coros in the queue. Coros may leave a shared queue at any time, but none enters it while the
    /// caller is in the critical section of the object that contains the queue.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    #[inline]
    fn add_to_len(&self, difference: isize) {
        // Only one thread at a time changes `len`, so the load and the store need not be one atomic operation.
        let len = self.len.load(Ordering::Relaxed);
        self.len
            .store(len.wrapping_add_signed(difference), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first.get().is_null()
    }

    /// The coro that has waited longest, None if the queue is empty. If the queue is shared, this is called inside of
    /// `exclusive`.
    #[inline]
    pub(super) fn first<'py>(&self, py: Python<'py>) -> Option<Coro<'py>> {
        let first = self.first.get();
        if first.is_null() {
            return None;
        }
        // SAFETY: a queued coro is waiting, and the runtime keeps it alive until it has ended.
        Some(unsafe { This::new(py, first.cast()) })
    }

    /// Appends a coro that is about to wait.
    #[inline]
    pub(super) fn push(&self, coro: Coro<'_>, request: i64) {
        self.exclusive(|| self.append(coro, request));
    }

    #[inline]
    fn append(&self, coro: Coro<'_>, request: i64) {
        let node = &coro.wait_node;
        debug_assert!(!node.is_queued());
        let (object, last) = (coro.as_ptr().cast::<CoroObject>(), self.last.get());
        node.queue
            .store(ptr::from_ref(self).cast_mut(), Ordering::Relaxed);
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
        self.add_to_len(1);
    }

    /// Removes all coros from the queue; they stay suspended.
    pub(super) fn clear(&self) {
        self.exclusive(|| {
            while let Some(first) = ptr::NonNull::new(self.first.get()) {
                // SAFETY: queued, so alive.
                unsafe { first.as_ref() }.wait_node.unlink_now();
            }
        });
    }
}

impl WaitNode {
    #[inline]
    pub(super) fn is_queued(&self) -> bool {
        !self.queue.load(Ordering::Acquire).is_null()
    }

    /// The address of the queue, a field of the object that the coro waits for; 0 if the coro is in no queue.
    pub(super) fn queue_address(&self) -> usize {
        self.queue.load(Ordering::Relaxed).addr()
    }

    /// Runs `body` while no other thread takes the coro out of the queue that the coro is in. Called by the coro's own
    /// thread.
    #[inline]
    pub(super) fn exclusive<R>(&self, body: impl FnOnce() -> R) -> R {
        // SAFETY: if the coro is in a queue, the queue exists: a frame on the coro's stack keeps the object that
        // contains the queue alive, and that frame cannot end now, because only this thread could run the coro.
        match unsafe { self.queue.load(Ordering::Acquire).as_ref() } {
            Some(queue) => queue.exclusive(body),
            None => body(),
        }
    }

    /// Removes the coro from its queue, if it is in one. Called by the coro's own thread.
    #[inline]
    pub(super) fn unlink(&self) {
        self.exclusive(|| self.unlink_now());
    }

    /// Like `unlink`. If the queue is shared, this is called inside of `exclusive`.
    #[inline]
    pub(super) fn unlink_now(&self) {
        let queue = self.queue.load(Ordering::Relaxed);
        if queue.is_null() {
            return;
        }
        let (previous, next) = (
            self.previous.replace(ptr::null_mut()),
            self.next.replace(ptr::null_mut()),
        );
        // SAFETY: the queue lives as long as a coro is in it; this coro's neighbours are in it too, so they are alive.
        unsafe {
            let list = &*queue;
            if previous.is_null() {
                list.first.set(next);
            } else {
                (*previous).wait_node.next.set(next);
            }
            if next.is_null() {
                list.last.set(previous);
            } else {
                (*next).wait_node.previous.set(previous);
            }
            list.add_to_len(-1);
        }
        // This store comes last, so that another thread that reads null here also sees what was stored before.
        self.queue.store(ptr::null_mut(), Ordering::Release);
    }
}

impl Drop for WaitQueue {
    fn drop(&mut self) {
        // Normally the queue is empty here, since a frame of each waiting coro references the object that contains the
        // queue. But an interpreter that exits may destroy the frames first. In that case, `clear` keeps the coros from
        // pointing to freed memory.
        self.clear();
    }
}
