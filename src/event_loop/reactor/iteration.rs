//! Running the loop: one iteration after another until `stop()`.
//!
//! An iteration has four parts: poll for events, call the sources that have an event, queue the timers that are due,
//! and run exactly the handles that are ready at that moment. The poll detaches the thread from the interpreter only if
//! it is going to block. While work is ready, the loop skips the poll for a while (`Pacing`).

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use grapeshot_core::sys::clock;
use grapeshot_core::sys::poller::Event;
use pyo3::ffi;
use pyo3::prelude::*;

use super::descriptors::{Pacing, Registered, SIGNAL_TOKEN, WAKER_TOKEN};
use super::held::Holding;
use super::ready::Ready;
use super::signals::check_signals_at;
use super::timers::lateness_ns;
use super::{Reactor, closed_error};
use crate::binding::{HAS_GIL, errors};
use crate::event_loop::probe::{Mode, observer, step};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::SourceRef;

/// A poll that waits for a timer never blocks longer than this (asyncio's `MAXIMUM_SELECT_TIMEOUT`).
const MAX_BLOCK_NS: u64 = 24 * 3600 * 1_000_000_000;

/// Selects the events that one call of `dispatch` handles.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    /// Events whose work goes to the ready queue (readers, writers, signals), and events of the waker.
    Watches,
    /// Events of transports and listeners, which are called directly.
    Sources,
}

/// Undoes `Access::claim` and `observer::enter` when dropped, even if a panic ends the run.
struct Claimed<'a>(&'a Reactor);

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        observer::leave();
        self.0.access.release();
    }
}

impl Reactor {
    /// Runs iterations until `stop()`, in the thread that has called `Access::claim`. After an error, the remaining
    /// work stays queued for the next run.
    pub(crate) fn run(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        let _claimed = Claimed(self);
        event_loop.make_done_future(py)?;
        self.descriptors.pacing.poll_next();
        event_loop.clock_version.forget();
        self.signals.enter();
        self.probe
            .switch(Mode::OBSERVED, observer::enter(&event_loop.to_bound(py)));
        self.newest_handle.forget();
        self.probe.counters.clock.begin_run();
        let (holding, begun) = Holding::begin(py, &self.held);
        let mut result = begun;
        while result.is_ok() {
            result = self.iterate(py, event_loop);
            if self.is_stopping() {
                break;
            }
        }
        result = result.and(self.show(py, event_loop));
        self.held.end_step(py, &mut result);
        drop(holding);
        self.set_stopping(false);
        self.contexts.forget_values(py);
        self.ready.drain_inbox();
        self.ready.track_kept(py);
        self.timers.track_kept(py);
        drop(event_loop.future_kwargs.take(py));
        drop(event_loop.done_future.take(py));
        self.signals.leave(&event_loop.to_bound(py));
        self.probe.counters.clock.end_run();
        result
    }

    fn iterate(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        self.probe.counters.iterations.add(1);
        self.ready.drain_inbox();
        if !HAS_GIL {
            self.probe.counters.note_queues(self.queue_lens());
        }
        if self.ready.is_empty() {
            // This may run destructors, which may schedule something. So the queue is checked again below.
            self.contexts.forget_values(py);
        }
        let has_work = !self.ready.is_empty() || self.is_stopping();
        let has_timers = !self.timers.is_empty();
        let pacing = &self.descriptors.pacing;
        let iteration = pacing.next_iteration();
        let reads_clock = has_timers || (has_work && Pacing::reads_clock(iteration));
        let mut now_ns = if reads_clock { clock::now_ns() } else { 0 };
        pacing.note_clock(now_ns);
        if has_work && Pacing::may_skip(iteration) && (!reads_clock || !pacing.is_overdue(now_ns)) {
            pacing.note_skipped(iteration);
        } else {
            // Read before the timeout is computed: computing it may run the program's code, which may set another
            // timer.
            let timers_set = self.probe.counters.timers_set.get();
            let timeout_ns = if has_work {
                Some(0)
            } else if has_timers {
                self.timers
                    .time_to_deadline_ns(py, event_loop.clock(), now_ns)?
                    .map(|timeout_ns| timeout_ns.min(MAX_BLOCK_NS))
            } else {
                None
            };
            let ready_before = self.ready.len();
            let count = self.poll(py, timeout_ns, now_ns, timers_set)?;
            if has_timers && timeout_ns != Some(0) {
                now_ns = clock::now_ns();
            }
            pacing.note_polled(now_ns);
            if ready_before > 0 && count > 0 {
                return self.finish_iteration(py, event_loop, count, ready_before, now_ns);
            }
            self.dispatch(py, event_loop, count, Part::All)?;
        }
        if has_timers {
            self.expire_timers(py, event_loop, now_ns)?;
        }
        self.run_ready(py, event_loop, self.ready.len())
    }

    /// A coro that yields calls this before it queues itself. If the next iteration would do nothing but run this coro,
    /// this call counts as that iteration: it returns the time of the native clock, and the coro continues without
    /// being queued. Otherwise returns None, for example if another entry is ready, a timer is due, a write is held or
    /// a poll is needed.
    #[inline]
    pub(crate) fn skip_iteration(&self, py: Python<'_>, event_loop: &LoopObject) -> Option<u64> {
        let pacing = &self.descriptors.pacing;
        let iteration = pacing.next_iteration();
        let is_alone = Pacing::may_skip(iteration)
            && self.ready.is_empty()
            && (HAS_GIL || self.ready.is_inbox_empty())
            && !self.has_events.get()
            && self.held.is_empty();
        if !is_alone
            || self.probe.has(Mode::STEPS - Mode::OBSERVED)
            || self.is_stopping()
            || !self.access.is_running()
        {
            return None;
        }
        let now_ns = clock::now_ns();
        pacing.note_clock(now_ns);
        if pacing.is_overdue(now_ns) || self.timers.may_be_due(py, event_loop.clock(), now_ns) {
            return None;
        }
        pacing.note_skipped(iteration);
        self.probe.counters.iterations.add(1);
        Some(now_ns)
    }

    /// How often the loop has polled.
    pub(crate) fn poll_count(&self) -> u64 {
        self.probe.counters.polls.get()
    }

    /// Whether the loop could run something else now: a ready entry, a due timer, or an object that waits for a
    /// descriptor which is ready. The watchdog asks this while a callback or coro runs. Takes nothing out of the queues
    /// or the poller.
    ///
    /// Any thread that holds the GIL may call this: no cell stays borrowed where a thread can lose the GIL.
    pub(crate) fn has_backlog(&self, py: Python<'_>, event_loop: &LoopObject) -> bool {
        !self.ready.is_empty()
            || self.has_events.get()
            || !self.ready.is_inbox_empty()
            || self.timers.is_due(py, event_loop.clock(), clock::now_ns())
            || self.descriptors.is_any_ready(py)
    }

    /// Finishes an iteration whose poll found events while handles were ready. First, the handles that were ready
    /// before the poll are run. Then the sources with an event are called, and then the handles of the other events and
    /// of the due timers run. So the order is the same as if the events had been queued behind the handles.
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
        let total = self.ready.len();
        self.probe.counters.note_ready(total);
        self.has_events.set(true);
        let result = self.run_ready(py, event_loop, ready_before);
        self.has_events.set(false);
        result?;
        self.dispatch(py, event_loop, count, Part::Sources)?;
        self.run_ready(py, event_loop, total - ready_before)
    }

    /// Waits for events and returns their number. Blocks (detached) unless `timeout_ns` is `Some(0)` or there is other
    /// work by now. The timeout was computed at the time `now_ns`, when the counter `timers_set` had the given value.
    /// Each kind of poller decides whether the timeout counts from `now_ns` or from the call of `Poller::wait_since`.
    fn poll(&self, py: Python<'_>, timeout_ns: Option<u64>, now_ns: u64, timers_set: u64) -> PyResult<usize> {
        if timeout_ns != Some(0) {
            self.signals.prepare(py, &self.descriptors.poller)?;
        }
        // Sends the data that signal handlers and finalizers have written since the last step.
        let mut sent = Ok(());
        self.held.end_step(py, &mut sent);
        sent?;
        // Checked again: code that ran since the first check (a finalizer of a dropped timer, a signal handler) may
        // have scheduled work, or let another thread do so. A new timer may be due before the timeout.
        let may_block = timeout_ns != Some(0)
            && self.ready.is_empty()
            && self.probe.counters.timers_set.get() == timers_set
            && !self.is_stopping();
        let polled = self.descriptors.poller.with_events(|poller, events| {
            if may_block && self.ready.begin_sleep() {
                // SAFETY: the thread is attached (`py`) and touches no Python object until `state` is restored.
                let state = unsafe { ffi::PyEval_SaveThread() };
                self.probe.counters.clock.begin_poll();
                let result = poller.wait_since(events, timeout_ns, now_ns);
                self.probe.counters.clock.end_poll();
                // SAFETY: the state was saved just above, on the same thread.
                unsafe { ffi::PyEval_RestoreThread(state) };
                self.ready.end_sleep();
                result
            } else {
                poller.wait_since(events, Some(0), now_ns)
            }
        });
        let Some(result) = polled else {
            return Err(closed_error());
        };
        self.probe.counters.polls.add(1);
        if let Some(measuring) = self.probe.measuring() {
            measuring.note_polled();
        }
        match result {
            Ok(count) => {
                self.probe.counters.events.add(count as u64);
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(errors::os_error(&error)),
        }
    }

    /// Handles `part` of the `count` events of the last poll. After an error (an exception that leaves the loop), the
    /// remaining events of sources and of signals are skipped, because the next poll reports them again. All other
    /// events are still handled, because the poller may report them only once.
    fn dispatch(&self, py: Python<'_>, event_loop: &LoopObject, count: usize, part: Part) -> PyResult<()> {
        // Python runs signal handlers while it executes bytecode. A loop with only native callbacks executes none, but
        // must still notice Ctrl-C.
        let mut result = py.check_signals();
        for index in 0..count {
            let event = self.descriptors.poller.event(index);
            if result.is_ok() && index > 0 {
                result = check_signals_at(py, index);
            }
            let is_own = event.token == SIGNAL_TOKEN || event.token == WAKER_TOKEN;
            if is_own && part == Part::Sources {
                continue;
            }
            if event.token == SIGNAL_TOKEN {
                result = result.and_then(|()| self.show(py, event_loop));
                result = result.and_then(|()| self.signals.take(&event_loop.to_bound(py)));
                continue;
            }
            if event.token == WAKER_TOKEN {
                self.ready.note_woken();
                continue;
            }
            // A stale token finds no entry: the handler of an earlier event has closed the descriptor, whose number may
            // already be in use again.
            match self.descriptors.get(event.token) {
                Some(Registered::Source(source)) if result.is_ok() && part != Part::Watches => {
                    result = self.dispatch_source(py, event_loop, source, event);
                }
                Some(Registered::Watch(watch)) if part != Part::Sources => {
                    let dispatched = self.descriptors.dispatch_watch(py, event, watch, &self.ready);
                    result = result.and(dispatched);
                }
                None if part != Part::Sources => self.descriptors.note_stale_event(py),
                // A source after an error, or an event that `part` excludes.
                Some(_) | None => {}
            }
        }
        self.ready.drain_inbox();
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
        if source.needs_running_loop() {
            self.show(py, event_loop)?;
        }
        let mut result = if self.probe.has(Mode::STEPS) {
            watch_source(py, event_loop, source, event)
        } else {
            call_source(py, event_loop, source, event)
        };
        if !self.held.is_empty() {
            result = result.and(self.show(py, event_loop));
        }
        self.held.end_step(py, &mut result);
        result
    }

    /// Moves due timers to the ready queue. `now_ns` is the time of the native clock. Fails only if the program has
    /// replaced `loop.time()`, and the replacement raises.
    #[inline]
    fn expire_timers(&self, py: Python<'_>, event_loop: &LoopObject, now_ns: u64) -> PyResult<()> {
        self.timers
            .expire(py, event_loop.clock(), now_ns, |handle, until| {
                self.probe.counters.timers_run.add(1);
                if let Some(measuring) = self.probe.measuring() {
                    let (late_ns, slack_ns) = lateness_ns(handle.this(py), until);
                    measuring.note_due(self.ready.len(), late_ns, slack_ns);
                }
                self.ready.push(handle);
            })
    }

    /// Runs the first `count` entries of the ready queue.
    fn run_ready(&self, py: Python<'_>, event_loop: &LoopObject, count: usize) -> PyResult<()> {
        if count == 0 {
            return Ok(());
        }
        self.show(py, event_loop)?;
        self.probe.counters.note_ready(count);
        for index in 0..count {
            check_signals_at(py, index)?;
            let Some(entry) = self.ready.pop() else {
                return Ok(());
            };
            let is_watched = self.probe.has(Mode::STEPS);
            // The queue's reference is dropped at the end of each arm.
            let mut result = match entry {
                Ready::Handle(handle) => {
                    self.probe.counters.callbacks.add(1);
                    if is_watched {
                        step::run_handle(event_loop, handle.this(py))
                    } else {
                        handle.this(py).run()
                    }
                }
                Ready::Call(call) if is_watched => step::run_deferred(py, event_loop, call),
                Ready::Call(call) => call.call(py),
            };
            self.held.end_step_of_batch(py, &mut result, index + 1 == count);
            // An error ends the run. At its end, the run sends the writes that are still held.
            result?;
        }
        Ok(())
    }
}

/// Calls a source that has an event, and drops this reference to it. A panic is reported and does not end the run.
#[inline(always)]
fn call_source(py: Python<'_>, event_loop: &LoopObject, source: SourceRef, event: Event) -> PyResult<()> {
    let result = match catch_unwind(AssertUnwindSafe(|| source.ready(py, event.readiness))) {
        Ok(result) => result,
        Err(payload) => report_panic(py, event_loop, &*payload),
    };
    drop(source);
    result
}

#[cold]
#[inline(never)]
fn report_panic(py: Python<'_>, event_loop: &LoopObject, payload: &(dyn Any + Send)) -> PyResult<()> {
    errors::report(
        &event_loop.to_bound(py),
        "Internal error in a transport",
        errors::panic_error(payload),
        &[],
    )
}

/// `call_source` as a step that the probe watches. Not inlined, because that would enlarge the frame of `dispatch`,
/// which greenlets copy when they switch in a loop that runs for gevent.
#[cold]
#[inline(never)]
fn watch_source(py: Python<'_>, event_loop: &LoopObject, source: SourceRef, event: Event) -> PyResult<()> {
    step::run_source(event_loop, &source.to_bound(py), || {
        call_source(py, event_loop, source, event)
    })
}
