//! Child processes: notices when a child has ended, and calls back.
//!
//! Used on the loop's thread only. Starting a child, its pipes and its transport are written in Python
//! (`_loop/subprocess.py`).

mod child;

use pyo3::prelude::*;

use crate::binding::rows::extend_type;

/// Adds the type to the module, and the method that creates its objects to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    child::register(module)?;
    extend_type(&module.getattr("Loop")?, child::loop_methods())
}
