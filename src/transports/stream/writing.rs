//! The write side.
//!
//! Outside a callback `write` sends at once and queues the rest. Inside the protocol's own callback it is corked:
//! the chunks are collected and leave in one system call as soon as the callback returns (a reply in four writes
//! costs one `writev`). What the kernel does not take waits for writability, under the watermarks.

use std::io;

use grapeshot_core::sys::socket;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Flags, Stream, StreamBody, sync_interest};
use crate::binding::errors;
use crate::transports::ending;
use crate::transports::flow;
use crate::transports::outgoing::Data;

/// Corked data beyond this leaves at once: it fills system calls anyway, and must not count as unsent.
const CORK_LEN: usize = 64 * 1024;

/// Runs the protocol's callback `call` with writes corked, then sends what it has written. The outer error is
/// for what must leave the loop, the inner result is the callback's.
#[inline]
pub(super) fn corked<R>(this: Stream<'_>, call: impl FnOnce() -> PyResult<R>) -> PyResult<PyResult<R>> {
    let was_corked = this.flags.has(Flags::CORKED);
    this.flags.set(Flags::CORKED);
    let result = call();
    if !was_corked {
        this.flags.clear(Flags::CORKED);
        uncork(this)?;
    }
    Ok(result)
}

/// Sends corked data, if there is any.
#[inline]
pub(super) fn uncork(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) || this.outgoing.is_empty() {
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
    if this.outgoing.is_empty() {
        return Ok(());
    }
    wait_writable(this)
}

fn wait_writable(this: Stream<'_>) -> PyResult<()> {
    this.flags.set(Flags::BLOCKED);
    sync_interest(this)?;
    maybe_pause(this)
}

/// One or more system calls; Ok with data left over means that the kernel's buffer is full.
fn send_buffered(this: Stream<'_>) -> io::Result<()> {
    let fd = this.usable_fd(this.py())?;
    this.outgoing.drain(|slices| match slices {
        [one] => socket::send(fd, one),
        many => socket::send_vectored(fd, many),
    })
}

#[cold]
fn on_write_error(this: Stream<'_>, error: &io::Error) -> PyResult<()> {
    drop_buffer(&this);
    ending::fatal_error(
        this,
        errors::os_error(error),
        "Fatal write error on socket transport",
    )
}

/// Discards what has not been sent.
pub(super) fn drop_buffer(body: &StreamBody) {
    body.outgoing.clear();
    body.flags.clear(Flags::BLOCKED);
}

/// The descriptor takes data again.
pub(super) fn on_writable(this: Stream<'_>) -> PyResult<()> {
    if let Err(error) = send_buffered(this) {
        return on_write_error(this, &error);
    }
    if this.outgoing.is_empty() {
        this.flags.clear(Flags::BLOCKED);
    }
    // The protocol may write or close inside resume_writing; its writes are corked like in any other callback.
    corked(this, || maybe_resume(this))??;
    if this.flags.has(Flags::BLOCKED) || this.lost_writes.get() != 0 {
        return Ok(());
    }
    if this.flags.has(Flags::CLOSING) {
        return ending::finish(this, None);
    }
    sync_interest(this)?;
    if this.flags.has(Flags::EOF_WRITTEN)
        && let Err(error) = shutdown(this)
    {
        return on_write_error(this, &error);
    }
    Ok(())
}

/// Ends our side of the connection; a peer that is already gone shows on the read side. EBADF if the socket was closed
/// behind our back.
pub(super) fn shutdown(this: Stream<'_>) -> io::Result<()> {
    let fd = this.usable_fd(this.py())?;
    let _ = socket::shutdown_write(fd);
    Ok(())
}

/// `write(data)`.
#[inline]
pub(super) fn write(this: Stream<'_>, data: *mut ffi::PyObject) -> PyResult<()> {
    let py = this.py();
    // SAFETY: `data` is an argument of the running call, so it is alive.
    let data = unsafe { Bound::from_borrowed_ptr(py, data) };
    let source = Data::new(&data)?;
    if !may_write(this, source.as_slice().is_empty(), "write")? {
        return Ok(());
    }
    if this.flags.has(Flags::CORKED | Flags::BLOCKED) {
        this.outgoing.push(&source)?;
        return after_push(this);
    }
    let bytes = source.as_slice();
    let fd = this.usable_fd(py);
    if this.flags.has(Flags::BLOCKED) {
        // The `fileno()` of an unusual socket object has written, more than was taken.
        this.outgoing.push(&source)?;
        return after_push(this);
    }
    let sent = match fd.and_then(|fd| socket::send(fd, bytes)) {
        Ok(sent) => sent,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => return on_write_error(this, &error),
    };
    if sent < bytes.len() {
        this.outgoing.push_rest(&source, sent)?;
        return wait_writable(this);
    }
    Ok(())
}

/// `writelines(list_of_data)`: one system call for all of them.
pub(super) fn writelines(this: Stream<'_>, items: &Bound<'_, PyAny>) -> PyResult<()> {
    let items: Vec<_> = items.try_iter()?.collect::<PyResult<_>>()?;
    let sources: Vec<_> = items.iter().map(Data::new).collect::<PyResult<_>>()?;
    if !may_write(
        this,
        sources.iter().all(|source| source.as_slice().is_empty()),
        "writelines",
    )? {
        return Ok(());
    }
    for source in &sources {
        if !source.as_slice().is_empty() {
            this.outgoing.push(source)?;
        }
    }
    if this.flags.has(Flags::CORKED | Flags::BLOCKED) {
        return after_push(this);
    }
    flush(this)
}

/// False if there is nothing to do: no data, or the connection is gone. RuntimeError after `write_eof`, and while
/// `loop.sendfile` writes.
#[inline]
fn may_write(this: Stream<'_>, is_empty: bool, method: &str) -> PyResult<bool> {
    if this.flags.has(Flags::EOF_WRITTEN | Flags::SENDFILE) {
        return Err(refused(this, method));
    }
    if is_empty {
        return Ok(false);
    }
    if this.lost_writes.get() != 0 {
        flow::note_lost_write(this.py(), &this.lost_writes, flow::SEND_FAILED)?;
        return Ok(false);
    }
    Ok(true)
}

#[cold]
fn refused(this: Stream<'_>, method: &str) -> PyErr {
    if this.flags.has(Flags::EOF_WRITTEN) {
        return PyRuntimeError::new_err("Cannot call write() after write_eof()");
    }
    PyRuntimeError::new_err(format!("unable to {method}; sendfile is in progress"))
}

/// After data was put behind other data: corked data leaves once there is enough of it, blocked data may pause.
fn after_push(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) {
        return maybe_pause(this);
    }
    if this.outgoing.len_bytes() > CORK_LEN {
        return flush(this);
    }
    Ok(())
}

/// Calls `pause_writing` if the unsent data has passed the high watermark.
pub(super) fn maybe_pause(this: Stream<'_>) -> PyResult<()> {
    if this.outgoing.must_pause() {
        return flow::pause(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}

/// Calls `resume_writing` if the unsent data has sunk to the low watermark.
fn maybe_resume(this: Stream<'_>) -> PyResult<()> {
    if this.outgoing.must_resume() {
        return flow::resume(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}
