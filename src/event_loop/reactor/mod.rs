//! The state of a loop, and what happens in one iteration.
//!
//! An iteration has four parts: poll for events, call the sources that have an event, queue the timers that are due,
//! run exactly the handles that are ready at that moment. The poll detaches the thread from the interpreter only if it
//! is going to block. While work is ready, the loop skips the poll, for at most `MAX_UNPOLLED_ITERATIONS` iterations or
//! `MAX_UNPOLLED_NS`.
//!
//! Only the thread that runs the loop touches this state, except for the inbox, the waker and the atomics. Before and
//! after a run, one thread at a time may touch it (`LoopObject::with_loop_access`). No cell stays borrowed across a
//! call into Python.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use grapeshot_core::queue::fd_table::FdTable;
use grapeshot_core::queue::inbox::Inbox;
use grapeshot_core::queue::ready::ReadyQueue;
use grapeshot_core::queue::timers::TimerHeap;
use grapeshot_core::sys::poller::{Events, Interest, Poller, Token};
use grapeshot_core::sys::waker::Waker;
use grapeshot_core::sys::{clock, file};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use super::contexts::Contexts;
use super::handle::HandleRef;
use super::limits::Limits;
use super::source::{Ready, SourceRef};

mod backlog;
mod counters;
mod descriptors;
mod ghosts;
mod held;
mod iteration;
pub(crate) mod measuring;
mod queues;
mod receiving;
mod signals;
mod targets;
mod watcher;
mod watches;

pub(crate) use counters::Counters;
use held::Held;
pub(crate) use held::{after_fork, flush_running};
use iteration::MAX_UNPOLLED_ITERATIONS;
use measuring::Measuring;
pub(crate) use receiving::{Received, receive_direct};
use signals::Signals;
pub(crate) use watcher::{Direction, Target, Watcher};
use watches::WatchRef;

/// The maximum number of events that one poll returns.
const EVENTS_PER_POLL: usize = 256;
/// The token of the waker's descriptor. No entry of the fd table has it, because descriptors are never negative.
const WAKER_TOKEN: Token = Token(u64::MAX);
/// The token of the pipe that receives signal numbers.
const SIGNAL_TOKEN: Token = Token(u64::MAX - 1);

/// The reasons for which a loop measures the time that its steps take, one bit each.
mod mode {
    /// Debug mode logs slow callbacks.
    pub(super) const DEBUG: u8 = 1;
    /// See `observer`.
    pub(super) const OBSERVED: u8 = 2;
    /// See `measuring`.
    pub(super) const MEASURED: u8 = 4;
    /// The loop has a step observer: see `slow::Clocks`.
    pub(super) const TIMED: u8 = 8;
}

/// What a descriptor in the fd table is for.
#[derive(Clone, Copy)]
pub(crate) enum FdUse {
    /// It belongs to a native source: a transport or a listener.
    Source(SourceRef),
    /// The program owns it and the loop only watches it: for `add_reader`, `add_writer` or a socket operation.
    Watch(WatchRef),
}

pub(crate) struct Reactor {
    ready: RefCell<ReadyQueue<Ready>>,
    held: Held,
    /// The newest handle made while the loop did not run, with a reference of its own: see `note_made`.
    last_made: Cell<Option<HandleRef>>,
    timers: RefCell<TimerHeap<HandleRef>>,
    cancelled_timers: Cell<usize>,
    contexts: Contexts,
    fds: RefCell<FdTable<FdUse>>,
    /// Weak references to closed file objects whose number now belongs to another object: see `targets`.
    displaced: RefCell<VecDeque<Py<PyWeakrefReference>>>,
    /// Boxed, because the inbox is aligned to cache lines and Python objects are not.
    inbox: Box<Inbox<Ready>>,
    /// None once the loop is closed.
    poller: RefCell<Option<Poller>>,
    /// None once the loop is closed. Locked, because other threads write to a descriptor that `close` frees. The lock
    /// is never held across a call into Python.
    waker: Mutex<Option<Waker>>,
    is_closed: AtomicBool,
    /// The number of events without a registration: see `ghosts`.
    stale_events: Cell<usize>,
    signals: Signals,
    events: RefCell<Events>,
    scratch: Cell<Vec<u8>>,
    unpolled_iterations: Cell<u32>,
    /// Whether the last poll found events that are handled after the entries that run now.
    has_events: Cell<bool>,
    last_poll_ns: Cell<u64>,
    /// `PyThread_get_thread_ident()` of the thread inside `run`; 0 if there is none.
    owner: AtomicU64,
    /// The threads inside `LoopObject::with_loop_access` while no thread runs the loop, in free-threaded builds.
    /// Touched only inside the loop's critical section. A thread gives up that section while it waits for another
    /// thread, so several threads can be listed here.
    visitors: RefCell<Vec<u64>>,
    is_stopping: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) limits: Limits,
    /// Created when a program first asks the loop to measure.
    measuring: OnceLock<Box<Measuring>>,
    /// Bits of `mode`.
    modes: AtomicU8,
    /// The bits of an `f64`.
    slow_callback_s: AtomicU64,
}

/// The loop's clock in seconds: `CLOCK_MONOTONIC`, the clock of `time.monotonic()`.
#[inline]
pub(crate) fn time_s() -> f64 {
    clock::now_ns() as f64 / 1e9
}

impl Reactor {
    pub(crate) fn new() -> io::Result<Self> {
        let (poller, waker) = (Poller::new()?, Waker::new()?);
        poller.add(waker.fd(), WAKER_TOKEN, Interest::READ)?;
        Ok(Self {
            ready: RefCell::new(ReadyQueue::new()),
            held: Held::new(),
            last_made: Cell::new(None),
            timers: RefCell::new(TimerHeap::new()),
            cancelled_timers: Cell::new(0),
            contexts: Contexts::new(),
            fds: RefCell::new(FdTable::new()),
            displaced: RefCell::new(VecDeque::new()),
            inbox: Box::new(Inbox::new()),
            poller: RefCell::new(Some(poller)),
            waker: Mutex::new(Some(waker)),
            is_closed: AtomicBool::new(false),
            stale_events: Cell::new(0),
            signals: Signals::new(),
            events: RefCell::new(Events::with_capacity(EVENTS_PER_POLL)),
            scratch: Cell::new(Vec::new()),
            unpolled_iterations: Cell::new(MAX_UNPOLLED_ITERATIONS),
            has_events: Cell::new(false),
            last_poll_ns: Cell::new(0),
            owner: AtomicU64::new(0),
            visitors: RefCell::new(Vec::new()),
            is_stopping: AtomicBool::new(false),
            counters: Counters::new(),
            limits: Limits::none(),
            measuring: OnceLock::new(),
            modes: AtomicU8::new(0),
            slow_callback_s: AtomicU64::new(0.1_f64.to_bits()),
        })
    }

    // ---- state -----------------------------------------------------------------------------------------------

    /// Raises RuntimeError if the loop is closed.
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
        self.is_closed.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn contexts(&self) -> &Contexts {
        &self.contexts
    }

    /// The thread inside `run`; 0 if there is none.
    #[inline]
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Acquire)
    }

    /// Records that this thread uses the loop's cells until the result is dropped. The thread must hold the loop's
    /// critical section at both moments.
    pub(crate) fn begin_visit(&self) -> Visit<'_> {
        self.visitors.borrow_mut().push(current_thread());
        Visit(self)
    }

    /// Whether another thread is in the middle of such a visit and waits there. The loop must not run until it is over.
    pub(crate) fn is_visited_by_others(&self) -> bool {
        let own = current_thread();
        self.visitors.borrow().iter().any(|visitor| *visitor != own)
    }

    /// Whether the run ends with this iteration.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopping(&self, is_stopping: bool) {
        self.is_stopping.store(is_stopping, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        self.has_mode(mode::DEBUG)
    }

    pub(crate) fn set_debug(&self, is_debug: bool) {
        self.set_mode(mode::DEBUG, is_debug);
    }

    /// Whether the observer learns what this loop runs.
    pub(crate) fn is_observed(&self) -> bool {
        self.has_mode(mode::OBSERVED)
    }

    pub(crate) fn set_observed(&self, is_observed: bool) {
        self.set_mode(mode::OBSERVED, is_observed);
    }

    /// Whether one of these bits is set.
    #[inline]
    fn has_mode(&self, bits: u8) -> bool {
        self.modes.load(Ordering::Relaxed) & bits != 0
    }

    /// Whether each step is timed for the loop's step observer.
    pub(crate) fn is_timed(&self) -> bool {
        self.has_mode(mode::TIMED)
    }

    pub(crate) fn set_timed(&self, is_timed: bool) {
        self.set_mode(mode::TIMED, is_timed);
    }

    fn set_mode(&self, bit: u8, is_on: bool) {
        if is_on {
            self.modes.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.modes.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Whether no step needs to be timed: the loop is not in debug mode, not observed, not measured and not timed.
    #[inline]
    fn is_plain(&self) -> bool {
        self.modes.load(Ordering::Relaxed) == 0
    }

    /// Debug mode logs callbacks and transport steps that take at least this many seconds.
    pub(crate) fn slow_callback_s(&self) -> f64 {
        f64::from_bits(self.slow_callback_s.load(Ordering::Relaxed))
    }

    pub(crate) fn set_slow_callback_s(&self, limit_s: f64) {
        self.slow_callback_s.store(limit_s.to_bits(), Ordering::Relaxed);
    }

    /// Calls `action` with the waker, unless the loop is closed.
    fn with_waker(&self, action: impl FnOnce(&Waker)) {
        if let Some(waker) = &*self.waker.lock().unwrap_or_else(PoisonError::into_inner) {
            action(waker);
        }
    }

    /// The number that the next descriptor of the process would get; None if the system refuses to open one.
    pub(super) fn lowest_free_fd(&self) -> Option<RawFd> {
        let mut number = None;
        self.with_waker(|waker| number = file::lowest_free(waker.fd()).ok());
        number
    }

    /// Called in the child of a fork, in the thread that runs the loop. Everything that is scheduled or watched belongs
    /// to the parent. The child forgets it without running any code, so its references are leaked. The poller, the
    /// waker and the signals' pipe are shared with the parent; new ones take their place.
    pub(crate) fn forget_parent(&self) -> io::Result<()> {
        let (poller, waker) = (Poller::new()?, Waker::new()?);
        poller.add(waker.fd(), WAKER_TOKEN, Interest::READ)?;
        drop(self.poller.borrow_mut().replace(poller));
        let shared = self
            .waker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(waker);
        drop(shared);
        self.signals.forget();
        self.forget_marks();
        while self.inbox.pop().is_some() {}
        mem::forget(self.ready.replace(ReadyQueue::new()));
        mem::forget(self.timers.replace(TimerHeap::new()));
        self.cancelled_timers.set(0);
        mem::forget(self.fds.replace(FdTable::new()));
        self.stale_events.set(0);
        self.limits.forget_parent();
        Ok(())
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Drops all queued work and closes the poller, the waker and the signals' pipe. Outside the main thread, the pipe
    /// may have to be closed later: see `signals`. Idempotent.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.is_closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        drop(self.poller.borrow_mut().take());
        drop(self.waker.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.signals.close(py);
        self.drop_work(py);
        self.forget_displaced(py);
        self.scratch.take();
    }

    /// Drops the contents of all queues; the collector's `tp_clear` also calls it.
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
        self.forget_marks();
        while let Some(entry) = self.held.pop() {
            // SAFETY: the list's reference, dropped once.
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
        self.contexts.forget(py);
        let fds: Vec<RawFd> = self.fds.borrow().iter().map(|(fd, _)| fd).collect();
        for fd in fds {
            let fd_use = self.fds.borrow_mut().remove(fd);
            if let Some(fd_use) = fd_use {
                release_fd_use(py, fd_use);
            }
        }
    }

    /// Reports every reference that the queues and the fd table hold.
    ///
    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`. No cell is borrowed then: no borrow lasts
    /// while Python code runs, and the collector runs only inside such code.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let (Ok(ready), Ok(timers), Ok(fds)) = (
            self.ready.try_borrow(),
            self.timers.try_borrow(),
            self.fds.try_borrow(),
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
            .chain(self.held.objects().into_iter().map(visit_one))
            .find(|result| *result != 0);
        if let Some(result) = result {
            return result;
        }
        // SAFETY: as above.
        let result = unsafe { self.contexts.traverse(visit, arg) };
        if result != 0 {
            return result;
        }
        for (_, fd_use) in fds.iter() {
            let result = match fd_use {
                FdUse::Source(source) => visit_one(source.as_ptr()),
                // SAFETY: as above.
                FdUse::Watch(watch) => unsafe { watch.traverse(visit, arg) },
            };
            if result != 0 {
                return result;
            }
        }
        0
    }
}

/// One visit of this thread, until it is dropped: see `Reactor::begin_visit`.
pub(crate) struct Visit<'a>(&'a Reactor);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let own = current_thread();
        let mut visitors = self.0.visitors.borrow_mut();
        if let Some(place) = visitors.iter().rposition(|visitor| *visitor == own) {
            visitors.swap_remove(place);
        }
    }
}

fn release_fd_use(py: Python<'_>, fd_use: FdUse) {
    match fd_use {
        FdUse::Source(source) => source.release(py),
        FdUse::Watch(watch) => watch.release(py),
    }
}

#[cold]
fn closed_error() -> PyErr {
    PyRuntimeError::new_err("Event loop is closed")
}

/// `threading.get_ident()` of this thread.
#[inline]
pub(crate) fn current_thread() -> u64 {
    // SAFETY: any thread may call this at any time.
    unsafe { ffi::PyThread_get_thread_ident() as u64 }
}
