//! `ObjectCell`: one owned, replaceable reference inside a native object.
//!
//! Only an attached thread may touch a cell, and only if it may touch the object that holds the cell. An empty cell
//! consists of zeroes, so the cells of freshly allocated (zeroed) objects need no further setup.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

#[repr(transparent)]
pub(crate) struct ObjectCell(Cell<*mut ffi::PyObject>);

impl ObjectCell {
    pub(crate) const fn empty() -> Self {
        Self(Cell::new(ptr::null_mut()))
    }

    pub(crate) fn is_set(&self) -> bool {
        !self.0.get().is_null()
    }

    /// The borrowed pointer, null when empty. It is valid only until other code can run.
    pub(crate) fn as_ptr(&self) -> *mut ffi::PyObject {
        self.0.get()
    }

    /// A new reference to the content of the cell.
    #[inline]
    pub(crate) fn get<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        // SAFETY: the cell holds null or a reference of its own; from_borrowed adds one for the result.
        unsafe { Bound::from_borrowed_ptr_or_opt(py, self.0.get()) }
    }

    /// Replaces the content. The old object is dropped after the new one was stored. So if the old object's destructor
    /// reads the cell, it finds the new object.
    pub(crate) fn set(&self, value: Bound<'_, PyAny>) {
        let py = value.py();
        let old = self.0.replace(value.into_ptr());
        // SAFETY: the cell owned `old`, which it no longer holds.
        drop(unsafe { Bound::from_owned_ptr_or_opt(py, old) });
    }

    /// Replaces the content and returns the old object. Nothing is dropped, so no other code can run.
    #[inline]
    pub(crate) fn replace<'py>(
        &self,
        value: Option<Bound<'py, PyAny>>,
        py: Python<'py>,
    ) -> Option<Bound<'py, PyAny>> {
        let old = self.0.replace(value.map_or(ptr::null_mut(), Bound::into_ptr));
        // SAFETY: the cell owned `old`, and ownership moves to the result.
        unsafe { Bound::from_owned_ptr_or_opt(py, old) }
    }

    /// Stores a reference in a cell that is known to be empty.
    #[inline]
    pub(crate) fn put_new(&self, value: *mut ffi::PyObject) {
        debug_assert!(self.0.get().is_null());
        self.0.set(value);
    }

    /// Takes the owned reference out as a pointer, null when empty.
    #[inline]
    pub(crate) fn take_ptr(&self) -> *mut ffi::PyObject {
        self.0.replace(ptr::null_mut())
    }

    /// Takes the content out and leaves the cell empty.
    #[inline]
    pub(crate) fn take<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let old = self.0.replace(ptr::null_mut());
        // SAFETY: the cell owned `old`, and ownership moves to the result.
        unsafe { Bound::from_owned_ptr_or_opt(py, old) }
    }

    /// For `tp_traverse`: reports the reference to the collector.
    ///
    /// # Safety
    /// `visit` and `arg` are the arguments that the collector passed to `tp_traverse`.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let object = self.0.get();
        if object.is_null() {
            return 0;
        }
        // SAFETY: the caller passes the collector's own function and argument; the object is alive while held here.
        unsafe { visit(object, arg) }
    }
}
