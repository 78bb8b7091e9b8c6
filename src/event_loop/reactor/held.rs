//! Transports with small writes that leave when what the loop is running has returned: a handle (and so a task's step or
//! a timer), a coro's run, or the event of a source.
//!
//! ```text
//!   write() in a step --> the transport keeps the data --> hold(): the transport is on the list
//!   the step returns  --> end_step(): list empty? one branch : each transport sends what it has
//! ```
//! The list belongs to the thread that runs the loop. It is empty between two steps and before each poll. Outside of a
//! run, in other threads, and while the list is being emptied, nothing is held: `may_hold` is false.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Reactor, current_thread};
use crate::event_loop::source::{Deferred, Ready};

/// Once a step goes on for this long after its first held write, its writes leave at once.
const LATE_NS: u64 = 1_000_000;

thread_local! {
    /// The reactor whose loop runs in this thread; null if there is none. Set by `Holding`, which the reactor outlives.
    static RUNNING: Cell<*const Reactor> = const { Cell::new(ptr::null()) };
}

/// Calls `action` with the reactor whose loop runs in this thread.
fn with_running<R>(action: impl FnOnce(&Reactor) -> R) -> Option<R> {
    let running = RUNNING.get();
    // SAFETY: null, or a reactor inside `run`, in this thread, which keeps it.
    unsafe { running.as_ref() }.map(action)
}

/// Sends what the step that runs in this thread has written. Before a fork: both processes would have it.
pub(crate) fn flush_running(py: Python<'_>) -> PyResult<()> {
    with_running(|reactor| reactor.flush_held(py)).unwrap_or(Ok(()))
}

/// How many forks lie between the first process and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// In the child of a fork the step goes on, but no loop ends it.
pub(crate) fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    with_running(|reactor| reactor.held.thread.set(0));
}

/// While writes leave at once, in one reactor.
struct Pause {
    /// `Held::thread` before.
    thread: u64,
    forks: u32,
}

impl Pause {
    fn begin(held: &Held) -> Self {
        Self {
            thread: held.thread.replace(0),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }

    /// What was before, unless this is the child of a fork by now.
    fn end(&self, held: &Held) {
        if FORKS.load(Ordering::Relaxed) == self.forks {
            held.thread.set(self.thread);
        }
    }
}

pub(super) struct Held {
    /// The thread in whose steps writes are held; 0: none.
    thread: Cell<u64>,
    /// Each has a reference of its own.
    entries: RefCell<Vec<Ready>>,
    is_empty: Cell<bool>,
    /// When the first of them was entered, by the coarse clock.
    since_ns: Cell<u64>,
}

impl Held {
    pub(super) const fn new() -> Self {
        Self {
            thread: Cell::new(0),
            entries: RefCell::new(Vec::new()),
            is_empty: Cell::new(true),
            since_ns: Cell::new(0),
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.is_empty.get()
    }

    /// Takes the last entry. The caller releases its reference.
    pub(super) fn pop(&self) -> Option<Ready> {
        let entry = self.entries.borrow_mut().pop();
        self.is_empty.set(self.entries.borrow().is_empty());
        entry
    }

    /// The objects, unless the list is being changed.
    pub(super) fn objects(&self) -> Vec<*mut ffi::PyObject> {
        match self.entries.try_borrow() {
            Ok(entries) => entries.iter().map(|entry| entry.object).collect(),
            Err(_) => Vec::new(),
        }
    }
}

/// From its creation until it is dropped, writes in the thread's steps are held for this loop. Those of a loop that has
/// been running in the thread until now (one inside of whose steps this run takes place) leave at once meanwhile.
pub(super) struct Holding<'a> {
    reactor: &'a Reactor,
    outer: *const Reactor,
    /// Of the outer reactor.
    pause: Option<Pause>,
}

impl<'a> Holding<'a> {
    /// With what has failed when that other loop's writes were sent.
    pub(super) fn begin(py: Python<'_>, reactor: &'a Reactor) -> (Self, PyResult<()>) {
        let flushed = flush_running(py);
        let pause = with_running(|outer| Pause::begin(&outer.held));
        let outer = RUNNING.replace(reactor);
        reactor.held.thread.set(current_thread());
        let holding = Self {
            reactor,
            outer,
            pause,
        };
        (holding, flushed)
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.reactor.held.thread.set(0);
        RUNNING.set(self.outer);
        with_running(|outer| self.pause.iter().for_each(|pause| pause.end(&outer.held)));
    }
}

impl Reactor {
    /// Whether a write may wait for the end of the running step: the loop runs, and in this thread.
    #[inline]
    pub(crate) fn may_hold(&self) -> bool {
        self.held.thread.get() == current_thread()
    }

    /// Whether the writes of this step have waited long enough. Asked only while there are some.
    #[inline]
    pub(crate) fn is_step_late(&self) -> bool {
        clock::coarse_ns().saturating_sub(self.held.since_ns.get()) >= LATE_NS
    }

    /// Calls `flush(object)` at the end of the running step. `may_hold` has said so.
    #[inline]
    pub(crate) fn hold(&self, object: Bound<'_, PyAny>, flush: Deferred) {
        if self.held.is_empty.replace(false) {
            self.held.since_ns.set(clock::coarse_ns());
        }
        self.held.entries.borrow_mut().push(Ready {
            object: object.into_ptr(),
            run: Some(flush),
        });
    }

    /// A step has returned `result`: what it has written leaves. Err is only for what must leave the loop.
    #[inline(always)]
    pub(super) fn end_step(&self, py: Python<'_>, result: &mut PyResult<()>) {
        if !self.held.is_empty.get() {
            self.flush_into(py, result);
        }
    }

    /// Apart, so that a step without held writes costs one branch and no copy of its result.
    #[inline(never)]
    fn flush_into(&self, py: Python<'_>, result: &mut PyResult<()>) {
        let flushed = self.flush_held(py);
        if result.is_ok() {
            *result = flushed;
        }
    }

    /// Empties the list, in the order of the first writes. What it calls may fork: the hook before that empties the rest.
    fn flush_held(&self, py: Python<'_>) -> PyResult<()> {
        // What is called meanwhile sends at once, so that the list stays empty.
        let pause = Pause::begin(&self.held);
        let mut result = Ok(());
        if pause.thread != 0 {
            self.held.entries.borrow_mut().reverse();
        }
        while let Some(entry) = self.held.pop() {
            let flushed = flush(py, entry);
            result = result.and(flushed);
        }
        pause.end(&self.held);
        result
    }
}

/// Calls the function of an entry that was taken from the list, and releases it.
fn flush(py: Python<'_>, entry: Ready) -> PyResult<()> {
    // SAFETY: `hold` has paired the function with its object, whose reference the list held. It is dropped once.
    unsafe {
        let result = match entry.run {
            Some(flush) => flush(py, entry.object),
            None => Ok(()),
        };
        ffi::Py_DECREF(entry.object);
        result
    }
}
