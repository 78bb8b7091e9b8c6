//! The buffer into which a transport receives data for a BufferedProtocol: an exported view of the object that
//! `get_buffer` returned.
//!
//! Used on the loop's thread only.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Writable memory, exported until this value is dropped. Avoid moving the value: moving a `Py_buffer` costs more than
/// everything else that this type does.
pub(super) struct LentBuffer(ffi::Py_buffer);

impl LentBuffer {
    /// A view that holds nothing yet.
    #[inline(always)]
    pub(super) fn none() -> Self {
        Self(ffi::Py_buffer::new())
    }

    /// Exports the memory of `offered`. Returns its address and its length in bytes (at least 1). BufferError or
    /// TypeError if the object has no writable memory, RuntimeError if the memory is empty. May be called once.
    #[inline(always)]
    pub(super) fn take(&mut self, offered: &Bound<'_, PyAny>) -> PyResult<(*mut u8, usize)> {
        debug_assert!(self.0.obj.is_null());
        // SAFETY: attached; the view is ours, and Drop releases its export exactly once.
        if unsafe { ffi::PyObject_GetBuffer(offered.as_ptr(), &raw mut self.0, ffi::PyBUF_WRITABLE) } != 0 {
            // An exporter that fails should set `obj` to null, but not all do.
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
        // SAFETY: transports run attached. Either PyObject_GetBuffer has filled the view, or the view has no object and
        // the release does nothing.
        unsafe { ffi::PyBuffer_Release(&raw mut self.0) };
    }
}
