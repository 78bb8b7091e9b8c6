//! The loop's state and one turn of it.
//!
//! A turn: poll (detached from the interpreter only if it will block) -> sources, straight from their events ->
//! due timers -> exactly the handles that were ready. While work is ready the poll is skipped, for at most
//! `MAX_UNPOLLED_TURNS` turns or `MAX_UNPOLLED_NS`.
//!
//! Everything but the inbox and the waker is touched only by the thread that runs the loop (or, before and after a
//! run, by the thread that holds the GIL). No cell stays borrowed across a call into Python.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::errors;
use super::handle::HandleRef;
use super::pyloop::LoopObject;
use super::slow;
use super::source::{Deferred, Ready, SourceRef};
use crate::queue::inbox::Inbox;
use crate::queue::ready::ReadyQueue;
use crate::queue::slots::Slots;
use crate::queue::timers::TimerHeap;
use crate::sys::clock;
use crate::sys::poller::{Event, Events, Interest, Poller, Token};
use crate::sys::waker::Waker;

/// Events taken from the poller at once.
const EVENTS_PER_POLL: usize = 256;
/// How long ready work may keep the loop from polling.
const MAX_UNPOLLED_TURNS: u32 = 16;
const MAX_UNPOLLED_NS: u64 = 100_000;
/// A poll never blocks longer than this (asyncio's MAXIMUM_SELECT_TIMEOUT).
const MAX_BLOCK_NS: u64 = 24 * 3600 * 1_000_000_000;
/// Cancelled timers are swept once there are this many and they are at least half of the heap.
const MIN_SWEPT_TIMERS: usize = 64;
/// The token of the waker's descriptor; no fd table entry has it, since fds are never negative.
const WAKER_TOKEN: Token = Token(u64::MAX);
/// Size of the buffer that small reads go through.
const SCRATCH_LEN: usize = 256 * 1024;

/// What a descriptor in the fd table is for.
#[derive(Clone, Copy)]
pub(crate) enum Slot {
    /// A native source: a transport or a listener.
    Source(SourceRef),
    /// `add_reader`/`add_writer`: handles to put into the ready queue.
    Watch {
        reader: Option<HandleRef>,
        writer: Option<HandleRef>,
    },
}

/// The kernel side, closed with the loop.
struct Kernel {
    poller: Poller,
    waker: Waker,
}

pub(crate) struct Reactor {
    ready: RefCell<ReadyQueue<Ready>>,
    /// The handle made last while the loop did not run, with a reference of its own: see `track_kept`.
    last_made: Cell<Option<HandleRef>>,
    timers: RefCell<TimerHeap<HandleRef>>,
    cancelled_timers: Cell<usize>,
    slots: RefCell<Slots<Slot>>,
    inbox: Inbox<Ready>,
    kernel: RefCell<Option<Kernel>>,
    events: RefCell<Events>,
    scratch: RefCell<Vec<u8>>,
    unpolled_turns: Cell<u32>,
    last_poll_ns: Cell<u64>,
    /// `PyThread_get_thread_ident()` of the thread inside `run`, 0 if none.
    owner: AtomicU64,
    is_stopping: Cell<bool>,
    is_debug: Cell<bool>,
    pub(crate) slow_callback_s: Cell<f64>,
}

/// Deadlines as heap keys: signed nanoseconds with the sign bit flipped, so that negative ones keep their order.
const SIGN: u64 = 1 << 63;

/// The heap key of a deadline in seconds, rounded so that `time() >= when` holds whenever the timer fires.
pub(crate) fn deadline_key(when_s: f64) -> u64 {
    let truncated = (when_s * 1e9) as i64;
    // One for the truncation, one for the rounding of the product, and more where a float no longer resolves a
    // nanosecond (after 52 days of uptime).
    let margin = 2 + (truncated.unsigned_abs() >> 51) as i64;
    (truncated.saturating_add(margin) as u64) ^ SIGN
}

/// The loop's clock in seconds: `CLOCK_MONOTONIC`, that of `time.monotonic()`.
#[inline]
pub(crate) fn time_s() -> f64 {
    clock::now_ns() as f64 / 1e9
}

impl Reactor {
    pub(crate) fn new() -> io::Result<Self> {
        let kernel = Kernel {
            poller: Poller::new()?,
            waker: Waker::new()?,
        };
        kernel
            .poller
            .add(kernel.waker.fd(), WAKER_TOKEN, Interest::READ)?;
        Ok(Self {
            ready: RefCell::new(ReadyQueue::new()),
            last_made: Cell::new(None),
            timers: RefCell::new(TimerHeap::new()),
            cancelled_timers: Cell::new(0),
            slots: RefCell::new(Slots::new()),
            inbox: Inbox::new(),
            kernel: RefCell::new(Some(kernel)),
            events: RefCell::new(Events::with_capacity(EVENTS_PER_POLL)),
            scratch: RefCell::new(Vec::new()),
            unpolled_turns: Cell::new(MAX_UNPOLLED_TURNS),
            last_poll_ns: Cell::new(0),
            owner: AtomicU64::new(0),
            is_stopping: Cell::new(false),
            is_debug: Cell::new(false),
            slow_callback_s: Cell::new(0.1),
        })
    }

    // ---- state -----------------------------------------------------------------------------------------------

    /// RuntimeError if the loop is closed.
    #[inline]
    pub(crate) fn check_closed(&self) -> PyResult<()> {
        if self.is_closed() {
            Err(closed_error())
        } else {
            Ok(())
        }
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        // Borrowed mutably only inside `close`, which runs no other code meanwhile.
        self.kernel.try_borrow().is_ok_and(|kernel| kernel.is_none())
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        self.is_stopping.set(true);
    }

    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        self.is_debug.get()
    }

    pub(crate) fn set_debug(&self, is_debug: bool) {
        self.is_debug.set(is_debug);
    }

    // ---- scheduling ------------------------------------------------------------------------------------------

    /// Called for each new handle, which a queue and its maker hold. While the loop does not run, the newest handle
    /// is tracked, and the one before it stays so only if someone has kept it: then no cycle through a
    /// pending handle of an abandoned loop is hidden from the collector.
    #[inline]
    pub(crate) fn note_made(&self, py: Python<'_>, handle: HandleRef) {
        if self.owner() == 0 {
            self.track_newest(py, handle);
        }
    }

    fn track_newest(&self, py: Python<'_>, handle: HandleRef) {
        handle.track(py);
        if let Some(last) = self.last_made.replace(Some(handle.new_ref())) {
            // Its queue and this function hold it.
            last.track_if_kept(py, 2);
            last.release(py);
        }
    }

    /// Before the loop stops running: tracks the pending handles that someone beside the queues keeps.
    fn track_kept(&self, py: Python<'_>) {
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

    /// `push_handle` for `call_soon`: behind what other threads have scheduled before, as in asyncio.
    #[inline]
    pub(crate) fn push_soon(&self, handle: HandleRef) {
        self.drain_inbox();
        self.push_handle(handle);
    }

    /// Queues a handle, whose reference the queue takes over.
    #[inline]
    pub(crate) fn push_handle(&self, handle: HandleRef) {
        self.ready.borrow_mut().push_back(Ready {
            object: handle.as_ptr(),
            run: None,
        });
    }

    /// Queues `run(object)` in order with the handles.
    pub(crate) fn defer(&self, object: Bound<'_, PyAny>, run: Deferred) {
        self.ready.borrow_mut().push_back(Ready {
            object: object.into_ptr(),
            run: Some(run),
        });
    }

    /// Queues a handle from any thread and wakes the loop if it sleeps.
    pub(crate) fn push_threadsafe(&self, handle: HandleRef) {
        if self.owner() == current_thread() {
            self.push_soon(handle);
        } else if self.inbox.push(Ready {
            object: handle.as_ptr(),
            run: None,
        }) && let Ok(kernel) = self.kernel.try_borrow()
            && let Some(kernel) = kernel.as_ref()
        {
            kernel.waker.wake();
        }
    }

    /// Puts a timer into the heap, which takes over its reference.
    #[inline]
    pub(crate) fn push_timer(&self, py: Python<'_>, handle: HandleRef) {
        handle.set_scheduled(py, true);
        self.timers
            .borrow_mut()
            .push(deadline_key(handle.when_s(py)), handle);
    }

    /// A scheduled timer was cancelled: take it out at once if it lies at the end, else count it and sweep when
    /// most of the heap is dead.
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

    /// Moves due timers to the ready queue.
    fn expire_timers(&self, py: Python<'_>, now_ns: u64) {
        loop {
            let due = self.timers.borrow_mut().pop_due(now_ns ^ SIGN);
            let Some(handle) = due else { return };
            handle.set_scheduled(py, false);
            if handle.is_cancelled(py) {
                self.cancelled_timers
                    .set(self.cancelled_timers.get().saturating_sub(1));
                handle.release(py);
            } else {
                self.push_handle(handle);
            }
        }
    }

    /// The first deadline of a timer that is not cancelled, in nanoseconds of the clock (0 if before its origin).
    fn next_deadline_ns(&self, py: Python<'_>) -> Option<u64> {
        loop {
            let first = self.timers.borrow().peek();
            let (key, handle) = first?;
            if !handle.is_cancelled(py) {
                return Some(((key ^ SIGN) as i64).max(0) as u64);
            }
            self.timers.borrow_mut().pop();
            self.cancelled_timers
                .set(self.cancelled_timers.get().saturating_sub(1));
            handle.set_scheduled(py, false);
            handle.release(py);
        }
    }

    // ---- descriptors -----------------------------------------------------------------------------------------

    /// Runs `action` on the poller; an error if the loop is closed.
    fn with_poller<R>(&self, action: impl FnOnce(&Poller) -> io::Result<R>) -> io::Result<R> {
        match self.kernel.borrow().as_ref() {
            Some(kernel) => action(&kernel.poller),
            None => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    pub(crate) fn slot(&self, fd: RawFd) -> Option<Slot> {
        self.slots.borrow().get_fd(fd)
    }

    /// Enters `slot` for `fd`, replacing a stale entry of a descriptor that was closed without being removed.
    /// Interest NONE only enters it into the table.
    pub(crate) fn register(
        &self,
        py: Python<'_>,
        fd: RawFd,
        slot: Slot,
        interest: Interest,
    ) -> io::Result<Token> {
        let stale = self.slots.borrow_mut().remove(fd);
        let token = self.slots.borrow_mut().insert(fd, slot);
        if let Some(stale) = stale {
            release_slot(py, stale);
        }
        if !interest.is_empty()
            && let Err(error) = self.with_poller(|poller| poller.add(fd, token, interest))
        {
            // The caller still owns what it put in.
            self.slots.borrow_mut().remove(fd);
            return Err(error);
        }
        Ok(token)
    }

    /// Changes what the poller waits for on a registered descriptor.
    pub(crate) fn set_interest(
        &self,
        fd: RawFd,
        token: Token,
        old: Interest,
        new: Interest,
    ) -> io::Result<()> {
        if old == new {
            return Ok(());
        }
        self.with_poller(|poller| {
            if new.is_empty() {
                poller.remove(fd)
            } else if old.is_empty() {
                poller.add(fd, token, new)
            } else {
                poller.modify(fd, token, new)
            }
        })
    }

    /// Takes a descriptor out of the poller (if `interest` is not NONE) and out of the fd table.
    pub(crate) fn unregister(&self, fd: RawFd, interest: Interest) -> Option<Slot> {
        let slot = self.slots.borrow_mut().remove(fd);
        if !interest.is_empty() {
            // A failure means that the kernel no longer knows the descriptor, which is what was wanted.
            let _ = self.with_poller(|poller| poller.remove(fd));
        }
        slot
    }

    /// Changes the handles of `add_reader`/`add_writer` on `fd`. Returns the two that were there before; their
    /// references go to the caller, except for those that `new` carries on.
    pub(crate) fn set_watch(
        &self,
        fd: RawFd,
        new: (Option<HandleRef>, Option<HandleRef>),
    ) -> io::Result<(Option<HandleRef>, Option<HandleRef>)> {
        let old = match self.slot(fd) {
            Some(Slot::Watch { reader, writer }) => (reader, writer),
            _ => (None, None),
        };
        let interest = |pair: (Option<HandleRef>, Option<HandleRef>)| {
            let read = if pair.0.is_some() {
                Interest::READ
            } else {
                Interest::NONE
            };
            if pair.1.is_some() {
                read.with(Interest::WRITE)
            } else {
                read
            }
        };
        let (before, after) = (interest(old), interest(new));
        if after.is_empty() {
            self.unregister(fd, before);
            return Ok(old);
        }
        let slot = Slot::Watch {
            reader: new.0,
            writer: new.1,
        };
        if before.is_empty() {
            let token = self.slots.borrow_mut().insert(fd, slot);
            if let Err(error) = self.with_poller(|poller| poller.add(fd, token, after)) {
                self.slots.borrow_mut().remove(fd);
                return Err(error);
            }
        } else {
            let token = self.slots.borrow().token_of(fd);
            if let Some(token) = token {
                self.with_poller(|poller| poller.modify(fd, token, after))?;
            }
            self.slots.borrow_mut().replace(fd, slot);
        }
        Ok(old)
    }

    /// Runs `read` on the loop's scratch buffer (256 KiB), which must not call into Python.
    pub(crate) fn with_scratch<R>(&self, read: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let mut scratch = self.scratch.borrow_mut();
        if scratch.capacity() == 0 {
            scratch.reserve_exact(SCRATCH_LEN);
        }
        read(&mut scratch)
    }

    /// New references to all registered sources.
    pub(crate) fn sources<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let slots = self.slots.borrow();
        slots
            .iter()
            .filter_map(|(_, slot)| match slot {
                Slot::Source(source) => Some(source.to_bound(py)),
                Slot::Watch { .. } => None,
            })
            .collect()
    }

    // ---- running ---------------------------------------------------------------------------------------------

    /// Runs turns until `stop()`; an error leaves the remaining work queued for the next run.
    pub(crate) fn run(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        self.owner.store(current_thread(), Ordering::Relaxed);
        self.unpolled_turns.set(MAX_UNPOLLED_TURNS);
        if let Some(last) = self.last_made.take() {
            last.release(py);
        }
        let result = loop {
            if let Err(error) = self.turn(py, event_loop) {
                break Err(error);
            }
            if self.is_stopping.get() {
                break Ok(());
            }
        };
        self.is_stopping.set(false);
        self.drain_inbox();
        self.track_kept(py);
        self.owner.store(0, Ordering::Relaxed);
        result
    }

    fn turn(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        self.drain_inbox();
        let has_work = !self.ready.borrow().is_empty() || self.is_stopping.get();
        let has_timers = self.timers.borrow().len() != 0;
        let mut now_ns = if has_work || has_timers {
            clock::now_ns()
        } else {
            0
        };
        let turns = self.unpolled_turns.get() + 1;
        if self.last_poll_ns.get() == 0 {
            // The last poll needed no clock, so the time without one counts from here.
            self.last_poll_ns.set(now_ns);
        }
        if has_work && turns <= MAX_UNPOLLED_TURNS && now_ns - self.last_poll_ns.get() < MAX_UNPOLLED_NS {
            self.unpolled_turns.set(turns);
        } else {
            let timeout_ns = if has_work {
                Some(0)
            } else {
                self.time_to_deadline_ns(py, now_ns)
            };
            let count = self.poll(py, timeout_ns)?;
            self.unpolled_turns.set(0);
            self.dispatch(py, event_loop, count)?;
            if has_timers && timeout_ns != Some(0) {
                now_ns = clock::now_ns();
            }
            self.last_poll_ns.set(now_ns);
        }
        if has_timers {
            self.expire_timers(py, now_ns);
        }
        self.run_ready(py, event_loop)
    }

    fn time_to_deadline_ns(&self, py: Python<'_>, now_ns: u64) -> Option<u64> {
        self.next_deadline_ns(py)
            .map(|deadline_ns| deadline_ns.saturating_sub(now_ns).min(MAX_BLOCK_NS))
    }

    #[inline]
    fn drain_inbox(&self) {
        if !self.inbox.is_empty() {
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

    /// Waits for events and returns their number. Blocks (detached) unless `timeout_ns` is `Some(0)`.
    fn poll(&self, py: Python<'_>, timeout_ns: Option<u64>) -> PyResult<usize> {
        let kernel = self.kernel.borrow();
        let Some(kernel) = kernel.as_ref() else {
            return Err(closed_error());
        };
        let mut events = self.events.borrow_mut();
        let result = if timeout_ns != Some(0) && self.inbox.begin_sleep() {
            // SAFETY: the thread is attached (`py`) and touches no Python object until it is restored.
            let state = unsafe { ffi::PyEval_SaveThread() };
            let result = kernel.poller.wait(&mut events, timeout_ns);
            // SAFETY: the state saved just above, on the same thread.
            unsafe { ffi::PyEval_RestoreThread(state) };
            self.inbox.end_sleep();
            result
        } else {
            kernel.poller.wait(&mut events, Some(0))
        };
        drop(events);
        let count = match result {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(errors::os_error(&error)),
        };
        // Python's signal handlers run in bytecode, or here: a loop of native callbacks must still see Ctrl-C.
        py.check_signals()?;
        Ok(count)
    }

    fn dispatch(&self, py: Python<'_>, event_loop: &LoopObject, count: usize) -> PyResult<()> {
        for index in 0..count {
            let event = self.events.borrow().get(index);
            if event.token == WAKER_TOKEN {
                if let Some(kernel) = self.kernel.borrow().as_ref() {
                    kernel.waker.drain();
                }
                continue;
            }
            // A stale token (the descriptor was closed, perhaps reused, by an earlier event) finds nothing.
            let slot = self.slots.borrow().get(event.token);
            match slot {
                Some(Slot::Source(source)) => self.dispatch_source(py, event_loop, source, event)?,
                Some(Slot::Watch { reader, writer }) => {
                    if let Some(handle) = reader.filter(|_| event.readiness.is_readable()) {
                        self.push_watched(py, event, handle, true);
                    }
                    if let Some(handle) = writer.filter(|_| event.readiness.is_writable()) {
                        self.push_watched(py, event, handle, false);
                    }
                }
                None => {}
            }
        }
        self.drain_inbox();
        Ok(())
    }

    #[inline]
    fn dispatch_source(
        &self,
        py: Python<'_>,
        event_loop: &LoopObject,
        source: SourceRef,
        event: Event,
    ) -> PyResult<()> {
        let started_ns = if self.is_debug() { clock::now_ns() } else { 0 };
        let kept = if started_ns != 0 {
            Some(source.to_bound(py))
        } else {
            None
        };
        match catch_unwind(AssertUnwindSafe(|| source.ready(py, event.readiness))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(error),
            Err(payload) => {
                let error = errors::panic_error(&*payload);
                errors::report(
                    &event_loop.to_bound(py),
                    "Internal error in a transport",
                    error,
                    &[],
                )?;
            }
        }
        if let Some(kept) = kept {
            slow::check_source(&kept, started_ns, self.slow_callback_s.get());
        }
        Ok(())
    }

    /// Queues the handle of `add_reader`/`add_writer`; a cancelled one ends its watch, as in asyncio.
    fn push_watched(&self, py: Python<'_>, event: Event, handle: HandleRef, is_reader: bool) {
        if !handle.is_cancelled(py) {
            self.push_handle(handle.new_ref());
            return;
        }
        let fd = (event.token.0 & u64::from(u32::MAX)) as RawFd;
        if let Some(Slot::Watch { reader, writer }) = self.slot(fd) {
            let kept = if is_reader { (None, writer) } else { (reader, None) };
            // On failure nothing was changed, and the next event comes here again.
            if self.set_watch(fd, kept).is_ok() {
                handle.release(py);
            }
        }
    }

    /// Runs exactly the entries that are ready now.
    fn run_ready(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        let count = self.ready.borrow().len();
        for _ in 0..count {
            let entry = self.ready.borrow_mut().pop_front();
            let Some(entry) = entry else { return Ok(()) };
            let result = match entry.run {
                None => {
                    let handle = HandleRef::from_owned(entry.object);
                    if self.is_debug() {
                        slow::run_handle(py, event_loop, handle, self.slow_callback_s.get())
                    } else {
                        handle.run(py)
                    }
                }
                // SAFETY: `defer` paired the function with its object, whose reference the queue held.
                Some(run) => unsafe { run(py, entry.object) },
            };
            // SAFETY: the queue's reference, dropped once.
            unsafe { ffi::Py_DECREF(entry.object) };
            result?;
        }
        Ok(())
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Drops all queued work and closes the poller and the waker. Idempotent.
    pub(crate) fn close(&self, py: Python<'_>) {
        drop(self.kernel.borrow_mut().take());
        self.drop_work(py);
        self.scratch.replace(Vec::new());
    }

    /// Drops what the queues hold; also the collector's `tp_clear`.
    pub(crate) fn drop_work(&self, py: Python<'_>) {
        self.drain_inbox();
        if let Some(last) = self.last_made.take() {
            last.release(py);
        }
        loop {
            let entry = self.ready.borrow_mut().pop_front();
            let Some(entry) = entry else { break };
            // SAFETY: the queue's reference, dropped once.
            unsafe { ffi::Py_DECREF(entry.object) };
        }
        loop {
            let first = self.timers.borrow().peek();
            let Some((_, handle)) = first else { break };
            self.timers.borrow_mut().pop();
            handle.set_scheduled(py, false);
            handle.release(py);
        }
        self.cancelled_timers.set(0);
        let fds: Vec<RawFd> = self.slots.borrow().iter().map(|(fd, _)| fd).collect();
        for fd in fds {
            let slot = self.slots.borrow_mut().remove(fd);
            if let Some(slot) = slot {
                release_slot(py, slot);
            }
        }
    }

    /// Reports every reference that the queues and the fd table hold.
    ///
    /// # Safety
    /// Called by the collector with its own `visit` and `arg`; no cell is borrowed, since none stays borrowed while
    /// Python code (and with it the collector) runs.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let (Ok(ready), Ok(timers), Ok(slots)) = (
            self.ready.try_borrow(),
            self.timers.try_borrow(),
            self.slots.try_borrow(),
        ) else {
            return 0;
        };
        // SAFETY: visit and arg are the collector's; every pointer is a reference held by a queue.
        let visit_one = |object: *mut ffi::PyObject| unsafe { visit(object, arg) };
        // SAFETY: as above.
        let visit_handle = |handle: HandleRef| unsafe { handle.traverse(visit, arg) };
        let queued = ready.iter().map(|entry| match entry.run {
            None => visit_handle(HandleRef::from_owned(entry.object)),
            Some(_) => visit_one(entry.object),
        });
        let last = self.last_made.get().map(|handle| visit_one(handle.as_ptr()));
        let result = queued
            .chain(timers.iter().map(visit_handle))
            .chain(last)
            .find(|result| *result != 0);
        if let Some(result) = result {
            return result;
        }
        for (_, slot) in slots.iter() {
            let pair = match slot {
                Slot::Source(source) => [Some(source.as_ptr()), None],
                Slot::Watch { reader, writer } => {
                    [reader.map(HandleRef::as_ptr), writer.map(HandleRef::as_ptr)]
                }
            };
            for object in pair.into_iter().flatten() {
                let result = visit_one(object);
                if result != 0 {
                    return result;
                }
            }
        }
        0
    }
}

fn release_slot(py: Python<'_>, slot: Slot) {
    match slot {
        Slot::Source(source) => source.release(py),
        Slot::Watch { reader, writer } => {
            for handle in [reader, writer].into_iter().flatten() {
                handle.release(py);
            }
        }
    }
}

#[cold]
fn closed_error() -> PyErr {
    PyRuntimeError::new_err("Event loop is closed")
}

/// `threading.get_ident()` of this thread.
#[inline]
pub(crate) fn current_thread() -> u64 {
    // SAFETY: callable from any thread, always.
    unsafe { ffi::PyThread_get_thread_ident() as u64 }
}
