//! The exceptions of coros. They are Python classes (`grapeshot/coro/_errors.py`), which the package passes in once,
//! at import.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The classes that native code raises or compares with.
#[derive(Clone, Copy)]
pub(super) enum ErrorClass {
    YieldFromMain,
    ScheduleError,
    DeadCoroutine,
    NotStarted,
    Cancelled,
    Shutdown,
    LockError,
    Closed,
    InvalidState,
    CoroCancelled,
    Timeout,
    Empty,
    Full,
    Simultaneous,
}

const COUNT: usize = 14;
static CLASSES: [AtomicPtr<ffi::PyObject>; COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];
/// In the order of `ErrorClass`.
const NAMES: [&str; COUNT] = [
    "YieldFromMain",
    "ScheduleError",
    "DeadCoroutine",
    "NotStartedError",
    "CancelledError",
    "Shutdown",
    "LockError",
    "ClosedError",
    "InvalidStateError",
    "CoroCancelled",
    "TimeoutError",
    "Empty",
    "Full",
    "SimultaneousError",
];

/// Stores the classes of the Python module, which are never freed. Raises TypeError if one of them is not a class.
pub(super) fn set_classes(module: &Bound<'_, PyAny>) -> PyResult<()> {
    for (place, name) in CLASSES.iter().zip(NAMES) {
        let class = module.getattr(name)?.cast_into::<PyType>()?;
        place.store(class.into_ptr(), Ordering::Release);
    }
    Ok(())
}

/// A new exception of the given class.
#[cold]
pub(super) fn new(py: Python<'_>, class: ErrorClass, message: &str) -> PyErr {
    let class = CLASSES[class as usize].load(Ordering::Acquire);
    // SAFETY: null or a class that is never freed.
    match unsafe { Bound::from_borrowed_ptr_or_opt(py, class) } {
        Some(class) => match if message.is_empty() {
            class.call0()
        } else {
            class.call1((message,))
        } {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        },
        None => PyRuntimeError::new_err(message.to_owned()),
    }
}

/// Whether the exception is of exactly the given class.
pub(super) fn is_exactly(exception: &Bound<'_, PyAny>, class: ErrorClass) -> bool {
    exception.get_type_ptr().cast() == CLASSES[class as usize].load(Ordering::Acquire)
}

/// Whether the exception is of the given class or a subclass.
pub(super) fn is_a(exception: &Bound<'_, PyAny>, class: ErrorClass) -> bool {
    let class = CLASSES[class as usize].load(Ordering::Acquire);
    // SAFETY: attached; a live object, and null or a class that is never freed.
    !class.is_null() && unsafe { ffi::PyObject_TypeCheck(exception.as_ptr(), class.cast()) } != 0
}
