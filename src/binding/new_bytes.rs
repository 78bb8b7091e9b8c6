//! A new `bytes` object: created with a capacity, filled, shrunk to the written length, and only then shared.

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

unsafe extern "C" {
    /// Public C API (`Doc/c-api/bytes.rst`), which pyo3-ffi does not export.
    fn _PyBytes_Resize(bytes: *mut *mut ffi::PyObject, len_bytes: ffi::Py_ssize_t) -> std::ffi::c_int;
}

/// A `bytes` object with a copy of `data`. `MemoryError` if there is no memory for it.
#[inline]
pub(crate) fn copied<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the call copies `len` readable bytes into a new object, or returns null with an exception set.
    unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyBytes_FromStringAndSize(data.as_ptr().cast(), data.len() as ffi::Py_ssize_t),
        )
    }
}

/// A `bytes` object that is still being filled. No other code has a reference to it.
pub(crate) struct NewBytes<'py> {
    object: Bound<'py, PyAny>,
    capacity: usize,
}

impl<'py> NewBytes<'py> {
    /// An object of `capacity` bytes (at least 1). `MemoryError` if there is no memory.
    pub(crate) fn with_capacity(py: Python<'py>, capacity: usize) -> PyResult<Self> {
        let capacity = capacity.max(1);
        // SAFETY: attached; the content is written before any other code sees the object.
        let object = unsafe {
            Bound::from_owned_ptr_or_err(
                py,
                ffi::PyBytes_FromStringAndSize(ptr::null(), capacity as ffi::Py_ssize_t),
            )?
        };
        Ok(Self { object, capacity })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The same object with more capacity, possibly at another address. `MemoryError` if there is no memory; the
    /// content is then lost.
    #[cold]
    pub(crate) fn grown(self, capacity: usize) -> PyResult<Self> {
        debug_assert!(capacity >= self.capacity);
        Ok(Self {
            object: resized(self.object, capacity)?,
            capacity,
        })
    }

    /// The address of the `capacity` bytes.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: the object is a bytes object.
        unsafe { ffi::PyBytes_AS_STRING(self.object.as_ptr()).cast_mut().cast() }
    }

    /// The unfinished object, for a place that no other code reads. It must come back through `from_object`.
    pub(crate) fn into_object(self) -> Bound<'py, PyAny> {
        self.object
    }

    /// # Safety
    /// `object` must come from `into_object`, and must be the only reference to the object.
    pub(crate) unsafe fn from_object(object: Bound<'py, PyAny>) -> Self {
        // SAFETY: the object is a bytes object, as the caller guarantees.
        let capacity = unsafe { ffi::Py_SIZE(object.as_ptr()) } as usize;
        Self { object, capacity }
    }

    /// The finished object, which has the first `len_bytes` bytes; the caller must have written them. If more than half
    /// of the capacity is unused, the written bytes are copied to a new object, because shrinking the old one would
    /// leave a hole in the heap that is larger than the object.
    pub(crate) fn finish(self, len_bytes: usize) -> PyResult<Bound<'py, PyAny>> {
        debug_assert!(len_bytes <= self.capacity);
        let py = self.object.py();
        if len_bytes == self.capacity {
            return Ok(self.object);
        }
        if len_bytes * 2 < self.capacity {
            // SAFETY: the first `len_bytes` bytes were written.
            return unsafe {
                let content = ffi::PyBytes_AS_STRING(self.object.as_ptr());
                Bound::from_owned_ptr_or_err(
                    py,
                    ffi::PyBytes_FromStringAndSize(content, len_bytes as ffi::Py_ssize_t),
                )
            };
        }
        resized(self.object, len_bytes)
    }
}

/// Changes the length of an unshared `bytes` object.
fn resized(object: Bound<'_, PyAny>, len_bytes: usize) -> PyResult<Bound<'_, PyAny>> {
    let py = object.py();
    let mut object = object.into_ptr();
    // SAFETY: the object is unshared; the call replaces the pointer, or frees the object, clears the pointer and
    // sets an exception.
    unsafe {
        _PyBytes_Resize(&raw mut object, len_bytes as ffi::Py_ssize_t);
        Bound::from_owned_ptr_or_err(py, object)
    }
}
