//! The reading end: each time the pipe is ready, one `read` through the loop's scratch buffer.

use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering;

use grapeshot_core::sys::pipe::{self, FileKind};
use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Pipe, PipeBody, PipeEnd, lifecycle, sync_interest};
use crate::binding::errors;
use crate::binding::names::names;
use crate::transports::ending;
use crate::transports::object;
use crate::transports::protocol::Receiver;

static READ_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

pub(super) struct Reading {
    /// `pause_reading()` is in force.
    is_paused: Cell<bool>,
}

impl PipeEnd for Reading {
    const NAME: &'static CStr = c"grapeshot._core.ReadPipeTransport";
    const DOC: &'static CStr =
        c"The reading end of a pipe, FIFO, terminal or socket; the interface of asyncio.ReadTransport.";
    const REFUSAL: &'static str = "Pipe transport is for pipes/sockets only.";

    fn new(_: FileKind) -> Self {
        Self {
            is_paused: Cell::new(false),
        }
    }

    fn kind() -> &'static AtomicPtr<ffi::PyTypeObject> {
        &READ_TYPE
    }

    fn wanted_interest(pipe: &PipeBody<Self>) -> Interest {
        if is_reading(pipe) {
            Interest::READ
        } else {
            Interest::NONE
        }
    }

    fn on_ready(this: Pipe<'_, Self>, _: Readiness) -> PyResult<()> {
        if is_reading(&this) {
            return on_readable(this);
        }
        // Reading was paused, but the poller still waits for data. Changing that costs a system call, which only pays
        // off now that data has come.
        sync_interest(this)
    }

    /// EIO is ordinary: a read from a pseudo-terminal fails with it once the other side of the terminal is closed.
    fn is_ordinary(errno: Option<i32>) -> bool {
        errno == Some(libc::EIO)
    }

    fn describe(pipe: &PipeBody<Self>) -> String {
        let is_polled = is_reading(pipe) && pipe.registration.is_entered();
        if is_polled { "polling" } else { "idle" }.to_owned()
    }
}

pub(super) fn is_paused(pipe: &PipeBody<Reading>) -> bool {
    pipe.end.is_paused.get()
}

pub(super) fn is_reading(pipe: &PipeBody<Reading>) -> bool {
    !pipe.is_closing.load(Ordering::Relaxed) && !pipe.end.is_paused.get()
}

/// `pause_reading()`. The poller is changed only when data comes during the pause; most pauses end before that.
pub(super) fn pause(this: Pipe<'_, Reading>) -> PyResult<()> {
    if !is_reading(&this) {
        return Ok(());
    }
    this.end.is_paused.set(true);
    object::log_change(this, "%r pauses reading")
}

/// `resume_reading()`.
pub(super) fn resume(this: Pipe<'_, Reading>) -> PyResult<()> {
    if this.is_closing.load(Ordering::Relaxed) || !this.end.is_paused.get() {
        return Ok(());
    }
    this.end.is_paused.set(false);
    // The pipe may have data by now, so the next iteration must poll. `sync_interest` does not ensure this: it does
    // nothing if the poller was not changed during the pause.
    this.reactor().descriptors.poll_next(Interest::READ);
    sync_interest(this)?;
    object::log_change(this, "%r resumes reading")
}

/// `close()`.
pub(super) fn close(this: Pipe<'_, Reading>) -> PyResult<()> {
    if this.is_closing.load(Ordering::Relaxed) {
        return Ok(());
    }
    object::check_thread(this)?;
    ending::finish(this, None)
}

fn on_readable(this: Pipe<'_, Reading>) -> PyResult<()> {
    let py = this.py();
    match read(this) {
        Ok(Some(Ok(data))) => {
            let delivered = match this.calls.receiver() {
                Receiver::Data => this.calls.data_received(py, &data),
                // As in asyncio, data from a pipe is always passed to `data_received`, even if the protocol is a
                // BufferedProtocol.
                _ => this.calls.call(py, names(py).data_received, &[&data]).map(drop),
            };
            match delivered {
                Ok(()) => Ok(()),
                Err(error) => object::report(this, error, "Exception in callback protocol.data_received()"),
            }
        }
        Ok(Some(Err(error))) => ending::fatal_error(this, error, "Fatal read error on pipe transport"),
        Ok(None) => on_eof(this),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => ending::fatal_error(
            this,
            errors::os_error(&error),
            "Fatal read error on pipe transport",
        ),
    }
}

/// Reads once and makes a `bytes` object of the exact size. Returns None at the end of the stream. The inner result is
/// an error if the object cannot be made.
fn read(this: Pipe<'_, Reading>) -> io::Result<Option<PyResult<Bound<'_, PyAny>>>> {
    let py = this.py();
    let fd = this.registration.usable_fd(py)?;
    this.reactor().scratch.with(|scratch| {
        // SAFETY: the buffer is borrowed for the length of the call.
        let len_bytes = unsafe { pipe::read(fd, scratch.as_mut_ptr(), scratch.len())? };
        if len_bytes == 0 {
            return Ok(None);
        }
        // SAFETY: `read` has written `len_bytes` bytes; making a bytes object copies them and runs no Python code.
        Ok(Some(unsafe {
            let made = ffi::PyBytes_FromStringAndSize(scratch.as_ptr().cast(), len_bytes as ffi::Py_ssize_t);
            Bound::from_owned_ptr_or_err(py, made)
        }))
    })
}

/// Called when the last writer has closed the pipe. The transport closes too, no matter what `eof_received` returns.
fn on_eof(this: Pipe<'_, Reading>) -> PyResult<()> {
    lifecycle::log_closed_by_peer(this)?;
    // Queue connection_lost first, so that it runs before the callbacks that eof_received schedules.
    ending::finish(this, None)?;
    match this.calls.call(this.py(), names(this.py()).eof_received, &[]) {
        Ok(_) => Ok(()),
        Err(error) => object::report(this, error, "Exception in callback protocol.eof_received()"),
    }
}
