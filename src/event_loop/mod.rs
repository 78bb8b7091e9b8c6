//! The loop: scheduling, the turn, descriptors, and its Python face `grapeshot._core.Loop`.
//!
//! Everything belongs to the thread that runs the loop. This room knows native I/O objects only as `Source`; it must
//! not know transports, processes, coros or TLS.

pub(crate) mod attributes;
pub(crate) mod audit;
mod coroutine_method;
pub(crate) mod deallocation;
pub(crate) mod errors;
pub(crate) mod freelist;
pub(crate) mod handle;
pub(crate) mod log;
pub(crate) mod loop_clock;
pub(crate) mod names;
pub(crate) mod native_type;
pub(crate) mod object_cell;
pub(crate) mod pyloop;
pub(crate) mod reactor;
mod scheduling;
mod slow;
pub(crate) mod source;
mod tasks;
pub(crate) mod watching;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Whether the GIL orders all that attached threads do. Then other threads put their callbacks into the ready queue
/// itself; free-threaded builds go through the inbox.
const HAS_GIL: bool = cfg!(not(Py_GIL_DISABLED));

/// Python 3.11 specializes calls of methods of an object that can have a dict only if it has one.
const HAS_LAZY_DICT: bool = cfg!(Py_3_12);

/// Whether the interpreter itself keeps nested deallocations from using up the stack.
const HAS_TRASHCAN: bool = cfg!(Py_3_14);

/// Adds the loop and handle types to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    names::fill(module.py())?;
    handle::register(module)?;
    pyloop::register(module)?;
    coroutine_method::register(module)
}

/// `ImportError` outside the main interpreter: the tables of names and types are one for the process. From 3.12 on
/// CPython refuses by itself, before it comes here.
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
