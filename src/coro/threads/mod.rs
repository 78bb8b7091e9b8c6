//! Locks and queues that work between the coros of one loop, between the coros of loops in different threads, and
//! between coros and real threads, in any direction. `coro.patch()` puts the locks and the simple queue in place of the
//! classes of `_thread` and `_queue`.
//!
//! - `waiters`, `task_waiters`: one queue in which coros, threads and tasks wait in their order of arrival, and how
//!   they are woken
//! - `lock`: the lock and the `RLock`; `simple_queue`: the queue
//! - `shared_queue`, `queue_methods`: the queue and the channel of `grapeshot.threads`, for which tasks can wait, too
//! - `limit`: the arguments with which a caller limits its wait, such as `timeout`
//!
//! A free lock and an available item are taken without a wait, even where a coro cannot wait: in a finalizer that the
//! garbage collector runs, in a greenlet, and in a forked child. A released lock or a new item is given to the first
//! waiter before that waiter runs.
//!
//! Outside of any coro (in a callback or a task) the loop's thread waits as any thread does: it blocks, and so does its
//! loop. Meanwhile no coro of that thread can run and release a lock. So a wait without a time limit for a lock that
//! such a coro holds raises `RuntimeError` instead. A shared queue's method that would block the thread of a task or
//! callback always raises `RuntimeError`. Tasks use methods such as `aget` instead, which they await.

mod limit;
mod lock;
mod queue_methods;
mod shared_queue;
mod simple_queue;
mod task_waiters;
mod waiters;

use std::ffi::c_char;

#[cfg(not(Py_3_13))]
use pyo3::ffi;
use pyo3::prelude::*;

pub(super) use waiters::{Party, forks};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    waiters::watch_forks();
    module.add("thread_lock", lock::make_type(module)?)?;
    module.add("thread_rlock", lock::make_recursive_type(module)?)?;
    module.add("thread_queue", simple_queue::make_type(module)?)?;
    module.add("shared_queue", queue_methods::make_queue_type(module)?)?;
    module.add("shared_channel", queue_methods::make_channel_type(module)?)
}

#[cfg(Py_3_13)]
unsafe extern "C" {
    fn PyErr_FormatUnraisable(format: *const c_char, ...);
}
#[cfg(not(Py_3_13))]
unsafe extern "C" {
    fn _PyErr_WriteUnraisableMsg(text: *const c_char, object: *mut ffi::PyObject);
}

/// Passes an exception of a thread's function to `sys.unraisablehook`, with the wording of the interpreter's version.
pub(super) fn report_error_of(function: &Bound<'_, PyAny>, error: PyErr) {
    error.restore(function.py());
    // SAFETY: attached, an exception is set, and `%R` (up to 3.12: the second argument) takes an object.
    #[cfg(Py_3_13)]
    unsafe {
        PyErr_FormatUnraisable(
            c"Exception ignored in thread started by %R".as_ptr(),
            function.as_ptr(),
        );
    }
    // SAFETY: as above.
    #[cfg(not(Py_3_13))]
    unsafe {
        _PyErr_WriteUnraisableMsg(c"in thread started by".as_ptr(), function.as_ptr());
    }
}
