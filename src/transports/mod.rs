//! Transports: what carries bytes between a descriptor and a protocol.
//!
//! They belong to the loop's thread and know the loop only through `LoopObject` and `Source`; they must not know
//! plain sockets (`sock`), processes, coros or TLS.

mod datagram;
mod ending;
mod files;
pub(crate) mod flags;
pub(crate) mod flow;
mod lent_buffer;
mod listener;
pub(crate) mod object;
pub(crate) mod outgoing;
mod owner;
mod pipe;
pub(crate) mod protocol;
mod registration;
pub(crate) mod stream;
mod stream_reader;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::extend_type;

/// Adds the transport types to the module, and the methods that make them to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    owner::register(module.py())?;
    stream::register(module)?;
    listener::register(module)?;
    pipe::register(module)?;
    datagram::register(module)?;
    files::register(module)?;
    stream_reader::register(module.py())?;
    extend_type(&module.getattr("Loop")?, loop_methods())
}

/// Methods that this room adds to the loop's type.
pub(crate) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = stream::loop_methods();
    methods.extend(listener::loop_methods());
    methods.extend(pipe::loop_methods());
    methods.extend(datagram::loop_methods());
    methods
}
