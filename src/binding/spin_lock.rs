//! A lock around a few memory accesses in free-threaded builds. In other builds, the GIL orders these accesses.

use super::HAS_GIL;
use super::parts::{AtomicBool, Ordering, yield_now};

/// A thread that holds this lock neither detaches nor runs Python code, and releases the lock within a microsecond. The
/// garbage collector and `os.fork()` wait until all other threads have stopped at a point where they could detach, so
/// they never find the lock held. A lock whose bytes are all zero is unlocked. In builds with the GIL, the lock does
/// nothing.
pub(crate) struct SpinLock(AtomicBool);

/// Releases the lock when the `body` of `SpinLock::with` has returned or panicked.
struct Unlock<'a>(&'a AtomicBool);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl SpinLock {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Runs `body` while no other thread runs code under this lock. `body` must not drop a reference to a Python
    /// object, and must not use this lock.
    #[inline(always)]
    pub(crate) fn with<R>(&self, body: impl FnOnce() -> R) -> R {
        if HAS_GIL {
            return body();
        }
        while self
            .0
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            yield_now();
        }
        let _unlock = Unlock(&self.0);
        body()
    }
}
