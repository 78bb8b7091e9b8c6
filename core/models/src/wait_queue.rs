//! A copy of the protocol by which coros enter and leave a shared `WaitQueue`, without Python objects. The functions
//! mirror these functions in `src/coro`:
//!
//! | here | there |
//! |---|---|
//! | [`WaitQueue::push`] | `wait_queue.rs::push`, `append`, and `suspension.rs::begin_wait` |
//! | [`Coro::exclusive`], [`Coro::unlink_now`] | `wait_queue.rs::WaitNode` |
//! | [`Coro::claim`], [`Coro::make_ready`] | `scheduler.rs` |
//! | [`WaitQueue::claim_first`] | `threads/waiters.rs::claim_first_coro`, `scheduler.rs::queue_from_anywhere` |
//! | [`Coro::resume`] | `scheduler.rs::resume`, and the end of `sync/object.rs::wait_in_queue` |
//!
//! A `VecDeque` in a cell stands for the links of a queue. loom reports an error if two threads could use this cell, or
//! a coro's `is_granted`, at the same time.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::cell::{Cell, UnsafeCell};

use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use crate::exclusive::Exclusive;

const READY: u8 = 1;
const RUNNING: u8 = 2;
const WAITING: u8 = 3;

/// A coro, with its `WaitNode`.
pub struct Coro {
    status: AtomicU8,
    /// Whether `WaitNode::queue` is set. (There is only one queue.)
    is_queued: AtomicBool,
    is_granted: Cell<bool>,
    /// How many entries were ever made for the coro in its loop's ready queue and inbox.
    entries: AtomicUsize,
}

pub struct WaitQueue {
    exclusive: Exclusive,
    coros: UnsafeCell<VecDeque<Arc<Coro>>>,
}

// SAFETY: `coros` is used only inside of `exclusive`, and a coro's `is_granted` inside of `exclusive` or while the coro
// is in no queue.
unsafe impl Send for WaitQueue {}
// SAFETY: as above.
unsafe impl Sync for WaitQueue {}
// SAFETY: as above.
unsafe impl Send for Coro {}
// SAFETY: as above.
unsafe impl Sync for Coro {}

impl WaitQueue {
    #[must_use]
    pub fn new() -> Self {
        Self {
            exclusive: Exclusive::new(),
            coros: UnsafeCell::new(VecDeque::new()),
        }
    }

    /// Called by the coro's own thread. The coro waits from now on.
    pub fn push(&self, coro: &Arc<Coro>) {
        self.exclusive.with(|| {
            coro.is_queued.store(true, Ordering::Relaxed);
            coro.is_granted.set(false);
            // SAFETY: inside of `exclusive`.
            self.coros
                .with_mut(|coros| unsafe { (*coros).push_back(Arc::clone(coro)) });
        });
        coro.status.store(WAITING, Ordering::Release);
    }

    /// Grants the first coro its request and puts the coro into its loop's inbox. Returns false if the queue is empty.
    /// The caller is in the critical section of the object that contains the queue.
    pub fn claim_first(&self) -> bool {
        let claimed = self.exclusive.with(|| {
            // SAFETY: inside of `exclusive`.
            let coro = self.coros.with(|coros| unsafe { (*coros).front().cloned() })?;
            coro.is_granted.set(true);
            coro.claim(self);
            Some(coro)
        });
        if let Some(coro) = &claimed {
            coro.entries.fetch_add(1, Ordering::Release); // `queue_from_anywhere`
        }
        claimed.is_some()
    }
}

impl Default for WaitQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl Coro {
    /// A running coro.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            status: AtomicU8::new(RUNNING),
            is_queued: AtomicBool::new(false),
            is_granted: Cell::new(false),
            entries: AtomicUsize::new(0),
        })
    }

    fn exclusive<R>(&self, queue: &WaitQueue, body: impl FnOnce() -> R) -> R {
        if self.is_queued.load(Ordering::Acquire) {
            queue.exclusive.with(body)
        } else {
            body()
        }
    }

    fn claim(self: &Arc<Self>, queue: &WaitQueue) -> bool {
        if self.status.load(Ordering::Acquire) == READY {
            return false;
        }
        self.status.store(READY, Ordering::Release);
        self.unlink_now(queue);
        true
    }

    fn unlink_now(self: &Arc<Self>, queue: &WaitQueue) {
        if !self.is_queued.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the coro is queued, so this is inside of `exclusive`.
        queue
            .coros
            .with_mut(|coros| unsafe { (*coros).retain(|coro| !Arc::ptr_eq(coro, self)) });
        self.is_queued.store(false, Ordering::Release);
    }

    /// Called by the coro's own thread when the coro's timeout has expired or the coro was interrupted.
    pub fn make_ready(self: &Arc<Self>, queue: &WaitQueue) {
        if self.exclusive(queue, || self.claim(queue)) {
            self.entries.fetch_add(1, Ordering::Release); // `queue`
        }
    }

    /// How many entries were made for the coro.
    pub fn entries(&self) -> usize {
        self.entries.load(Ordering::Acquire)
    }

    /// Called by the coro's own thread for each entry, and when the thread ends. None if the coro is not ready;
    /// otherwise, whether it was granted its request.
    pub fn resume(&self) -> Option<bool> {
        if self.status.load(Ordering::Acquire) != READY {
            return None;
        }
        self.status.store(RUNNING, Ordering::Release);
        Some(self.is_granted.get())
    }
}
