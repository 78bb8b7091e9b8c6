//! The boundary to Python, which all other modules use: native types and their method tables, cells for references,
//! interned names, conversion of errors, the logger, `bytes` and socket objects. It knows nothing about loops.

pub(crate) mod args;
pub(crate) mod arrived;
pub(crate) mod attributes;
pub(crate) mod audit;
pub(crate) mod base_socket;
pub(crate) mod deallocation;
pub(crate) mod errors;
pub(crate) mod exports;
pub(crate) mod flags;
pub(crate) mod freelist;
pub(crate) mod lengths;
pub(crate) mod log;
pub(crate) mod names;
pub(crate) mod native_type;
pub(crate) mod new_bytes;
pub(crate) mod new_objects;
pub(crate) mod object_cell;
pub(crate) mod object_ref;
pub(crate) mod object_result;
pub(crate) mod rows;
pub(crate) mod signature;
pub(crate) mod socket_object;
pub(crate) mod spin_lock;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The types that `spin_lock` is made of. `core/models` compiles `spin_lock` with loom's types instead.
mod parts {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::thread::yield_now;
}

/// Whether the build has a GIL. With a GIL, only one thread is attached at a time, so threads other than the loop's put
/// their callbacks directly into the ready queue. In free-threaded builds, they use the inbox.
pub(crate) const HAS_GIL: bool = cfg!(not(Py_GIL_DISABLED));

/// Whether an object's dict may be created later without making method calls slower. If an object can have a dict,
/// Python 3.11 specializes method calls on it only if the dict exists.
const HAS_LAZY_DICT: bool = cfg!(Py_3_12);

/// Whether the interpreter itself limits how deep deallocations nest, for objects of every type.
const HAS_TRASHCAN: bool = cfg!(Py_3_14);

/// Whether an environment variable switches something on: it is set, and neither empty nor 0.
pub(crate) fn is_switched_on(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

#[cfg(all(Py_GIL_DISABLED, Py_3_14))]
unsafe extern "C" {
    /// Unstable C API (`Doc/c-api/object.rst`), which pyo3-ffi does not export.
    fn PyUnstable_Object_EnableDeferredRefcount(object: *mut ffi::PyObject) -> std::ffi::c_int;
}

/// Lets the interpreter use the object without counting each reference, in free-threaded builds from 3.14 on. Without
/// this, threads that call the same function contend for its count. CPython frees such an object only in a collection,
/// so this is for objects that live as long as the process.
pub(crate) fn defer_counting(object: &Bound<'_, PyAny>) {
    #[cfg(all(Py_GIL_DISABLED, Py_3_14))]
    // SAFETY: attached, with a live object. The function ignores objects for which this is not possible.
    unsafe {
        PyUnstable_Object_EnableDeferredRefcount(object.as_ptr());
    }
    let _ = object;
}

/// `threading.get_ident()` of this thread.
#[inline]
pub(crate) fn current_thread() -> u64 {
    // SAFETY: any thread may call this at any time.
    unsafe { ffi::PyThread_get_thread_ident() as u64 }
}

/// Raises `ImportError` outside the main interpreter, because the process has only one table of names and types. From
/// 3.12 on, CPython itself refuses the import in subinterpreters with a GIL of their own, before this check runs.
pub(crate) fn refuse_subinterpreter(_: Python<'_>) -> PyResult<()> {
    // SAFETY: attached, so there is a current interpreter.
    let is_main = unsafe { ffi::PyInterpreterState_Get() == ffi::PyInterpreterState_Main() };
    if is_main {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "module grapeshot._core does not support loading in subinterpreters",
    ))
}
