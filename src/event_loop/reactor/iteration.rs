//! Running the loop: one iteration after another until `stop()`.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use grapeshot_core::sys::clock;
use grapeshot_core::sys::poller::Event;
use grapeshot_core::sys::waker::Waker;
use pyo3::ffi;
use pyo3::prelude::*;

use super::held::Holding;
use super::signals::check_signals_at;
use super::{FdUse, Reactor, SIGNAL_TOKEN, WAKER_TOKEN, closed_error, current_thread, mode};
use crate::binding::{HAS_GIL, errors};
use crate::event_loop::handle::HandleRef;
use crate::event_loop::observer;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::slow::{self, SourceMonitor};
use crate::event_loop::source::SourceRef;

/// The number of iterations for which ready work may keep the loop from polling.
pub(super) const MAX_UNPOLLED_ITERATIONS: u32 = 64;
const MAX_UNPOLLED_NS: u64 = 100_000;
/// If there are no timers, only the first two iterations after a poll and then every fourth one read the clock. Reading
/// it takes a fifth of the time of a short iteration, and if the first two were short, the others probably are too.
const CLOCK_CHECK_INTERVAL: u32 = 4;
/// A poll never blocks longer than this (asyncio's `MAXIMUM_SELECT_TIMEOUT`).
const MAX_BLOCK_NS: u64 = 24 * 3600 * 1_000_000_000;

/// Whether an iteration without timers reads the clock. `iterations` counts from the last poll, beginning with 1.
#[inline]
fn checks_clock(iterations: u32) -> bool {
    iterations <= 2 || iterations.is_multiple_of(CLOCK_CHECK_INTERVAL) || iterations > MAX_UNPOLLED_ITERATIONS
}

/// Which events of a poll `dispatch` handles.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    /// Events whose work goes to the ready queue (readers, writers, signals), and events of the waker.
    Watches,
    /// Events of transports and listeners, which are called directly.
    Sources,
}

/// Undoes `claim` and `observer::enter` when dropped, even if a panic ends the run.
struct Claimed<'a>(&'a Reactor);

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        observer::leave();
        self.0.owner.store(0, Ordering::Release);
    }
}

impl Reactor {
    /// Makes this thread the one that runs the loop, until `run` has returned. False if another thread already runs it.
    pub(crate) fn claim(&self) -> bool {
        let claimed = self
            .owner
            .compare_exchange(0, current_thread(), Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    }

    /// Runs iterations until `stop()`, in the thread that has called `claim`. After an error, the remaining work stays
    /// queued for the next run.
    pub(crate) fn run(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        let _claimed = Claimed(self);
        self.unpolled_iterations.set(MAX_UNPOLLED_ITERATIONS);
        event_loop.forget_clock();
        self.signals.enter();
        self.set_observed(observer::enter(&event_loop.to_bound(py)));
        if let Some(last) = self.last_made.take() {
            last.release(py);
        }
        self.counters.clock.begin_run();
        let (holding, begun) = Holding::begin(py, self);
        let mut result = begun;
        while result.is_ok() {
            result = self.iterate(py, event_loop);
            if self.is_stopping.load(Ordering::Relaxed) {
                break;
            }
        }
        self.end_step(py, &mut result);
        drop(holding);
        self.is_stopping.store(false, Ordering::Relaxed);
        self.contexts.forget_values(py);
        self.drain_inbox();
        self.track_kept(py);
        drop(event_loop.future_kwargs.take(py));
        self.leave_signals(py, event_loop);
        self.counters.clock.end_run();
        result
    }

    fn iterate(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        self.counters.iterations.add(1);
        self.drain_inbox();
        if !HAS_GIL {
            self.counters.note_queues(self.queue_lens());
        }
        if self.ready.borrow().is_empty() {
            // This may run destructors, which may schedule something. So the queue is checked again below.
            self.contexts.forget_values(py);
        }
        let has_work = !self.ready.borrow().is_empty() || self.is_stopping.load(Ordering::Relaxed);
        let has_timers = !self.timers.borrow().is_empty();
        let iterations = self.unpolled_iterations.get() + 1;
        let reads_clock = has_timers || (has_work && checks_clock(iterations));
        let mut now_ns = if reads_clock { clock::now_ns() } else { 0 };
        if self.last_poll_ns.get() == 0 {
            // The clock was not read after the last poll, so the time without a poll counts from here.
            self.last_poll_ns.set(now_ns);
        }
        if has_work
            && iterations <= MAX_UNPOLLED_ITERATIONS
            && (!reads_clock || now_ns - self.last_poll_ns.get() < MAX_UNPOLLED_NS)
        {
            self.unpolled_iterations.set(iterations);
        } else {
            // Read before the timeout is computed: computing it may run the program's code, which may set another
            // timer.
            let timers_set = self.counters.timers_set.get();
            let timeout_ns = if has_work {
                Some(0)
            } else if has_timers {
                self.time_to_deadline_ns(py, event_loop, now_ns)?
                    .map(|timeout_ns| timeout_ns.min(MAX_BLOCK_NS))
            } else {
                None
            };
            let ready_before = self.ready.borrow().len();
            let count = self.poll(py, timeout_ns, now_ns, timers_set)?;
            self.unpolled_iterations.set(0);
            if has_timers && timeout_ns != Some(0) {
                now_ns = clock::now_ns();
            }
            self.last_poll_ns.set(now_ns);
            if ready_before > 0 && count > 0 {
                return self.finish_iteration(py, event_loop, count, ready_before, now_ns);
            }
            self.dispatch(py, event_loop, count, Part::All)?;
        }
        if has_timers {
            self.expire_timers(py, event_loop, now_ns)?;
        }
        let count = self.ready.borrow().len();
        self.run_ready(py, event_loop, count)
    }

    /// A coro that yields calls this before it queues itself. If the next iteration would only run that one entry,
    /// because no other entry is ready, no timer is due, no write is held and no poll is needed, this call counts as
    /// that iteration: it returns the time of the native clock, and the coro continues without being queued. Returns
    /// None otherwise.
    #[inline]
    pub(crate) fn skip_iteration(&self, py: Python<'_>, event_loop: &LoopObject) -> Option<u64> {
        let iterations = self.unpolled_iterations.get() + 1;
        let is_alone = iterations <= MAX_UNPOLLED_ITERATIONS
            && self.ready.borrow().is_empty()
            && !self.has_events.get()
            && self.held.is_empty();
        if !is_alone
            || self.has_mode(mode::DEBUG | mode::MEASURED | mode::TIMED)
            || self.is_stopping()
            || self.owner() == 0
        {
            return None;
        }
        let now_ns = clock::now_ns();
        if self.last_poll_ns.get() == 0 {
            self.last_poll_ns.set(now_ns);
        }
        if now_ns - self.last_poll_ns.get() >= MAX_UNPOLLED_NS || self.may_be_due(py, event_loop, now_ns) {
            return None;
        }
        self.unpolled_iterations.set(iterations);
        self.counters.iterations.add(1);
        Some(now_ns)
    }

    /// Finishes an iteration whose poll found events while handles were ready. The handles that were ready before the
    /// poll run first. Then the sources with an event are called, and then the handles of the other events and of the
    /// due timers run. It is as if the events had been queued behind the handles.
    fn finish_iteration(
        &self,
        py: Python<'_>,
        event_loop: &LoopObject,
        count: usize,
        ready_before: usize,
        now_ns: u64,
    ) -> PyResult<()> {
        let result = self.dispatch(py, event_loop, count, Part::Watches);
        let expired = self.expire_timers(py, event_loop, now_ns);
        result.and(expired)?;
        let total = self.ready.borrow().len();
        self.counters.note_ready(total);
        self.has_events.set(true);
        let result = self.run_ready(py, event_loop, ready_before);
        self.has_events.set(false);
        result?;
        self.dispatch(py, event_loop, count, Part::Sources)?;
        self.run_ready(py, event_loop, total - ready_before)
    }

    /// Waits for events and returns their number. Blocks (detached) unless `timeout_ns` is `Some(0)`. The timeout
    /// counts from `now_ns`. It was computed when the counter `timers_set` had the given value.
    fn poll(&self, py: Python<'_>, timeout_ns: Option<u64>, now_ns: u64, timers_set: u64) -> PyResult<usize> {
        if timeout_ns != Some(0) {
            self.prepare_signals(py)?;
        }
        // Sends the data that signal handlers and finalizers have written since the last step.
        let mut sent = Ok(());
        self.end_step(py, &mut sent);
        sent?;
        let poller = self.poller.borrow();
        let Some(poller) = poller.as_ref() else {
            return Err(closed_error());
        };
        let mut events = self.events.borrow_mut();
        // Checked again: code that ran since the first check (a finalizer of a dropped timer, a signal handler) may
        // have scheduled work, or let another thread do so. A new timer may be due before the timeout.
        let may_block = timeout_ns != Some(0)
            && self.ready.borrow().is_empty()
            && self.counters.timers_set.get() == timers_set
            && !self.is_stopping.load(Ordering::Relaxed);
        let result = if may_block && self.begin_sleep() {
            // SAFETY: the thread is attached (`py`) and touches no Python object until it is restored.
            let state = unsafe { ffi::PyEval_SaveThread() };
            self.counters.clock.begin_poll();
            let result = poller.wait_since(&mut events, timeout_ns, now_ns);
            self.counters.clock.end_poll();
            // SAFETY: the state was saved just above, on the same thread.
            unsafe { ffi::PyEval_RestoreThread(state) };
            self.inbox.end_sleep();
            result
        } else {
            poller.wait_since(&mut events, Some(0), now_ns)
        };
        drop(events);
        self.counters.polls.add(1);
        if !self.is_plain() {
            self.note_polled();
        }
        match result {
            Ok(count) => {
                self.counters.events.add(count as u64);
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(errors::os_error(&error)),
        }
    }

    /// Records that the loop is about to block. Returns false if it must not, because another thread has scheduled
    /// something.
    #[inline]
    fn begin_sleep(&self) -> bool {
        if HAS_GIL {
            // Other threads need the GIL to queue something, and this thread has held it since it checked the queue.
            self.inbox.begin_locked_sleep();
            return true;
        }
        self.inbox.begin_sleep()
    }

    /// Handles `part` of the `count` events of the last poll. After an error (an exception that leaves the loop), the
    /// remaining sources are not called: the next poll reports their events again. The poller may report the other
    /// events only once, so they are handled even after an error.
    fn dispatch(&self, py: Python<'_>, event_loop: &LoopObject, count: usize, part: Part) -> PyResult<()> {
        // Python's signal handlers run in bytecode, or here. A loop with only native callbacks must still notice
        // Ctrl-C.
        let mut result = py.check_signals();
        for index in 0..count {
            let event = self.events.borrow().get(index);
            if result.is_ok() && index > 0 {
                result = check_signals_at(py, index);
            }
            let is_own = event.token == SIGNAL_TOKEN || event.token == WAKER_TOKEN;
            if is_own && part == Part::Sources {
                continue;
            }
            if event.token == SIGNAL_TOKEN {
                result = result.and_then(|()| self.take_signals(py, event_loop));
                continue;
            }
            if event.token == WAKER_TOKEN {
                self.with_waker(Waker::drain);
                continue;
            }
            // A stale token finds no entry: an earlier event closed the descriptor, and its number may already be in
            // use again.
            let fd_use = self.fds.borrow().get(event.token);
            match fd_use {
                Some(FdUse::Source(source)) if result.is_ok() && part != Part::Watches => {
                    result = self.dispatch_source(py, event_loop, source, event);
                }
                Some(FdUse::Watch(watch)) if part != Part::Sources => {
                    result = result.and(self.dispatch_watch(py, event, watch));
                }
                None if part != Part::Sources => self.note_stale_event(py),
                // A source after an error, or an event that `part` excludes.
                Some(_) | None => {}
            }
        }
        self.drain_inbox();
        result
    }

    #[inline]
    fn dispatch_source(
        &self,
        py: Python<'_>,
        event_loop: &LoopObject,
        source: SourceRef,
        event: Event,
    ) -> PyResult<()> {
        let monitor = if self.is_plain() {
            None
        } else {
            Some(SourceMonitor::begin(self, source.to_bound(py)))
        };
        let result = match catch_unwind(AssertUnwindSafe(|| source.ready(py, event.readiness))) {
            Ok(result) => result,
            Err(payload) => {
                let error = errors::panic_error(&*payload);
                errors::report(
                    &event_loop.to_bound(py),
                    "Internal error in a transport",
                    error,
                    &[],
                )
            }
        };
        let mut result = match monitor {
            None => result,
            Some(monitor) => monitor.end(event_loop, result),
        };
        self.end_step(py, &mut result);
        result
    }

    /// Runs the first `count` entries of the ready queue.
    fn run_ready(&self, py: Python<'_>, event_loop: &LoopObject, count: usize) -> PyResult<()> {
        if count == 0 {
            return Ok(());
        }
        self.counters.note_ready(count);
        for index in 0..count {
            check_signals_at(py, index)?;
            let entry = self.ready.borrow_mut().pop_front();
            let Some(entry) = entry else { return Ok(()) };
            let mut result = match entry.run {
                None => {
                    let handle = HandleRef::from_owned(entry.object);
                    self.counters.callbacks.add(1);
                    if self.is_plain() {
                        handle.run(py)
                    } else {
                        slow::run_handle(py, event_loop, handle)
                    }
                }
                // SAFETY: `defer` paired the function with its object, whose reference the queue held.
                Some(run) if self.is_plain() => unsafe { run(py, entry.object) },
                // SAFETY: as above.
                Some(run) => unsafe { slow::run_deferred(py, event_loop, entry.object, run) },
            };
            // SAFETY: the queue's reference, dropped once.
            unsafe { ffi::Py_DECREF(entry.object) };
            self.end_step_of_batch(py, &mut result, index + 1 == count);
            // An error ends the run. At its end, the run sends the writes that are still held.
            result?;
        }
        Ok(())
    }
}
