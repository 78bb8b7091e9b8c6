//! The write side.
//!
//! Outside a callback `write` sends at once and queues the rest. Inside the protocol's own callback it is corked:
//! the chunks are collected and leave in one system call as soon as the callback returns (a reply in four writes
//! costs one `writev`). What the kernel does not take waits for writability, under the watermarks.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{Chunk, Stream, flag, lifecycle};
use crate::event_loop::errors;
use crate::event_loop::names::{Kept, names};
use crate::sys::socket;

/// Corked data beyond this leaves at once: it fills system calls anyway, and must not count as unsent.
const CORK_LEN: usize = 64 * 1024;
/// Chunks handed to one `sendmsg`.
const SLICES_PER_SEND: usize = 64;
/// Writes after the connection was lost that go without a word, as in asyncio.
const QUIET_LOST_WRITES: u8 = 5;

/// Runs the protocol's callback `call` with writes corked, then sends what it has written. The outer error is
/// for what must leave the loop, the inner result is the callback's.
#[inline]
pub(super) fn corked<R>(this: Stream<'_>, call: impl FnOnce() -> PyResult<R>) -> PyResult<PyResult<R>> {
    let was_corked = this.has(flag::CORKED);
    this.raise_flag(flag::CORKED);
    let result = call();
    if !was_corked {
        this.lower_flag(flag::CORKED);
        uncork(this)?;
    }
    Ok(result)
}

/// Sends corked data, if there is any.
#[inline]
pub(super) fn uncork(this: Stream<'_>) -> PyResult<()> {
    if this.has(flag::BLOCKED) || this.outbuf.borrow().is_empty() {
        return Ok(());
    }
    flush(this)
}

/// Sends from the out-buffer until it is empty or the kernel takes no more; then waits for writability.
fn flush(this: Stream<'_>) -> PyResult<()> {
    match send_buffered(this) {
        Ok(()) => {}
        Err(error) => return on_write_error(this, &error),
    }
    if this.outbuf.borrow().is_empty() {
        return Ok(());
    }
    wait_writable(this)
}

fn wait_writable(this: Stream<'_>) -> PyResult<()> {
    this.raise_flag(flag::BLOCKED);
    this.sync_interest()?;
    maybe_pause(this)
}

/// One or more system calls; Ok with data left over means that the kernel's buffer is full.
fn send_buffered(this: Stream<'_>) -> io::Result<()> {
    let fd = this.fd.get();
    let mut outbuf = this.outbuf.borrow_mut();
    while !outbuf.is_empty() {
        let (sent, offered) = {
            let mut slices = [const { MaybeUninit::<IoSlice<'_>>::uninit() }; SLICES_PER_SEND];
            let count = outbuf.fill_slices(&mut slices);
            // SAFETY: fill_slices has initialized the first `count` places.
            let slices = unsafe { std::slice::from_raw_parts(slices.as_ptr().cast::<IoSlice<'_>>(), count) };
            let offered: usize = slices.iter().map(|slice| slice.len()).sum();
            let result = match slices {
                [one] => socket::send(fd, one),
                many => socket::send_vectored(fd, many),
            };
            match result {
                Ok(sent) => (sent, offered),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        };
        // Dropping bytes objects runs no Python code (a subclass's finalizer runs after the borrow, at worst at the
        // end of this function, since chunks are exact bytes or copies).
        outbuf.advance(sent, &mut drop);
        if sent < offered {
            return Ok(());
        }
    }
    Ok(())
}

#[cold]
fn on_write_error(this: Stream<'_>, error: &io::Error) -> PyResult<()> {
    drop_buffer(this);
    lifecycle::fatal_error(
        this,
        errors::os_error(error),
        "Fatal write error on socket transport",
    )
}

/// Discards what has not been sent.
pub(super) fn drop_buffer(this: Stream<'_>) {
    loop {
        let chunk = this.outbuf.borrow_mut().pop();
        if chunk.is_none() {
            break;
        }
    }
    this.lower_flag(flag::BLOCKED);
}

/// The descriptor takes data again.
pub(super) fn on_writable(this: Stream<'_>) -> PyResult<()> {
    if let Err(error) = send_buffered(this) {
        return on_write_error(this, &error);
    }
    if this.outbuf.borrow().is_empty() {
        this.lower_flag(flag::BLOCKED);
    }
    // The protocol may write or close inside resume_writing; its writes are corked like in any other callback.
    corked(this, || maybe_resume(this))??;
    if this.has(flag::BLOCKED) || this.lost_writes.get() != 0 {
        return Ok(());
    }
    if this.has(flag::CLOSING) {
        return lifecycle::finish(this, None);
    }
    this.sync_interest()?;
    if this.has(flag::EOF_WRITTEN) {
        shutdown(this);
    }
    Ok(())
}

/// Ends our side of the connection; a peer that is already gone shows on the read side.
pub(super) fn shutdown(this: Stream<'_>) {
    let _ = socket::shutdown_write(this.fd.get());
}

/// `write(data)`.
#[inline]
pub(super) fn write(this: Stream<'_>, data: *mut ffi::PyObject) -> PyResult<()> {
    let py = this.py();
    // SAFETY: `data` is an argument of the running call, so it is alive.
    let data = unsafe { Bound::from_borrowed_ptr(py, data) };
    let Some(source) = Data::new(&data)? else {
        return Err(wrong_type(&data, "data argument"));
    };
    if !may_write(this, source.as_slice().is_empty())? {
        return Ok(());
    }
    if this.has(flag::CORKED | flag::BLOCKED) {
        push(this, &source)?;
        return after_push(this);
    }
    let bytes = source.as_slice();
    let sent = match socket::send(this.fd.get(), bytes) {
        Ok(sent) => sent,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => return on_write_error(this, &error),
    };
    if sent < bytes.len() {
        push_rest(this, &source, sent)?;
        return wait_writable(this);
    }
    Ok(())
}

/// `writelines(list_of_data)`: one system call for all of them.
pub(super) fn writelines(this: Stream<'_>, items: &Bound<'_, PyAny>) -> PyResult<()> {
    let items: Vec<_> = items.try_iter()?.collect::<PyResult<_>>()?;
    let mut sources = Vec::with_capacity(items.len());
    for item in &items {
        match Data::new(item)? {
            Some(source) => sources.push(source),
            None => return Err(wrong_type(item, "data argument")),
        }
    }
    if !may_write(this, sources.iter().all(|source| source.as_slice().is_empty()))? {
        return Ok(());
    }
    for source in &sources {
        if !source.as_slice().is_empty() {
            push(this, source)?;
        }
    }
    if this.has(flag::CORKED | flag::BLOCKED) {
        return after_push(this);
    }
    flush(this)
}

/// False if there is nothing to do: no data, or the connection is gone. RuntimeError after `write_eof`.
#[inline]
fn may_write(this: Stream<'_>, is_empty: bool) -> PyResult<bool> {
    if this.has(flag::EOF_WRITTEN) {
        return Err(PyRuntimeError::new_err("Cannot call write() after write_eof()"));
    }
    if is_empty {
        return Ok(false);
    }
    if this.lost_writes.get() != 0 {
        return lost_write(this);
    }
    Ok(true)
}

#[cold]
fn lost_write(this: Stream<'_>) -> PyResult<bool> {
    let count = this.lost_writes.get();
    if count >= QUIET_LOST_WRITES {
        let logger = this.py().import("asyncio.log")?.getattr("logger")?;
        logger.call_method1("warning", ("socket.send() raised exception.",))?;
    }
    this.lost_writes.set(count.saturating_add(1));
    Ok(false)
}

/// After data was put behind other data: corked data leaves once there is enough of it, blocked data may pause.
fn after_push(this: Stream<'_>) -> PyResult<()> {
    if this.has(flag::BLOCKED) {
        return maybe_pause(this);
    }
    if this.outbuf.borrow().len_bytes() > CORK_LEN {
        return flush(this);
    }
    Ok(())
}

fn push(this: Stream<'_>, source: &Data<'_, '_>) -> PyResult<()> {
    let chunk = source.to_chunk(0)?;
    this.outbuf.borrow_mut().push(chunk);
    Ok(())
}

/// Queues what is left of `source` after its first `sent` bytes.
fn push_rest(this: Stream<'_>, source: &Data<'_, '_>, sent: usize) -> PyResult<()> {
    let chunk = source.to_chunk(sent)?;
    let skip = if source.is_shared() { sent } else { 0 };
    let mut outbuf = this.outbuf.borrow_mut();
    outbuf.push(chunk);
    outbuf.advance(skip, &mut drop);
    Ok(())
}

// ---- flow control --------------------------------------------------------------------------------------------

/// Calls `pause_writing` if the unsent data has passed the high watermark.
pub(super) fn maybe_pause(this: Stream<'_>) -> PyResult<()> {
    let len_bytes = this.outbuf.borrow().len_bytes();
    if this.watermarks.must_pause(len_bytes) {
        return tell(this, names().pause_writing, "protocol.pause_writing() failed");
    }
    Ok(())
}

/// Calls `resume_writing` if the unsent data has sunk to the low watermark.
fn maybe_resume(this: Stream<'_>) -> PyResult<()> {
    let len_bytes = this.outbuf.borrow().len_bytes();
    if this.watermarks.must_resume(len_bytes) {
        return tell(this, names().resume_writing, "protocol.resume_writing() failed");
    }
    Ok(())
}

/// A flow-control call: in the caller's context, since `write` may run anywhere, and with its faults reported.
#[cold]
fn tell(this: Stream<'_>, method: Kept, failure: &str) -> PyResult<()> {
    let py = this.py();
    let Some(protocol) = this.calls.get(py) else {
        return Ok(());
    };
    let name = method.bind(py).cast_into::<pyo3::types::PyString>()?;
    let Err(error) = protocol.call_method0(name) else {
        return Ok(());
    };
    let Some(event_loop) = this.event_loop.get(py) else {
        return Ok(());
    };
    let details = [("transport", &this.to_bound()), ("protocol", &protocol)];
    errors::report(&event_loop, failure, error, &details)
}

// ---- data ----------------------------------------------------------------------------------------------------

/// The bytes of an argument of `write`, borrowed from it.
enum Data<'a, 'py> {
    /// An exact `bytes`: queued without a copy.
    Bytes(&'a Bound<'py, PyBytes>),
    /// Anything else that may change under us: copied where it must wait.
    View(&'a Bound<'py, PyAny>, ffi::Py_buffer),
}

impl<'a, 'py> Data<'a, 'py> {
    /// None if the object is not bytes, bytearray or memoryview. BufferError if its memory is not contiguous.
    #[inline]
    fn new(data: &'a Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        if let Ok(bytes) = data.cast_exact::<PyBytes>() {
            return Ok(Some(Self::Bytes(bytes)));
        }
        Self::view(data)
    }

    fn view(data: &'a Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let is_known = data.is_instance_of::<PyBytes>()
            || data.is_instance_of::<pyo3::types::PyByteArray>()
            || data.is_instance_of::<pyo3::types::PyMemoryView>();
        if !is_known {
            return Ok(None);
        }
        let mut view = ffi::Py_buffer::new();
        // SAFETY: attached; on success the view is released exactly once, by Drop.
        if unsafe { ffi::PyObject_GetBuffer(data.as_ptr(), &raw mut view, ffi::PyBUF_SIMPLE) } != 0 {
            return Err(errors::fetch(data.py()));
        }
        Ok(Some(Self::View(data, view)))
    }

    #[inline]
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes.as_bytes(),
            Self::View(_, view) if view.len == 0 => &[],
            // SAFETY: the exported view gives `len` readable bytes until it is released; no Python code that could
            // change them runs while the slice is in use.
            Self::View(_, view) => unsafe { std::slice::from_raw_parts(view.buf.cast(), view.len as usize) },
        }
    }

    fn is_shared(&self) -> bool {
        matches!(self, Self::Bytes(_))
    }

    /// A chunk for the out-buffer: the same object, or a copy of what follows the first `sent` bytes.
    fn to_chunk(&self, sent: usize) -> PyResult<Chunk> {
        match self {
            Self::Bytes(bytes) => Ok(Chunk::new((*bytes).clone().into_any())),
            Self::View(data, _) => Ok(Chunk::new(
                PyBytes::new(data.py(), &self.as_slice()[sent..]).into_any(),
            )),
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
fn wrong_type(data: &Bound<'_, PyAny>, what: &str) -> PyErr {
    match data.get_type().name() {
        Ok(name) => PyTypeError::new_err(format!("{what} must be a bytes-like object, not '{name}'")),
        Err(error) => error,
    }
}
