//! The read side: one `recv` per readiness, delivered to the protocol at once.
//!
//! Small reads go through the loop's scratch buffer into an exactly sized `bytes`. A transport whose last read was
//! large receives the next one straight into an object of that size, with the scratch buffer behind it for more.

use std::io;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Stream, flag, lifecycle, writing};
use crate::event_loop::errors;
use crate::event_loop::names::names;
use crate::sys::socket;

#[inline]
pub(super) fn on_readable(this: Stream<'_>) -> PyResult<()> {
    if this.calls.is_buffered() {
        return read_into_protocol(this);
    }
    let py = this.py();
    let fd = this.fd.get();
    let received = this.reactor().with_scratch(|scratch| {
        // SAFETY: the buffer has `capacity` bytes of its own.
        let len_bytes = unsafe { socket::recv(fd, scratch.as_mut_ptr(), scratch.capacity())? };
        if len_bytes == 0 {
            return Ok(None);
        }
        // SAFETY: recv has written `len_bytes` bytes; making a bytes object copies them and runs no Python code.
        let data = unsafe {
            errors::owned(
                py,
                ffi::PyBytes_FromStringAndSize(scratch.as_ptr().cast(), len_bytes as ffi::Py_ssize_t),
            )
        };
        Ok(Some(data))
    });
    match received {
        Ok(Some(data)) => {
            let data = data?;
            let result = writing::corked(this, || this.calls.data_received(py, &data))?;
            if let Err(error) = result {
                return lifecycle::fatal_error(
                    this,
                    error,
                    "Fatal error: protocol.data_received() call failed.",
                );
            }
            Ok(())
        }
        Ok(None) => on_eof(this),
        Err(error) => on_read_error(this, &error),
    }
}

/// BufferedProtocol: receive into the buffer that the protocol offers.
fn read_into_protocol(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    let offered = writing::corked(this, || {
        this.calls.get_buffer(py, &(-1_i32).into_pyobject(py)?.into_any())
    })?;
    let target = match offered.and_then(|object| WritableBuffer::new(&object)) {
        Ok(target) => target,
        Err(error) => {
            return lifecycle::fatal_error(this, error, "Fatal error: protocol.get_buffer() call failed.");
        }
    };
    if this.fd.get() < 0 || this.has(flag::CLOSING | flag::PAUSED) {
        return Ok(());
    }
    // SAFETY: the view gives `len` writable bytes and stays exported until it is dropped.
    let received = unsafe { socket::recv(this.fd.get(), target.view.buf.cast(), target.view.len as usize) };
    drop(target);
    match received {
        Ok(0) => on_eof(this),
        Ok(len_bytes) => {
            let result = writing::corked(this, || this.calls.buffer_updated(py, len_bytes))?;
            if let Err(error) = result {
                return lifecycle::fatal_error(
                    this,
                    error,
                    "Fatal error: protocol.buffer_updated() call failed.",
                );
            }
            Ok(())
        }
        Err(error) => on_read_error(this, &error),
    }
}

#[cold]
fn on_read_error(this: Stream<'_>, error: &io::Error) -> PyResult<()> {
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(());
    }
    lifecycle::fatal_error(
        this,
        errors::os_error(error),
        "Fatal read error on socket transport",
    )
}

/// The peer has ended its side: the protocol says whether to go on writing.
fn on_eof(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    let answer = writing::corked(this, || {
        this.calls.call(py, names().eof_received, &[])?.is_truthy()
    })?;
    match answer {
        Err(error) => {
            lifecycle::fatal_error(this, error, "Fatal error: protocol.eof_received() call failed.")
        }
        Ok(true) => {
            this.raise_flag(flag::EOF_RECEIVED);
            this.sync_interest()
        }
        Ok(false) => lifecycle::close(this),
    }
}

/// A writable buffer of a Python object, released when dropped.
struct WritableBuffer {
    view: ffi::Py_buffer,
}

impl WritableBuffer {
    /// BufferError or TypeError if the object offers none, RuntimeError if it is empty.
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = ffi::Py_buffer::new();
        // SAFETY: attached; the view is ours, and on success it is released exactly once, by Drop.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, ffi::PyBUF_WRITABLE) } != 0 {
            return Err(errors::fetch(object.py()));
        }
        let buffer = Self { view };
        if buffer.view.len == 0 {
            return Err(PyRuntimeError::new_err("get_buffer() returned an empty buffer"));
        }
        Ok(buffer)
    }
}

impl Drop for WritableBuffer {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer in `new`; transports run attached.
        unsafe { ffi::PyBuffer_Release(&raw mut self.view) };
    }
}
