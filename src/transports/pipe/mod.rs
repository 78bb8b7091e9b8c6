//! `ReadPipeTransport` and `WritePipeTransport`: the transports of the two ends of pipes, FIFOs, terminals, and sockets
//! that are used in one direction.
//!
//! - `lifecycle`: from `connection_made` to `connection_lost`, the same for both ends
//! - `reading`, `writing`: the two ends
//! - `methods`: the Python methods and attributes
//!
//! A transport is used on the loop's thread only, except that any thread may call `close`, `is_closing` and, at the
//! writing end, `abort`. It owns the pipe object that it was given; the pipe object owns the descriptor and is closed
//! exactly once. All fields that change are cells or atomics, because a call into Python may re-enter every method.

mod lifecycle;
mod methods;
mod reading;
mod writing;

use std::cell::Cell;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use grapeshot_core::sys::pipe::FileKind;
use grapeshot_core::sys::poller::{Interest, Readiness};
use pyo3::exceptions::PyOSError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::ending::{self, Ending};
use super::object::{Body, TransportObject};
use super::protocol::ProtocolCalls;
use super::registration::Registration;
use crate::binding::errors;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::event_loop::source::Source;

pub(super) use methods::{loop_methods, register};

/// The parts that differ between the two ends.
pub(super) trait PipeEnd: Sized {
    const NAME: &'static CStr;
    const DOC: &'static CStr;
    /// The message of the ValueError for a file that cannot be polled.
    const REFUSAL: &'static str;

    fn new(kind: FileKind) -> Self;

    /// The Python type of this end, which `register` has made.
    fn kind() -> &'static AtomicPtr<ffi::PyTypeObject>;

    /// The events to wait for, derived from the transport's state.
    fn wanted_interest(pipe: &PipeBody<Self>) -> Interest;

    fn on_ready(this: Pipe<'_, Self>, readiness: Readiness) -> PyResult<()>;

    /// Whether an OSError with this errno is part of normal operation on this end. Such errors are not reported.
    fn is_ordinary(errno: Option<i32>) -> bool;

    /// Discards the data that has not been sent.
    fn drop_buffer(&self) {}

    /// The part of the repr that only an open pipe has: whether the poller waits for readability or writability. The
    /// writing end adds the size of its buffer.
    fn describe(pipe: &PipeBody<Self>) -> String;
}

pub(super) struct PipeBody<E> {
    /// The pipe object, which owns the descriptor; empty once the pipe object is closed.
    pipe: ObjectCell,
    /// The Future to complete when the transport is set up.
    waiter: ObjectCell,
    /// The exception to pass to `connection_lost`; empty for None.
    exception: ObjectCell,
    calls: ProtocolCalls,
    registration: Registration,
    /// A descriptor of our own, if another transport already polls the pipe's descriptor.
    duplicate: Cell<Option<OwnedFd>>,
    /// The pipe's descriptor, which `repr()` shows even after the close.
    fileno: RawFd,
    /// Set when `close()`, `write_eof()` or `abort()` was called, the stream has ended, or the pipe has failed.
    is_closing: AtomicBool,
    /// Set when all I/O has stopped and `connection_lost` is queued.
    is_finished: Cell<bool>,
    end: E,
}

pub(super) type PipeObject<E> = TransportObject<PipeBody<E>>;
pub(super) type Pipe<'py, E> = This<'py, PipeObject<E>>;

/// Makes the poller wait for the events that the transport's state requires. A failure ends the transport.
fn sync_interest<E: PipeEnd>(this: Pipe<'_, E>) -> PyResult<()> {
    let wanted = E::wanted_interest(&this);
    match this.registration.sync(this.py(), this.reactor(), wanted) {
        Ok(()) => Ok(()),
        Err(error) => ending::fatal_error(this, errors::os_error(&error), "Fatal error on pipe transport"),
    }
}

impl<E: PipeEnd> Source for PipeObject<E> {
    fn on_ready(this: This<'_, Self>, readiness: Readiness) -> PyResult<()> {
        match this.registration.usable_fd(this.py()) {
            Ok(_) => E::on_ready(this, readiness),
            Err(error) => {
                ending::fatal_error(this, errors::os_error(&error), "Fatal error on pipe transport")
            }
        }
    }

    fn interest(&self) -> Interest {
        self.registration.interest()
    }

    fn has_descriptor(this: This<'_, Self>) -> bool {
        this.registration.usable_fd(this.py()).is_ok()
    }

    fn on_displaced(this: This<'_, Self>) {
        ending::on_displaced(this);
    }
}

impl<E: PipeEnd> Ending for PipeBody<E> {
    const FAULT: &'static str = "Fatal error on pipe transport";
    const LOST_FAILED: &'static str = "Exception in callback protocol.connection_lost()";
    const CLOSE_FAILED: &'static str = "Exception in callback pipe.close()";

    fn registration(&self) -> &Registration {
        &self.registration
    }

    fn exception(&self) -> &ObjectCell {
        &self.exception
    }

    fn mark_finished(&self) -> bool {
        self.is_closing.store(true, Ordering::Relaxed);
        !self.is_finished.replace(true)
    }

    fn drop_buffer(&self) {
        self.end.drop_buffer();
    }

    fn close_owned(&self, py: Python<'_>) -> PyResult<()> {
        lifecycle::close_pipe(py, self)
    }

    fn is_ordinary(error: &PyErr, py: Python<'_>) -> bool {
        let errno = || error.value(py).getattr("errno").and_then(|errno| errno.extract());
        error.is_instance_of::<PyOSError>(py) && E::is_ordinary(errno().ok())
    }
}

impl<E: PipeEnd> Body for PipeBody<E> {
    const NAME: &'static CStr = E::NAME;
    const DOC: &'static CStr = E::DOC;

    /// `<ReadPipeTransport fd=7 polling>`, in the words that asyncio's own transports use.
    fn describe(this: Pipe<'_, E>) -> String {
        let name = E::NAME.to_string_lossy();
        let name = name.rsplit('.').next().unwrap_or_default();
        let mut words = vec![name.to_owned()];
        if !this.pipe.is_set() {
            words.push("closed".to_owned());
        } else if this.is_closing.load(Ordering::Relaxed) {
            words.push("closing".to_owned());
        }
        words.push(format!("fd={}", this.fileno));
        if this.pipe.is_set() {
            if this.reactor().is_closed() {
                words.push("open".to_owned());
            } else {
                words.push(E::describe(&this));
            }
        }
        format!("<{}>", words.join(" "))
    }

    fn is_open(&self) -> bool {
        self.pipe.is_set()
    }

    fn close(&self, py: Python<'_>) {
        if let Err(error) = lifecycle::close_pipe(py, self) {
            error.write_unraisable(py, None);
        }
    }

    fn calls(&self) -> &ProtocolCalls {
        &self.calls
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        let owner = self.registration.owner().cell();
        [&self.pipe, &self.waiter, &self.exception, owner]
    }

    fn clear(&self, py: Python<'_>) {
        drop(self.waiter.take(py));
        drop(self.exception.take(py));
    }
}

/// The body of the transport of `pipe`. `fd` is the pipe's descriptor, and `kind` is the kind of its file. If there is
/// a `duplicate`, it is polled instead of `fd`.
fn new_body<E: PipeEnd>(
    pipe: &Bound<'_, PyAny>,
    fd: RawFd,
    kind: FileKind,
    duplicate: Option<OwnedFd>,
    protocol: &Bound<'_, PyAny>,
) -> PyResult<PipeBody<E>> {
    let is_duplicate = duplicate.is_some();
    let body = PipeBody {
        pipe: ObjectCell::empty(),
        waiter: ObjectCell::empty(),
        exception: ObjectCell::empty(),
        calls: ProtocolCalls::new(protocol)?,
        registration: Registration::new(duplicate.as_ref().map_or(fd, AsRawFd::as_raw_fd)),
        duplicate: Cell::new(duplicate),
        fileno: fd,
        is_closing: AtomicBool::new(false),
        is_finished: Cell::new(false),
        end: E::new(kind),
    };
    if !is_duplicate {
        body.registration.set_owner(pipe);
    }
    body.pipe.set(pipe.clone());
    Ok(body)
}
