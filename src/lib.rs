//! grapeshot's native core. This file registers the rooms and nothing else; `docs/architecture.md` draws them.

mod binding;
mod coro;
mod event_loop;
mod process;
mod tls;
mod transports;

/// The extension module `grapeshot._core`.
#[pyo3::pymodule(gil_used = false)]
fn _core(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    binding::refuse_subinterpreter(module.py())?;
    grapeshot_core::sys::unwinding::hang_threads_that_end();
    binding::names::fill(module.py())?;
    event_loop::register(module)?;
    transports::register(module)?;
    process::register(module)?;
    coro::register(module)?;
    tls::register(module)
}
