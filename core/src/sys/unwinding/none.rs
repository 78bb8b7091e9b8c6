//! For systems that do not unwind the stack of a thread that is ended.

/// Does nothing, because nothing needs to be prevented.
pub fn hang_threads_that_end() {}
