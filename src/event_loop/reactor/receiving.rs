//! `recv` on a socket that waits in the fd table: where the data goes.
//!
//! Small and irregular reads go through the loop's scratch buffer into a `bytes` of exactly their size. Steady reads of a
//! larger size go straight into a `bytes` of that size (`read_size`), and so do large reads of which the last one filled
//! half of what the program asks for.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::socket;
use pyo3::prelude::*;

use super::Reactor;
use crate::binding::new_bytes::{self, NewBytes};

/// What was received, and how much the call could have returned.
pub(crate) struct Received<'py> {
    pub(crate) data: Bound<'py, PyAny>,
    pub(crate) len_bytes: usize,
    pub(crate) capacity: usize,
}

impl Reactor {
    /// Receives up to `len` bytes, at least 1, without blocking. None: a datagram may be longer than the scratch buffer,
    /// so the caller must receive it in another way.
    ///
    /// A direct read of steady size happens only after an event, since most first attempts find nothing. It reads less
    /// than asked for only from a stream, of which nothing is lost if there was more.
    #[inline]
    pub(crate) fn receive<'py>(
        &self,
        py: Python<'py>,
        fd: RawFd,
        len: usize,
        is_after_event: bool,
        is_stream: impl Fn() -> bool,
    ) -> PyResult<Option<io::Result<Received<'py>>>> {
        // Valid to the end: receiving runs no other code, nor does making a `bytes` object.
        let watch = self.watch(fd);
        let note = |len_bytes, capacity| {
            if let Some(watch) = watch {
                watch.note_read(len_bytes, capacity);
            }
        };
        let expected = watch.map_or(0, |watch| watch.read_capacity(len, is_after_event));
        if expected > 0 && (expected == len || is_stream()) {
            let received = receive_direct(py, fd, expected)?;
            if let Ok(received) = &received {
                // A read that is as long as was asked for says nothing about what there is.
                let limit = if expected == len { usize::MAX } else { expected };
                note(received.len_bytes, limit);
            }
            return Ok(Some(received));
        }
        let received = self.with_scratch(|scratch| {
            if len > scratch.len() && !is_stream() {
                return Ok(None);
            }
            let capacity = len.min(scratch.len());
            // SAFETY: the scratch buffer is lent for this call and at least `capacity` long.
            Ok(Some(
                match unsafe { socket::recv_now(fd, scratch.as_mut_ptr(), capacity) } {
                    Ok(len_bytes) => Ok(Received {
                        data: new_bytes::copied(py, &scratch[..len_bytes])?,
                        len_bytes,
                        capacity,
                    }),
                    Err(error) => Err(error),
                },
            ))
        });
        if let Ok(Some(Ok(received))) = &received {
            note(received.len_bytes, 0);
        }
        received
    }
}

/// Receives straight into a new object of `capacity` bytes, which then gives back the bytes that it does not need.
pub(crate) fn receive_direct(
    py: Python<'_>,
    fd: RawFd,
    capacity: usize,
) -> PyResult<io::Result<Received<'_>>> {
    let mut data = NewBytes::with_capacity(py, capacity)?;
    // SAFETY: the object is unshared and has so many bytes.
    match unsafe { socket::recv_now(fd, data.as_mut_ptr(), capacity) } {
        Ok(len_bytes) => Ok(Ok(Received {
            data: data.finish(len_bytes)?,
            len_bytes,
            capacity,
        })),
        Err(error) => Ok(Err(error)),
    }
}
