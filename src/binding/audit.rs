//! Audit events (PEP 578) for native code that replaces a function of the standard library.

use std::ffi::{c_char, c_int};

use pyo3::prelude::*;

unsafe extern "C" {
    /// Public C API (`Doc/c-api/sys.rst`), which pyo3-ffi does not export. Does nothing if there is no hook.
    pub(crate) fn PySys_Audit(event: *const c_char, format: *const c_char, ...) -> c_int;
}

/// Turns the result of `PySys_Audit` into a `PyResult`. Err is the exception that a hook has raised.
pub(crate) fn check(py: Python<'_>, result: c_int) -> PyResult<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(py))
    }
}
