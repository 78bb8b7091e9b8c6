//! The read side: one `recv` per readiness, delivered to the protocol at once.
//!
//! Reads go through the loop's scratch buffer into an exactly sized `bytes`; those that keep to one size are received
//! straight into an object of that size (`queue::read_size`).

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{Flags, Stream, lifecycle, sync_interest, writing};
use crate::binding::errors;
use crate::binding::log::{self, Topic};
use crate::binding::names::names;
use crate::binding::new_bytes::{self, NewBytes};
use crate::transports::protocol::Receiver;
use crate::transports::stream_reader::Feed;
use crate::transports::{ending, object};

#[inline(always)]
fn note_read(this: Stream<'_>, len_bytes: usize) {
    log::event(this.py(), Topic::Io, || {
        (this.to_bound(), format!("has received {len_bytes} bytes"))
    });
}

#[inline]
pub(super) fn on_readable(this: Stream<'_>) -> PyResult<()> {
    let fd = match this.usable_fd(this.py()) {
        Ok(fd) => fd,
        Err(error) => return on_read_error(this, &error),
    };
    match this.calls.receiver() {
        Receiver::Data => match this.calls.feed(this.py()) {
            Some(feed) => read_into_reader(this, fd, feed),
            None => read_object(this, fd),
        },
        Receiver::Object(_) => read_object(this, fd),
        Receiver::Buffered => read_into_protocol(this),
        Receiver::Native => read_native(this, fd),
    }
}

/// Protocol: receive a `bytes` object and call `data_received`, or hand it to a native one.
#[inline]
fn read_object(this: Stream<'_>, fd: RawFd) -> PyResult<()> {
    let py = this.py();
    let received = match this.read_size.capacity() {
        0 => receive_small(this, fd),
        len_bytes => receive_direct(this, fd, len_bytes),
    };
    match received {
        Ok(Some(data)) => {
            if log::is_on(Topic::Io) {
                note_read(this, data.len().unwrap_or(0));
            }
            let result = writing::corked(this, || match this.calls.receiver() {
                Receiver::Data => this.calls.call_data_received(py, &data),
                _ => this.calls.deliver(py, data.cast::<PyBytes>()?),
            })?;
            after_delivery(this, result)
        }
        Ok(None) => on_eof(this),
        Err(failure) => on_failure(this, failure),
    }
}

#[cold]
fn on_failure(this: Stream<'_>, failure: Failure) -> PyResult<()> {
    match failure {
        Failure::System(error) => on_read_error(this, &error),
        Failure::Python(error) => ending::fatal_error(this, error, "Fatal read error on socket transport"),
    }
}

/// An exception in `data_received` closes the connection.
#[inline]
fn after_delivery(this: Stream<'_>, result: PyResult<()>) -> PyResult<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => ending::fatal_error(this, error, "Fatal error: protocol.data_received() call failed."),
    }
}

/// asyncio's streams: receive into the reader's buffer, large reads straight, small ones through the scratch buffer.
fn read_into_reader<'py>(this: Stream<'py>, fd: RawFd, feed: Feed<'py>) -> PyResult<()> {
    // SAFETY: the callers give `len` writable bytes.
    let receive = |start: *mut u8, len: usize| unsafe { socket::recv(fd, start, len) };
    let capacity = this.read_size.capacity();
    let received = if capacity == 0 {
        this.reactor().with_scratch(|scratch| {
            let len_bytes = receive(scratch.as_mut_ptr(), scratch.len())?;
            let data = &scratch[..len_bytes];
            if data.is_empty() || feed.extend(data) {
                return Ok((len_bytes, None));
            }
            Ok((len_bytes, Some(new_bytes::copied(this.py(), data)?)))
        })
    } else {
        match feed.receive(capacity, receive) {
            Some(received) => received
                .map(|len_bytes| (len_bytes, None))
                .map_err(Failure::System),
            None => return read_object(this, fd),
        }
    };
    match received {
        Ok((0, _)) => on_eof(this),
        Ok((len_bytes, refused)) => {
            note_read(this, len_bytes);
            this.read_size.note(len_bytes, capacity);
            let result = writing::corked(this, || match refused {
                None => this.calls.fed(feed),
                Some(data) => this.calls.call_data_received(this.py(), &data),
            })?;
            after_delivery(this, result)
        }
        Err(failure) => on_failure(this, failure),
    }
}

/// Why nothing was received: the system call failed, or there was no memory for the object.
enum Failure {
    System(io::Error),
    Python(PyErr),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

/// Through the scratch buffer into an exactly sized object. None at the end of the stream.
#[inline]
fn receive_small(this: Stream<'_>, fd: RawFd) -> Result<Option<Bound<'_, PyAny>>, Failure> {
    let py = this.py();
    this.reactor().with_scratch(|scratch| {
        // SAFETY: the buffer is borrowed for the length of the call.
        let len_bytes = unsafe { socket::recv(fd, scratch.as_mut_ptr(), scratch.len())? };
        if len_bytes == 0 {
            return Ok(None);
        }
        this.read_size.note(len_bytes, scratch.len());
        Ok(Some(new_bytes::copied(py, &scratch[..len_bytes])?))
    })
}

/// Straight into a new object of `capacity` bytes, which then gives back the bytes that it does not need. None at the
/// end of the stream.
fn receive_direct(this: Stream<'_>, fd: RawFd, capacity: usize) -> Result<Option<Bound<'_, PyAny>>, Failure> {
    let mut data = NewBytes::with_capacity(this.py(), capacity)?;
    // SAFETY: the object is new, unshared and has `capacity` bytes.
    let len_bytes = unsafe { socket::recv(fd, data.as_mut_ptr(), capacity)? };
    if len_bytes == 0 {
        return Ok(None);
    }
    this.read_size.note(len_bytes, capacity);
    Ok(Some(data.finish(len_bytes)?))
}

/// A native protocol: it gets what lies in the scratch buffer.
fn read_native(this: Stream<'_>, fd: RawFd) -> PyResult<()> {
    let py = this.py();
    let outcome = writing::corked(this, || {
        this.reactor().with_scratch(|scratch| {
            // SAFETY: the buffer is borrowed for the length of the call.
            let result = unsafe { socket::recv(fd, scratch.as_mut_ptr(), scratch.len()) };
            if let Ok(len_bytes @ 1..) = result {
                this.calls.received(py, &scratch[..len_bytes])?;
            }
            Ok(result)
        })
    })?;
    match outcome {
        Ok(Ok(0)) => on_eof(this),
        Ok(Ok(len_bytes)) => {
            note_read(this, len_bytes);
            Ok(())
        }
        Ok(Err(error)) => on_read_error(this, &error),
        Err(error) => ending::fatal_error(this, error, "Fatal error: protocol.data_received() call failed."),
    }
}

/// BufferedProtocol: receive into the buffer that the protocol offers. Both calls are one visit to its context.
fn read_into_protocol(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    let mut stage = "Fatal error: protocol.get_buffer() call failed.";
    let received = writing::corked(this, || {
        this.calls.in_context(py, || {
            let hint = (-1_i32).into_pyobject(py)?;
            this.calls.fill_buffer(py, hint.as_any(), |memory, capacity| {
                if this.fd() < 0 || this.flags.has(Flags::CLOSING | Flags::PAUSED) {
                    return Ok((0, None));
                }
                stage = "Fatal error: protocol.buffer_updated() call failed.";
                let received = this.usable_fd(py).and_then(|fd| {
                    // SAFETY: `capacity` bytes may be written.
                    unsafe { socket::recv(fd, memory, capacity) }
                });
                Ok((*received.as_ref().unwrap_or(&0), Some(received)))
            })
        })
    })?;
    match received {
        Ok(Some(Some(Ok(0)))) => on_eof(this),
        Ok(Some(Some(Ok(len_bytes)))) => {
            note_read(this, len_bytes);
            Ok(())
        }
        Ok(Some(Some(Err(error)))) => on_read_error(this, &error),
        Ok(_) => Ok(()),
        Err(error) => ending::fatal_error(this, error, stage),
    }
}

#[cold]
fn on_read_error(this: Stream<'_>, error: &io::Error) -> PyResult<()> {
    if error.kind() == io::ErrorKind::WouldBlock {
        return Ok(());
    }
    ending::fatal_error(
        this,
        errors::os_error(error),
        "Fatal read error on socket transport",
    )
}

/// The peer has ended its side: the protocol says whether to go on writing.
fn on_eof(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    object::log_change(this, "%r received EOF")?;
    let answer = writing::corked(this, || {
        this.calls.call(py, names(py).eof_received, &[])?.is_truthy()
    })?;
    match answer {
        Err(error) => ending::fatal_error(this, error, "Fatal error: protocol.eof_received() call failed."),
        Ok(true) => {
            this.flags.set(Flags::EOF_RECEIVED);
            sync_interest(this)
        }
        Ok(false) => lifecycle::close(this),
    }
}
