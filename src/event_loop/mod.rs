//! The loop: scheduling, iterations, descriptors, and its Python interface `grapeshot._core.Loop`.
//!
//! Everything belongs to the thread that runs the loop. This room knows native I/O objects only as `Source`. It must
//! not depend on transports, processes, coros or TLS.

mod call_methods;
mod contexts;
pub(crate) mod coroutine;
mod coroutine_method;
mod fileno;
pub(crate) mod handle;
pub(crate) mod limits;
pub(crate) mod loop_clock;
pub(crate) mod loop_methods;
pub(crate) mod observer;
pub(crate) mod pyloop;
pub(crate) mod reactor;
mod slow;
pub(crate) mod source;
mod tasks;
pub(crate) mod waiter;
pub(crate) mod watching;

use pyo3::prelude::*;

/// Adds the loop and handle types to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    contexts::find_fields(module.py())?;
    handle::register(module)?;
    loop_methods::register(module)?;
    waiter::register(module)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)?;
    coroutine_method::register(module)
}

/// `_before_fork()`: sends what the running step has written, so that only the parent sends it.
#[pyfunction(name = "_before_fork")]
fn before_fork(py: Python<'_>) -> PyResult<()> {
    reactor::flush_running(py)
}

/// `_after_fork()`, in the child: writes leave at once, since it may end in the middle of the step.
#[pyfunction(name = "_after_fork")]
fn after_fork() {
    reactor::after_fork();
}
