//! The write side.
//!
//! Small writes are corked or held and then sent together, so that a reply in four writes costs a single system call;
//! `flush_policy` decides when. Data that the kernel does not take waits in the out-buffer until the socket is
//! writable. If the buffer grows above the high watermark, the protocol is told to pause.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;

use grapeshot_core::queue::outbuf;
use grapeshot_core::sys::socket;
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Flags, Stream, StreamBody, StreamObject, sync_interest};
use crate::binding::errors;
use crate::binding::flags::FlagCell;
use crate::event_loop::probe::Mode;
use crate::event_loop::reactor::Held;
use crate::event_loop::reactor::flush_policy::{self, Flushable};
use crate::transports::ending;
use crate::transports::flow;
use crate::transports::outgoing::Data;

/// Several chunks of at most this many bytes in total are copied into one buffer and sent from there.
const JOINED_LEN: usize = 2 * 1024;

impl Flushable for StreamObject {
    type Flags = Flags;
    const CORKED: Flags = Flags::CORKED;
    const HELD: Flags = Flags::HELD;
    const HELD_LEN: usize = flush_policy::HELD_STREAM_LEN;

    #[inline]
    fn flags(&self) -> &FlagCell<Flags> {
        &self.flags
    }

    #[inline]
    fn held(&self) -> &Held {
        &self.reactor().held
    }

    #[inline]
    fn unsent_len(&self) -> usize {
        self.outgoing.len_bytes()
    }

    #[inline]
    fn high_watermark(&self) -> usize {
        self.outgoing.watermarks.high()
    }

    #[inline]
    fn flush(this: Stream<'_>) -> PyResult<()> {
        send_collected(this)
    }
}

/// Sends corked and held data, if there is any.
#[inline]
pub(super) fn send_collected(this: Stream<'_>) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) || this.outgoing.is_empty() {
        return Ok(());
    }
    flush(this)
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

/// Sends from the out-buffer with one or more system calls. If it returns `Ok` and data is left over, the kernel's
/// buffer is full.
fn send_buffered(this: Stream<'_>) -> io::Result<()> {
    let fd = this.usable_fd(this.py())?;
    let counters = &this.reactor().probe.counters;
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
    this.reactor().probe.log_event(this.py(), Mode::LOG_IO, || {
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

/// Called when the socket is writable again.
pub(super) fn on_writable(this: Stream<'_>) -> PyResult<()> {
    if let Err(error) = send_buffered(this) {
        return on_write_error(this, &error);
    }
    if this.outgoing.is_empty() {
        this.flags.clear(Flags::BLOCKED);
    }
    // The protocol may write or close inside resume_writing; its writes are corked as in any other callback.
    flush_policy::corked(this, || maybe_resume(this))??;
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

/// Ends our side of the connection. Err only if other code has closed the descriptor (EBADF). An error of shutdown(2)
/// is ignored: if the connection is already lost, the next read reports it.
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
    flush_policy::send_held(this)
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
    if is_holdable && flush_policy::may_hold(this, bytes.len()) {
        this.outgoing.push(&source)?;
        this.reactor().probe.counters.corked_writes.add(1);
        flush_policy::hold(this, bytes.len());
        return Ok(());
    }
    let fd = this.usable_fd(py);
    // Code that ran in `usable_fd` (the `fileno()` of an unusual socket object) may have changed a bytearray.
    let bytes = source.as_slice();
    if this.flags.has(Flags::BLOCKED) {
        // That code has written other data, and the kernel did not take all of that. So `data` waits behind the rest.
        this.outgoing.push(&source)?;
        return after_push(this, bytes.len());
    }
    let sent = match fd.and_then(|fd| socket::send(fd, bytes)) {
        Ok(sent) => {
            this.reactor().probe.counters.note_write(sent);
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

/// `writelines(list_of_data)`: sends, corks or holds all objects together.
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
    if flush_policy::may_hold(this, new_len) {
        this.reactor().probe.counters.corked_writes.add(1);
        flush_policy::hold(this, new_len);
        return Ok(());
    }
    flush(this)
}

/// Returns false if there is nothing to do, because there is no data or the connection is gone. Raises RuntimeError
/// after `write_eof`, and while `loop.sendfile` writes.
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

/// To be called after `new_len` bytes were put into the out-buffer of a corked, held or blocked transport. If the
/// transport is blocked, pauses the protocol if necessary. Otherwise sends the corked or held data, unless
/// `flush_policy` lets it wait longer.
fn after_push(this: Stream<'_>, new_len: usize) -> PyResult<()> {
    if this.flags.has(Flags::BLOCKED) {
        return maybe_pause(this);
    }
    this.reactor().probe.counters.corked_writes.add(1);
    if flush_policy::may_wait(this, new_len) {
        return Ok(());
    }
    flush(this)
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
