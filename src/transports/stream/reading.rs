//! The read side: each time the socket is ready, one `recv` is made, and its data is delivered to the protocol at once.
//!
//! Data is received into the loop's scratch buffer and copied to a `bytes` object of the exact size. But after several
//! large reads in a row of about the same size, data is received directly into an object of that size
//! (`queue::read_size`).

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{Flags, Stream, lifecycle, sync_interest};
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::new_bytes::{self, NewBytes};
use crate::event_loop::probe::Mode;
use crate::event_loop::reactor::flush_policy;
use crate::transports::protocol::Receiver;
use crate::transports::stream_reader::Feed;
use crate::transports::{ending, object};

#[inline(always)]
fn note_read(this: Stream<'_>, len_bytes: usize) {
    this.reactor().probe.log_event(this.py(), Mode::LOG_IO, || {
        (this.to_bound(), format!("has received {len_bytes} bytes"))
    });
}

/// Called when the socket is readable. Receives in the way that the protocol requires.
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

/// For a Protocol: receives a `bytes` object and passes it to `data_received`, or to the native function that is called
/// in place of `data_received`.
#[inline]
fn read_object(this: Stream<'_>, fd: RawFd) -> PyResult<()> {
    let py = this.py();
    let received = match this.read_size.capacity() {
        0 => receive_small(this, fd),
        len_bytes => receive_direct(this, fd, len_bytes),
    };
    match received {
        Ok(Some(data)) => {
            if this.reactor().probe.has(Mode::LOG_IO) {
                note_read(this, data.len().unwrap_or(0));
            }
            let result = flush_policy::corked(this, || match this.calls.receiver() {
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

/// Closes the connection if `data_received` has raised.
#[inline]
fn after_delivery(this: Stream<'_>, result: PyResult<()>) -> PyResult<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => ending::fatal_error(this, error, "Fatal error: protocol.data_received() call failed."),
    }
}

/// For asyncio's streams: receives into the reader's buffer, directly for large reads and through the scratch buffer
/// for small ones.
fn read_into_reader<'py>(this: Stream<'py>, fd: RawFd, feed: Feed<'py>) -> PyResult<()> {
    // SAFETY: both callers below pass the address of `len` writable bytes.
    let receive = |start: *mut u8, len: usize| unsafe { socket::recv(fd, start, len) };
    let capacity = this.read_size.capacity();
    let received = if capacity == 0 {
        this.reactor().scratch.with(|scratch| {
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
            let result = flush_policy::corked(this, || match refused {
                None => this.calls.finish_feed(feed),
                Some(data) => this.calls.call_data_received(this.py(), &data),
            })?;
            after_delivery(this, result)
        }
        Err(failure) => on_failure(this, failure),
    }
}

/// The reason why there is no data to deliver: the system call failed, or there was no memory for the object.
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

/// Receives into the scratch buffer and copies the data to an object of the exact size. None at the end of the stream.
#[inline]
fn receive_small(this: Stream<'_>, fd: RawFd) -> Result<Option<Bound<'_, PyAny>>, Failure> {
    let py = this.py();
    this.reactor().scratch.with(|scratch| {
        // SAFETY: the buffer is borrowed for the length of the call.
        let len_bytes = unsafe { socket::recv(fd, scratch.as_mut_ptr(), scratch.len())? };
        if len_bytes == 0 {
            return Ok(None);
        }
        this.read_size.note(len_bytes, scratch.len());
        Ok(Some(new_bytes::copied(py, &scratch[..len_bytes])?))
    })
}

/// Receives directly into a new object of `capacity` bytes, which is then shrunk to the bytes received. None at the end
/// of the stream.
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

/// For a native protocol: receives into the scratch buffer, and lends the received data to the protocol.
fn read_native(this: Stream<'_>, fd: RawFd) -> PyResult<()> {
    let py = this.py();
    let outcome = flush_policy::corked(this, || {
        this.reactor().scratch.with(|scratch| {
            // SAFETY: the buffer is borrowed for the length of the call.
            let result = unsafe { socket::recv(fd, scratch.as_mut_ptr(), scratch.len()) };
            if let Ok(len_bytes @ 1..) = result {
                this.calls.deliver_native(py, &scratch[..len_bytes])?;
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

/// For a BufferedProtocol: receives into the buffer that the protocol provides. The context is entered once for both
/// calls, `get_buffer` and `buffer_updated`.
fn read_into_protocol(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    let mut stage = "Fatal error: protocol.get_buffer() call failed.";
    let received = flush_policy::corked(this, || {
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

/// Called when the peer has ended its side. The result of `eof_received` says whether our side stays open for writing.
fn on_eof(this: Stream<'_>) -> PyResult<()> {
    let py = this.py();
    object::log_change(this, "%r received EOF")?;
    let answer = flush_policy::corked(this, || {
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
