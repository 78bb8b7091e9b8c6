//! Where the end of a thread unwinds nothing.

/// Nothing is to be done.
pub fn hang_threads_that_end() {}
