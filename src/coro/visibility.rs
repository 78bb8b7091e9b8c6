//! Hides the running loop from a coro and shows it again.
//!
//! A coro that hides the loop runs blocking-style code the way a thread would: in it, asyncio's functions see no
//! running loop (`tasks` arranges that at each switch). The package's own functions still work there, because they find
//! the loop through the coro.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::coroutine::Coro;
use super::runtime::{current, with_runtime};
use super::tasks;

/// The running coro, if it hides the loop.
fn hiding(py: Python<'_>) -> Option<Coro<'_>> {
    current(py).filter(|coro| coro.hides_loop.get())
}

/// Whether the running coro hides the loop. False in a process that the coro has forked, which has no loop to hide.
pub(super) fn is_hidden(py: Python<'_>) -> bool {
    hiding(py).is_some() && !with_runtime(|runtime| runtime.is_forked.get())
}

/// The loop that runs in this thread, even if it is hidden, or None. If blocking code in the coro runs a loop of its
/// own, the result is that loop.
pub(super) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let visible = tasks::running_loop(py)?;
    if !visible.is_none() {
        return Ok(visible);
    }
    let hidden = hiding(py).and_then(|coro| coro.event_loop.get(py));
    Ok(hidden.unwrap_or(visible))
}

/// Raises RuntimeError if `event_loop` is a loop that blocking code runs inside a coro: such a loop cannot run coros.
pub(super) fn check_can_host(event_loop: &Bound<'_, PyAny>) -> PyResult<()> {
    match hiding(event_loop.py()) {
        Some(coro) if coro.event_loop.as_ptr() != event_loop.as_ptr() => Err(PyRuntimeError::new_err(
            "another event loop runs in this coro, and coros cannot run in it",
        )),
        _ => Ok(()),
    }
}

/// Hides the loop from the running coro. Returns the current task, for `show`.
pub(super) fn hide(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    if coro.hides_loop.get() {
        return Err(PyRuntimeError::new_err("the coro already hides the loop"));
    }
    tasks::hide(coro)
}

/// Shows the loop to the running coro again, with `task` as the current task.
pub(super) fn show<'py>(coro: Coro<'py>, task: &Bound<'py, PyAny>) -> PyResult<()> {
    if !coro.hides_loop.get() {
        return Err(PyRuntimeError::new_err("the coro does not hide the loop"));
    }
    tasks::show(coro, task)
}
