//! Reads the flags of a Python function's code directly, without making a Python int, because each `spawn` needs them.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;

use super::{field, imp};

/// `inspect.CO_COROUTINE` and `inspect.CO_ASYNC_GENERATOR`.
const IS_ASYNC: c_int = 0x80 | 0x200;

/// The flags of a function's code.
///
/// # Safety
/// `function` is an object of the type `PyFunction_Type`.
#[inline]
unsafe fn flags_of(function: *mut ffi::PyObject) -> c_int {
    // SAFETY: by the contract; a function has a code object, which it keeps. The offset is inside a code object in
    // every version.
    unsafe { *field(ffi::PyFunction_GetCode(function).cast(), imp::CODE_FLAGS) }
}

/// Whether a function was defined by `async def`.
///
/// # Safety
/// `function` is an object of the type `PyFunction_Type`.
#[inline]
pub(in crate::coro) unsafe fn is_async_function(function: *mut ffi::PyObject) -> bool {
    // SAFETY: by the contract.
    unsafe { flags_of(function) & IS_ASYNC != 0 }
}

/// Whether the flags of this function's code are at the expected offset.
pub(in crate::coro) fn has_known_code(function: &Bound<'_, PyAny>) -> PyResult<bool> {
    let flags: c_int = function.getattr("__code__")?.getattr("co_flags")?.extract()?;
    // SAFETY: the caller passes a Python function (`methods/functions.rs`).
    Ok(unsafe { flags_of(function.as_ptr()) } == flags)
}
