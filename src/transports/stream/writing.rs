//! The write side.
//!
//! Small writes are collected and sent in one system call, so that a reply in four writes costs a single `writev`.
//! Writes in a callback of the transport's own protocol are sent when the callback returns (they are corked). Writes in
//! any other code that the loop runs are sent at the end of the running step (they are held). Large writes are sent at
//! once, and so are all writes while no loop runs. Data that the kernel does not take waits until the socket is
//! writable, under the control of the watermarks.
//!
//! ```text
//!   write --> in own callback: corked ---.                   .--- small, in a step: held
//!                                        v                   v
//!   callback returns, above CORK_LEN --> flush <-- end of step, above HOLD_LEN, step takes long, state is queried
//! ```

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;

use grapeshot_core::queue::outbuf;
use grapeshot_core::sys::socket;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Flags, Stream, StreamBody, sync_interest};
use crate::binding::errors;
use crate::binding::log::{self, Topic};
use crate::binding::native_type::This;
use crate::transports::ending;
use crate::transports::flow;
use crate::transports::outgoing::Data;

/// Corked data beyond this is sent at once. It fills whole system calls anyway, and memory must not fill with data that
/// the kernel would take.
const CORK_LEN: usize = 64 * 1024;

/// Held data beyond this is sent at once, while it is still in the processor's cache.
const HOLD_LEN: usize = 16 * 1024;

/// Several chunks of at most this many bytes in total are copied into one buffer and sent from there.
const JOINED_LEN: usize = 2 * 1024;

/// Runs `call`, a callback of the protocol, with writes corked, and then sends the data that it has written. The outer
/// error is for exceptions that must leave the loop; the inner result is the callback's.
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

/// Sends held data, so that the caller finds the transport in the state that it would have if each write had been sent
/// at once. Corked data stays.
#[inline]
pub(super) fn send_held(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::HELD) && !this.flags.has(Flags::CORKED) {
        return uncork(this);
    }
    Ok(())
}

/// Sends the held data at the end of the step that has written it.
///
/// # Safety
/// The loop calls this with a stream transport, to which it holds a reference.
unsafe fn end_hold(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Stream<'_> = unsafe { This::new(py, object) };
    // The flag stays set during the call: if code that runs inside it writes (the `fileno()` of an unusual socket
    // object), the new data must go behind the old.
    let sent = uncork(this);
    this.flags.clear(Flags::HELD);
    sent
}

/// Whether a write of `len_bytes` to a transport with an empty out-buffer may wait for the end of the running step.
#[inline]
fn may_hold(this: Stream<'_>, len_bytes: usize) -> bool {
    len_bytes <= HOLD_LEN && this.outgoing.watermarks.may_hold(len_bytes) && this.reactor().held.may_hold()
}

/// Keeps the content of the out-buffer until the end of the running step.
#[inline]
fn hold(this: Stream<'_>, len_bytes: usize) {
    this.flags.set(Flags::HELD);
    this.reactor().held.hold(this.to_bound(), len_bytes, end_hold);
}

/// Sends from the out-buffer until it is empty or the kernel takes no more. The rest then waits until the socket is
/// writable.
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

/// Keeps the out-buffer until the socket is writable, and pauses the protocol if the buffer holds too much.
fn wait_writable(this: Stream<'_>) -> PyResult<()> {
    this.flags.set(Flags::BLOCKED);
    sync_interest(this)?;
    maybe_pause(this)
}

/// Sends from the out-buffer with one or more system calls. Ok with data left over means that the kernel's buffer is
/// full.
fn send_buffered(this: Stream<'_>) -> io::Result<()> {
    let fd = this.usable_fd(this.py())?;
    let counters = &this.reactor().counters;
    let before = counters.bytes_written.get();
    let result = this.outgoing.drain(|slices| {
        let sent = match slices {
            [one] => socket::send(fd, one),
            many => send_many(fd, many),
        }?;
        counters.note_write(sent);
        Ok(sent)
    });
    note_sent(this, counters.bytes_written.get() - before);
    result
}

#[inline(always)]
fn note_sent(this: Stream<'_>, len_bytes: u64) {
    log::event(this.py(), Topic::Io, || {
        (this.to_bound(), format!("has sent {len_bytes} bytes"))
    });
}

/// Sends several slices with one system call. Short ones are joined first, because the kernel handles a single buffer
/// faster.
fn send_many(fd: RawFd, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    if slices.iter().map(|slice| slice.len()).sum::<usize>() > JOINED_LEN {
        return socket::send_vectored(fd, slices);
    }
    let mut joined = [const { MaybeUninit::uninit() }; JOINED_LEN];
    socket::send(fd, outbuf::join(slices, &mut joined))
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

/// Discards the data that has not been sent.
pub(super) fn drop_buffer(body: &StreamBody) {
    body.outgoing.clear();
    body.flags.clear(Flags::BLOCKED);
}

/// The socket is writable again.
pub(super) fn on_writable(this: Stream<'_>) -> PyResult<()> {
    if let Err(error) = send_buffered(this) {
        return on_write_error(this, &error);
    }
    if this.outgoing.is_empty() {
        this.flags.clear(Flags::BLOCKED);
    }
    // The protocol may write or close inside resume_writing; its writes are corked as in any other callback.
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

/// Ends our side of the connection. Errors of the call are ignored: if the peer is gone already, the read side finds
/// out. Returns EBADF if other code has closed the socket.
pub(super) fn shutdown(this: Stream<'_>) -> io::Result<()> {
    let fd = this.usable_fd(this.py())?;
    let _ = socket::shutdown_write(fd);
    Ok(())
}

/// `write(data)`.
#[inline]
pub(super) fn write(this: Stream<'_>, data: *mut ffi::PyObject) -> PyResult<()> {
    write_or_hold(this, data, true)
}

/// `write(data)` for native callers that have collected data themselves. This data is not held. If other data is held,
/// both are sent now.
#[inline]
pub(super) fn write_collected(this: Stream<'_>, data: *mut ffi::PyObject) -> PyResult<()> {
    write_or_hold(this, data, false)?;
    send_held(this)
}

#[inline(always)]
fn write_or_hold(this: Stream<'_>, data: *mut ffi::PyObject, is_holdable: bool) -> PyResult<()> {
    let py = this.py();
    // SAFETY: `data` is an argument of the running call, so it is alive.
    let data = unsafe { Bound::from_borrowed_ptr(py, data) };
    let source = Data::new(&data)?;
    if !may_write(this, source.as_slice().is_empty(), "write")? {
        return Ok(());
    }
    let bytes = source.as_slice();
    if this.flags.has(Flags::CORKED | Flags::BLOCKED | Flags::HELD) {
        this.outgoing.push(&source)?;
        return after_push(this, bytes.len());
    }
    if is_holdable && may_hold(this, bytes.len()) {
        this.outgoing.push(&source)?;
        this.reactor().counters.corked_writes.add(1);
        hold(this, bytes.len());
        return Ok(());
    }
    let fd = this.usable_fd(py);
    if this.flags.has(Flags::BLOCKED) {
        // Code that ran in `usable_fd` (the `fileno()` of an unusual socket object) has written more than the kernel
        // took.
        this.outgoing.push(&source)?;
        return after_push(this, bytes.len());
    }
    let sent = match fd.and_then(|fd| socket::send(fd, bytes)) {
        Ok(sent) => {
            this.reactor().counters.note_write(sent);
            sent
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => return on_write_error(this, &error),
    };
    if sent < bytes.len() {
        this.outgoing.push_rest(&source, sent)?;
        wait_writable(this)?;
    }
    note_sent(this, sent as u64);
    Ok(())
}

/// `writelines(list_of_data)`: sends all objects with one system call.
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
    let mut new_len = 0;
    for source in &sources {
        new_len += source.as_slice().len();
        if !source.as_slice().is_empty() {
            this.outgoing.push(source)?;
        }
    }
    if this.flags.has(Flags::CORKED | Flags::BLOCKED | Flags::HELD) {
        return after_push(this, new_len);
    }
    if may_hold(this, this.outgoing.len_bytes()) {
        this.reactor().counters.corked_writes.add(1);
        hold(this, new_len);
        return Ok(());
    }
    flush(this)
}

/// Returns false if there is nothing to do, because there is no data or the connection is gone. RuntimeError after
/// `write_eof`, and while `loop.sendfile` writes.
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

/// To be called after `new_len` bytes were queued behind other data. Corked and held data is sent once there is enough
/// of it; if the socket is blocked, the protocol may have to be paused.
fn after_push(this: Stream<'_>, new_len: usize) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) {
        return maybe_pause(this);
    }
    this.reactor().counters.corked_writes.add(1);
    let len_bytes = this.outgoing.len_bytes();
    let may_wait = if this.flags.has(Flags::CORKED) {
        len_bytes <= CORK_LEN
    } else {
        may_hold(this, len_bytes) && this.reactor().held.may_hold_more(new_len)
    };
    if may_wait { Ok(()) } else { flush(this) }
}

/// Calls `pause_writing` if the unsent data has risen above the high watermark.
pub(super) fn maybe_pause(this: Stream<'_>) -> PyResult<()> {
    if this.outgoing.must_pause() {
        return flow::pause(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}

/// Calls `resume_writing` if the unsent data has fallen to the low watermark.
fn maybe_resume(this: Stream<'_>) -> PyResult<()> {
    if this.outgoing.must_resume() {
        return flow::resume(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}
