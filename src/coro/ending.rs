//! The end of coros whose loop does not run any more: it is closed, its thread ends, or the interpreter exits.
//!
//! Each is resumed with `Shutdown`, on the thread's own stack as the loop would do it, so that its `finally` blocks
//! run. They may yield; what they wait for is interrupted again. One that does not end is left where it is: its stack,
//! its frames and what they refer to stay for good.

use pyo3::prelude::*;

use super::coroutine::{Coro, Status};
use super::errors::{self as coro_errors, ErrorClass};
use super::runtime::{current, with_runtime};
use super::{interruption, scheduler};

/// Rounds in which coros may yield in their cleanup; then that is interrupted too.
const GENTLE_ROUNDS: usize = 100;

/// Shuts down this thread's coros (those of `event_loop`, if there is one given) in up to `rounds` rounds; the number
/// of those that are left. Does nothing inside a coro.
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
    let is_inside = current(py).is_some();
    for round in 0..rounds {
        left = 0;
        for object in with_runtime(|runtime| runtime.live(py)) {
            let coro = scheduler::coro_of(&object);
            let is_meant =
                event_loop.is_none_or(|event_loop| coro.event_loop.as_ptr() == event_loop.as_ptr());
            if !is_meant || coro.is_done() {
                continue;
            }
            if !is_inside {
                let may_yield = (1..GENTLE_ROUNDS).contains(&round);
                let ended = end(coro, may_yield);
                if leaving.is_ok() {
                    leaving = ended;
                }
            }
            if !coro.is_done() {
                left += 1;
            }
        }
        if left == 0 || is_inside {
            break;
        }
    }
    leaving.map(|()| left)
}

/// Resumes one coro, with `Shutdown` unless it has only yielded and may.
fn end(coro: Coro<'_>, may_yield: bool) -> PyResult<()> {
    match coro.status.get() {
        Status::Ready if may_yield => return scheduler::resume(coro),
        Status::Ready | Status::Waiting => {}
        _ => return Ok(()),
    }
    let py = coro.py();
    let shutdown = coro_errors::new(py, ErrorClass::Shutdown, "")
        .into_value(py)
        .into_bound(py);
    interruption::push(coro, shutdown.into_any())?;
    coro.wait_node.unlink();
    coro.status.set(Status::Ready);
    scheduler::resume(coro)
}
