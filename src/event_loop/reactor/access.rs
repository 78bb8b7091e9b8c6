//! Keeps track of the threads that use the loop: the thread that runs it, or, in free-threaded builds, the threads that
//! call its methods while it does not run.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::binding::current_thread;

pub(crate) struct Access {
    /// The thread that has claimed the loop; 0 if there is none.
    owner: AtomicU64,
    /// Whether the owner runs only one of the loop's coros, not the loop (`borrowed`). Only the owner uses this field.
    is_borrowed: Cell<bool>,
    /// In free-threaded builds: the threads inside `LoopObject::with_loop_access` while no thread runs the loop. Used
    /// only inside the loop's critical section. A thread gives up that section while it waits for another thread, so
    /// several threads can be listed here.
    visitors: RefCell<Vec<u64>>,
}

impl Access {
    pub(super) const fn new() -> Self {
        Self {
            owner: AtomicU64::new(0),
            is_borrowed: Cell::new(false),
            visitors: RefCell::new(Vec::new()),
        }
    }

    /// The thread that runs the loop, or only one of its coros; 0 if there is none.
    #[inline]
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Acquire)
    }

    /// Makes this thread the owner of the loop, until `release`. False if the loop already has an owner.
    pub(crate) fn claim(&self) -> bool {
        let claimed = self
            .owner
            .compare_exchange(0, current_thread(), Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    }

    pub(super) fn release(&self) {
        self.owner.store(0, Ordering::Release);
    }

    /// Whether a thread runs the loop, and not only one of its coros. Called by the owner, or while there is no owner.
    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.owner() != 0 && !self.is_borrowed.get()
    }

    /// Runs `body`, which resumes a coro of the loop, and then releases the loop. The caller has claimed the loop.
    pub(crate) fn borrowed<R>(&self, body: impl FnOnce() -> R) -> R {
        self.is_borrowed.set(true);
        let result = body();
        self.is_borrowed.set(false);
        self.release();
        result
    }

    /// Records that this thread uses the loop's cells until the result is dropped. The thread must hold the loop's
    /// critical section when it calls this and when it drops the result.
    pub(crate) fn begin_visit(&self) -> Visit<'_> {
        self.visitors.borrow_mut().push(current_thread());
        Visit(self)
    }

    /// Whether another thread has begun a visit that has not ended yet. The loop must not run before that visit ends.
    pub(crate) fn is_visited_by_others(&self) -> bool {
        let own = current_thread();
        self.visitors.borrow().iter().any(|visitor| *visitor != own)
    }
}

/// A visit of the thread that called `Access::begin_visit`. Dropping this value ends the visit.
pub(crate) struct Visit<'a>(&'a Access);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let own = current_thread();
        let mut visitors = self.0.visitors.borrow_mut();
        if let Some(place) = visitors.iter().rposition(|visitor| *visitor == own) {
            visitors.swap_remove(place);
        }
    }
}
