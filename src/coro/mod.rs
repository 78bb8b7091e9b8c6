//! The coro mode: ordinary blocking-style functions as cooperative threads, in the loop's own ready queue.
//!
//! - `arch` and `stack` of grapeshot-core: the switch of registers, and the memory that coros run on
//! - `pystate`: what of the interpreter's thread state belongs to a coro, per minor version
//! - `coroutine`: the `Coro` object; `runtime`: what a thread has for its coros; `scheduler`: who runs; `function`: what it
//!   runs, and what becomes of it; `suspension`: how it waits; `interruption`: exceptions on their way into a coro; `ending`: what is left when a loop or thread ends
//! - `line`: coros in line for the same thing; `waiting`: the things, from `semaphore` to `channel`
//!
//! Everything belongs to the thread that runs the loop. The scheduler runs on the thread's own stack and never on a
//! coro's; it must not know what coros wait for, but takes a coro that it makes ready out of its line.

mod collector;
mod coroutine;
mod ending;
mod errors;
mod function;
mod hooks;
mod interruption;
mod latency;
mod line;
mod machine;
mod methods;
mod notifier;
mod profiling;
mod pystate;
mod runtime;
mod scheduler;
mod suspension;
mod tasks;
mod thread_locals;
mod waiting;

/// Makes the types and functions of the coro mode.
pub(crate) fn register(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    methods::register(module)?;
    waiting::register(module)
}
