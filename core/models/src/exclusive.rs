//! The lock of all shared wait queues: the real `spin_lock.rs`.

use super::parts;

#[path = "../../../src/binding/spin_lock.rs"]
mod spin_lock;

/// Read by `spin_lock.rs`. If it were true, the lock would do nothing, and the tests would have nothing to check.
const HAS_GIL: bool = false;

/// A public wrapper of `SpinLock`, which is `pub(crate)`.
pub struct Exclusive(spin_lock::SpinLock);

impl Exclusive {
    #[must_use]
    pub fn new() -> Self {
        let lock = spin_lock::SpinLock::new();
        lock.with(|| ()); // this first use creates loom's atomic inside the lock: see `parts`
        Self(lock)
    }

    pub fn with<R>(&self, body: impl FnOnce() -> R) -> R {
        self.0.with(body)
    }
}

impl Default for Exclusive {
    fn default() -> Self {
        Self::new()
    }
}
