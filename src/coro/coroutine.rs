//! `Coro`: the object of one coro, with its function, its status and its outcome.
//!
//! ```text
//!   new() --> [ new ] --start()--> [ ready ] <---- yield_slice() ---- [ running ] ---- returns, raises --> [ done ]
//!                                   |     ^                            ^     |
//!                                   |     '--- schedule(), interrupt --|--.  | waits for something
//!                                   '---- its entry in the ready queue-'  |  v
//!                                                                       [ waiting ]
//! ```
//!
//! Only the thread of the coro's loop runs the coro. Other threads may read its status at any time, and its outcome
//! after its end. If the coro waits for a lock or a queue of `threads`, other threads may also make it ready
//! (`scheduler::claim`). All fields are cells, because any code that runs during a method may call other methods of the
//! same object.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::errors::{self as coro_errors, ErrorClass};
use super::fiber::{self, Fiber};
use super::wait_queue::WaitNode;
use crate::binding::deallocation::free_memory;
use crate::binding::native_type::{NativeType, This, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::rows::{member, offset_member};
use crate::binding::{HAS_GIL, current_thread, errors};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Status {
    /// Not started.
    New,
    /// In the loop's ready queue.
    Ready,
    Running,
    /// Suspended until it is woken.
    Waiting,
    Done,
}

/// The status of a coro, which any thread may read. A thread that reads `Done` sees the outcome, too.
pub(super) struct StatusCell(AtomicU8);

impl StatusCell {
    #[inline]
    pub(super) fn get(&self) -> Status {
        match self.0.load(Ordering::Acquire) {
            0 => Status::New,
            1 => Status::Ready,
            2 => Status::Running,
            3 => Status::Waiting,
            _ => Status::Done,
        }
    }

    #[inline]
    pub(super) fn set(&self, status: Status) {
        self.0.store(status as u8, Ordering::Release);
    }
}

#[repr(C)]
pub(super) struct CoroObject {
    base: ffi::PyObject,
    pub(super) event_loop: ObjectCell,
    pub(super) function: ObjectCell,
    /// A tuple.
    pub(super) args: ObjectCell,
    /// A dict. The cell is empty if there are no keyword arguments.
    pub(super) kwargs: ObjectCell,
    /// The context in which the coro runs: the one that the caller gave, or a copy that belongs to the coro.
    pub(super) context: ObjectCell,
    pub(super) name: ObjectCell,
    /// The result of the function, or the traceback of the exception with which the coro ended.
    pub(super) result: ObjectCell,
    /// The exception that the function has raised.
    pub(super) exception: ObjectCell,
    /// The value that the finished wait returns.
    pub(super) wake_value: ObjectCell,
    /// The exceptions that are pending for the coro (`interruption`).
    pub(super) wake_exception: ObjectCell,
    /// A list of `(callback, context)` tuples to call when the coro has ended.
    pub(super) callbacks: ObjectCell,
    /// The future that `await_` waits for.
    awaited: ObjectCell,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// The number of `cancel()` calls that were not taken back by `uncancel()`.
    cancel_count: Cell<c_int>,
    /// `_asyncio_future_blocking`: set by `await`, reset by the task that waits.
    pub(super) is_blocking: Cell<u8>,
    pub(super) id: Cell<u64>,
    /// The index of the coro in its thread's table of live coros.
    pub(super) place: Cell<usize>,
    /// `threading.get_ident()` of the only thread that may run the coro.
    pub(super) thread: Cell<u64>,
    pub(super) status: StatusCell,
    pub(super) has_own_stack: Cell<bool>,
    /// Whether this coro hides the loop. In such a coro, asyncio's functions see no running loop.
    pub(super) hides_loop: Cell<bool>,
    /// The coro stands for a daemon thread: nothing waits for its end.
    is_daemon: Cell<bool>,
    /// The coro is not in `asyncio.all_tasks()`.
    is_unlisted: AtomicBool,
    /// The coro is a daemon that did not end when it was shut down. It is not shut down again.
    pub(super) is_given_up: Cell<bool>,
    /// Interruptions do not end the coro's waits for locks and queues of `threads`, unless a wait has a time limit.
    pub(super) is_undisturbed: Cell<bool>,
    /// The coro became ready because of an event on the descriptor that it waits for.
    pub(super) has_event: Cell<bool>,
    /// The coro was started but has not run yet, and a stack of its own is reserved for it.
    pub(super) is_promised: Cell<bool>,
    /// The coro ended with an exception that has not been retrieved yet.
    pub(super) is_unseen: Cell<bool>,
    /// The exception notifier has received the exception with which the coro ended.
    pub(super) is_notified: Cell<bool>,
    /// How many I/O operations the coro has begun since it last waited or yielded. When the limit is reached, the coro
    /// yields before the next operation.
    pub(super) acts: Cell<u16>,
    /// One more than the coro's own limit for `acts`; 0 if the limit of the thread applies.
    pub(super) max_acts: Cell<u16>,
    /// The depth of nested deallocations on the coro's stack (`binding::deallocation`).
    pub(super) dealloc_depth: Cell<u32>,
    /// The coro's place in a queue of waiters.
    pub(super) wait_node: WaitNode,
    /// Points to the fiber from the first run to the end of the coro; null before and after.
    pub(super) fiber: Cell<*mut Fiber>,
}

pub(super) type Coro<'py> = This<'py, CoroObject>;

/// The result of a wait or of a coro's function.
pub(super) type Outcome<'py> = PyResult<Bound<'py, PyAny>>;

impl CoroObject {
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.status.get() == Status::Done
    }

    pub(super) fn is_daemon(&self) -> bool {
        self.is_daemon.get()
    }

    /// Code that cancels all tasks and waits for them must not wait for a daemon, so a daemon is not listed.
    pub(super) fn make_daemon(&self) {
        self.is_daemon.set(true);
        self.is_unlisted.store(true, Ordering::Relaxed);
    }

    /// Whether the coro is in `asyncio.all_tasks()` while it is live. Any thread may ask.
    pub(super) fn is_listed(&self) -> bool {
        !self.is_unlisted.load(Ordering::Relaxed)
    }

    /// Fails with `ScheduleError` unless the coro belongs to this thread.
    pub(super) fn check_thread(&self, py: Python<'_>) -> PyResult<()> {
        if self.thread.get() == current_thread() {
            return Ok(());
        }
        Err(coro_errors::new(
            py,
            ErrorClass::ScheduleError,
            "a coro can be used only in the thread of its loop: call loop.call_soon_threadsafe() from other threads",
        ))
    }

    /// The fields that Python code uses as attributes.
    #[expect(
        deprecated,
        reason = "the replacement, `Py_T_OBJECT_EX`, raises for an empty cell"
    )]
    pub(super) fn members() -> Vec<ffi::PyMemberDef> {
        let weakrefs = offset_of!(CoroObject, weakrefs);
        let function = offset_of!(CoroObject, function);
        let awaited = offset_of!(CoroObject, awaited);
        let count = offset_of!(CoroObject, cancel_count);
        let is_blocking = offset_of!(CoroObject, is_blocking);
        let hides_loop = offset_of!(CoroObject, hides_loop);
        let is_daemon = offset_of!(CoroObject, is_daemon);
        let is_given_up = offset_of!(CoroObject, is_given_up);
        let is_unlisted = offset_of!(CoroObject, is_unlisted);
        vec![
            offset_member(c"__weaklistoffset__", weakrefs),
            member(c"_function", ffi::_Py_T_OBJECT, function, ffi::Py_READONLY),
            member(c"_awaited", ffi::_Py_T_OBJECT, awaited, 0),
            member(c"_cancel_count", ffi::Py_T_INT, count, 0),
            member(c"_asyncio_future_blocking", ffi::Py_T_BOOL, is_blocking, 0),
            member(c"_hides_loop", ffi::Py_T_BOOL, hides_loop, ffi::Py_READONLY),
            member(c"_is_daemon", ffi::Py_T_BOOL, is_daemon, ffi::Py_READONLY),
            member(c"_is_given_up", ffi::Py_T_BOOL, is_given_up, 0),
            member(c"_is_unlisted", ffi::Py_T_BOOL, is_unlisted, 0),
        ]
    }

    /// Sets the initial status. Called on a zeroed allocation; the other fields begin as zeroes.
    pub(super) fn init(&self) {
        self.status.set(Status::New);
    }
}

impl NativeType for CoroObject {
    const NAME: &'static CStr = c"grapeshot._core.Coro";
    const DOC: &'static CStr = c"A function that the loop runs as a cooperative thread.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE | ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc;

    // The runtime keeps a reference to a coro between its start and its end, so the collector clears only a coro that
    // was never started or has ended.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.function,
            &self.args,
            &self.kwargs,
            &self.context,
            &self.name,
            &self.result,
            &self.exception,
            &self.wake_value,
            &self.wake_exception,
            &self.callbacks,
            &self.awaited,
        ]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let is_running = self.status.get() == Status::Running;
        // SAFETY: the collector's arguments are passed on; while the collector runs, no other thread changes the fiber.
        unsafe { fiber::traverse(self.fiber.get(), is_running, visit, arg) }
    }

    /// A coro belongs to its thread. In a free-threaded build, until the coro has ended, other threads may use only the
    /// methods that are marked as thread-safe (`threadsafe_method`).
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        if HAS_GIL {
            return body();
        }
        if !this.is_done() {
            this.check_thread(this.py())?;
        }
        with_critical_section(this, body)
    }
}

/// Reports an exception that was never retrieved. This is native code because a Python `__del__` would run for each
/// coro, which would add a quarter to the cost of spawning and finishing one.
///
/// # Safety
/// Called by CPython, attached, with a coro.
pub(super) unsafe extern "C" fn finalize(slf: *mut ffi::PyObject) {
    // SAFETY: by the contract; the current exception is kept aside as PEP 442 asks.
    unsafe {
        let this: Coro<'_> = This::new(Python::assume_attached(), slf);
        if !this.is_unseen.get() {
            return;
        }
        let py = this.py();
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            let coro = this.to_bound();
            if let Err(error) = coro.call_method0("_report_unseen") {
                error.write_unraisable(py, Some(&coro));
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

/// # Safety
/// Called by CPython with an unreferenced coro: one that was never started, or has ended.
unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: attached; if the finalizer revives the object, this returns at once. The runtime keeps a reference to a
    // coro between its start and its end, so no stack is lost here.
    unsafe {
        if ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let body = &*slf.cast::<CoroObject>();
        if !body.weakrefs.get().is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        CoroObject::empty_cells(This::new(py, slf));
        free_memory(slf);
    }
}
