//! grapeshot's native core. This file registers the rooms and nothing else; `docs/architecture.md` draws them.

mod coro;
pub mod queue;
pub mod sys;

#[cfg(feature = "python")]
mod event_loop;
#[cfg(feature = "python")]
mod process;
#[cfg(feature = "python")]
mod tls;
#[cfg(feature = "python")]
mod transports;

/// The extension module `grapeshot._core`.
#[cfg(feature = "python")]
#[pyo3::pymodule(gil_used = false)]
fn _core(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
    event_loop::refuse_subinterpreter(module.py())?;
    sys::unwinding::hang_threads_that_end();
    event_loop::register(module)?;
    transports::register(module)?;
    process::register(module)?;
    coro::register(module)?;
    tls::register(module)
}
