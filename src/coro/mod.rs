//! The coro mode: ordinary blocking-style functions as cooperative threads, in the loop's own ready queue.
//!
//! | modules | what they have |
//! |---|---|
//! | `arch` and `stack` of grapeshot-core | the switch of registers, the memory that coros run on |
//! | `pystate` | what of the interpreter's thread state belongs to a coro, per minor version |
//! | `fiber` | the stack and the interpreter state of one coro |
//! | `coroutine`, `function` | the `Coro` object; what it runs, and what becomes of it |
//! | `runtime`, `scheduler` | what a thread has for its coros; who runs |
//! | `suspension`, `interruption` | how a coro waits; exceptions on their way into it |
//! | `wait_queue`, `sync` | who waits for the same thing; the things, from `semaphore` to `channel` |
//! | `tasks` | the running task that asyncio sees while a coro runs |
//! | `ending`, `notifier` | coros whose loop has ended; who hears of exceptions |
//! | `pulse`, `latency`, `watchdog` | coros that run for too long |
//! | `collector`, `profiling`, `thread_locals` | what others know of the C stack: the collector, profilers, libraries |
//! | `errors`, `hooks` | classes and functions of the Python package that native code needs |
//! | `methods` | what Python calls |
//!
//! All of it belongs to the thread that runs the loop. The scheduler runs on the thread's own stack, never on the stack
//! of a coro. It must not know what coros wait for; but when it makes a coro ready, it removes that coro from its
//! queue.

mod collector;
mod coroutine;
mod ending;
mod errors;
mod fiber;
mod function;
mod hooks;
mod interruption;
mod latency;
mod methods;
mod notifier;
mod profiling;
mod pulse;
mod pystate;
mod runtime;
mod scheduler;
mod suspension;
mod sync;
mod tasks;
mod thread_locals;
mod wait_queue;
mod watchdog;

/// Adds the types and functions of the coro mode to the native module.
pub(crate) fn register(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    methods::register(module)?;
    sync::register(module)
}
