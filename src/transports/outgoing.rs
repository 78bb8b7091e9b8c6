//! What a transport has been given to write and has not sent yet: the out-buffer with its watermarks, and the
//! arguments of `write` on their way into it.
//!
//! Belongs to the loop's thread. Knows no transport: how bytes leave is the caller's business.

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

/// Chunks handed to one system call.
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

    /// Queues what is left of `data` (at least one byte) after its first `sent` bytes, before what Python code has
    /// queued while those left.
    pub(crate) fn push_rest(&self, data: &Data<'_, '_>, sent: usize) -> PyResult<()> {
        let chunk = data.to_chunk(sent)?;
        let skip = if data.is_shared() { sent } else { 0 };
        self.outbuf.borrow_mut().push_front(chunk, skip);
        Ok(())
    }

    /// Hands what is queued to `give` until it is empty or `give` takes less than it was offered. `give` gets some
    /// slices, none of them empty, and returns how many of their bytes it took; it must not call into Python.
    /// `WouldBlock` counts as none. Ok with data left over means that the kernel's buffer is full.
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
            // Dropping bytes objects runs no Python code (a subclass's finalizer runs after the borrow, at worst at
            // the end of this function, since chunks are exact bytes or copies).
            outbuf.advance(sent, &mut drop);
            if sent < offered {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Runs `look` on what is queued, which stays as it is meanwhile: `look` must not call into Python.
    #[inline]
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&OutBuf<Chunk>) -> R) -> R {
        look(&self.outbuf.borrow())
    }

    /// Takes the first `len_bytes` bytes out, or as many as there are.
    pub(crate) fn advance(&self, len_bytes: usize) {
        let mut outbuf = self.outbuf.borrow_mut();
        let len_bytes = len_bytes.min(outbuf.len_bytes());
        outbuf.advance(len_bytes, &mut drop);
    }

    /// Discards what has not been sent.
    pub(crate) fn clear(&self) {
        loop {
            let chunk = self.outbuf.borrow_mut().pop();
            if chunk.is_none() {
                break;
            }
        }
    }

    /// True if the protocol has to be told to pause; the caller must then do it.
    #[inline]
    pub(crate) fn must_pause(&self) -> bool {
        self.watermarks.must_pause(self.len_bytes())
    }

    /// True if the protocol has to be told to go on; the caller must then do it.
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
        // SAFETY: the object is a bytes object (checked where the chunk is made), kept alive and never changed.
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

/// The bytes of an argument of `write`, borrowed from it.
pub(crate) enum Data<'a, 'py> {
    /// An exact `bytes`: queued without a copy.
    Bytes(&'a Bound<'py, PyBytes>),
    /// Anything else that may change under us: copied where it must wait.
    View(&'a Bound<'py, PyAny>, ffi::Py_buffer),
}

impl<'a, 'py> Data<'a, 'py> {
    /// TypeError if the object is not bytes, bytearray or memoryview, BufferError if its memory is not contiguous.
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
            // SAFETY: the exported view gives `len` readable bytes until it is released; no Python code that could
            // change them runs while the slice is in use.
            Self::View(_, view) => unsafe { std::slice::from_raw_parts(view.buf.cast(), view.len as usize) },
        }
    }

    /// The object that was given.
    pub(super) fn object(&self) -> &Bound<'py, PyAny> {
        match self {
            Self::Bytes(bytes) => bytes.as_any(),
            Self::View(object, _) => object,
        }
    }

    fn is_shared(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }

    /// A chunk for the out-buffer: the same object, or a copy of what follows the first `sent` bytes. `MemoryError` if
    /// there is no memory for the copy.
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
            // SAFETY: filled by PyObject_GetBuffer in `view`; released only here.
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
