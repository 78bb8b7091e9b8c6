//! `grapeshot.threads.Queue` and `Channel`: bounded queues between tasks of any loop, coros and real threads.
//!
//! ```text
//!   items       [ oldest ... ]     at least as many as are promised, unless the queue is closed
//!   promised    the number of getters that were woken for an item and have not run yet
//!   reserved    the number of putters that were woken for a place and have not run yet
//!   getters, putters, joiners      the waiters
//! ```
//!
//! A getter that runs takes the oldest item, whose place is then free for the next putter. A waiter that is interrupted
//! after it was woken gives its item or place back, for the next one.
//!
//! When the queue is closed, all getters and putters are woken as if they had got what they wait for. Each of them then
//! finds that the queue is closed. Joiners are woken only when all work is done.
//!
//! Each method that changes the queue runs in a critical section (`in_section`), and wakes waiters after that section.
//! Otherwise a waiter that another core runs at once would find the queue locked, and would go to sleep again.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::waiters::{Claimed, Grants, Source, Waiters};
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::names::names;
use crate::binding::native_type::{NativeType, This, with_critical_section};
use crate::coro::runtime;
use crate::coro::sync::item_queue::ItemQueue;

/// In the initial state, all bytes are zero, except those of `items` and of the waiters.
#[repr(C)]
pub(super) struct SharedQueue<const CHANNEL: bool> {
    base: ffi::PyObject,
    pub(super) weakrefs: Cell<*mut ffi::PyObject>,
    pub(super) items: ItemQueue,
    pub(super) promised: Grants,
    pub(super) reserved: Grants,
    /// How many items fit; 0 if there is no limit.
    pub(super) capacity: Cell<usize>,
    /// The number of items for which `task_done()` was not called yet.
    pub(super) unfinished: Cell<usize>,
    pub(super) is_closed: Cell<bool>,
    pub(super) getters: Waiters,
    pub(super) putters: Waiters,
    pub(super) joiners: Waiters,
}

pub(super) type Shared<'py, const C: bool> = This<'py, SharedQueue<C>>;

impl<const C: bool> NativeType for SharedQueue<C> {
    const NAME: &'static CStr = if C {
        c"grapeshot._core.shared_channel"
    } else {
        c"grapeshot._core.shared_queue"
    };
    const DOC: &'static CStr = if C {
        c"shared_channel()\n--\n\nThe native part of grapeshot.threads.Channel."
    } else {
        c"shared_queue()\n--\n\nThe native part of grapeshot.threads.Queue."
    };
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        for waiters in [&self.getters, &self.putters, &self.joiners] {
            // SAFETY: `visit` and `arg` are passed on from the collector.
            let result = unsafe { waiters.tasks.traverse(visit, arg) };
            if result != 0 {
                return result;
            }
        }
        // SAFETY: as above.
        unsafe { self.items.traverse(visit, arg) }
    }

    fn clear(this: This<'_, Self>) {
        for waiters in [&this.getters, &this.putters, &this.joiners] {
            waiters.tasks.forget();
        }
        this.items.clear(this.py());
    }

    /// The methods enter the section themselves.
    fn with_access<T>(_: This<'_, Self>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        body()
    }
}

// ---- what one waits for -------------------------------------------------------------------------------------------

/// An item to get.
pub(super) struct Item<'a, const C: bool>(pub(super) &'a SharedQueue<C>);

impl<const C: bool> Source for Item<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.getters
    }

    #[inline]
    fn take(&self, _: Python<'_>) -> bool {
        let is_there = self.0.available() > 0 || self.0.is_closed.get();
        if is_there {
            self.0.promised.add();
        }
        is_there
    }

    fn give_back(&self, _: Python<'_>) {
        self.0.promised.remove();
    }

    fn what(&self) -> &'static str {
        "the queue is empty"
    }
}

/// A place for an item to put.
pub(super) struct Place<'a, const C: bool>(pub(super) &'a SharedQueue<C>);

impl<const C: bool> Source for Place<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.putters
    }

    #[inline]
    fn take(&self, _: Python<'_>) -> bool {
        let is_there = self.0.has_place() || self.0.is_closed.get();
        if is_there {
            self.0.reserved.add();
        }
        is_there
    }

    fn give_back(&self, _: Python<'_>) {
        self.0.reserved.remove();
    }

    fn what(&self) -> &'static str {
        "the queue is full"
    }
}

/// The end of all work, for `join()`. There is nothing to take.
pub(super) struct Finish<'a, const C: bool>(pub(super) &'a SharedQueue<C>);

impl<const C: bool> Source for Finish<'_, C> {
    fn waiters(&self) -> &Waiters {
        &self.0.joiners
    }

    fn take(&self, _: Python<'_>) -> bool {
        self.0.unfinished.get() == 0
    }

    fn give_back(&self, _: Python<'_>) {}

    fn what(&self) -> &'static str {
        "there are unfinished items"
    }
}

impl<const C: bool> SharedQueue<C> {
    /// The number of items that are not promised.
    #[inline]
    pub(super) fn available(&self) -> usize {
        self.items.len().saturating_sub(self.promised.get())
    }

    #[inline]
    pub(super) fn has_place(&self) -> bool {
        self.capacity.get() == 0 || self.items.len() + self.reserved.get() < self.capacity.get()
    }

    /// Claims a waiter that can go on: an item or a place is there for it, or all work is done. The caller has to
    /// wake it and to `settle` the claim.
    #[inline]
    fn claim<'py>(&self, py: Python<'py>) -> Option<Claim<'_, 'py>> {
        let is_closed = self.is_closed.get();
        loop {
            let (waiters, grants) = if self.getters.len() > 0 && (is_closed || self.available() > 0) {
                (&self.getters, Some(&self.promised))
            } else if self.putters.len() > 0 && (is_closed || self.has_place()) {
                (&self.putters, Some(&self.reserved))
            } else if self.joiners.len() > 0 && self.unfinished.get() == 0 {
                (&self.joiners, None)
            } else {
                return None;
            };
            if let Some(claimed) = waiters.claim_first(py) {
                if let Some(grants) = grants {
                    grants.add();
                }
                return Some(Claim {
                    claimed,
                    waiters,
                    grants,
                });
            }
        }
    }

    /// Puts an item into the place that is reserved for it.
    #[inline]
    pub(super) fn push(&self, item: Bound<'_, PyAny>) -> PyResult<()> {
        let py = item.py();
        self.reserved.remove();
        if self.is_closed.get() {
            return Err(closed::<C>(py));
        }
        self.items.push(item, false);
        self.unfinished.set(self.unfinished.get() + 1);
        Ok(())
    }

    /// Takes the item that is promised to the caller. If the queue is closed and empty, returns an error. If the queue
    /// is empty but not closed, for example because the collector has emptied it, returns None.
    #[inline]
    pub(super) fn pop<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.promised.remove();
        match self.items.pop(py) {
            Some((item, _)) => Ok(Some(item)),
            None if self.is_closed.get() => Err(closed::<C>(py)),
            None => Ok(None),
        }
    }
}

/// A waiter that was granted its request and has to be woken.
struct Claim<'a, 'py> {
    claimed: Claimed<'py>,
    waiters: &'a Waiters,
    /// The count that contains this grant; None for `join()`, which takes nothing.
    grants: Option<&'a Grants>,
}

impl Claim<'_, '_> {
    /// Ends the claim. If the waiter is a task whose loop is closed, its grant is taken back.
    fn settle(&self, is_woken: bool) {
        if let Claimed::Task(waiter) = &self.claimed
            && self.waiters.tasks.settle(waiter, is_woken)
            && let Some(grants) = self.grants
        {
            grants.remove();
        }
    }
}

/// Runs `body` while no other thread uses the queue. Then wakes the waiters that can go on.
#[inline]
pub(super) fn in_section<const C: bool, R>(this: Shared<'_, C>, body: impl FnOnce() -> R) -> R {
    let py = this.py();
    let (result, mut claimed) = with_critical_section(this, || {
        let result = body();
        (result, this.claim(py))
    });
    while let Some(claim) = claimed {
        let is_woken = claim.claimed.wake(py).is_some();
        // `claim` is dropped outside of the section, because it may hold the last references to a waiter.
        claimed = with_critical_section(this, || {
            claim.settle(is_woken);
            this.claim(py)
        });
    }
    result
}

// ---- errors -------------------------------------------------------------------------------------------------------

#[cold]
pub(super) fn closed<const C: bool>(py: Python<'_>) -> PyErr {
    let name = if C { "ClosedError" } else { "ShutDown" };
    let made = py
        .import("grapeshot.threads")
        .and_then(|module| module.getattr(name))
        .and_then(|class| {
            if C {
                class.call1(("the channel is closed",))
            } else {
                class.call0()
            }
        });
    made.map_or_else(|error| error, PyErr::from_value)
}

/// The error of a call that got no item or no place within its limit. `name` is the class in the module `queue`.
#[cold]
pub(super) fn not_in_time<const C: bool>(py: Python<'_>, name: &CStr) -> PyErr {
    if C {
        let what = if name == c"Empty" {
            "no item was sent in time"
        } else {
            "no place became free in time"
        };
        return PyTimeoutError::new_err(what);
    }
    let made = py
        .import("queue")
        .and_then(|module| module.getattr(name))
        .and_then(|class| class.call0());
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Raises RuntimeError in a task or callback, which must not block the loop's thread.
#[cold]
pub(super) fn refuse_in_task<const C: bool>(py: Python<'_>, method: &str) -> PyResult<()> {
    if runtime::current_anywhere(py).is_some() || names(py).read_running_loop.bind(py).call0()?.is_none() {
        return Ok(());
    }
    let kind = if C { "Channel" } else { "Queue" };
    Err(PyRuntimeError::new_err(format!(
        "{kind}.{method}() would block the event loop; use await {kind}.a{method}() in a task"
    )))
}
