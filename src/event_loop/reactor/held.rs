//! Transports with small writes that leave together when what the loop is running has returned.
//!
//! A step is what the loop calls once: a handle (and so a task's step or a timer), a coro's run, or the event of a source.
//! The ready handles and coros of one iteration are a batch. What the steps of a batch have written leaves when it is
//! over, or at the end of a step after which it is due; what the event of a source has written leaves when it returns.
//!
//! ```text
//!   write() in a step --> the transport keeps the data --> hold(): the transport is on the list
//!   the step returns  --> list empty? one branch : the batch is over, or it is due? : each transport sends what it has
//! ```
//! A peer on the same machine that sleeps is woken by a send, which the sender pays for: sends that come close together
//! find it awake. The list belongs to the thread that runs the loop. It is empty between two batches and before each poll.
//! Outside of a run, in other threads, and while the list is being emptied, nothing is held: `may_hold` is false.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Reactor, current_thread};
use crate::event_loop::source::{Deferred, Ready};

/// Once a step goes on for this long after the first held write, its writes leave at once.
const LATE_NS: u64 = 1_000_000;

/// Looked at when a step of a batch returns: what is held is due if it is of so many transports...
const BATCH_LEN: usize = 64;
/// ... or more than so many bytes...
const BATCH_LEN_BYTES: usize = 256 * 1024;
/// ... or if its first write was so long ago.
const BATCH_NS: u64 = 1_000_000;

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

/// Sends what the steps of the loop that runs in this thread have written. Before a fork: both processes would have it.
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
    /// How many these are.
    len: Cell<usize>,
    /// How much they have written, at least what has not left yet.
    len_bytes: Cell<usize>,
    /// When the first of them was entered.
    since_ns: Cell<u64>,
}

impl Held {
    pub(super) const fn new() -> Self {
        Self {
            thread: Cell::new(0),
            entries: RefCell::new(Vec::new()),
            len: Cell::new(0),
            len_bytes: Cell::new(0),
            since_ns: Cell::new(0),
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len.get() == 0
    }

    /// Whether they wait no longer although other steps of the batch follow: there are many, much or old ones.
    #[inline(never)]
    fn is_due(&self) -> bool {
        self.len.get() >= BATCH_LEN
            || self.len_bytes.get() > BATCH_LEN_BYTES
            || clock::now_ns() - self.since_ns.get() >= BATCH_NS
    }

    /// Takes the last entry. The caller releases its reference.
    pub(super) fn pop(&self) -> Option<Ready> {
        let entry = self.entries.borrow_mut().pop();
        self.len.set(self.entries.borrow().len());
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

    /// Another `len_bytes` wait in an object that is held already. False if what is held has waited for long, so that
    /// they must leave at once.
    #[inline]
    pub(crate) fn may_hold_more(&self, len_bytes: usize) -> bool {
        self.held.len_bytes.set(self.held.len_bytes.get() + len_bytes);
        // The coarse clock is cheap, and behind.
        clock::coarse_ns().saturating_sub(self.held.since_ns.get()) < LATE_NS
    }

    /// Calls `flush(object)`, with `len_bytes` to send, when the running step is over or another one soon after it.
    /// `may_hold` has said so.
    #[inline]
    pub(crate) fn hold(&self, object: Bound<'_, PyAny>, len_bytes: usize, flush: Deferred) {
        let held = &self.held;
        if held.is_empty() {
            held.since_ns.set(clock::now_ns());
            held.len_bytes.set(0);
        }
        held.len.set(held.len.get() + 1);
        held.len_bytes.set(held.len_bytes.get() + len_bytes);
        held.entries.borrow_mut().push(Ready {
            object: object.into_ptr(),
            run: Some(flush),
        });
    }

    /// A step has returned `result`: what it has written leaves. Err is only for what must leave the loop.
    #[inline(always)]
    pub(super) fn end_step(&self, py: Python<'_>, result: &mut PyResult<()>) {
        if !self.held.is_empty() {
            self.flush_into(py, result);
        }
    }

    /// The same for a step that is one of a batch: what is held waits unless that was the last one, or it is due.
    #[inline(always)]
    pub(super) fn end_step_of_batch(&self, py: Python<'_>, result: &mut PyResult<()>, is_last: bool) {
        if !self.held.is_empty() && (is_last || self.held.is_due()) {
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
