//! For systems where the end of a thread unwinds nothing.

/// Does nothing.
pub fn hang_threads_that_end() {}
