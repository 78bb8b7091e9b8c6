//! Transports: what carries bytes between a descriptor and a protocol.
//!
//! They belong to the loop's thread and know the loop only through `LoopObject` and `Source`; they must not know
//! processes, coros or TLS.

mod datagram;
mod files;
pub(crate) mod flow;
mod lent_buffer;
mod listener;
pub(crate) mod new_bytes;
mod object;
pub(crate) mod outgoing;
mod owner;
mod pipe;
pub(crate) mod protocol;
mod registration;
mod sock;
mod socket_object;
pub(crate) mod stream;
mod stream_reader;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::binding::native_type::extend_type;
use crate::event_loop::pyloop;

/// Adds the transport types to the module, and the methods that make them to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    owner::register(module.py())?;
    stream::register(module)?;
    listener::register(module)?;
    pipe::register(module)?;
    sock::register(module)?;
    datagram::register(module)?;
    files::register(module)?;
    stream_reader::register(module.py())?;
    extend_type(&module.getattr("Loop")?, loop_methods())?;
    module.add_function(wrap_pyfunction!(bind_methods, module)?)
}

fn loop_methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = stream::loop_methods();
    methods.extend(listener::loop_methods());
    methods.extend(pipe::loop_methods());
    methods.extend(sock::loop_methods());
    methods.extend(datagram::loop_methods());
    methods
}

/// `_bind_methods(kind)`: puts the native methods of `Loop` on its subclass `kind` once more, those aside that it
/// defines itself. CPython's specialized calls want a method to be found on the exact type of the object.
#[pyfunction(name = "_bind_methods")]
fn bind_methods(kind: &Bound<'_, PyType>) -> PyResult<()> {
    if !pyloop::is_loop_type(kind) {
        return Err(PyTypeError::new_err(
            "a subclass of grapeshot._core.Loop is required",
        ));
    }
    let mut methods = pyloop::methods();
    methods.extend(loop_methods());
    let mut missing = Vec::with_capacity(methods.len());
    for method in methods {
        // SAFETY: method tables are made of C string literals.
        let name = unsafe { std::ffi::CStr::from_ptr(method.ml_name) }.to_string_lossy();
        let base = kind
            .py()
            .import("grapeshot._core")?
            .getattr("Loop")?
            .getattr(name.as_ref())?;
        if kind.getattr(name.as_ref())?.is(&base) {
            missing.push(method);
        }
    }
    extend_type(kind.as_any(), missing)
}
