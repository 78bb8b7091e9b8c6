//! The writing end. As much data as the kernel takes is written at once. The rest is written when the pipe can take
//! more. The transport also notices when the last reader has closed the pipe.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering;

use grapeshot_core::sys::pipe::{self, FileKind};
use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::exceptions::PyBrokenPipeError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Pipe, PipeBody, PipeEnd, lifecycle, sync_interest};
use crate::binding::errors;
use crate::transports::ending;
use crate::transports::outgoing::{Data, Outgoing};
use crate::transports::{flow, object};

static WRITE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

pub(super) struct Writing {
    pub(super) outgoing: Outgoing,
    /// The out-buffer waits for the descriptor to become writable.
    pub(super) is_blocked: Cell<bool>,
    /// Whether the event "readable" means that the last reader has closed the pipe.
    tells_of_lost_reader: bool,
    /// The number of failed writes, and of writes after the pipe has ended or was closed.
    lost_writes: Cell<u8>,
}

impl PipeEnd for Writing {
    const NAME: &'static CStr = c"grapeshot._core.WritePipeTransport";
    const DOC: &'static CStr =
        c"The writing end of a pipe, FIFO, terminal or socket; the interface of asyncio.WriteTransport.";
    const REFUSAL: &'static str = "Pipe transport is only for pipes, sockets and character devices";

    fn new(kind: FileKind) -> Self {
        Self {
            outgoing: Outgoing::new(),
            is_blocked: Cell::new(false),
            tells_of_lost_reader: kind.tells_of_lost_reader(),
            lost_writes: Cell::new(0),
        }
    }

    fn kind() -> &'static AtomicPtr<ffi::PyTypeObject> {
        &WRITE_TYPE
    }

    fn wanted_interest(pipe: &PipeBody<Self>) -> Interest {
        let end = &pipe.end;
        let watch = if end.tells_of_lost_reader {
            Interest::READ
        } else {
            Interest::NONE
        };
        if end.is_blocked.get() {
            watch.with(Interest::WRITE)
        } else {
            watch
        }
    }

    fn on_ready(this: Pipe<'_, Self>, readiness: Readiness) -> PyResult<()> {
        if readiness.is_readable() && this.registration.interest().has_read() {
            return on_reader_lost(this);
        }
        if readiness.is_writable() && this.end.is_blocked.get() {
            return on_writable(this);
        }
        Ok(())
    }

    fn is_ordinary(_: Option<i32>) -> bool {
        true
    }

    fn drop_buffer(&self) {
        self.outgoing.clear();
        self.is_blocked.set(false);
    }

    fn describe(pipe: &PipeBody<Self>) -> String {
        let polling = if pipe.end.is_blocked.get() {
            "polling"
        } else {
            "idle"
        };
        format!("{polling} bufsize={}", pipe.end.outgoing.len_bytes())
    }
}

/// `write(data)`.
pub(super) fn write(this: Pipe<'_, Writing>, data: &Bound<'_, PyAny>) -> PyResult<()> {
    let data = Data::new(data)?;
    if data.as_slice().is_empty() || is_lost(this)? {
        return Ok(());
    }
    let outgoing = &this.end.outgoing;
    // Get the descriptor before reading `is_blocked`: `usable_fd` may call the `fileno()` of an unusual pipe object,
    // which may call `write` and so set `is_blocked`.
    let fd = this.registration.usable_fd(this.py());
    if this.end.is_blocked.get() {
        outgoing.push(&data)?;
        return maybe_pause(this);
    }
    let bytes = data.as_slice();
    let sent = match fd.and_then(|fd| pipe::write(fd, bytes)) {
        Ok(sent) => {
            this.reactor().probe.counters.note_write(sent);
            sent
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => return on_write_error(this, &error),
    };
    if sent == bytes.len() {
        return Ok(());
    }
    outgoing.push_rest(&data, sent)?;
    wait_writable(this)
}

/// `writelines(list_of_data)`: writes all objects together. Each system call takes up to 64 of them.
pub(super) fn writelines(this: Pipe<'_, Writing>, items: &Bound<'_, PyAny>) -> PyResult<()> {
    let items: Vec<_> = items.try_iter()?.collect::<PyResult<_>>()?;
    let data: Vec<_> = items.iter().map(Data::new).collect::<PyResult<_>>()?;
    if data.iter().all(|data| data.as_slice().is_empty()) || is_lost(this)? {
        return Ok(());
    }
    let outgoing = &this.end.outgoing;
    for data in data.iter().filter(|data| !data.as_slice().is_empty()) {
        outgoing.push(data)?;
    }
    if this.end.is_blocked.get() {
        return maybe_pause(this);
    }
    match drain(this) {
        Err(error) => on_write_error(this, &error),
        Ok(()) if outgoing.is_empty() => Ok(()),
        Ok(()) => wait_writable(this),
    }
}

/// `write_eof()` and `close()`: write the buffered data, then close the pipe.
pub(super) fn close(this: Pipe<'_, Writing>) -> PyResult<()> {
    if this.is_closing.load(Ordering::Relaxed) {
        return Ok(());
    }
    object::check_thread(this)?;
    this.is_closing.store(true, Ordering::Relaxed);
    if !this.end.is_blocked.get() {
        return ending::finish(this, None);
    }
    // If other code has closed the pipe object, the buffer can never drain: end the transport with an error.
    match this.registration.usable_fd(this.py()) {
        Ok(_) => Ok(()),
        Err(error) => on_write_error(this, &error),
    }
}

/// `abort()`: closes the pipe and discards the buffered data.
pub(super) fn abort(this: Pipe<'_, Writing>) -> PyResult<()> {
    object::check_thread(this)?;
    ending::finish(this, None)
}

/// True if the pipe has ended or is being closed. If so, this counts the caller's write as lost. After a few such
/// writes, each further one logs a warning (`flow::note_lost_write`).
fn is_lost(this: Pipe<'_, Writing>) -> PyResult<bool> {
    let lost_writes = &this.end.lost_writes;
    if lost_writes.get() == 0 && !this.is_closing.load(Ordering::Relaxed) {
        return Ok(false);
    }
    let warning = "pipe closed by peer or os.write(pipe, data) raised exception.";
    flow::note_lost_write(this.py(), lost_writes, warning)?;
    Ok(true)
}

/// Writes from the out-buffer with one or more system calls. Ok with data left over means that the pipe is full.
fn drain(this: Pipe<'_, Writing>) -> io::Result<()> {
    let fd = this.registration.usable_fd(this.py())?;
    let counters = &this.reactor().probe.counters;
    this.end.outgoing.drain(|slices| {
        let sent = match slices {
            [one] => pipe::write(fd, one),
            many => pipe::write_vectored(fd, many),
        }?;
        counters.note_write(sent);
        Ok(sent)
    })
}

fn wait_writable(this: Pipe<'_, Writing>) -> PyResult<()> {
    this.end.is_blocked.set(true);
    sync_interest(this)?;
    maybe_pause(this)
}

fn maybe_pause(this: Pipe<'_, Writing>) -> PyResult<()> {
    if this.end.outgoing.must_pause() {
        return flow::pause(&this.event_loop, &this.calls, &this.to_bound());
    }
    Ok(())
}

/// Called when the watermarks were changed: pauses the protocol if it must be paused now.
pub(super) fn limits_changed(this: Pipe<'_, Writing>) -> PyResult<()> {
    if this.end.is_blocked.get() {
        return maybe_pause(this);
    }
    Ok(())
}

fn on_writable(this: Pipe<'_, Writing>) -> PyResult<()> {
    if let Err(error) = drain(this) {
        return on_write_error(this, &error);
    }
    let end = &this.end;
    if end.outgoing.is_empty() {
        end.is_blocked.set(false);
    }
    if end.outgoing.must_resume() {
        // The protocol may write, close or abort inside this call.
        flow::resume(&this.event_loop, &this.calls, &this.to_bound())?;
    }
    if end.is_blocked.get() {
        return Ok(());
    }
    if this.is_closing.load(Ordering::Relaxed) {
        return ending::finish(this, None);
    }
    sync_interest(this)
}

#[cold]
fn on_write_error(this: Pipe<'_, Writing>, error: &io::Error) -> PyResult<()> {
    let lost_writes = &this.end.lost_writes;
    lost_writes.set(lost_writes.get().saturating_add(1));
    ending::fatal_error(
        this,
        errors::os_error(error),
        "Fatal write error on pipe transport",
    )
}

/// Called when the last reader has closed the pipe. `connection_lost` gets `BrokenPipeError` if there was data left to
/// write, otherwise None.
#[cold]
fn on_reader_lost(this: Pipe<'_, Writing>) -> PyResult<()> {
    lifecycle::log_closed_by_peer(this)?;
    let exception = if this.end.outgoing.is_empty() {
        None
    } else {
        let error = PyBrokenPipeError::new_err(());
        Some(error.into_value(this.py()).into_bound(this.py()).into_any())
    };
    ending::finish(this, exception)
}
