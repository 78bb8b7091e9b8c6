//! The timers of a loop, ordered by their deadlines.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::mem;

use grapeshot_core::queue::timers::TimerHeap;
use pyo3::ffi;
use pyo3::prelude::*;

use super::tracking;
use crate::event_loop::handle::{Handle, HandleRef};
use crate::event_loop::loop_clock::LoopClock;

/// Cancelled timers are removed once there are this many and they are at least half of the heap.
const MIN_SWEPT_TIMERS: usize = 64;

/// Taking many due timers out of the heap one by one is slow. So once the loop has taken out at least this many, and at
/// least one for every [`FEW_DUE_SHARE`] timers that are left in the heap, it sorts the remaining due timers.
const FEW_DUE: usize = 16;
const FEW_DUE_SHARE: usize = 16;

/// A due timer's handle is prefetched this many places before its turn. Thousands of handles do not fit into the cache.
const PREFETCH_AHEAD: usize = 8;

/// How late a timer with slack may run: one millisecond. asyncio, too, rounds timeouts up to whole milliseconds.
const SLACK_NS: u64 = 1_000_000;

/// asyncio's `_clock_resolution`: on a program's own clock, timers that are due within this time count as due.
const RESOLUTION_S: f64 = 1e-9;

/// A heap key is a deadline in signed nanoseconds with this bit, the sign, flipped. So negative deadlines sort before
/// positive ones although keys are unsigned.
const SIGN: u64 = 1 << 63;

/// The heap key of a deadline in seconds, rounded so that on the native clock `time() >= when` holds when the timer
/// fires.
fn deadline_key(when_s: f64) -> u64 {
    let truncated = (when_s * 1e9) as i64;
    // One nanosecond for the truncation, one for the rounding of the product, and one for each 26 days of uptime,
    // because a later time in seconds is a coarser float.
    let margin = 2 + (truncated.unsigned_abs() >> 51) as i64;
    (truncated.saturating_add(margin) as u64) ^ SIGN
}

/// For a timer that `Timers::expire` has taken out: how long ago it was due, and how long the loop may have chosen to
/// sleep beyond its deadline. Both are in nanoseconds. `until` is the current time as a heap key.
pub(super) fn lateness_ns(handle: Handle<'_>, until: u64) -> (u64, u64) {
    let late_ns = until.saturating_sub(deadline_key(handle.when_s()));
    (late_ns, if handle.has_slack() { SLACK_NS } else { 0 })
}

pub(crate) struct Timers {
    heap: RefCell<TimerHeap<HandleRef>>,
    /// How many of the timers in the heap are cancelled.
    cancelled: Cell<usize>,
}

impl Timers {
    pub(super) const fn new() -> Self {
        Self {
            heap: RefCell::new(TimerHeap::new()),
            cancelled: Cell::new(0),
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.heap.borrow().is_empty()
    }

    /// The number of timers that are not cancelled.
    pub(super) fn len(&self) -> usize {
        self.heap.borrow().len().saturating_sub(self.cancelled.get())
    }

    /// The handles in the heap, from the earliest to the latest.
    pub(crate) fn handles<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let mut handles: Vec<_> = self.heap.borrow().iter().map(HandleRef::new_ref).collect();
        handles.sort_by(|one, other| one.when_s().total_cmp(&other.when_s()));
        handles.into_iter().map(|handle| handle.into_bound(py)).collect()
    }

    /// See `tracking::track_kept`.
    pub(super) fn track_kept(&self, py: Python<'_>) {
        tracking::track_kept(py, self.heap.borrow().iter());
    }

    // ---- setting and cancelling ------------------------------------------------------------------------------

    /// Puts a timer into the heap.
    #[inline]
    pub(super) fn push(&self, handle: HandleRef) {
        handle.set_scheduled(true);
        let key = deadline_key(handle.when_s());
        self.heap.borrow_mut().push(key, handle);
    }

    /// Called when a scheduled timer was cancelled. Removes the timer at once if it is the last entry of one of the
    /// heap's two parts (`TimerHeap::remove_last_if`). Otherwise counts it, and removes all cancelled timers once there
    /// are enough of them (`MIN_SWEPT_TIMERS`).
    pub(crate) fn note_cancelled(&self, handle: Handle<'_>) {
        let last = self
            .heap
            .borrow_mut()
            .remove_last_if(|entry| entry.as_ptr() == handle.as_ptr());
        if let Some(last) = last {
            last.set_scheduled(false);
            return;
        }
        let cancelled = self.cancelled.get() + 1;
        self.cancelled.set(cancelled);
        let len = self.heap.borrow().len();
        if cancelled >= MIN_SWEPT_TIMERS && cancelled * 2 >= len {
            self.sweep();
        }
    }

    #[cold]
    fn sweep(&self) {
        let mut dropped = Vec::with_capacity(self.cancelled.get());
        self.heap
            .borrow_mut()
            .retain(|handle| !handle.is_cancelled(), &mut dropped);
        self.cancelled.set(0);
        // Each is dropped here, after the borrow has ended.
        for handle in dropped {
            handle.set_scheduled(false);
        }
    }

    /// Takes a timer out of the heap.
    #[cold]
    pub(super) fn take(&self, handle: Handle<'_>) -> Option<HandleRef> {
        let mut taken = Vec::new();
        self.heap
            .borrow_mut()
            .retain(|entry| entry.as_ptr() != handle.as_ptr(), &mut taken);
        taken.pop()
    }

    // ---- deadlines -------------------------------------------------------------------------------------------

    /// Takes out the timers that are due, the earliest first, and passes the ones that are not cancelled to `run`, each
    /// with the argument that `lateness_ns` needs as `until`. `now_ns` is the time of the native clock. Fails only if
    /// the program has replaced `loop.time()`, and the replacement raises.
    #[inline]
    pub(super) fn expire(
        &self,
        py: Python<'_>,
        clock: LoopClock<'_>,
        now_ns: u64,
        run: impl FnMut(HandleRef, u64),
    ) -> PyResult<()> {
        let until = if clock.is_native(py) {
            Some(now_ns ^ SIGN)
        } else {
            self.until_by_clock(py, clock)?
        };
        if let Some(until) = until {
            self.expire_until(until, run);
        }
        Ok(())
    }

    /// The key up to which timers are due by the program's own clock; None if there is no timer.
    #[cold]
    fn until_by_clock(&self, py: Python<'_>, clock: LoopClock<'_>) -> PyResult<Option<u64>> {
        if self.is_empty() {
            return Ok(None);
        }
        let now_s = clock.now_s(py)?;
        Ok(Some(deadline_key(now_s + RESOLUTION_S)))
    }

    fn expire_until(&self, until: u64, mut run: impl FnMut(HandleRef, u64)) {
        let mut taken = 0;
        let mut is_sorted = false;
        loop {
            let due = {
                let mut heap = self.heap.borrow_mut();
                if taken >= FEW_DUE && !is_sorted && taken >= heap.len() / FEW_DUE_SHARE {
                    is_sorted = true;
                    heap.sort_due(until);
                }
                if is_sorted && let Some(later) = heap.peek_run(PREFETCH_AHEAD) {
                    later.prefetch();
                }
                heap.pop_due(until)
            };
            let Some(handle) = due else { return };
            taken += 1;
            handle.set_scheduled(false);
            if handle.is_cancelled() {
                self.uncount_cancelled();
                drop(handle);
            } else {
                run(handle, until);
            }
        }
    }

    /// Called when a cancelled timer has been taken out of the heap.
    fn uncount_cancelled(&self) {
        self.cancelled.set(self.cancelled.get().saturating_sub(1));
    }

    /// Whether a timer may be due. `now_ns` is the time of the native clock. If the program has its own clock, true if
    /// there is any timer.
    #[inline]
    pub(super) fn may_be_due(&self, py: Python<'_>, clock: LoopClock<'_>, now_ns: u64) -> bool {
        // The borrow ends here, because `is_native` may run Python code.
        let first = self.heap.borrow().peek().map(|(key, _)| key);
        first.is_some_and(|key| key <= now_ns ^ SIGN || !clock.is_native(py))
    }

    /// Whether a timer that is not cancelled is due. If the program has its own clock, any timer counts as due.
    #[cold]
    pub(super) fn is_due(&self, py: Python<'_>, clock: LoopClock<'_>, now_ns: u64) -> bool {
        let is_native = clock.is_native(py);
        self.may_be_due(py, clock, now_ns)
            && self.heap.borrow().iter().any(|handle| {
                let is_due = !is_native || deadline_key(handle.when_s()) <= now_ns ^ SIGN;
                is_due && !handle.is_cancelled()
            })
    }

    /// The time until the loop must wake up for a timer, in nanoseconds; None if there is no timer. `now_ns` is the
    /// time of the native clock. Unless a timer is due now, timers with slack wait for others that are due soon after
    /// them, so that one wake-up serves all. With a program's own clock, slack is not used. Fails only if that clock
    /// raises.
    #[inline]
    pub(super) fn time_to_deadline_ns(
        &self,
        py: Python<'_>,
        clock: LoopClock<'_>,
        now_ns: u64,
    ) -> PyResult<Option<u64>> {
        if !clock.is_native(py) {
            return self.time_by_clock_ns(py, clock);
        }
        match self.first() {
            None => return Ok(None),
            Some((key, _)) if key <= now_ns ^ SIGN => return Ok(Some(0)),
            Some(_) => {}
        }
        let wake_key = self
            .heap
            .borrow()
            .wake_when(SLACK_NS, |handle| handle.has_slack());
        Ok(wake_key.map(|key| (((key ^ SIGN) as i64).max(0) as u64).saturating_sub(now_ns)))
    }

    #[cold]
    fn time_by_clock_ns(&self, py: Python<'_>, clock: LoopClock<'_>) -> PyResult<Option<u64>> {
        if self.is_empty() {
            return Ok(None);
        }
        let now_s = clock.now_s(py)?;
        let first = self.first();
        // Negative values and NaN become 0.
        Ok(first.map(|(_, when_s)| ((when_s - now_s) * 1e9).ceil() as u64))
    }

    /// The key of the first timer that is not cancelled, and its deadline in seconds. Cancelled timers before it are
    /// removed.
    fn first(&self) -> Option<(u64, f64)> {
        loop {
            let cancelled = {
                let mut heap = self.heap.borrow_mut();
                let (key, first) = heap.peek()?;
                if !first.is_cancelled() {
                    return Some((key, first.when_s()));
                }
                heap.pop()?
            };
            self.uncount_cancelled();
            cancelled.set_scheduled(false);
        }
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Drops all timers. The heap is not borrowed while one is dropped.
    pub(super) fn drop_work(&self) {
        loop {
            let first = self.heap.borrow_mut().pop();
            let Some(handle) = first else { break };
            handle.set_scheduled(false);
        }
        self.cancelled.set(0);
    }

    /// Called in the child of a fork: leaks the parent's timers.
    pub(super) fn forget_parent(&self) {
        mem::forget(self.heap.replace(TimerHeap::new()));
        self.cancelled.set(0);
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Ok(heap) = self.heap.try_borrow() else {
            return 0;
        };
        heap.iter()
            // SAFETY: the heap holds a reference to each handle; visit and arg are the collector's.
            .map(|handle| unsafe { handle.traverse(visit, arg) })
            .find(|result| *result != 0)
            .unwrap_or(0)
    }
}
