//! Coros: ordinary blocking-style functions that run as cooperative threads, in the loop's own ready queue.
//!
//! | modules | what they contain |
//! |---|---|
//! | `arch` and `stack` of grapeshot-core | the switch between two stacks, the memory of the stacks |
//! | `pystate` | the part of the interpreter's thread state that belongs to a coro, per minor version |
//! | `fiber` | the stack and the interpreter state of one coro |
//! | `coroutine`, `function` | the `Coro` object; its function and the function's outcome |
//! | `runtime`, `live` | the stacks of a thread; its live coros |
//! | `slots`, `scheduler` | which coro gets which slot; which coro runs |
//! | `suspension`, `interruption` | how a coro waits; exceptions that are pending for it |
//! | `wait_queue`, `sync` | queues of waiting coros; the primitives, from `semaphore` to `channel` |
//! | `io` | waits on descriptors; sockets |
//! | `threads` | locks and queues that coros share with real threads |
//! | `tasks`, `visibility` | asyncio's running loop and current task while a coro runs; coros that hide the loop |
//! | `ending`, `notifier` | ends coros whose loop cannot run any more; the exception notifier |
//! | `pulse`, `latency`, `watchdog`, `report` | find and report code that blocks a loop |
//! | `reprs` | the containers whose `repr` is in progress, per coro |
//! | `stamps` | the times of switches, for the package's profiler |
//! | `collector`, `profiling`, `thread_locals` | other users of the C stack: the collector, profilers, libraries |
//! | `errors`, `hooks` | classes and functions of the Python package that native code needs |
//! | `methods` | the methods and functions that Python calls |
//!
//! A *slot* is the memory in which a coro's stack lies while the coro runs. If another coro needs the slot, the stack
//! is *evicted*: copied out of the slot until its coro runs again.
//!
//! Unless a module says otherwise, its functions are called only by the thread that runs the loop. The scheduler
//! resumes coros only from the thread's own stack, never from the stack of a coro. It does not know why a coro waits,
//! but when it makes a coro ready it removes the coro from the queue in which the coro waits.

mod collector;
mod coroutine;
mod ending;
mod errors;
mod fiber;
mod function;
mod hooks;
mod interruption;
mod io;
mod latency;
mod live;
mod methods;
mod notifier;
mod profiling;
mod pulse;
mod pystate;
mod report;
mod reprs;
mod runtime;
mod scheduler;
mod slots;
mod stamps;
mod suspension;
mod sync;
mod tasks;
mod thread_locals;
mod threads;
mod visibility;
mod wait_queue;
mod watchdog;

/// Adds the types and functions of this folder to the native module.
pub(crate) fn register(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    methods::register(module)?;
    sync::register(module)?;
    threads::register(module)
}
