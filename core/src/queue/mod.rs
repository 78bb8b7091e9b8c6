//! The containers of an event loop, without Python and without system calls.
//!
//! | module | what it holds | shape |
//! |---|---|---|
//! | [`ready`] | callbacks to run next | FIFO ring |
//! | [`timers`] | callbacks with a deadline | heap ordered by (deadline, sequence number) |
//! | [`inbox`] | items from other threads | lock-free queue and a sleep flag |
//! | [`outbuf`] | chunks waiting to be written | inline slot, then a deque |
//! | [`fd_table`] | the registration of each fd | table by fd, with generations |
//! | [`read_size`] | how much a socket's reads return | two bytes |
//! | [`histogram`] | durations | counts in buckets that widen |
//! | [`records`] | where TLS records end in received bytes | a header of five bytes and a count |
//!
//! Owner: the thread of the loop, except [`inbox::Inbox::push`]. Elements are opaque. A `Copy` element is usually a
//! pointer; the modules that use the container count its references.

pub mod fd_table;
pub mod histogram;
pub mod inbox;
pub mod outbuf;
pub mod read_size;
pub mod ready;
pub mod records;
pub mod timers;
