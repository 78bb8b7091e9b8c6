//! Exported buffers of bytes-like objects, which are released on drop.

use pyo3::ffi;
use pyo3::prelude::*;

/// An exported buffer. It is made and dropped only on attached threads.
pub(crate) struct View(ffi::Py_buffer);

impl View {
    /// Exports the buffer. TypeError or BufferError if the object has no contiguous buffer that fits the flags.
    pub(crate) fn new(object: &Bound<'_, PyAny>, flags: i32) -> PyResult<Self> {
        let mut view = Self(ffi::Py_buffer::new());
        view.fill(object, flags)?;
        Ok(view)
    }

    /// Like `new`, in a box, for a view that is kept while a coro or a call on a file waits: when the box moves, the
    /// view's address does not change.
    pub(crate) fn boxed(object: &Bound<'_, PyAny>, flags: i32) -> PyResult<Box<Self>> {
        let mut view = Box::new(Self(ffi::Py_buffer::new()));
        view.fill(object, flags)?;
        Ok(view)
    }

    fn fill(&mut self, object: &Bound<'_, PyAny>, flags: i32) -> PyResult<()> {
        // SAFETY: attached; on success the view is released once, on drop. After a failure its object is null.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut self.0, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.0.len as usize
    }

    #[inline]
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self.0.len {
            0 => &[],
            // SAFETY: the buffer is exported until the drop.
            len => unsafe { std::slice::from_raw_parts(self.0.buf.cast(), len as usize) },
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled by `fill` and released once; without an object the call does nothing.
        unsafe { ffi::PyBuffer_Release(&raw mut self.0) };
    }
}
