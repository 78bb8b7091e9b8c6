//! The queues of the work that the loop has to run: the ready queue, the timer heap and the inbox.

use std::sync::atomic::{Ordering, fence};

use grapeshot_core::sys::waker::Waker;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Reactor;
use crate::binding::HAS_GIL;
use crate::event_loop::handle::HandleRef;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::{Deferred, Ready};

/// Cancelled timers are removed once there are this many and they are at least half of the heap.
const MIN_SWEPT_TIMERS: usize = 64;

/// If many timers are due together, taking them out of the heap one by one is slow, so the rest of them is sorted. That
/// is done once this many due timers were taken out, and at least this fraction (1/16) of the timers that are left.
const FEW_DUE: usize = 16;

/// How many places before its turn a due timer's handle is prefetched. Thousands of handles do not fit into the cache.
const PREFETCH_AHEAD: usize = 8;

/// How late a timer with slack may run. asyncio rounds timeouts up to this, a millisecond.
const SLACK_NS: u64 = 1_000_000;

/// asyncio's `_clock_resolution`: timers that are due within this time count as due.
const RESOLUTION_S: f64 = 1e-9;

/// A heap key is a deadline in signed nanoseconds with this bit, the sign, flipped. So negative deadlines sort before
/// positive ones although keys are unsigned.
const SIGN: u64 = 1 << 63;

/// The heap key of a deadline in seconds, rounded so that `time() >= when` holds whenever the timer fires.
fn deadline_key(when_s: f64) -> u64 {
    let truncated = (when_s * 1e9) as i64;
    // One nanosecond for the truncation, one for the rounding of the product, and more once a float is too coarse for
    // single nanoseconds (after 52 days of uptime).
    let margin = 2 + (truncated.unsigned_abs() >> 51) as i64;
    (truncated.saturating_add(margin) as u64) ^ SIGN
}

/// Puts a timer that another thread has created into the heap.
unsafe fn enter_timer(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    let handle = HandleRef::from_owned(object);
    // A cancelled handle does not refer to its loop any more.
    if let Some(event_loop) = handle.event_loop(py) {
        LoopObject::of(&event_loop)
            .reactor()
            .push_timer(py, handle.new_ref());
    }
    Ok(())
}

impl Reactor {
    /// The handles in the ready queue, in order.
    pub(crate) fn ready_handles<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let ready = self.ready.borrow();
        let handles = ready.iter().filter(|entry| entry.run.is_none());
        handles
            .map(|entry| HandleRef::from_owned(entry.object).new_ref().into_bound(py))
            .collect()
    }

    /// The handles in the timer heap, from the earliest to the latest.
    pub(crate) fn timer_handles<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let mut handles: Vec<HandleRef> = self.timers.borrow().iter().collect();
        handles.sort_by(|one, other| one.when_s(py).total_cmp(&other.when_s(py)));
        handles
            .into_iter()
            .map(|handle| handle.new_ref().into_bound(py))
            .collect()
    }

    /// Called for each new handle, while a queue and its creator hold a reference to it. While the loop does not run,
    /// the collector tracks the newest handle, and the one before it stays tracked only if the program has kept a
    /// reference. So the collector sees every cycle through a pending handle of an abandoned loop.
    #[inline]
    pub(crate) fn note_made(&self, py: Python<'_>, handle: HandleRef) {
        if HAS_GIL && self.owner() == 0 {
            self.track_newest(py, handle);
        }
    }

    fn track_newest(&self, py: Python<'_>, handle: HandleRef) {
        handle.track(py);
        if let Some(last) = self.last_made.replace(Some(handle.new_ref())) {
            // 2: the references of the queue and of this function.
            last.track_if_kept(py, 2);
            last.release(py);
        }
    }

    /// Called before the loop stops running: makes the collector track those pending handles to which other code holds
    /// references.
    pub(super) fn track_kept(&self, py: Python<'_>) {
        if !HAS_GIL {
            // Without a freelist, all handles are already tracked.
            return;
        }
        let handles: Vec<HandleRef> = {
            let ready = self.ready.borrow();
            let timers = self.timers.borrow();
            let plain = ready
                .iter()
                .filter(|entry| entry.run.is_none())
                .map(|entry| HandleRef::from_owned(entry.object));
            plain
                .chain(timers.iter())
                .filter(|handle| handle.is_kept(py))
                .collect()
        };
        for handle in handles {
            handle.track(py);
        }
    }

    /// `push_handle` for `call_soon`. The handle comes after everything that other threads have scheduled before, as in
    /// asyncio.
    #[inline]
    pub(crate) fn push_soon(&self, handle: HandleRef) {
        self.drain_inbox();
        self.push_handle(handle);
    }

    /// Queues a handle. The queue takes over its reference.
    #[inline]
    pub(crate) fn push_handle(&self, handle: HandleRef) {
        self.ready.borrow_mut().push_back(Ready {
            object: handle.as_ptr(),
            run: None,
        });
    }

    /// The number of queued entries. Only running the queue removes entries.
    #[inline]
    pub(crate) fn ready_len(&self) -> usize {
        self.ready.borrow().len()
    }

    /// Queues a call of `run(object)`, in order with the handles.
    pub(crate) fn defer(&self, object: Bound<'_, PyAny>, run: Deferred) {
        self.ready.borrow_mut().push_back(Ready {
            object: object.into_ptr(),
            run: Some(run),
        });
    }

    /// The object of the queued entry that has `offset` others in front of it, if it was queued with `run`. The pointer
    /// is borrowed, and valid until other code runs.
    #[inline]
    pub(crate) fn deferred_at(&self, offset: usize, run: Deferred) -> Option<*mut ffi::PyObject> {
        let entry = self.ready.borrow().get(offset)?;
        let has_this_run = entry.run.is_some_and(|other| std::ptr::fn_addr_eq(other, run));
        has_this_run.then_some(entry.object)
    }

    /// `defer` from any thread. Wakes the loop if it sleeps. The loop must not be closed.
    pub(crate) fn defer_from_anywhere(&self, object: Bound<'_, PyAny>, run: Deferred) {
        let must_wake = if HAS_GIL {
            // As in `push_from_outside`.
            self.defer(object, run);
            self.inbox.claim_wake()
        } else {
            self.inbox.push(Ready {
                object: object.into_ptr(),
                run: Some(run),
            })
        };
        if must_wake {
            self.wake();
        }
    }

    /// Makes the thread that runs the loop put a timer into the heap. The heap takes over the reference.
    #[cold]
    pub(crate) fn push_timer_from_outside(&self, py: Python<'_>, handle: HandleRef) {
        let entry = Ready {
            object: handle.as_ptr(),
            run: Some(enter_timer),
        };
        if self.inbox.push(entry) {
            self.wake();
        }
        self.empty_closed_inbox(py);
    }

    /// Queues a handle from a thread that does not run the loop, and wakes the loop if it sleeps.
    pub(crate) fn push_from_outside(&self, py: Python<'_>, handle: HandleRef) {
        let must_wake = if HAS_GIL {
            // The loop sleeps only without the GIL, and reads the queue only with it.
            self.push_handle(handle);
            self.inbox.claim_wake()
        } else {
            self.inbox.push(Ready {
                object: handle.as_ptr(),
                run: None,
            })
        };
        if must_wake {
            self.wake();
        }
        self.empty_closed_inbox(py);
    }

    /// Wakes the loop out of its poll.
    fn wake(&self) {
        self.counters.wakeups.add_anywhere(1);
        self.with_waker(Waker::wake);
    }

    /// Called after a push into the inbox, in case another thread closes the loop at the same time. Either this
    /// function sees that the loop is closed and drops the contents of the inbox, or `close` sees what was pushed and
    /// drops it.
    fn empty_closed_inbox(&self, py: Python<'_>) {
        if HAS_GIL {
            return;
        }
        fence(Ordering::SeqCst);
        while self.is_closed()
            && let Some(entry) = self.inbox.pop()
        {
            HandleRef::from_owned(entry.object).release(py);
        }
    }

    /// Puts a timer into the heap. The heap takes over its reference.
    #[inline]
    pub(crate) fn push_timer(&self, py: Python<'_>, handle: HandleRef) {
        handle.set_scheduled(py, true);
        self.counters.timers_set.add(1);
        self.timers
            .borrow_mut()
            .push(deadline_key(handle.when_s(py)), handle);
    }

    /// The number of ready entries, and the number of timers in the heap that are not cancelled.
    pub(crate) fn queue_lens(&self) -> (usize, usize) {
        let timers = self.timers.borrow().len();
        (
            self.ready.borrow().len(),
            timers.saturating_sub(self.cancelled_timers.get()),
        )
    }

    /// Called when a scheduled timer was cancelled. Removes the timer at once if it is at the end of the heap.
    /// Otherwise counts it, and removes all cancelled timers once they are at least half of the heap.
    pub(crate) fn timer_cancelled(&self, py: Python<'_>, handle: HandleRef) {
        let last = self.timers.borrow_mut().remove_last_if(|entry| entry == handle);
        if let Some(handle) = last {
            handle.set_scheduled(py, false);
            handle.release(py);
            return;
        }
        let cancelled = self.cancelled_timers.get() + 1;
        self.cancelled_timers.set(cancelled);
        let len = self.timers.borrow().len();
        if cancelled >= MIN_SWEPT_TIMERS && cancelled * 2 >= len {
            self.sweep_timers(py);
        }
    }

    /// Called when a scheduled timer has a new deadline.
    #[cold]
    pub(crate) fn timer_moved(&self, py: Python<'_>, handle: HandleRef) {
        let mut taken = Vec::new();
        self.timers
            .borrow_mut()
            .retain(|entry| entry != handle, &mut taken);
        for handle in taken {
            self.push_timer(py, handle);
        }
    }

    #[cold]
    fn sweep_timers(&self, py: Python<'_>) {
        let mut dropped = Vec::with_capacity(self.cancelled_timers.get());
        self.timers
            .borrow_mut()
            .retain(|handle| !handle.is_cancelled(py), &mut dropped);
        self.cancelled_timers.set(0);
        for handle in dropped {
            handle.set_scheduled(py, false);
            handle.release(py);
        }
    }

    /// Moves due timers to the ready queue. `now_ns` is the time of the native clock. Err is an exception from the
    /// program's own `time()`, if it has replaced the loop's.
    #[inline]
    pub(super) fn expire_timers(&self, py: Python<'_>, event_loop: &LoopObject, now_ns: u64) -> PyResult<()> {
        if event_loop.has_native_clock(py) {
            self.expire_until(py, now_ns ^ SIGN);
            return Ok(());
        }
        self.expire_by_clock(py, event_loop)
    }

    /// Whether a timer may be due. `now_ns` is the time of the native clock. If the program has its own clock, true if
    /// there is any timer.
    #[inline]
    pub(super) fn may_be_due(&self, py: Python<'_>, event_loop: &LoopObject, now_ns: u64) -> bool {
        match self.timers.borrow().peek() {
            Some((key, _)) => key <= now_ns ^ SIGN || !event_loop.has_native_clock(py),
            None => false,
        }
    }

    /// Whether a timer is due that is not cancelled. If the program has its own clock, any timer counts as due.
    #[cold]
    pub(super) fn has_due_timer(&self, py: Python<'_>, event_loop: &LoopObject, now_ns: u64) -> bool {
        let has_native_clock = event_loop.has_native_clock(py);
        self.may_be_due(py, event_loop, now_ns)
            && self.timers.borrow().iter().any(|handle| {
                let is_due = !has_native_clock || deadline_key(handle.when_s(py)) <= now_ns ^ SIGN;
                is_due && !handle.is_cancelled(py)
            })
    }

    #[cold]
    fn expire_by_clock(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        if !self.timers.borrow().is_empty() {
            let now_s = event_loop.now_s(py)?;
            self.expire_until(py, deadline_key(now_s + RESOLUTION_S));
        }
        Ok(())
    }

    fn expire_until(&self, py: Python<'_>, key: u64) {
        let mut taken = 0;
        let mut is_sorted = false;
        loop {
            let due = {
                let mut timers = self.timers.borrow_mut();
                if taken >= FEW_DUE && !is_sorted && taken >= timers.len() / FEW_DUE {
                    is_sorted = true;
                    timers.sort_due(key);
                }
                if is_sorted && let Some(later) = timers.peek_run(PREFETCH_AHEAD) {
                    later.prefetch();
                }
                timers.pop_due(key)
            };
            let Some(handle) = due else { return };
            taken += 1;
            handle.set_scheduled(py, false);
            if handle.is_cancelled(py) {
                self.cancelled_timers
                    .set(self.cancelled_timers.get().saturating_sub(1));
                handle.release(py);
            } else {
                self.counters.timers_run.add(1);
                if self.is_measured() {
                    let late_ns = key.saturating_sub(deadline_key(handle.when_s(py)));
                    self.note_due(late_ns, if handle.has_slack(py) { SLACK_NS } else { 0 });
                }
                self.push_handle(handle);
            }
        }
    }

    /// The time until the loop must wake up for a timer, in nanoseconds. `now_ns` is the time of the native clock.
    /// Unless a timer is due now, timers with slack wait for others that are due soon after them, so that one wake-up
    /// serves all. With a program's own clock, slack is not used, and Err is an exception from that clock.
    #[inline]
    pub(super) fn time_to_deadline_ns(
        &self,
        py: Python<'_>,
        event_loop: &LoopObject,
        now_ns: u64,
    ) -> PyResult<Option<u64>> {
        if !event_loop.has_native_clock(py) {
            return self.time_by_clock_ns(py, event_loop);
        }
        match self.first_timer(py) {
            None => return Ok(None),
            Some((key, _)) if key <= now_ns ^ SIGN => return Ok(Some(0)),
            Some(_) => {}
        }
        let wake_key = self
            .timers
            .borrow()
            .wake_when(SLACK_NS, |handle| handle.has_slack(py));
        Ok(wake_key.map(|key| (((key ^ SIGN) as i64).max(0) as u64).saturating_sub(now_ns)))
    }

    #[cold]
    fn time_by_clock_ns(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<Option<u64>> {
        if self.timers.borrow().is_empty() {
            return Ok(None);
        }
        let now_s = event_loop.now_s(py)?;
        let first = self.first_timer(py);
        // Negative values and NaN become 0.
        Ok(first.map(|(_, handle)| ((handle.when_s(py) - now_s) * 1e9).ceil() as u64))
    }

    /// The first timer that is not cancelled, and its key. The heap keeps the reference. Cancelled timers before it are
    /// removed.
    fn first_timer(&self, py: Python<'_>) -> Option<(u64, HandleRef)> {
        loop {
            let first = self.timers.borrow().peek();
            let (key, handle) = first?;
            if !handle.is_cancelled(py) {
                return Some((key, handle));
            }
            self.timers.borrow_mut().pop();
            self.cancelled_timers
                .set(self.cancelled_timers.get().saturating_sub(1));
            handle.set_scheduled(py, false);
            handle.release(py);
        }
    }

    /// Moves everything that other threads have scheduled to the ready queue.
    #[inline]
    pub(super) fn drain_inbox(&self) {
        if !HAS_GIL && !self.inbox.is_empty() {
            self.take_inbox();
        }
    }

    #[cold]
    fn take_inbox(&self) {
        let mut ready = self.ready.borrow_mut();
        while let Some(entry) = self.inbox.pop() {
            ready.push_back(entry);
        }
    }
}
