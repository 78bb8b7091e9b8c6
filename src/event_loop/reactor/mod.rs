//! The loop's state and one iteration of it.
//!
//! An iteration: poll (detached from the interpreter only if it will block) -> sources, straight from their events ->
//! due timers -> exactly the handles that were ready. While work is ready the poll is skipped, for at most
//! `MAX_UNPOLLED_ITERATIONS` iterations or `MAX_UNPOLLED_NS`.
//!
//! Everything but the inbox, the waker and the atomics is touched only by the thread that runs the loop (or, before
//! and after a run, by one thread at a time: `LoopObject::with_loop_access`). No cell stays borrowed across a call into
//! Python.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use grapeshot_core::queue::fd_table::FdTable;
use grapeshot_core::queue::inbox::Inbox;
use grapeshot_core::queue::ready::ReadyQueue;
use grapeshot_core::queue::timers::TimerHeap;
use grapeshot_core::sys::clock;
use grapeshot_core::sys::poller::{Events, Interest, Poller, Token};
use grapeshot_core::sys::waker::Waker;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use super::handle::HandleRef;
use super::source::{Ready, SourceRef};

mod descriptors;
mod ghosts;
mod iteration;
mod queues;
mod signals;
mod targets;
mod watcher;
mod watches;

use iteration::MAX_UNPOLLED_ITERATIONS;
use signals::Signals;
pub(crate) use watcher::{Direction, Target, Watcher};
use watches::WatchRef;

/// Events taken from the poller at once.
const EVENTS_PER_POLL: usize = 256;
/// The token of the waker's descriptor; no fd table entry has it, since fds are never negative.
const WAKER_TOKEN: Token = Token(u64::MAX);
/// The token of the pipe that signals are written to.
const SIGNAL_TOKEN: Token = Token(u64::MAX - 1);

/// What a descriptor in the fd table is for.
#[derive(Clone, Copy)]
pub(crate) enum FdUse {
    /// A native source: a transport or a listener.
    Source(SourceRef),
    /// A descriptor that stays its owner's: `add_reader`, `add_writer`, the plain socket operations.
    Watch(WatchRef),
}

pub(crate) struct Reactor {
    ready: RefCell<ReadyQueue<Ready>>,
    /// The handle made last while the loop did not run, with a reference of its own: see `track_kept`.
    last_made: Cell<Option<HandleRef>>,
    timers: RefCell<TimerHeap<HandleRef>>,
    cancelled_timers: Cell<usize>,
    fds: RefCell<FdTable<FdUse>>,
    /// Weak references to closed objects whose number another one has got: see `targets`.
    displaced: RefCell<VecDeque<Py<PyWeakrefReference>>>,
    /// Boxed: it is aligned to cache lines, which Python objects are not.
    inbox: Box<Inbox<Ready>>,
    /// None once the loop is closed.
    poller: RefCell<Option<Poller>>,
    /// None once the loop is closed. Locked, since other threads write to a descriptor that closing frees; never
    /// across a call into Python.
    waker: Mutex<Option<Waker>>,
    is_closed: AtomicBool,
    /// Events that belonged to nobody: see `ghosts`.
    stale_events: Cell<usize>,
    signals: Signals,
    events: RefCell<Events>,
    scratch: Cell<Vec<u8>>,
    unpolled_iterations: Cell<u32>,
    last_poll_ns: Cell<u64>,
    /// `PyThread_get_thread_ident()` of the thread inside `run`, 0 if none.
    owner: AtomicU64,
    /// The threads inside of `LoopObject::with_loop_access` while none runs the loop, in free-threaded builds. Touched only with
    /// the loop's critical section, which a thread gives up while it waits for another one: then there are several.
    visitors: RefCell<Vec<u64>>,
    is_stopping: AtomicBool,
    is_debug: AtomicBool,
    /// The bits of an `f64`.
    slow_callback_s: AtomicU64,
}

/// The loop's clock in seconds: `CLOCK_MONOTONIC`, that of `time.monotonic()`.
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
            last_made: Cell::new(None),
            timers: RefCell::new(TimerHeap::new()),
            cancelled_timers: Cell::new(0),
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
            last_poll_ns: Cell::new(0),
            owner: AtomicU64::new(0),
            visitors: RefCell::new(Vec::new()),
            is_stopping: AtomicBool::new(false),
            is_debug: AtomicBool::new(false),
            slow_callback_s: AtomicU64::new(0.1_f64.to_bits()),
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
        self.is_closed.load(Ordering::Relaxed)
    }

    /// The thread inside `run`, 0 if none.
    #[inline]
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Acquire)
    }

    /// This thread uses the loop's cells until the result is dropped, with the loop's critical section in both moments.
    pub(crate) fn begin_visit(&self) -> Visit<'_> {
        self.visitors.borrow_mut().push(current_thread());
        Visit(self)
    }

    /// Whether another thread waits in the middle of such a use: the loop must not run meanwhile.
    pub(crate) fn is_visited_by_others(&self) -> bool {
        let own = current_thread();
        self.visitors.borrow().iter().any(|visitor| *visitor != own)
    }

    /// Whether the run ends with this iteration.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        self.is_debug.load(Ordering::Relaxed)
    }

    pub(crate) fn set_debug(&self, is_debug: bool) {
        self.is_debug.store(is_debug, Ordering::Relaxed);
    }

    /// Debug mode logs what takes at least so many seconds.
    pub(crate) fn slow_callback_s(&self) -> f64 {
        f64::from_bits(self.slow_callback_s.load(Ordering::Relaxed))
    }

    pub(crate) fn set_slow_callback_s(&self, limit_s: f64) {
        self.slow_callback_s.store(limit_s.to_bits(), Ordering::Relaxed);
    }

    /// Does `action` with the waker, unless the loop is closed.
    fn with_waker(&self, action: impl FnOnce(&Waker)) {
        if let Some(waker) = &*self.waker.lock().unwrap_or_else(PoisonError::into_inner) {
            action(waker);
        }
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Drops all queued work and closes the poller, the waker and the signals' pipe (which the main thread may have to
    /// do). Idempotent.
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
    /// Called by the collector with its own `visit` and `arg`; no cell is borrowed, since none stays borrowed while
    /// Python code (and with it the collector) runs.
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
            .find(|result| *result != 0);
        if let Some(result) = result {
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

/// See `Reactor::begin_visit`.
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
    // SAFETY: callable from any thread, always.
    unsafe { ffi::PyThread_get_thread_ident() as u64 }
}
