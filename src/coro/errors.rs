//! The coro mode's exceptions: Python classes (`grapeshot/coro/_errors.py`), handed over once at import.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The classes that native code raises.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    YieldFromMain,
    ScheduleError,
    DeadCoroutine,
    NotStarted,
}

const COUNT: usize = 4;
static CLASSES: [AtomicPtr<ffi::PyObject>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];
/// In the order of `Kind`.
const NAMES: [&str; COUNT] = [
    "YieldFromMain",
    "ScheduleError",
    "DeadCoroutine",
    "NotStartedError",
];

/// Takes the classes from the Python module; they stay for good.
pub(super) fn set_classes(module: &Bound<'_, PyAny>) -> PyResult<()> {
    for (place, name) in CLASSES.iter().zip(NAMES) {
        place.store(module.getattr(name)?.into_ptr(), Ordering::Release);
    }
    Ok(())
}

/// An exception of that class.
#[cold]
pub(super) fn new(py: Python<'_>, kind: Kind, message: &str) -> PyErr {
    let class = CLASSES[kind as usize].load(Ordering::Acquire);
    // SAFETY: null or a class that is never freed.
    match unsafe { Bound::from_borrowed_ptr_or_opt(py, class) } {
        Some(class) => match class.call1((message,)) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        },
        None => PyRuntimeError::new_err(message.to_owned()),
    }
}
