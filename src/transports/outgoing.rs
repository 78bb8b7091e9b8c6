//! The data that a transport was given to write and has not sent yet (`Outgoing`: the out-buffer with its watermarks),
//! and the arguments of `write` (`Data`).
//!
//! Used on the loop's thread only. The caller does the sending.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;

use grapeshot_core::queue::outbuf::OutBuf;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView};

use super::flow::Watermarks;
use crate::binding::new_bytes;

/// The maximum number of chunks to pass to one system call.
const SLICES_PER_CALL: usize = 64;

/// The out-buffer of a transport.
pub(crate) struct Outgoing {
    outbuf: RefCell<OutBuf<Chunk>>,
    pub(crate) watermarks: Watermarks,
}

impl Outgoing {
    pub(crate) fn new() -> Self {
        Self::with_watermarks(Watermarks::new())
    }

    pub(crate) fn with_watermarks(watermarks: Watermarks) -> Self {
        Self {
            outbuf: RefCell::new(OutBuf::new()),
            watermarks,
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.outbuf.borrow().is_empty()
    }

    #[inline]
    pub(crate) fn len_bytes(&self) -> usize {
        self.outbuf.borrow().len_bytes()
    }

    /// Queues all of `data`.
    pub(crate) fn push(&self, data: &Data<'_, '_>) -> PyResult<()> {
        let chunk = data.to_chunk(0)?;
        self.outbuf.borrow_mut().push(chunk);
        Ok(())
    }

    /// Queues `data` without its first `sent` bytes; at least one byte must remain. The queued bytes go in front of any
    /// data that Python code has queued while the first bytes were being sent.
    pub(crate) fn push_rest(&self, data: &Data<'_, '_>, sent: usize) -> PyResult<()> {
        let chunk = data.to_chunk(sent)?;
        let skip = if data.is_shared() { sent } else { 0 };
        self.outbuf.borrow_mut().push_front(chunk, skip);
        Ok(())
    }

    /// Offers the queued data to `give`, until the queue is empty or `give` takes less than it was offered. `give` gets
    /// some slices, each of at least one byte, and returns the number of bytes that it took; it must not call into
    /// Python. `WouldBlock` counts as taking no bytes.
    ///
    /// If this returns `Ok` and data is left over, the kernel's buffer is full.
    pub(crate) fn drain(&self, mut give: impl FnMut(&[IoSlice<'_>]) -> io::Result<usize>) -> io::Result<()> {
        let mut outbuf = self.outbuf.borrow_mut();
        while !outbuf.is_empty() {
            let (sent, offered) = {
                let mut storage = [const { MaybeUninit::<IoSlice<'_>>::uninit() }; SLICES_PER_CALL];
                let slices = outbuf.slices(&mut storage);
                let offered: usize = slices.iter().map(|slice| slice.len()).sum();
                match give(slices) {
                    Ok(sent) => (sent, offered),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    Err(error) => return Err(error),
                }
            };
            // Dropping a chunk runs no Python code during the borrow, because chunks are exact `bytes` objects.
            outbuf.advance(sent, &mut drop);
            if sent < offered {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Runs `look` on the queued data, which must not change during the call, so `look` must not call into Python.
    #[inline]
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&OutBuf<Chunk>) -> R) -> R {
        look(&self.outbuf.borrow())
    }

    /// Removes the first `len_bytes` bytes, or all of them if there are fewer.
    pub(crate) fn advance(&self, len_bytes: usize) {
        let mut outbuf = self.outbuf.borrow_mut();
        let len_bytes = len_bytes.min(outbuf.len_bytes());
        outbuf.advance(len_bytes, &mut drop);
    }

    /// Discards the data that has not been sent.
    pub(crate) fn clear(&self) {
        loop {
            let chunk = self.outbuf.borrow_mut().pop();
            if chunk.is_none() {
                break;
            }
        }
    }

    /// True if the protocol must be told to pause. The caller must then call `flow::pause`.
    #[inline]
    pub(crate) fn must_pause(&self) -> bool {
        self.watermarks.must_pause(self.len_bytes())
    }

    /// True if the protocol must be told to resume. The caller must then call `flow::resume`.
    #[inline]
    pub(crate) fn must_resume(&self) -> bool {
        self.watermarks.must_resume(self.len_bytes())
    }
}

/// One `bytes` object in a buffer.
pub(crate) struct Chunk(*mut ffi::PyObject);

impl Chunk {
    pub(super) fn new(bytes: Bound<'_, PyAny>) -> Self {
        debug_assert!(bytes.is_instance_of::<PyBytes>());
        Self(bytes.into_ptr())
    }

    /// A new reference to the `bytes`.
    #[inline]
    pub(crate) fn to_bound<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        // SAFETY: the chunk holds a reference; from_borrowed adds one.
        unsafe { Bound::from_borrowed_ptr(py, self.0) }
    }
}

impl AsRef<[u8]> for Chunk {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the object is a bytes object (the callers of `new` make sure of that), kept alive by the chunk and
        // never changed.
        unsafe {
            let len = ffi::Py_SIZE(self.0) as usize;
            std::slice::from_raw_parts(ffi::PyBytes_AS_STRING(self.0).cast(), len)
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: chunks live inside transports, whose code runs attached; the reference is the chunk's own.
        unsafe { ffi::Py_DECREF(self.0) };
    }
}

/// The bytes of an argument of `write`, borrowed from the argument.
pub(crate) enum Data<'a, 'py> {
    /// An exact `bytes` object, which is queued without a copy.
    Bytes(&'a Bound<'py, PyBytes>),
    /// Any other object. Its content may change later, so it is copied if it must be queued.
    View(&'a Bound<'py, PyAny>, ffi::Py_buffer),
}

impl<'a, 'py> Data<'a, 'py> {
    /// TypeError unless the object is bytes, bytearray or memoryview; BufferError if its memory is not contiguous.
    #[inline]
    pub(crate) fn new(data: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = data.cast_exact::<PyBytes>() {
            return Ok(Self::Bytes(bytes));
        }
        Self::view(data)
    }

    fn view(data: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        let is_known = data.is_instance_of::<PyBytes>()
            || data.is_instance_of::<PyByteArray>()
            || data.is_instance_of::<PyMemoryView>();
        if !is_known {
            return Err(wrong_type(data));
        }
        let mut view = ffi::Py_buffer::new();
        // SAFETY: attached; on success the view is released exactly once, by Drop.
        if unsafe { ffi::PyObject_GetBuffer(data.as_ptr(), &raw mut view, ffi::PyBUF_SIMPLE) } != 0 {
            return Err(PyErr::fetch(data.py()));
        }
        Ok(Self::View(data, view))
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes.as_bytes(),
            Self::View(_, view) if view.len == 0 => &[],
            // SAFETY: the exported view gives `len` readable bytes until it is released, so they are neither freed nor
            // moved. Python code that runs meanwhile (a callback of the `SSLContext`, a `fileno()`) could change them.
            // That would only change what is sent: the slice is only copied, or passed to C.
            Self::View(_, view) => unsafe { std::slice::from_raw_parts(view.buf.cast(), view.len as usize) },
        }
    }

    /// The argument itself.
    pub(super) fn object(&self) -> &Bound<'py, PyAny> {
        match self {
            Self::Bytes(bytes) => bytes.as_any(),
            Self::View(object, _) => object,
        }
    }

    fn is_shared(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }

    /// A chunk for the out-buffer: the same object for an exact `bytes`, else a copy of the data after the first `sent`
    /// bytes. `MemoryError` if there is no memory for the copy.
    pub(super) fn to_chunk(&self, sent: usize) -> PyResult<Chunk> {
        match self {
            Self::Bytes(bytes) => Ok(Chunk::new((*bytes).clone().into_any())),
            Self::View(data, _) => Ok(Chunk::new(new_bytes::copied(
                data.py(),
                &self.as_slice()[sent..],
            )?)),
        }
    }
}

impl Drop for Data<'_, '_> {
    fn drop(&mut self) {
        if let Self::View(_, view) = self {
            // SAFETY: `Data::view` makes a `View` only after PyObject_GetBuffer has filled the buffer, and only this
            // place releases it.
            unsafe { ffi::PyBuffer_Release(view) };
        }
    }
}

#[cold]
fn wrong_type(data: &Bound<'_, PyAny>) -> PyErr {
    match data.get_type().name() {
        Ok(name) => PyTypeError::new_err(format!("data argument must be a bytes-like object, not '{name}'")),
        Err(error) => error,
    }
}
