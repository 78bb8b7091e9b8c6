//! Freed objects of one layout, kept for the next allocation.
//!
//! With a GIL, the list is global, and the GIL protects it. Without a GIL, nothing would protect the list, so
//! free-threaded builds keep no objects. Their allocator is per thread anyway.

#[cfg(not(Py_GIL_DISABLED))]
#[path = "kept.rs"]
mod imp;
#[cfg(Py_GIL_DISABLED)]
#[path = "none.rs"]
mod imp;

pub(crate) use imp::Freelist;
