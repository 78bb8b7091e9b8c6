//! The list of the transports that hold data. It lets the loop send the writes of several steps one right after the
//! other. `flush_policy` decides which writes are held and when they are sent.
//!
//! ```text
//!   write() in a step --> the transport keeps the data --> push(): the transport is put on the list
//!   the step returns  --> is the list empty? -- yes --> nothing to do, at the cost of one branch
//!                            | no
//!                            v
//!                         must the data be sent now? -- no --> the list stays
//!                            | yes
//!                            v
//!                         each transport sends the data that it has
//! ```
//! The list belongs to the thread that runs the loop. It is empty between two batches and before each poll. Outside of
//! a run, in other threads, and while it is being emptied, it accepts no transport (`Held::is_accepting`).

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::current_thread;
use crate::event_loop::source::{Deferred, DeferredCall};

thread_local! {
    /// The list of the loop that runs in this thread; null if there is none. Set by a `Holding`, which does not live
    /// longer than the list.
    static RUNNING: Cell<*const Held> = const { Cell::new(ptr::null()) };
}

/// Calls `action` with the list of the loop that runs in this thread.
fn with_running<R>(action: impl FnOnce(&Held) -> R) -> Option<R> {
    let running = RUNNING.get();
    // SAFETY: null, or the list of a loop that this thread is running. `Holding` borrows the list and resets the
    // pointer when it is dropped.
    unsafe { running.as_ref() }.map(action)
}

/// Sends the held writes of the loop that runs in this thread. Called before a fork, because otherwise both processes
/// would send them.
pub(crate) fn flush_running(py: Python<'_>) -> PyResult<()> {
    with_running(|held| held.flush(py)).unwrap_or(Ok(()))
}

/// The number of forks between the first process and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in the child of a fork. The step continues in the child, but perhaps no loop will run there to send held
/// writes. So no writes are held until this run ends.
pub(crate) fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    with_running(|held| held.thread.set(0));
}

/// A time during which one loop's writes are not held but sent at once.
struct Pause {
    /// The value of `Held::thread` before the pause.
    thread: u64,
    /// The value of `FORKS` at the start of the pause.
    forks: u32,
}

impl Pause {
    fn begin(held: &Held) -> Self {
        Self {
            thread: held.thread.replace(0),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }

    /// Restores the state from before the pause. Does nothing in a child that was forked during the pause.
    fn end(&self, held: &Held) {
        if FORKS.load(Ordering::Relaxed) == self.forks {
            held.thread.set(self.thread);
        }
    }
}

pub(crate) struct Held {
    /// The thread in whose steps writes are held; 0 while all writes are sent at once.
    thread: Cell<u64>,
    /// The transports that hold data, and the function that sends the data.
    entries: RefCell<Vec<DeferredCall>>,
    /// The number of entries.
    len: Cell<usize>,
    /// The number of bytes that were held since the list was last empty. Data that a transport has sent in the meantime
    /// still counts.
    len_bytes: Cell<usize>,
    /// When the first transport was put on the list.
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

    /// Whether a write may be held now, in this thread. It may not in another thread, or while all writes are sent at
    /// once.
    #[inline]
    pub(super) fn is_accepting(&self) -> bool {
        self.thread.get() == current_thread()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.get()
    }

    #[inline]
    pub(super) fn len_bytes(&self) -> usize {
        self.len_bytes.get()
    }

    #[inline]
    pub(super) fn since_ns(&self) -> u64 {
        self.since_ns.get()
    }

    /// Puts `object`, which has `len_bytes` bytes to send, on the list. `flush(object)` is called at the end of the
    /// running step or of a later step of the batch. `is_accepting` must be true.
    #[inline]
    pub(super) fn push(&self, object: Bound<'_, PyAny>, len_bytes: usize, flush: Deferred) {
        if self.is_empty() {
            self.since_ns.set(clock::now_ns());
            self.len_bytes.set(0);
        }
        self.len.set(self.len.get() + 1);
        self.add_bytes(len_bytes);
        self.entries.borrow_mut().push(DeferredCall::new(object, flush));
    }

    /// Counts another `len_bytes` for an object that is already on the list.
    #[inline]
    pub(super) fn add_bytes(&self, len_bytes: usize) {
        self.len_bytes.set(self.len_bytes.get() + len_bytes);
    }

    /// Sends the held data at the end of a step that has returned `result`. Changes `result` only if sending raises an
    /// exception that must leave the loop. This is a function of its own, so that a step without held data costs one
    /// branch and no copy of its result.
    #[inline(never)]
    pub(super) fn flush_into(&self, py: Python<'_>, result: &mut PyResult<()>) {
        let flushed = self.flush(py);
        if result.is_ok() {
            *result = flushed;
        }
    }

    /// Empties the list: each transport sends its data, in the order in which they were put on the list. A transport
    /// may call code that forks; `flush_running`, which runs before the fork, then calls this function for the rest of
    /// the list.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        // Writes in the code that is called here are sent at once, so nothing is added to the list.
        let pause = Pause::begin(self);
        let mut result = Ok(());
        // Reversed, because `pop` takes the last entry. In a nested call, `thread` is 0, and the outer call has already
        // reversed the list.
        if pause.thread != 0 {
            self.entries.borrow_mut().reverse();
        }
        while let Some(entry) = self.pop() {
            result = result.and(entry.call(py));
        }
        pause.end(self);
        result
    }

    /// Takes the last entry. Dropping it may run any code.
    fn pop(&self) -> Option<DeferredCall> {
        let entry = self.entries.borrow_mut().pop();
        self.len.set(self.entries.borrow().len());
        entry
    }

    /// Drops the list without sending the data.
    pub(super) fn drop_work(&self) {
        while self.pop().is_some() {}
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // While the list is being changed, nothing is reported.
        let Ok(entries) = self.entries.try_borrow() else {
            return 0;
        };
        entries
            .iter()
            // SAFETY: the list holds a reference to each object; visit and arg are the collector's.
            .map(|entry| unsafe { visit(entry.as_ptr(), arg) })
            .find(|result| *result != 0)
            .unwrap_or(0)
    }
}

/// While this exists, the writes in the steps of one loop are held. That loop may itself run inside a step of another
/// loop. The writes of the outer loop are then sent at once.
pub(super) struct Holding<'a> {
    held: &'a Held,
    /// The list of the outer loop; null if there is none.
    outer: *const Held,
    /// The pause of the outer loop.
    pause: Option<Pause>,
}

impl<'a> Holding<'a> {
    /// Starts to hold writes. The second value is the result of sending the outer loop's held writes.
    pub(super) fn begin(py: Python<'_>, held: &'a Held) -> (Self, PyResult<()>) {
        let flushed = flush_running(py);
        let pause = with_running(Pause::begin);
        let outer = RUNNING.replace(held);
        held.thread.set(current_thread());
        (Self { held, outer, pause }, flushed)
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.held.thread.set(0);
        RUNNING.set(self.outer);
        with_running(|outer| self.pause.iter().for_each(|pause| pause.end(outer)));
    }
}
