//! `TaskWaiters`: the tasks that wait for a shared queue. Each task awaits a future of its loop.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::binding::object_ref::ObjectRef;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::waiter;

/// `grapeshot.threads._set_done`, which sets a future of another package's loop if the future is not done yet.
static SET_DONE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A task that waits.
pub(super) struct TaskWaiter {
    ticket: i64,
    event_loop: ObjectRef,
    /// A native waiter if the loop is grapeshot's, else an `asyncio.Future`.
    future: ObjectRef,
}

impl TaskWaiter {
    /// Wakes the task. False if its loop is closed.
    pub(super) fn wake(&self, py: Python<'_>) -> bool {
        let (event_loop, future) = (self.event_loop.to_bound(py), self.future.to_bound(py));
        if waiter::is_waiter(&future) {
            return waiter::set_done_from_anywhere(&future);
        }
        set_done_in(&event_loop, &future)
    }
}

/// The future that a task of the loop has to await.
pub(super) fn future_of<'py>(event_loop: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if LoopObject::is_loop(event_loop) {
        waiter::new_signal(event_loop)
    } else {
        event_loop.call_method0("create_future")
    }
}

/// Lets another package's loop set `future`, which belongs to that loop. False if the loop is closed.
fn set_done_in(event_loop: &Bound<'_, PyAny>, future: &Bound<'_, PyAny>) -> bool {
    let py = future.py();
    let call = || {
        let set = SET_DONE.import(py, "grapeshot.threads", "_set_done")?;
        event_loop.call_method1("call_soon_threadsafe", (set, future))
    };
    let Err(error) = call() else {
        // Another thread may have closed the loop meanwhile. A closed loop keeps the callback, but never runs it.
        return !says(event_loop, "is_closed") || says(future, "done");
    };
    if says(event_loop, "is_closed") {
        return false;
    }
    // A signal handler may have raised the error, before or after the callback was queued. So try again: if the
    // callback is queued twice, its second run does nothing.
    let again = call();
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // SAFETY: attached. The main thread raises the interruption again.
        unsafe { ffi::PyErr_SetInterrupt() };
    } else {
        error.write_unraisable(py, Some(event_loop));
    }
    again.is_ok()
}

/// The answer of a method; false if it raises an exception.
fn says(object: &Bound<'_, PyAny>, method: &str) -> bool {
    let answer = object.call_method0(method).and_then(|answer| answer.is_truthy());
    answer.unwrap_or(false)
}

/// The collector visits these waiters as a part of their queue: otherwise it could not free a queue and a task that
/// refer to each other.
pub(super) struct TaskWaiters {
    waiting: RefCell<VecDeque<TaskWaiter>>,
    /// The addresses of the futures of waiters that were claimed and are being woken. If such a waiter leaves before it
    /// is woken, it gives its grant back itself, and its address is removed from here. So if waking it fails later,
    /// `settle` knows that the grant must not be given back a second time.
    claimed: RefCell<Vec<usize>>,
    /// The addresses of the futures of waiters that could not be woken, because their loops are closed. Such a waiter
    /// has no grant to give back when its coroutine (`grapeshot.threads._wait`) is closed and calls `leave`. A
    /// reference to the future would keep the task alive, so only the address is kept. The coroutine keeps the future
    /// alive until it calls `leave`, which removes the address.
    refused: RefCell<Vec<usize>>,
}

impl TaskWaiters {
    pub(super) fn new() -> Self {
        Self {
            waiting: RefCell::new(VecDeque::new()),
            claimed: RefCell::new(Vec::new()),
            refused: RefCell::new(Vec::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.borrow().len()
    }

    pub(super) fn first_ticket(&self) -> Option<i64> {
        self.waiting.borrow().front().map(|waiter| waiter.ticket)
    }

    /// Adds a task of the loop. The task is going to await the future.
    pub(super) fn add(&self, ticket: i64, event_loop: Bound<'_, PyAny>, future: &Bound<'_, PyAny>) {
        remove(&self.refused, future.as_ptr());
        self.waiting.borrow_mut().push_back(TaskWaiter {
            ticket,
            event_loop: ObjectRef::new(event_loop),
            future: ObjectRef::new(future.clone()),
        });
    }

    /// Ends the wait for this future. Returns false if the waiter was granted its request before; the caller then has
    /// to give the grant back.
    pub(super) fn leave(&self, future: &Bound<'_, PyAny>) -> bool {
        let is_it = |waiter: &TaskWaiter| waiter.future.as_ptr() == future.as_ptr();
        let waiting = {
            let mut waiting = self.waiting.borrow_mut();
            let place = waiting.iter().position(is_it);
            place.and_then(|place| waiting.remove(place))
        };
        // The references are dropped here, where nothing is borrowed any more.
        if waiting.is_some() || remove(&self.refused, future.as_ptr()) {
            return true;
        }
        remove(&self.claimed, future.as_ptr());
        false
    }

    /// Removes and returns the first waiter. The caller then wakes it.
    pub(super) fn claim_first(&self) -> Option<TaskWaiter> {
        let waiter = self.waiting.borrow_mut().pop_front()?;
        self.claimed.borrow_mut().push(waiter.future.as_ptr().addr());
        Some(waiter)
    }

    /// Records whether a claimed waiter was woken. Returns true if the caller has to take its grant back: the waiter
    /// was not woken, and has not given the grant back itself. Keeps no reference to the waiter.
    pub(super) fn settle(&self, waiter: &TaskWaiter, is_woken: bool) -> bool {
        let is_refused = remove(&self.claimed, waiter.future.as_ptr()) && !is_woken;
        if is_refused {
            self.refused.borrow_mut().push(waiter.future.as_ptr().addr());
        }
        is_refused
    }

    /// Drops all waiters without waking them, in the child of a fork or for the collector. They have no grants to give
    /// back when their coroutines are closed.
    pub(super) fn forget(&self) {
        let waiting = self.waiting.take();
        let mut refused = self.refused.borrow_mut();
        refused.extend(waiting.iter().map(|waiter| waiter.future.as_ptr().addr()));
        refused.append(&mut self.claimed.borrow_mut());
        // End the borrow before the references are dropped, because dropping them may run any code.
        drop(refused);
        drop(waiting);
    }

    /// # Safety
    /// `visit` and `arg` are the values that the collector passed to `tp_traverse`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // While the collector runs, no method of this type has the deque borrowed.
        let Ok(waiting) = self.waiting.try_borrow() else {
            return 0;
        };
        for waiter in waiting.iter() {
            for object in [&waiter.event_loop, &waiter.future] {
                // SAFETY: by the contract; the objects are alive while they are held here.
                let result = unsafe { visit(object.as_ptr(), arg) };
                if result != 0 {
                    return result;
                }
            }
        }
        0
    }
}

/// Removes the address of the future. False if it is not there.
fn remove(addresses: &RefCell<Vec<usize>>, future: *mut ffi::PyObject) -> bool {
    let mut addresses = addresses.borrow_mut();
    let place = addresses.iter().position(|address| *address == future.addr());
    place.map(|place| addresses.swap_remove(place)).is_some()
}
