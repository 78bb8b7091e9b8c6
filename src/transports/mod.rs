//! Transports: what carries bytes between a descriptor and a protocol.
//!
//! They belong to the loop's thread and know the loop only through `LoopObject` and `Source`; they must not know
//! processes, coros or TLS.

mod flow;
mod listener;
mod protocol;
mod socket_object;
mod stream;

use pyo3::prelude::*;

/// Adds the transport types to the module, and the methods that make them to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    stream::register(module)?;
    listener::register(module)
}
