//! Exceptions that are pending for a coro. They are raised one at a time: the first one ends the coro's current wait,
//! or its next wait if the coro is not waiting. Each further one ends one more wait.
//!
//! ```text
//!   wake_exception:   empty   |   one exception   |   a list of several, the oldest first
//! ```
//!
//! No exception replaces another, so a timeout that follows a `Shutdown` does not undo it. Only repetitions are
//! dropped: a second `Shutdown`, and a plain `CancelledError` (not a subclass) after a `Shutdown` or another plain one.
//!
//! Only the coro's thread adds or removes these exceptions.

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coroutine::Coro;
use super::errors::{ErrorClass, is_exactly};

/// Adds an exception after the ones that are already pending, unless it repeats one of them (see above).
#[cold]
pub(super) fn push(coro: Coro<'_>, exception: Bound<'_, PyAny>) -> PyResult<()> {
    let py = coro.py();
    let Some(pending) = coro.wake_exception.get(py) else {
        coro.wake_exception.set(exception);
        return Ok(());
    };
    let list = match pending.cast_into_exact::<PyList>() {
        Ok(list) => list,
        Err(error) => PyList::new(py, [error.into_inner()])?,
    };
    let is_shutdown = is_exactly(&exception, ErrorClass::Shutdown);
    if is_shutdown || is_exactly(&exception, ErrorClass::Cancelled) {
        let says_it = |other: &Bound<'_, PyAny>| {
            is_exactly(other, ErrorClass::Shutdown)
                || (!is_shutdown && is_exactly(other, ErrorClass::Cancelled))
        };
        if list.iter().any(|other| says_it(&other)) {
            return Ok(());
        }
    }
    list.append(exception)?;
    coro.wake_exception.set(list.into_any());
    Ok(())
}

/// Removes and returns the exception that is to be raised now.
#[cold]
pub(super) fn pop(coro: Coro<'_>) -> Option<PyErr> {
    let py = coro.py();
    let pending = coro.wake_exception.take(py)?;
    let list = match pending.cast_into_exact::<PyList>() {
        Ok(list) => list,
        Err(error) => return Some(PyErr::from_value(error.into_inner())),
    };
    let first = list.get_item(0).ok()?;
    // Nothing else refers to the list, so it does not change here. Its other exceptions stay pending, in their order.
    match list.len() {
        0 | 1 => {}
        2 => {
            if let Ok(last) = list.get_item(1) {
                coro.wake_exception.set(last);
            }
        }
        len => coro.wake_exception.set(list.get_slice(1, len).into_any()),
    }
    Some(PyErr::from_value(first))
}

/// Puts back an exception that `pop` returned, in front of the others. It is raised at the coro's next wait.
#[cold]
pub(super) fn put_back(coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    let py = coro.py();
    let exception = error.into_value(py).into_bound(py).into_any();
    let Some(pending) = coro.wake_exception.get(py) else {
        coro.wake_exception.set(exception);
        return Ok(());
    };
    let list = match pending.cast_into_exact::<PyList>() {
        Ok(list) => list,
        Err(error) => PyList::new(py, [error.into_inner()])?,
    };
    list.insert(0, exception)?;
    coro.wake_exception.set(list.into_any());
    Ok(())
}

/// Whether an exception of exactly the given class is pending.
pub(super) fn contains(coro: Coro<'_>, class: ErrorClass) -> bool {
    match coro.wake_exception.get(coro.py()) {
        Some(pending) => match pending.cast_exact::<PyList>() {
            Ok(list) => list.iter().any(|exception| is_exactly(&exception, class)),
            Err(_) => is_exactly(&pending, class),
        },
        None => false,
    }
}

/// Removes the pending exceptions for which `is_meant` returns true. Returns whether there was one.
#[cold]
pub(super) fn take_back(coro: Coro<'_>, is_meant: impl Fn(&Bound<'_, PyAny>) -> bool) -> bool {
    let py = coro.py();
    let mut kept = Vec::new();
    let mut found = false;
    while let Some(error) = pop(coro) {
        let exception = error.into_value(py).into_bound(py).into_any();
        if is_meant(&exception) {
            found = true;
        } else {
            kept.push(exception);
        }
    }
    for exception in kept {
        // `push` keeps the order, and drops only an exception that repeats one before it.
        if let Err(error) = push(coro, exception) {
            error.write_unraisable(py, None);
        }
    }
    found
}

/// Raises the oldest pending exception, if there is one. Called before the coro waits and when it continues.
#[inline]
pub(super) fn raise_pending(coro: Coro<'_>) -> PyResult<()> {
    if coro.wake_exception.is_set()
        && let Some(error) = pop(coro)
    {
        return Err(error);
    }
    Ok(())
}
