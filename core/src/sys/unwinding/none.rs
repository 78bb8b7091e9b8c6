//! For systems on which `pthread_exit` does not unwind the stack, and for 32-bit ARM, whose unwind tables have a format
//! that `forced.rs` does not support.

/// Does nothing. 32-bit ARM stays unprotected; on the other systems there is nothing to prevent.
pub fn hang_threads_that_end() {}
