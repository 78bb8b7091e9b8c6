//! The flags of a native object. They are in a cell, because a call into Python may run any method of the object. So no
//! code may hold a borrow of the flags during such a call.

use std::cell::Cell;

/// A set of flags of type `F`, which the `bitflags!` macro defines.
pub(crate) struct FlagCell<F>(Cell<F>);

impl<F: bitflags::Flags + Copy> FlagCell<F> {
    /// A set in which no flag is set.
    pub(crate) fn new() -> Self {
        Self(Cell::new(F::empty()))
    }

    /// True if any of `flags` is set.
    #[inline]
    pub(crate) fn has(&self, flags: F) -> bool {
        self.0.get().intersects(flags)
    }

    #[inline]
    pub(crate) fn set(&self, flags: F) {
        self.0.set(self.0.get().union(flags));
    }

    #[inline]
    pub(crate) fn clear(&self, flags: F) {
        self.0.set(self.0.get().difference(flags));
    }
}
