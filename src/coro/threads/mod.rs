//! Locks and queues that are true between the coros of one loop, the coros of loops in different threads, and real
//! threads, in any direction. `coro.install()` puts them in place of those of `_thread` and `_queue`.
//!
//! - `waiters`: who waits, in one order for coros and threads, and how they are woken
//! - `lock`: the lock and the `RLock`; `simple_queue`: the queue
//! - `limit`: the arguments of `acquire` and `get`
//!
//! What is free is taken at once, everywhere: also by a finalizer that the garbage collector runs, in a greenlet, and
//! in a forked child, where a coro cannot wait. What is released goes to the first waiter before that one runs.
//!
//! The loop's thread outside of any coro (a callback, a task) waits as any thread does: it blocks, and the loop with
//! it. If a coro of that loop has the lock, and only this coro would release it, both wait for ever, as a thread does
//! that acquires a lock twice.

mod limit;
mod lock;
mod simple_queue;
mod waiters;

use std::ffi::c_char;

#[cfg(not(Py_3_13))]
use pyo3::ffi;
use pyo3::prelude::*;

pub(super) use waiters::{Party, after_fork, forks};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("thread_lock", lock::make_type(module)?)?;
    module.add("thread_rlock", lock::make_recursive_type(module)?)?;
    module.add("thread_queue", simple_queue::make_type(module)?)
}

#[cfg(Py_3_13)]
unsafe extern "C" {
    fn PyErr_FormatUnraisable(format: *const c_char, ...);
}
#[cfg(not(Py_3_13))]
unsafe extern "C" {
    fn _PyErr_WriteUnraisableMsg(text: *const c_char, object: *mut ffi::PyObject);
}

/// Passes an exception of a thread's function to `sys.unraisablehook`, with the text of the interpreter's version.
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
