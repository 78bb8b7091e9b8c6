//! `Parcels`: objects on their way through a fifo or a channel, the oldest first.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

/// A reference, and whether it is to be raised rather than returned.
#[derive(Clone, Copy)]
struct Parcel {
    object: *mut ffi::PyObject,
    is_exception: bool,
}

/// Owns its references. Touched only by the thread that may touch the object it is part of.
pub(super) struct Parcels(UnsafeCell<VecDeque<Parcel>>);

impl Parcels {
    pub(super) fn new() -> Self {
        Self(UnsafeCell::new(VecDeque::new()))
    }

    /// The deque for the length of `body`, which calls nothing that could come back here.
    #[inline]
    fn with<R>(&self, body: impl FnOnce(&mut VecDeque<Parcel>) -> R) -> R {
        // SAFETY: no other reference exists: `body` is one of the lines below, none of which runs Python code.
        body(unsafe { &mut *self.0.get() })
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.with(|parcels| parcels.len())
    }

    #[inline]
    pub(super) fn push(&self, object: Bound<'_, PyAny>, is_exception: bool) {
        let parcel = Parcel {
            object: object.into_ptr(),
            is_exception,
        };
        self.with(|parcels| parcels.push_back(parcel));
    }

    /// The oldest, and whether it is an exception.
    #[inline]
    pub(super) fn pop<'py>(&self, py: Python<'py>) -> Option<(Bound<'py, PyAny>, bool)> {
        let parcel = self.with(VecDeque::pop_front)?;
        // SAFETY: the reference was the deque's.
        Some((
            unsafe { Bound::from_owned_ptr(py, parcel.object) },
            parcel.is_exception,
        ))
    }

    /// For `tp_traverse`: reports the references to the collector.
    ///
    /// # Safety
    /// `visit` and `arg` are those that the collector passed to `tp_traverse`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        self.with(|parcels| {
            for parcel in parcels {
                // SAFETY: the caller's, and the object is alive while it is held here. Visiting runs no Python code.
                let result = unsafe { visit(parcel.object, arg) };
                if result != 0 {
                    return result;
                }
            }
            0
        })
    }

    /// Drops all. The references go through a list, whose destructor bounds how deep nested ones recurse: fifos that
    /// hold fifos would use the C stack up.
    pub(super) fn clear(&self, py: Python<'_>) {
        let parcels = self.with(std::mem::take);
        if parcels.is_empty() {
            return;
        }
        // A destructor keeps the exception that is on its way.
        let pending = PyErr::take(py);
        // SAFETY: attached; the list takes over as many references as it has places. Without memory for it they are
        // dropped one by one.
        unsafe {
            let list = ffi::PyList_New(parcels.len() as ffi::Py_ssize_t);
            if list.is_null() {
                ffi::PyErr_Clear();
                for parcel in parcels {
                    drop(Bound::from_owned_ptr(py, parcel.object));
                }
            } else {
                for (index, parcel) in parcels.into_iter().enumerate() {
                    ffi::PyList_SET_ITEM(list, index as ffi::Py_ssize_t, parcel.object);
                }
                ffi::Py_DECREF(list);
            }
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

impl Drop for Parcels {
    fn drop(&mut self) {
        debug_assert_eq!(self.len(), 0, "cleared before, while attached");
    }
}
