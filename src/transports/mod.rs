//! Transports: the objects that carry bytes between a descriptor and a protocol.
//!
//! They are used on the loop's thread only, except that any thread may call `close`, `abort` and `is_closing`. They
//! reach the loop through `LoopObject` and its reactor. The loop calls them as a `Source` or through a deferred
//! function.

mod datagram;
mod ending;
mod files;
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

use crate::binding::rows::extend_type;

/// Adds the transport types to the module, and the methods that create transports to `grapeshot._core.Loop`.
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

/// The methods that this module adds to the loop's type.
pub(crate) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = stream::loop_methods();
    methods.extend(listener::loop_methods());
    methods.extend(pipe::loop_methods());
    methods.extend(datagram::loop_methods());
    methods
}
