//! Functions of the Python package that native code calls. The package hands them over once, at import.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::binding::native_type::Args;

/// Returns the loop of coros that are made while none runs.
static PENDING_LOOP: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Arranges for the end of this thread.
static WATCH_THREAD: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Waits for coros: `wait` with arguments.
static WAIT_FOR: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// The code of the function that runs the loop.
static RUN_FOREVER: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Logs where a late run is.
static REPORT_LATE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// The coro that has forked has ended in the child.
static END_CHILD: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// Takes the functions; they stay for good.
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
pub(super) fn wait_for<'py>(py: Python<'py>, args: &Args<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let kwargs = PyDict::new(py);
    for (name, value) in args.keywords() {
        // SAFETY: keyword values are alive for the length of the call.
        kwargs.set_item(name, unsafe { Bound::from_borrowed_ptr(py, value) })?;
    }
    let values = (0..args.positional().len()).filter_map(|index| args.get(index));
    find(py, &WAIT_FOR)?.call(PyTuple::new(py, values.collect::<Vec<_>>())?, Some(&kwargs))
}

/// The loop of coros that are made while none runs in this thread.
#[cold]
pub(super) fn pending_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    call(py, &PENDING_LOOP)
}

/// Called before the first coro of a thread starts.
#[cold]
pub(super) fn watch_thread(py: Python<'_>) {
    if let Err(error) = call(py, &WATCH_THREAD) {
        error.write_unraisable(py, None);
    }
}

/// The coro that has forked has ended in the child; `leaves`: with an exception that leaves the loop. Returns whether
/// those who wait for the coro exist in the child.
#[cold]
pub(super) fn end_child(coro: &Bound<'_, PyAny>, leaves: bool) -> PyResult<bool> {
    find(coro.py(), &END_CHILD)?.call1((coro, leaves))?.is_truthy()
}

/// The code of the function that runs the loop. Its frame is between what has called the loop and what the loop calls.
pub(super) fn run_forever(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: null, or code that is never freed.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, RUN_FOREVER.load(Ordering::Acquire)) }
}

/// The watchdog calls this with kind and name of what runs, the seconds that it has run, and the code and line of each
/// function that it is in.
#[cold]
pub(super) fn report_late<'py>(
    py: Python<'py>,
    (kind, name, seconds, places): (&'static str, String, f64, Bound<'py, PyList>),
) -> PyResult<()> {
    find(py, &REPORT_LATE)?.call1((kind, name, seconds, places))?;
    Ok(())
}
