//! Audit events (PEP 578) of what native code does in the place of a function of the standard library.

use std::ffi::{c_char, c_int};

use pyo3::prelude::*;

unsafe extern "C" {
    /// Public C API (`Doc/c-api/sys.rst`), which pyo3-ffi does not export. Calls nothing if there is no hook.
    pub(crate) fn PySys_Audit(event: *const c_char, format: *const c_char, ...) -> c_int;
}

/// What a hook has raised, from the result of `PySys_Audit`.
pub(crate) fn check(py: Python<'_>, result: c_int) -> PyResult<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(py))
    }
}
