//! `ObjectRef`: an owned reference to a Python object, for queues and tables outside of native objects' cells.
//!
//! Dropping an `ObjectRef` releases the reference. Dropping a `Py` first checks whether pyo3 has attached the thread.
//! If pyo3 has not, the reference is released later. In a function that CPython calls directly, the thread is attached,
//! but pyo3 does not know that. An `ObjectRef` makes no check: it costs no more than the pointer, and always releases
//! the reference at once.
//!
//! An `ObjectRef` is neither `Send` nor `Sync`, so it cannot be used inside `Python::detach`: a thread that has one is
//! attached. Only the loop's inbox carries references to another thread, and that thread is attached when it takes them
//! out.
//!
//! Releasing the last reference to an object may run any code. So take the value out of its queue or table first, and
//! drop it when nothing is borrowed any more.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;

#[repr(transparent)]
pub(crate) struct ObjectRef(NonNull<ffi::PyObject>);

impl ObjectRef {
    /// Takes over the reference.
    #[inline]
    pub(crate) fn new(object: Bound<'_, PyAny>) -> Self {
        // SAFETY: a Bound is never null, and gives its reference away.
        unsafe { Self::from_owned_ptr(object.into_ptr()) }
    }

    /// # Safety
    /// Attached; `object` is not null, and the caller owns a reference to it, which this function takes over.
    #[inline]
    pub(crate) unsafe fn from_owned_ptr(object: *mut ffi::PyObject) -> Self {
        // SAFETY: not null, by the contract.
        Self(unsafe { NonNull::new_unchecked(object) })
    }

    /// The borrowed pointer, valid as long as this reference.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.0.as_ptr()
    }

    /// Another reference to the same object.
    #[inline]
    pub(crate) fn new_ref(&self) -> Self {
        // SAFETY: this reference keeps the object alive; a thread that has one is attached.
        unsafe { ffi::Py_INCREF(self.0.as_ptr()) };
        Self(self.0)
    }

    /// Another reference to the same object, for code that gives it to Python.
    #[inline]
    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.new_ref().into_bound(py)
    }

    /// Gives the reference to code that passes it to Python.
    #[inline]
    pub(crate) fn into_bound(self, py: Python<'_>) -> Bound<'_, PyAny> {
        let object = ManuallyDrop::new(self).as_ptr();
        // SAFETY: the reference moves into the result, and `self` is not dropped.
        unsafe { Bound::from_owned_ptr(py, object) }
    }
}

impl Drop for ObjectRef {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this value owns the reference, which is not used again. A thread that has an `ObjectRef` is attached.
        unsafe { ffi::Py_DECREF(self.0.as_ptr()) };
    }
}
