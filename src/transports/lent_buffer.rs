//! A buffer that a BufferedProtocol lends for what is received: `get_buffer` to `buffer_updated`.
//!
//! Runs on the loop's thread. Knows nothing of where the data comes from.

use std::ptr;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::event_loop::errors;

/// The writable memory of what `get_buffer` has returned, and the `buffer_updated` of the same protocol, which is told
/// even if the transport has another protocol by then.
pub(crate) struct LentBuffer<'py> {
    view: View,
    updated: Bound<'py, PyAny>,
}

impl<'py> LentBuffer<'py> {
    /// BufferError or TypeError if `offered` has no writable memory, RuntimeError if there is none of it.
    pub(super) fn new(offered: &Bound<'py, PyAny>, updated: Bound<'py, PyAny>) -> PyResult<Self> {
        let view = View::new(offered)?;
        if view.0.len == 0 {
            return Err(PyRuntimeError::new_err("get_buffer() returned an empty buffer"));
        }
        Ok(Self { view, updated })
    }

    /// The memory: that many writable bytes (at least 1) while this lives.
    pub(crate) fn memory(&self) -> (*mut u8, usize) {
        (self.view.0.buf.cast(), self.view.0.len as usize)
    }

    /// Gives the memory back and calls `buffer_updated(len_bytes)`; to be called inside `ProtocolCalls::in_context`.
    #[inline]
    pub(crate) fn updated(self, len_bytes: usize) -> PyResult<()> {
        let Self { view, updated } = self;
        drop(view);
        let py = updated.py();
        let count = len_bytes.into_pyobject(py)?;
        let call = [ptr::null_mut(), count.as_ptr()];
        // SAFETY: both objects are references of our own; call[0] is the free place that the offset flag allows.
        unsafe {
            let result = ffi::PyObject_Vectorcall(
                updated.as_ptr(),
                call[1..].as_ptr(),
                1 | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                ptr::null_mut(),
            );
            errors::owned(py, result).map(drop)
        }
    }
}

/// An exported view, released when dropped.
struct View(ffi::Py_buffer);

impl View {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: attached; the view is ours, and on success it is released exactly once, by Drop.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, ffi::PyBUF_WRITABLE) } != 0 {
            return Err(errors::fetch(object.py()));
        }
        Ok(Self(view))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer in `new`; transports run attached.
        unsafe { ffi::PyBuffer_Release(&raw mut self.0) };
    }
}
