//! A buffer that a BufferedProtocol lends for what is received: the exported view of what `get_buffer` has returned.
//!
//! Runs on the loop's thread. Knows nothing of where the data comes from.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Writable memory, exported until this is dropped. It stays where it was made: moving a view costs more than all else.
pub(super) struct LentBuffer(ffi::Py_buffer);

impl LentBuffer {
    /// Nothing is lent yet.
    #[inline(always)]
    pub(super) fn none() -> Self {
        Self(ffi::Py_buffer::new())
    }

    /// Takes the memory of `offered`: where it is, and how many bytes (at least 1). BufferError or TypeError if it has
    /// no writable memory, RuntimeError if there is none of it. Called once.
    #[inline(always)]
    pub(super) fn take(&mut self, offered: &Bound<'_, PyAny>) -> PyResult<(*mut u8, usize)> {
        debug_assert!(self.0.obj.is_null());
        // SAFETY: attached; the view is ours, and what it exports is released exactly once, by Drop.
        if unsafe { ffi::PyObject_GetBuffer(offered.as_ptr(), &raw mut self.0, ffi::PyBUF_WRITABLE) } != 0 {
            // An exporter that fails should have left it so.
            self.0.obj = std::ptr::null_mut();
            return Err(PyErr::fetch(offered.py()));
        }
        if self.0.len == 0 {
            return Err(PyRuntimeError::new_err("get_buffer() returned an empty buffer"));
        }
        Ok((self.0.buf.cast(), self.0.len as usize))
    }
}

impl Drop for LentBuffer {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer, or without an object, which is passed over; transports run attached.
        unsafe { ffi::PyBuffer_Release(&raw mut self.0) };
    }
}
