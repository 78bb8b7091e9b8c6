//! Name resolution: `loop.getaddrinfo` for address literals, which need no lookup ([`literals`]), and the loop's access
//! to the native threads that look up names ([`resolver`]).

mod literals;
mod resolver;

use pyo3::ffi;
use pyo3::prelude::*;

/// The methods that this module adds to the loop's type.
pub(crate) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    literals::loop_methods()
}

/// Adds `getaddrinfo` to `grapeshot._core.Loop`, and the type and the functions of resolvers to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    literals::register(module)?;
    resolver::register(module)
}
