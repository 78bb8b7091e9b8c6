//! The containers of an event loop. They do not use Python and make no system calls.
//!
//! | module | contents | shape |
//! |---|---|---|
//! | [`ready`] | callbacks to run next | FIFO ring |
//! | [`timers`] | callbacks with a deadline | heap and sorted deque, by (deadline, sequence number) |
//! | [`inbox`] | items from other threads | lock-free queue and a sleep flag |
//! | [`outbuf`] | chunks of a stream that are still to be written | inline slot, then a deque |
//! | [`fd_table`] | the registration of each fd | table by fd, with generations |
//! | [`read_size`] | how much the last reads of a socket returned | two bytes |
//! | [`histogram`] | durations | counts in buckets that get wider |
//! | [`records`] | the position in a stream of TLS records | a header, and how much of the record's body is missing |
//!
//! All of them belong to the loop's thread, with three exceptions: any thread may call [`inbox::Inbox::push`] and
//! [`inbox::Inbox::claim_wake`], any thread may read a [`histogram`], and a thread that has the GIL may push to the
//! ready queue. Elements are opaque, and the container owns them. Dropping an element may run any code, even code that
//! uses the container. So the methods never drop elements; they pass every element that they take out to the caller.

pub mod fd_table;
pub mod histogram;
pub mod inbox;
pub mod outbuf;
pub mod read_size;
pub mod ready;
pub mod records;
pub mod timers;

/// The types that the inbox is made of. `core/models` compiles the inbox with loom's types instead.
mod parts {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering, fence};

    pub(super) use crossbeam_queue::SegQueue;
}
