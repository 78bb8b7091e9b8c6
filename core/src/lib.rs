//! The part of grapeshot that does not need Python. It is built, tested and fuzzed without an interpreter.
//!
//! | module | contents | uses |
//! |---|---|---|
//! | [`sys`] | the interface to the operating system: poller, sockets, signals, child processes ... | |
//! | [`queue`] | the loop's containers: ready callbacks, timers, descriptors, data still to be written ... | `sys` |
//! | [`arch`] | the code that differs between processors: the switch between two stacks of one thread | |
//! | [`stack`] | the memory that coros run on, and the copies of evicted stacks | `sys` |
//! | [`msgpack`] | checks a packet before it is decoded | `probing` |
//! | [`probing`] | counts how many steps a dict takes to insert integer keys | |
//!
//! The extension, `grapeshot` in the parent folder, wraps this crate for CPython. This crate cannot use Python, because
//! its manifest does not list pyo3. `docs/architecture.md` has a diagram of the modules of both crates.

#![warn(missing_docs)]
// A test build also compiles the fallbacks for other systems. It does not export them, so the lint would warn about
// their `pub` items.
#![cfg_attr(not(test), warn(unreachable_pub))]

pub mod arch;
pub mod msgpack;
pub mod probing;
pub mod queue;
pub mod stack;
pub mod sys;
