//! Receiving on a socket that the program owns: decides into which buffer the data is read.
//!
//! Small and irregular reads go through the loop's scratch buffer and are then copied into a `bytes` of exactly their
//! size. If reads keep returning about the same size, between 8 and 256 KiB, the next one goes straight into a `bytes`
//! of that size. Otherwise, if at most 256 KiB are requested and the last read returned at least 8 KiB and at least
//! about half of the requested length, the read goes straight into a `bytes` of the requested length. See `read_size`.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket;
use pyo3::prelude::*;

use super::Reactor;
use crate::binding::new_bytes::{self, NewBytes};

/// The received data, its length, and the largest number of bytes that the call could have returned.
pub(crate) struct Received<'py> {
    pub(crate) data: Bound<'py, PyAny>,
    pub(crate) len_bytes: usize,
    pub(crate) capacity: usize,
}

impl Reactor {
    /// Receives up to `len` bytes without blocking; `len` is at least 1. Returns None if the caller must receive in
    /// another way: the socket is not a stream, and a datagram may be longer than the scratch buffer.
    ///
    /// If the size of reads has been steady, a read goes straight into a `bytes` of that size, but only after an event:
    /// most reads without an event find no data. The `bytes` may be shorter than `len`, but only on a stream, where the
    /// rest of the data stays for the next read.
    #[inline]
    pub(crate) fn receive<'py>(
        &self,
        py: Python<'py>,
        fd: RawFd,
        len: usize,
        is_after_event: bool,
        is_stream: impl Fn() -> bool,
    ) -> PyResult<Option<io::Result<Received<'py>>>> {
        // The watch stays valid in this function: neither receiving nor making a `bytes` object runs other code.
        let watch = self.descriptors.watch(fd);
        let note = |len_bytes, capacity| {
            if let Some(watch) = watch {
                watch.note_read(len_bytes, capacity);
            }
        };
        let expected = watch.map_or(0, |watch| watch.read_capacity(len, is_after_event));
        if expected > 0 && (expected == len || is_stream()) {
            let received = receive_direct(py, fd, expected)?;
            if let Ok(received) = &received {
                // If the program's own `len` was the limit, filling it does not mean that larger reads are coming.
                let limit = if expected == len { usize::MAX } else { expected };
                note(received.len_bytes, limit);
            }
            return Ok(Some(received));
        }
        let received = self.scratch.with(|scratch| {
            if len > scratch.len() && !is_stream() {
                return Ok(None);
            }
            let capacity = len.min(scratch.len());
            // SAFETY: the scratch buffer is lent for this call and at least `capacity` long.
            let received = unsafe { socket::recv_now(fd, scratch.as_mut_ptr(), capacity) };
            Ok(Some(match received {
                Ok(len_bytes) => Ok(Received {
                    data: new_bytes::copied(py, &scratch[..len_bytes])?,
                    len_bytes,
                    capacity,
                }),
                Err(error) => Err(error),
            }))
        });
        if let Ok(Some(Ok(received))) = &received {
            note(received.len_bytes, 0);
        }
        received
    }
}

/// Receives straight into a new `bytes` of `capacity` bytes, and then shrinks it to the received length.
pub(crate) fn receive_direct(
    py: Python<'_>,
    fd: RawFd,
    capacity: usize,
) -> PyResult<io::Result<Received<'_>>> {
    let mut data = NewBytes::with_capacity(py, capacity)?;
    // SAFETY: the object is unshared and has `capacity` bytes.
    match unsafe { socket::recv_now(fd, data.as_mut_ptr(), capacity) } {
        Ok(len_bytes) => Ok(Ok(Received {
            data: data.finish(len_bytes)?,
            len_bytes,
            capacity,
        })),
        Err(error) => Ok(Err(error)),
    }
}
