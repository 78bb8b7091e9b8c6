//! The part of grapeshot that needs no Python. It is built, tested and fuzzed without an interpreter.
//!
//! | module | what it has | uses |
//! |---|---|---|
//! | [`sys`] | the operating system: poller, sockets, signals, child processes ... | |
//! | [`queue`] | the containers of a loop: ready callbacks, timers, descriptors, what waits to be written ... | `sys` |
//! | [`arch`] | the switch between two stacks of one thread | |
//! | [`stack`] | the memory that coros run on, and the copies of it | `sys` |
//! | [`msgpack`] | the shape of a packet, before anything is made of it | `probing` |
//! | [`probing`] | what integers cost that are keys of a dict | |
//!
//! The extension, `grapeshot` in the folder above, wraps this for CPython. Nothing here knows about callbacks,
//! transports or Python: the manifest has no pyo3, and cargo refuses what it does not list. `docs/architecture.md`
//! draws the rooms of both crates.

#![warn(missing_docs)]
// A test build also contains the fallbacks for other systems, which are not exported.
#![cfg_attr(not(test), warn(unreachable_pub))]

pub mod arch;
pub mod msgpack;
pub mod probing;
pub mod queue;
pub mod stack;
pub mod sys;
