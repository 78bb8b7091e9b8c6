//! Calls OpenSSL directly for the data of one connection. Ciphertext goes through a BIO of ours (`bio`) instead of two
//! `ssl.MemoryBIO` objects, which saves Python objects and copies for each record.
//!
//! The `ssl.SSLObject` stays: it owns the `SSL`, Python code sees it, and it does the handshake and the shutdown, whose
//! callbacks and errors it handles. If a read or a write fails, the engine makes the same call on that object. OpenSSL
//! then reports the same error once more, because its queue still has the error and the `SSL` stays in its error state.
//! So the object raises Python's exception.
//!
//! A call does not release the GIL, since decrypting a record of 16 KiB takes only a few microseconds. On a
//! free-threaded build, a call runs in the critical section of the `_SSLSocket`, as its Python methods do.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Mutex;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyBytes;

use super::bio::{Buffers, locked};
use super::openssl::{Bio, OpenSsl, Ssl};
use crate::binding::HAS_GIL;
use crate::binding::new_bytes::{self, NewBytes};
use crate::binding::object_cell::ObjectCell;

/// The plaintext of a full record, in bytes.
const RECORD_LEN: usize = 16 * 1024;
const HEADER_LEN: usize = 5;
/// The length of the nonce and the tag of a record of TLS 1.2 with AES-GCM, the most common cipher. (A longer record
/// that does not fit into the window goes to `Buffers::outgoing`.)
const AES_GCM_LEN: usize = 24;
/// The largest window for ciphertext. More ciphertext than this is passed on in several `bytes` objects.
const WINDOW_LEN: usize = 96 * 1024;

/// The result of a call.
pub(super) enum Outcome {
    /// The number of bytes that were read or written, at least 1.
    Done(usize),
    /// OpenSSL needs more ciphertext from the peer.
    NeedsInput,
    /// The end of the stream, or an error. The same call on the `_SSLSocket` gives Python's result.
    Other,
}

pub(super) struct Direct {
    openssl: &'static OpenSsl,
    /// Lives as long as the `_SSLSocket`.
    ssl: NonNull<Ssl>,
    /// Our own reference, which `drop` releases.
    bio: NonNull<Bio>,
    /// Lives as long as the BIO.
    buffers: NonNull<Mutex<Buffers>>,
    /// The `bytes` object whose memory is the window; empty if there is none.
    window: ObjectCell,
}

impl Direct {
    /// Replaces the two BIOs of `ssl` with one new BIO. None if there is no memory for it.
    ///
    /// # Safety
    /// No handshake may have begun. `ssl` must be live, and stay live for as long as methods of the result are called.
    pub(super) unsafe fn new(openssl: &'static OpenSsl, ssl: NonNull<Ssl>) -> Option<Self> {
        // SAFETY: a new BIO gets its data before any other code sees it, and the data is freed with the BIO.
        // SSL_set_bio takes one reference for both directions, and drops the references to the old BIOs. The second
        // reference to the new BIO is ours.
        unsafe {
            let bio = NonNull::new((openssl.BIO_new)(openssl.bio_method))?;
            let buffers = NonNull::from(Box::leak(Box::new(Mutex::new(Buffers::new()))));
            (openssl.BIO_set_data)(bio.as_ptr(), buffers.as_ptr().cast());
            (openssl.BIO_up_ref)(bio.as_ptr());
            (openssl.SSL_set_bio)(ssl.as_ptr(), bio.as_ptr(), bio.as_ptr());
            Some(Self {
                openssl,
                ssl,
                bio,
                buffers,
                window: ObjectCell::empty(),
            })
        }
    }

    /// Removes errors that other code has left in OpenSSL's queue.
    pub(super) fn clear_errors(&self) {
        self.openssl.clear_errors();
    }

    fn buffers(&self) -> &Mutex<Buffers> {
        // SAFETY: our reference keeps the BIO alive, and the BIO owns the buffers.
        unsafe { self.buffers.as_ref() }
    }

    /// Appends a copy of `data` to the ciphertext that OpenSSL can read. `MemoryError` if there is no memory.
    pub(super) fn feed(&self, data: &[u8]) -> PyResult<()> {
        if locked(self.buffers()).keep(data) {
            Ok(())
        } else {
            Err(PyMemoryError::new_err(()))
        }
    }

    /// Lets OpenSSL read `data` where it lies, until the result is dropped. The bytes that OpenSSL has not read by then
    /// are copied.
    pub(super) fn lend<'a>(&'a self, data: &'a [u8]) -> Lent<'a> {
        // SAFETY: the result borrows the data, and `Lent::drop` withdraws it. No caller leaks the result, so it is
        // dropped before the borrow ends.
        unsafe { locked(self.buffers()).lend(data.as_ptr(), data.len()) };
        Lent(self)
    }

    pub(super) fn unread_len(&self) -> usize {
        locked(self.buffers()).incoming_len()
    }

    pub(super) fn unsent_len(&self) -> usize {
        locked(self.buffers()).outgoing_len()
    }

    /// Decrypts up to `capacity` bytes into `memory`. `MemoryError` if there was no memory for ciphertext; the
    /// connection is then lost.
    ///
    /// # Safety
    /// `capacity` bytes at `memory` must be writable, and must stay valid during the call even if Python code runs.
    /// `ssl_socket` must be the object that owns the `SSL`.
    #[inline]
    pub(super) unsafe fn read(
        &self,
        ssl_socket: &Bound<'_, PyAny>,
        memory: *mut u8,
        capacity: usize,
    ) -> PyResult<Outcome> {
        let capacity = c_int::try_from(capacity).unwrap_or(c_int::MAX);
        self.openssl.clear_errors();
        // SAFETY: the caller's contract; `ssl_socket` keeps the SSL alive.
        alone(ssl_socket, || unsafe {
            self.outcome((self.openssl.SSL_read)(
                self.ssl.as_ptr(),
                memory.cast(),
                capacity,
            ))
        })
    }

    /// Encrypts bytes from the start of `data`, which must not be empty. `MemoryError` as for `read`.
    ///
    /// # Safety
    /// `ssl_socket` must be the object that owns the `SSL`.
    #[inline]
    pub(super) unsafe fn write(&self, ssl_socket: &Bound<'_, PyAny>, data: &[u8]) -> PyResult<Outcome> {
        let len = c_int::try_from(data.len()).unwrap_or(c_int::MAX);
        self.openssl.clear_errors();
        // SAFETY: `data` has at least `len` bytes; `ssl_socket` keeps the SSL alive.
        alone(ssl_socket, || unsafe {
            self.outcome((self.openssl.SSL_write)(
                self.ssl.as_ptr(),
                data.as_ptr().cast(),
                len,
            ))
        })
    }

    /// # Safety
    /// `count` must be the result of the last call of OpenSSL for the `SSL`, and the `SSL` must be live.
    unsafe fn outcome(&self, count: c_int) -> PyResult<Outcome> {
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(Outcome::Done(count)),
            _ if locked(self.buffers()).is_broken => Err(PyMemoryError::new_err(())),
            // SAFETY: the caller's contract.
            _ if unsafe { self.openssl.needs_input(self.ssl.as_ptr(), count) } => Ok(Outcome::NeedsInput),
            _ => Ok(Outcome::Other),
        }
    }

    /// The number of bytes of a decrypted record that were not read.
    ///
    /// # Safety
    /// `ssl_socket` must be the object that owns the `SSL`.
    pub(super) unsafe fn pending_len(&self, ssl_socket: &Bound<'_, PyAny>) -> usize {
        // SAFETY: the caller's contract.
        let count = alone(ssl_socket, || unsafe {
            (self.openssl.SSL_pending)(self.ssl.as_ptr())
        });
        usize::try_from(count).unwrap_or(0)
    }

    /// Makes a window for the ciphertext of `plain_len` bytes, if one may be opened (`Buffers::may_open_window`). A
    /// record has `overhead_len` bytes more than its header and its plaintext (0 if that is not known). `MemoryError`
    /// if there is no memory.
    pub(super) fn prepare(&self, py: Python<'_>, plain_len: usize, overhead_len: usize) -> PyResult<()> {
        if !locked(self.buffers()).may_open_window() {
            return Ok(());
        }
        let overhead_len = HEADER_LEN
            + if overhead_len > 0 {
                overhead_len
            } else {
                AES_GCM_LEN
            };
        // Data that is longer than one record may take several calls, and each call may end with a short record. Count
        // one such record. If there are more, the ciphertext that does not fit goes to `Buffers::outgoing`.
        let records = plain_len.div_ceil(RECORD_LEN) + usize::from(plain_len > RECORD_LEN);
        let capacity = (plain_len + records * overhead_len).min(WINDOW_LEN);
        let mut window = NewBytes::with_capacity(py, capacity)?;
        // SAFETY: the memory belongs to an object that only `window` refers to. `close_window` and `drop` withdraw it
        // before the object is used or freed.
        unsafe { locked(self.buffers()).open_window(window.as_mut_ptr(), capacity) };
        self.window.set(window.into_object());
        Ok(())
    }

    /// Takes ciphertext that OpenSSL has written; call it again until there is none.
    pub(super) fn ciphertext<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        if let Some(window) = self.window.take(py) {
            let len = locked(self.buffers()).close_window();
            if len > 0 {
                // SAFETY: `prepare` has stored an unfinished object, whose first `len` bytes OpenSSL has written.
                let bytes = unsafe { NewBytes::from_object(window).finish(len)? };
                return Ok(Some(bytes.cast_into::<PyBytes>()?));
            }
        }
        let rest = {
            let mut buffers = locked(self.buffers());
            if buffers.outgoing_len() == 0 {
                return Ok(None);
            }
            buffers.take_outgoing()
        };
        Ok(Some(new_bytes::copied(py, &rest)?.cast_into::<PyBytes>()?))
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        locked(self.buffers()).close_window();
        // SAFETY: transports are freed by an attached thread. Nothing refers to the window any more, and the reference
        // to the BIO is ours.
        unsafe {
            drop(self.window.take(Python::assume_attached()));
            (self.openssl.BIO_free)(self.bio.as_ptr());
        }
    }
}

/// Ciphertext that OpenSSL may read.
pub(super) struct Lent<'a>(&'a Direct);

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        locked(self.0.buffers()).withdraw();
    }
}

/// Runs `body` while no other thread runs methods of `ssl_socket`.
#[inline]
fn alone<R>(ssl_socket: &Bound<'_, PyAny>, body: impl FnOnce() -> R) -> R {
    if HAS_GIL {
        body()
    } else {
        with_critical_section(ssl_socket, body)
    }
}
