//! `ItemQueue`: the objects in a fifo, in a channel or in a queue of the module `threads`, oldest first.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

/// A reference to an object, and whether the receiver raises it instead of returning it.
#[derive(Clone, Copy)]
struct Item {
    object: *mut ffi::PyObject,
    is_exception: bool,
}

/// Owns its references. It has no lock: code that uses it must hold the GIL or, in a free-threaded build, be in a
/// critical section of the object that contains it.
pub(in crate::coro) struct ItemQueue(UnsafeCell<VecDeque<Item>>);

impl ItemQueue {
    pub(in crate::coro) fn new() -> Self {
        Self(UnsafeCell::new(VecDeque::new()))
    }

    /// Calls `body` with the deque. `body` must not call anything that uses this queue.
    #[inline]
    fn with<R>(&self, body: impl FnOnce(&mut VecDeque<Item>) -> R) -> R {
        // SAFETY: no other reference exists, because each `body` is one of the closures below, and none of them runs
        // Python code.
        body(unsafe { &mut *self.0.get() })
    }

    #[inline]
    pub(in crate::coro) fn len(&self) -> usize {
        self.with(|items| items.len())
    }

    #[inline]
    pub(in crate::coro) fn push(&self, object: Bound<'_, PyAny>, is_exception: bool) {
        let item = Item {
            object: object.into_ptr(),
            is_exception,
        };
        self.with(|items| items.push_back(item));
    }

    /// Removes the oldest item. Returns it, and whether it is an exception.
    #[inline]
    pub(in crate::coro) fn pop<'py>(&self, py: Python<'py>) -> Option<(Bound<'py, PyAny>, bool)> {
        let item = self.with(VecDeque::pop_front)?;
        // SAFETY: the reference was the deque's.
        let object = unsafe { Bound::from_owned_ptr(py, item.object) };
        Some((object, item.is_exception))
    }

    /// For `tp_traverse`: reports the references to the collector.
    ///
    /// # Safety
    /// `visit` and `arg` are the values that the collector passed to `tp_traverse`.
    pub(in crate::coro) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        self.with(|items| {
            for item in items {
                // SAFETY: `visit` and `arg` are the collector's (contract), and the object is alive while it is held
                // here. Visiting runs no Python code.
                let result = unsafe { visit(item.object, arg) };
                if result != 0 {
                    return result;
                }
            }
            0
        })
    }

    /// Drops all items. They are moved into a list first, because a list's destructor limits the depth of the
    /// recursion. Otherwise nested fifos could use up the C stack.
    pub(in crate::coro) fn clear(&self, py: Python<'_>) {
        let items = self.with(std::mem::take);
        if items.is_empty() {
            return;
        }
        // A destructor must preserve the exception that is being raised.
        let pending = PyErr::take(py);
        // SAFETY: attached; the list takes over exactly one reference per item. If there is no memory for the list, the
        // items are dropped one by one.
        unsafe {
            let list = ffi::PyList_New(items.len() as ffi::Py_ssize_t);
            if list.is_null() {
                ffi::PyErr_Clear();
                for item in items {
                    drop(Bound::from_owned_ptr(py, item.object));
                }
            } else {
                for (index, item) in items.into_iter().enumerate() {
                    ffi::PyList_SET_ITEM(list, index as ffi::Py_ssize_t, item.object);
                }
                ffi::Py_DECREF(list);
            }
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

impl Drop for ItemQueue {
    fn drop(&mut self) {
        debug_assert_eq!(self.len(), 0, "must be cleared while attached, before the drop");
    }
}
