//! grapeshot's native core. This file makes the extension module, with the types and functions of the folders and files
//! beside it. `docs/architecture.md` describes the folders.

mod aio;
mod binding;
mod coro;
mod dns;
mod event_loop;
mod gevent;
mod process;
mod rpc;
mod sock;
mod streams;
mod tls;
mod transports;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use binding::rows;
use event_loop::{loop_methods, pyloop};

/// The extension module `grapeshot._core`.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    binding::refuse_subinterpreter(module.py())?;
    grapeshot_core::sys::unwinding::hang_threads_that_end();
    binding::errors::silence_memory_errors();
    binding::names::fill(module.py())?;
    binding::base_socket::fill(module.py())?;
    event_loop::register(module)?;
    transports::register(module)?;
    sock::register(module)?;
    dns::register(module)?;
    aio::register(module)?;
    process::register(module)?;
    gevent::register(module)?;
    rpc::register(module)?;
    coro::register(module)?;
    streams::register(module)?;
    tls::register(module)?;
    module.add_function(wrap_pyfunction!(bind_methods, module)?)?;
    // Counting references to the module's functions is needless: they live as long as the process.
    for function in module.dict().values() {
        binding::defer_counting(&function);
    }
    Ok(())
}

/// `_bind_methods(kind)`: copies the native methods of `Loop` onto its subclass `kind`, except for methods that `kind`
/// or a class between the two replaces. (`_tls` and `_watch_child` are not copied: they are called only once per
/// connection or child.)
///
/// CPython specializes a method call only if it finds the method on the object's exact type, so calls on a subclass
/// would be slower without the copies.
#[pyfunction(name = "_bind_methods")]
fn bind_methods(kind: &Bound<'_, PyType>) -> PyResult<()> {
    if !pyloop::is_loop_type(kind) {
        return Err(PyTypeError::new_err(
            "_bind_methods() requires a subclass of grapeshot._core.Loop",
        ));
    }
    let mut methods = loop_methods::methods();
    methods.extend(transports::loop_methods());
    methods.extend(sock::loop_methods());
    methods.extend(dns::loop_methods());
    let base = kind.py().import("grapeshot._core")?.getattr("Loop")?;
    rows::bind_methods(kind, &base, methods)
}
