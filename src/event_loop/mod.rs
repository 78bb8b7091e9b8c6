//! The loop: scheduling, iterations, descriptors, and its Python interface `grapeshot._core.Loop`.
//!
//! The state in these modules belongs to the thread that runs the loop, unless a module says otherwise. Transports,
//! processes, coros and TLS are built on top of these modules, which know them only as a `Source`, a waiter or a
//! deferred function.

mod call_methods;
mod contexts;
pub(crate) mod coroutine;
mod coroutine_method;
mod fileno;
pub(crate) mod handle;
mod limit_methods;
pub(crate) mod limits;
pub(crate) mod loop_clock;
pub(crate) mod loop_methods;
pub(crate) mod probe;
pub(crate) mod progress;
pub(crate) mod pyloop;
pub(crate) mod reactor;
pub(crate) mod source;
mod tasks;
pub(crate) mod waiter;
pub(crate) mod watching;

use pyo3::prelude::*;

/// Adds the types and functions to the Python module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    contexts::find_fields(module.py())?;
    handle::register(module)?;
    loop_methods::register(module)?;
    waiter::register(module)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(keep_forever, module)?)?;
    coroutine_method::register(module)
}

/// `_before_fork()`: sends the data that the loop of this thread still holds. Otherwise the child would send it too.
#[pyfunction(name = "_before_fork")]
fn before_fork(py: Python<'_>) -> PyResult<()> {
    reactor::flush_running(py)
}

/// `_after_fork()`, in the child: until a loop begins to run there, writes are sent at once, because perhaps no loop
/// will send them later.
#[pyfunction(name = "_after_fork")]
fn after_fork() {
    reactor::after_fork();
}

/// `_keep_forever(value)`, in the child of a fork: the object belongs to the parent, so it is never freed here.
#[pyfunction(name = "_keep_forever")]
fn keep_forever(value: Bound<'_, PyAny>) {
    std::mem::forget(value);
}
