//! The flags of a native object. A call into Python may run any method of the object, and methods change the flags. So
//! the flags are in an atomic, of which nothing can be borrowed.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU16, Ordering};

/// A set of flags of type `F`, which the `bitflags!` macro defines. Any thread may read the set. One thread at a time
/// changes it.
pub(crate) struct FlagCell<F>(AtomicU16, PhantomData<F>);

impl<F: bitflags::Flags<Bits = u16> + Copy> FlagCell<F> {
    /// An empty set.
    pub(crate) fn new() -> Self {
        Self(AtomicU16::new(0), PhantomData)
    }

    #[inline]
    fn get(&self) -> F {
        F::from_bits_retain(self.0.load(Ordering::Relaxed))
    }

    /// True if any of `flags` is set.
    #[inline]
    pub(crate) fn has(&self, flags: F) -> bool {
        self.get().intersects(flags)
    }

    #[inline]
    pub(crate) fn set(&self, flags: F) {
        self.0.store(self.get().union(flags).bits(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn clear(&self, flags: F) {
        self.0
            .store(self.get().difference(flags).bits(), Ordering::Relaxed);
    }
}
