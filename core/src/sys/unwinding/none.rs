//! For systems that do not unwind the stack of a thread that is ended, and for 32-bit ARM, whose unwind tables are of a
//! kind for which `forced.rs` is not made.

/// Does nothing: except on 32-bit ARM, nothing needs to be prevented.
pub fn hang_threads_that_end() {}
