//! The native part of `grapeshot.gevent`: the io watchers, the running loop of each greenlet, and the base class of the
//! hub's loop. The rest is Python: `python/grapeshot/gevent`.
//!
//! The watchers and their descriptors belong to the thread that runs the hub's loop.

mod descriptor;
mod hub_loop;
mod io;
mod running_loops;

use pyo3::prelude::*;

/// Adds the types and functions of this folder to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    hub_loop::register(module)?;
    descriptor::register(module)?;
    io::register(module)?;
    running_loops::register(module)
}
