//! Functions of the Python package that native code calls, and one code object that native code looks for on the
//! stack. The package passes them in once, at import.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::binding::args::Args;
use crate::binding::object_result::ObjectResult;

/// Returns the loop for coros that are made while no loop runs.
static PENDING_LOOP: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Arranges the cleanup at the end of this thread.
static WATCH_THREAD: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// `wait()` with arguments: waits for coros.
static WAIT_FOR: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// The code of the function that runs the loop.
static RUN_FOREVER: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Logs a late run (one that blocks the loop for too long), with its place in the code.
static REPORT_LATE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Called in the child process when the coro that forked has ended.
static END_CHILD: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// Stores the functions and the code object; they are never freed.
pub(super) fn set(
    [pending_loop, watch_thread, wait_for, report_late, end_child]: [Bound<'_, PyAny>; 5],
    run_forever: Py<PyAny>,
) {
    END_CHILD.store(end_child.into_ptr(), Ordering::Release);
    RUN_FOREVER.store(run_forever.into_ptr(), Ordering::Release);
    REPORT_LATE.store(report_late.into_ptr(), Ordering::Release);
    WAIT_FOR.store(wait_for.into_ptr(), Ordering::Release);
    PENDING_LOOP.store(pending_loop.into_ptr(), Ordering::Release);
    WATCH_THREAD.store(watch_thread.into_ptr(), Ordering::Release);
}

fn call<'py>(py: Python<'py>, hook: &AtomicPtr<ffi::PyObject>) -> PyResult<Bound<'py, PyAny>> {
    find(py, hook)?.call0()
}

fn find<'py>(py: Python<'py>, hook: &AtomicPtr<ffi::PyObject>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: null, or a function that is never freed.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, hook.load(Ordering::Acquire)) }
        .ok_or_else(|| PyRuntimeError::new_err("no running event loop"))
}

/// `wait(*args, **kwargs)` for coros.
#[cold]
pub(super) fn wait_for<'py>(py: Python<'py>, args: &Args<'_, 'py>) -> ObjectResult<'py> {
    let kwargs = PyDict::new(py);
    for (name, value) in args.keywords() {
        // SAFETY: keyword values stay alive during the call.
        kwargs.set_item(name, unsafe { Bound::from_borrowed_ptr(py, value) })?;
    }
    let values = (0..args.positional().len()).filter_map(|index| args.get(index));
    find(py, &WAIT_FOR)?.call(PyTuple::new(py, values.collect::<Vec<_>>())?, Some(&kwargs))
}

/// The loop for coros that are made while no loop runs in this thread.
#[cold]
pub(super) fn pending_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    call(py, &PENDING_LOOP)
}

/// Called once in a thread, before its first coro starts or when it first sets a limit for the watchdog, whichever
/// comes first. From then on the package notices the thread's end.
#[cold]
pub(super) fn watch_thread(py: Python<'_>) {
    if let Err(error) = call(py, &WATCH_THREAD) {
        error.write_unraisable(py, None);
    }
}

/// Called in the child process when the coro that forked has ended. `leaves` tells whether the coro ended with an
/// exception that leaves the loop. Ends the process, unless `leaves` is true or the loop runs only until this coro
/// ends, as in `coro.run()`. Returns whether the loop runs only until this coro ends.
#[cold]
pub(super) fn end_child(coro: &Bound<'_, PyAny>, leaves: bool) -> PyResult<bool> {
    find(coro.py(), &END_CHILD)?.call1((coro, leaves))?.is_truthy()
}

/// The code of the function that runs the loop. Its frame separates the callers of the loop from the functions that the
/// loop calls.
pub(super) fn run_forever(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: null, or code that is never freed.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, RUN_FOREVER.load(Ordering::Acquire)) }
}

/// Logs a late run. The watchdog calls this with the kind and name of the object that runs, the seconds it has run, and
/// the code and line of each function that it is in.
#[cold]
pub(super) fn report_late<'py>(
    py: Python<'py>,
    (kind, name, seconds, places): (&'static str, String, f64, Bound<'py, PyList>),
) -> PyResult<()> {
    find(py, &REPORT_LATE)?.call1((kind, name, seconds, places))?;
    Ok(())
}
