//! Child processes: the loop is told when one has ended.
//!
//! Belongs to the loop's thread, and knows the loop only through `LoopObject` and `Source`. Starting a child, its
//! pipes and its transport are Python (`_subprocess.py`); this room must not know transports, coros or TLS.

mod child;

use pyo3::prelude::*;

use crate::binding::native_type::extend_type;

/// Adds the type to the module, and the method that makes its objects to `grapeshot._core.Loop`.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    child::register(module)?;
    extend_type(&module.getattr("Loop")?, child::loop_methods())
}
