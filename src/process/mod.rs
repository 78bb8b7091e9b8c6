//! Watches child processes, and calls a function when a child has ended.
//!
//! Used on the loop's thread only. Python code (`_loop/subprocess.py`) starts the child, and makes its pipes and its
//! transport.

mod child;

use pyo3::prelude::*;

use crate::binding::rows::extend_type;

/// Makes the type of the watches, and adds the method `_watch_child` to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    child::register(module)?;
    extend_type(&module.getattr("Loop")?, child::loop_methods())
}
