//! The end of coros whose loop does not run any more: it is closed, its thread ends, or the interpreter exits.
//!
//! Each is resumed with `Shutdown`, on the thread's own stack as the loop would do it, so that its `finally` blocks run;
//! what it waits for in them is interrupted again. One that does not end is left where it is: its stack, its frames and
//! what they refer to stay for good.

use pyo3::prelude::*;

use super::coroutine::{Coro, Status};
use super::errors::{self as coro_errors, Kind};
use super::runtime::with_runtime;
use super::{interruption, scheduler};

/// Shuts down this thread's coros (those of `event_loop`, if there is one given) in up to `rounds` rounds; the number of
/// those that are left. Does nothing inside a coro.
///
/// # Errors
/// The first `SystemExit` or `KeyboardInterrupt` that came out of a coro, once all have had their rounds.
pub(super) fn shut_down(
    py: Python<'_>,
    event_loop: Option<&Bound<'_, PyAny>>,
    rounds: usize,
) -> PyResult<usize> {
    let mut leaving = Ok(());
    let mut left = 0;
    for _ in 0..rounds {
        left = 0;
        for object in with_runtime(|runtime| runtime.live(py)) {
            let coro = scheduler::coro_of(&object);
            let is_meant =
                event_loop.is_none_or(|event_loop| coro.event_loop.as_ptr() == event_loop.as_ptr());
            if !is_meant || coro.is_done() {
                continue;
            }
            let ended = end(coro);
            if leaving.is_ok() {
                leaving = ended;
            }
            if !coro.is_done() {
                left += 1;
            }
        }
        if left == 0 {
            break;
        }
    }
    leaving.map(|()| left)
}

/// Resumes one coro with `Shutdown`.
fn end(coro: Coro<'_>) -> PyResult<()> {
    if !matches!(coro.status.get(), Status::Ready | Status::Waiting) {
        return Ok(());
    }
    let py = coro.py();
    let shutdown = coro_errors::new(py, Kind::Shutdown, "")
        .into_value(py)
        .into_bound(py);
    interruption::push(coro, shutdown.into_any())?;
    coro.place_in_line.leave();
    coro.status.set(Status::Ready);
    scheduler::resume(coro)
}
