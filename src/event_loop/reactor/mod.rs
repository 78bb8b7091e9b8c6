//! The state of a loop: its parts, and the operations that need several of them.
//!
//! Each part owns its state and does not know the reactor. The loop's Python object (`pyloop`) has one reactor, and
//! `iteration` runs it.
//!
//! Only the thread that runs the loop changes this state. The exceptions are the inbox, the waker, the atomics, and, in
//! builds with a GIL, the ready queue and the shared contexts. Before and after a run, one thread at a time may use the
//! state (`LoopObject::with_loop_access`). No cell stays borrowed across a call into Python.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use grapeshot_core::sys::waker::Waker;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::contexts::Contexts;
use super::handle::{Handle, HandleRef};
use super::limits::{Limits, Reached};
use super::probe::Probe;
use super::pyloop::LoopObject;
use super::source::Deferred;
use crate::binding::HAS_GIL;
use crate::binding::native_type::This;

mod access;
mod descriptors;
pub(crate) mod flush_policy;
mod held;
mod iteration;
mod ready;
mod receiving;
mod scratch;
mod signals;
mod timers;
mod tracking;

use access::Access;
pub(crate) use descriptors::{Descriptors, Direction, FdUse, Watcher};
pub(crate) use held::{Held, after_fork, flush_running};
use ready::ReadyWork;
pub(crate) use receiving::{Received, receive_direct};
use scratch::Scratch;
use signals::Signals;
use timers::Timers;
use tracking::NewestHandle;

pub(crate) struct Reactor {
    /// Handles and deferred functions that run next; also the inbox and the waker for other threads.
    pub(crate) ready: ReadyWork,
    /// Handles with a deadline.
    pub(crate) timers: Timers,
    /// The fd table and the poller.
    pub(crate) descriptors: Descriptors,
    /// Transports whose small writes wait for the end of a step or of its batch (`flush_policy`).
    pub(crate) held: Held,
    /// The contexts of callbacks that are scheduled without one.
    pub(super) contexts: Contexts,
    signals: Signals,
    /// The buffer for small reads.
    pub(crate) scratch: Scratch,
    pub(crate) limits: Limits,
    /// Everything that watches the loop.
    pub(crate) probe: Probe,
    /// The thread that runs the loop, or the threads that use it while it does not run.
    pub(crate) access: Access,
    newest_handle: NewestHandle,
    is_closed: AtomicBool,
    is_stopping: AtomicBool,
    /// Whether the last poll found events that are handled after the entries that run now.
    has_events: Cell<bool>,
    /// The function that makes this loop the thread's running loop again. Set while this loop runs hidden: the thread
    /// has no running loop, because this loop calls only code that does not know asyncio.
    hidden: Cell<Option<Show>>,
}

/// Makes the loop the running one of the thread again.
pub(crate) type Show = fn(Python<'_>, &LoopObject) -> PyResult<()>;

/// Puts into the heap a timer that another thread has created.
unsafe fn enter_timer(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `push_timer_from_outside` with a handle, which the entry keeps alive.
    let handle: Handle<'_> = unsafe { This::new(py, object) };
    // A cancelled handle does not refer to its loop any more.
    if let Some(event_loop) = handle.event_loop() {
        LoopObject::of(&event_loop)
            .reactor()
            .push_timer(HandleRef::of(handle));
    }
    Ok(())
}

impl Reactor {
    pub(crate) fn new() -> io::Result<Self> {
        let waker = Waker::new()?;
        Ok(Self {
            descriptors: Descriptors::new(waker.fd())?,
            ready: ReadyWork::new(waker),
            timers: Timers::new(),
            held: Held::new(),
            contexts: Contexts::new(),
            signals: Signals::new(),
            scratch: Scratch::new(),
            limits: Limits::none(),
            probe: Probe::new(),
            access: Access::new(),
            newest_handle: NewestHandle::new(),
            is_closed: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            has_events: Cell::new(false),
            hidden: Cell::new(None),
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

    /// Whether the run ends with this iteration.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopping(&self, is_stopping: bool) {
        self.is_stopping.store(is_stopping, Ordering::Relaxed);
    }

    /// The number of ready entries, and the number of timers that are not cancelled.
    pub(crate) fn queue_lens(&self) -> (usize, usize) {
        (self.ready.len(), self.timers.len())
    }

    /// The limit of descriptors, if one more descriptor would exceed it.
    #[inline]
    pub(crate) fn descriptor_limit_reached(&self) -> Option<Reached> {
        self.limits
            .descriptors_reached(|| self.descriptors.poller.lowest_free_fd())
    }

    /// The limit that one more connection would exceed: the limit of connections or the limit of descriptors.
    #[inline]
    pub(crate) fn connection_limit_reached(&self) -> Option<Reached> {
        self.limits
            .connections_reached()
            .or_else(|| self.descriptor_limit_reached())
    }

    /// The descriptor to which the interpreter writes signal numbers, created and watched on first use.
    pub(crate) fn signal_fd(&self) -> io::Result<RawFd> {
        self.signals.fd(&self.descriptors.poller)
    }

    /// Called when the thread has no running loop any more. The loop shows itself with `show` before it calls code that
    /// needs a running loop.
    pub(crate) fn note_hidden(&self, show: Show) {
        self.hidden.set(Some(show));
    }

    #[inline]
    pub(crate) fn is_hidden(&self) -> bool {
        self.hidden.get().is_some()
    }

    /// Makes the loop the running one of the thread again, if it is hidden.
    #[inline]
    pub(crate) fn show(&self, py: Python<'_>, event_loop: &LoopObject) -> PyResult<()> {
        match self.hidden.take() {
            Some(show) => show(py, event_loop),
            None => Ok(()),
        }
    }

    // ---- handles ---------------------------------------------------------------------------------------------

    /// Called for each new handle, while a queue and the handle's creator hold references to it: see `tracking`.
    #[inline]
    pub(crate) fn note_made(&self, handle: Handle<'_>) {
        if HAS_GIL && self.access.owner() == 0 {
            self.newest_handle.set(handle);
        }
    }

    /// Puts a timer into the heap.
    #[inline]
    pub(crate) fn push_timer(&self, handle: HandleRef) {
        self.probe.counters.timers_set.add(1);
        self.timers.push(handle);
    }

    /// Called when a scheduled timer has a new deadline.
    #[cold]
    pub(crate) fn timer_moved(&self, handle: Handle<'_>) {
        if let Some(handle) = self.timers.take(handle) {
            self.push_timer(handle);
        }
    }

    // ---- other threads ---------------------------------------------------------------------------------------

    /// Queues a handle from a thread that does not run the loop, and wakes the loop if it sleeps.
    pub(crate) fn push_from_outside(&self, handle: HandleRef) {
        if self.ready.push_from_outside(handle) {
            self.wake();
        }
        self.empty_closed_inbox();
    }

    /// Makes the thread that runs the loop put a timer into the heap.
    #[cold]
    pub(crate) fn push_timer_from_outside(&self, py: Python<'_>, handle: HandleRef) {
        self.defer_from_anywhere(handle.into_bound(py), enter_timer);
    }

    /// Calls `ReadyWork::defer_from_anywhere`, and wakes the loop if it sleeps. Any thread may call this.
    pub(crate) fn defer_from_anywhere(&self, object: Bound<'_, PyAny>, run: Deferred) {
        if self.ready.defer_from_anywhere(object, run) {
            self.wake();
        }
        self.empty_closed_inbox();
    }

    /// Wakes the loop out of its poll.
    fn wake(&self) {
        self.probe.counters.wakeups.add_anywhere(1);
        self.ready.wake();
    }

    /// Called after a push into the inbox, in case another thread closes the loop at the same time. Either this
    /// function sees that the loop is closed and drops the contents of the inbox, or `close` sees what was pushed and
    /// drops it.
    fn empty_closed_inbox(&self) {
        if HAS_GIL {
            return;
        }
        fence(Ordering::SeqCst);
        self.ready.empty_inbox_while(|| self.is_closed());
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Called in the child of a fork, in the thread that runs the loop. Everything that is scheduled or watched belongs
    /// to the parent. The child forgets all of it without running any code, so the references are leaked. The poller,
    /// the waker and the signals' pipe are shared with the parent; new ones take their place.
    pub(crate) fn forget_parent(&self) -> io::Result<()> {
        let waker = Waker::new()?;
        self.descriptors.forget_parent(waker.fd())?;
        self.signals.forget();
        self.probe.forget_marks();
        self.ready.forget_parent(waker);
        self.timers.forget_parent();
        self.limits.forget_parent();
        Ok(())
    }

    /// Drops all queued work and closes the poller, the waker and the signals' pipe. Outside the main thread, the pipe
    /// may have to be closed later: see `signals`. Idempotent.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.is_closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.descriptors.close_poller();
        self.ready.close_waker();
        self.signals.close(py);
        self.drop_work(py);
        self.descriptors.forget_displaced(py);
        self.scratch.free();
    }

    /// Drops the contents of all queues; the collector's `tp_clear` also calls it.
    pub(crate) fn drop_work(&self, py: Python<'_>) {
        self.newest_handle.forget();
        self.ready.drop_work();
        self.probe.forget_marks();
        self.held.drop_work();
        self.timers.drop_work();
        self.contexts.forget(py);
        self.descriptors.drop_work();
    }

    /// Reports the references that the parts hold, except for those in the inbox. The collector treats the inbox's
    /// objects as reachable.
    ///
    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`. A part whose `RefCell` is borrowed at that
    /// moment reports nothing, so the collector treats the part's objects as reachable.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: by the contract.
        unsafe {
            let mut result = self.ready.traverse(visit, arg);
            if result == 0 {
                result = self.timers.traverse(visit, arg);
            }
            if result == 0 {
                result = self.newest_handle.traverse(visit, arg);
            }
            if result == 0 {
                result = self.held.traverse(visit, arg);
            }
            if result == 0 {
                result = self.contexts.traverse(visit, arg);
            }
            if result == 0 {
                result = self.descriptors.traverse(visit, arg);
            }
            if result == 0 {
                result = self.probe.traverse(visit, arg);
            }
            result
        }
    }
}

#[cold]
fn closed_error() -> PyErr {
    PyRuntimeError::new_err("Event loop is closed")
}
