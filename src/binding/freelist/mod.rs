//! Freed objects of one layout, kept for the next allocation.
//!
//! With the GIL, the list is global and the GIL guards it. Free-threaded builds have no such guard, but their allocator
//! is already per thread, so they have no list.

#[cfg(not(Py_GIL_DISABLED))]
#[path = "kept.rs"]
mod imp;
#[cfg(Py_GIL_DISABLED)]
#[path = "none.rs"]
mod imp;

pub(crate) use imp::Freelist;
