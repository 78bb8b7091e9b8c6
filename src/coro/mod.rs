//! The coro mode: ordinary blocking-style functions as cooperative threads, in the loop's own ready queue.
//!
//! - `arch`: the switch of registers; `stack`: the memory that coros run on (both without Python)
//! - `pystate`: what of the interpreter's thread state belongs to a coro, per minor version
//! - `coroutine`: the `Coro` object; `runtime`: what a thread has for its coros; `scheduler`: who runs; `function`: what it
//!   runs, and what becomes of it; `suspension`: how it waits; `interruption`: exceptions on their way into a coro; `ending`: what is left when a loop or thread ends
//! - `line`: coros in line for the same thing; `waiting`: the things, from `semaphore` to `channel`
//!
//! Everything belongs to the thread that runs the loop. The scheduler runs on the thread's own stack and never on a
//! coro's; it must not know what coros wait for, but takes a coro that it makes ready out of its line.

// Without Python only the tests use the stacks.
#![cfg_attr(not(feature = "python"), allow(dead_code))]

mod arch;
mod stack;

#[cfg(feature = "python")]
mod collector;
#[cfg(feature = "python")]
mod coroutine;
#[cfg(feature = "python")]
mod ending;
#[cfg(feature = "python")]
mod errors;
#[cfg(feature = "python")]
mod function;
#[cfg(feature = "python")]
mod hooks;
#[cfg(feature = "python")]
mod interruption;
#[cfg(feature = "python")]
mod latency;
#[cfg(feature = "python")]
mod line;
#[cfg(feature = "python")]
mod machine;
#[cfg(feature = "python")]
mod methods;
#[cfg(feature = "python")]
mod notifier;
#[cfg(feature = "python")]
mod profiling;
#[cfg(feature = "python")]
mod pystate;
#[cfg(feature = "python")]
mod runtime;
#[cfg(feature = "python")]
mod scheduler;
#[cfg(feature = "python")]
mod suspension;
#[cfg(feature = "python")]
mod tasks;
#[cfg(feature = "python")]
mod thread_locals;
#[cfg(feature = "python")]
mod waiting;

/// Makes the types and functions of the coro mode.
#[cfg(feature = "python")]
pub(crate) fn register(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    methods::register(module)?;
    waiting::register(module)
}
