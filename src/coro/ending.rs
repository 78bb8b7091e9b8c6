//! Ends coros whose loop cannot run any more, because its thread ends, because the interpreter exits, or because it was
//! closed while another loop runs. (If a loop can still run when it is closed, the package ends its coros, in
//! `grapeshot/coro/_ending.py`.)
//!
//! Each coro is resumed with `Shutdown` so that its `finally` blocks run. Like the loop, this module resumes the coro
//! from the thread's own stack. In the `finally` blocks the coro may yield, but a wait is interrupted again. Coros that
//! have not ended are resumed again in further rounds. A coro that does not end is abandoned: its stack, its frames and
//! the objects that they refer to are never freed. A coro that stands for a daemon thread is abandoned after a few
//! rounds, since plain Python would not wait for a daemon thread at all. After a coro has forked, all other coros are
//! abandoned in the child process.

use pyo3::prelude::*;

use super::coroutine::{Coro, Status};
use super::errors::{self as coro_errors, ErrorClass};
use super::function::store;
use super::runtime::{current, with_runtime};
use super::{interruption, scheduler};
use crate::binding::HAS_GIL;
use crate::event_loop::pyloop::LoopObject;

/// The first round raises `Shutdown` in each coro. From the second round until this many rounds are over, a coro that
/// has yielded during its cleanup just continues. In later rounds, `Shutdown` is raised in such a coro, too.
const GENTLE_ROUNDS: usize = 100;
/// The number of rounds after which daemons are abandoned.
const DAEMON_ROUNDS: usize = 10;

/// Shuts down this thread's coros (only those of `event_loop`, if given) in up to `rounds` rounds. Returns how many are
/// left, not counting daemons that were abandoned. If a coro calls this function, the function only counts the coros.
///
/// # Errors
/// The first `SystemExit` or `KeyboardInterrupt` that a coro raised. It is returned after the last round.
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
        for object in with_runtime(|runtime| runtime.live.all(py)) {
            let coro = scheduler::coro_of(&object);
            let is_meant =
                event_loop.is_none_or(|event_loop| coro.event_loop.as_ptr() == event_loop.as_ptr());
            if !is_meant || coro.is_done() || is_given_up(coro, round) {
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

/// Whether the coro is a daemon that has been abandoned, because it did not end in the rounds so far.
fn is_given_up(coro: Coro<'_>, round: usize) -> bool {
    if coro.is_daemon() && round >= DAEMON_ROUNDS {
        coro.is_given_up.set(true);
    }
    coro.is_given_up.get()
}

/// Called in the child of a fork, where only the running coro continues. The others are marked as ended by `Shutdown`,
/// but none of their code runs, and their stacks, frames and references are never freed. (CPython treats the threads of
/// the parent in the same way.)
pub(super) fn forget_others(py: Python<'_>) {
    for object in with_runtime(|runtime| runtime.take_others(py)) {
        let coro = scheduler::coro_of(&object);
        with_runtime(|runtime| runtime.forgo_stack(coro));
        coro.wait_node.unlink();
        coro.status.set(Status::Done);
        let why = "the coro continues only in the parent process, not in this fork";
        store(coro, Err(coro_errors::new(py, ErrorClass::Shutdown, why)));
        coro.is_unseen.set(false);
        // This reference is never dropped.
        let _ = object.into_ptr();
    }
}

/// Resumes a coro that waits or is ready. Raises `Shutdown` in it, unless it is ready (it has yielded, for example) and
/// `may_yield` is true.
fn end(coro: Coro<'_>, may_yield: bool) -> PyResult<()> {
    match coro.status.get() {
        Status::Ready if may_yield => return resume_as_owner(coro),
        Status::Ready | Status::Waiting => {}
        _ => return Ok(()),
    }
    let py = coro.py();
    let shutdown = coro_errors::new(py, ErrorClass::Shutdown, "")
        .into_value(py)
        .into_bound(py);
    interruption::push(coro, shutdown.into_any())?;
    // If the coro was ready already, it has an entry in the ready queue, which stays there. When that entry's turn
    // comes, it does nothing unless the coro is ready again.
    coro.wait_node.exclusive(|| scheduler::claim(coro));
    resume_as_owner(coro)
}

/// Resumes the coro. In a free-threaded build, this thread owns the coro's loop meanwhile, so that no other thread uses
/// the loop. If another thread uses the loop already, the coro is not resumed in this round. With a GIL, other threads
/// may use the loop.
fn resume_as_owner(coro: Coro<'_>) -> PyResult<()> {
    let py = coro.py();
    let Some(event_loop) = coro.event_loop.get(py).filter(|_| !HAS_GIL) else {
        return scheduler::resume(coro);
    };
    let event_loop = LoopObject::of(&event_loop);
    match event_loop.claim(py) {
        Ok(true) => event_loop.reactor().access.borrowed(|| scheduler::resume(coro)),
        Ok(false) => scheduler::resume(coro),
        Err(_) => Ok(()),
    }
}
