//! The read side: ciphertext from the inner transport is decrypted and delivered to the application at once.
//!
//! All plaintext of the ciphertext that arrives in one call is delivered in one `data_received`, or decrypted directly
//! into the buffers of a BufferedProtocol. `queue/records` counts the whole records that have arrived. So `SSL_read` is
//! usually called once for each record, and not once more to find that no data is left.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::engine::Read;
use super::{Flags, State, Tls, lifecycle, shutdown, writing};
use crate::binding::errors;
use crate::binding::native_type::This;
use crate::binding::new_bytes::NewBytes;
use crate::event_loop::reactor::flush_policy;
use crate::transports::protocol::Receiver;

/// The maximum amount of ciphertext in bytes to put into the BIO before reading. An `ssl.MemoryBIO` never gives back
/// the memory that it once needed.
const FEED_LEN: usize = 64 * 1024;
/// The maximum amount of ciphertext in bytes that the peer may send after our `close_notify`; beyond it the connection
/// is aborted. The limit allows for data that was already on the way, but not for an endless download.
const TRAILING_LEN: usize = 4 * 1024 * 1024;

/// Receives ciphertext from a native inner transport: see `protocol::register_native`.
///
/// # Safety
/// `object` must be a live `SSLTransport`.
pub(super) unsafe fn received_raw(py: Python<'_>, object: *mut ffi::PyObject, data: &[u8]) -> PyResult<()> {
    // SAFETY: the caller's contract.
    received(unsafe { This::new(py, object) }, data)
}

/// Takes ciphertext from the inner transport. Faults of the connection are handled inside; Err is only for exceptions
/// that must leave the loop.
pub(super) fn received(this: Tls<'_>, data: &[u8]) -> PyResult<()> {
    if this.state.get() == State::Open {
        return read_app(this, data);
    }
    if this.state.get() == State::Over {
        return Ok(());
    }
    if this.state.get() == State::Shutdown {
        let discarded_len = this.discarded_len.get() + data.len();
        this.discarded_len.set(discarded_len);
        if discarded_len > TRAILING_LEN {
            return lifecycle::abort(this, None);
        }
    }
    if let Err(error) = feed(this, data) {
        return lifecycle::fatal_error(this, error, "Fatal error on SSL protocol");
    }
    lifecycle::proceed(this)
}

/// Delivers data to the application and handles the consequences: writes of the application, pausing the inner
/// transport, and the peer's `close_notify`.
#[inline]
pub(super) fn read_app(this: Tls<'_>, data: &[u8]) -> PyResult<()> {
    let is_closed = match deliver(this, data) {
        Ok(is_closed) => is_closed,
        Err(error) => return lifecycle::fatal_error(this, error, "Fatal error on SSL protocol"),
    };
    writing::flush(this)?;
    control_inner(this)?;
    if is_closed {
        shutdown::call_eof_received(this)?;
        return shutdown::start_shutdown(this);
    }
    Ok(())
}

/// Puts ciphertext where OpenSSL reads it, and counts its records.
#[inline]
pub(super) fn feed(this: Tls<'_>, data: &[u8]) -> PyResult<()> {
    if data.is_empty() {
        return Ok(());
    }
    count(this, data);
    this.engine.feed(this.py(), data)
}

/// Counts the records that `data` completes.
#[inline]
fn count(this: Tls<'_>, data: &[u8]) {
    let mut framing = this.framing.get();
    let counted = framing.advance(data, this.overhead_len.get());
    this.framing.set(framing);
    this.records.set(this.records.get() + counted.records);
    this.capacity.set(this.capacity.get() + counted.capacity);
}

/// Estimates the number of unread records again after the handshake, because OpenSSL has read some of the counted
/// records during the handshake.
pub(super) fn recount(this: Tls<'_>) -> PyResult<()> {
    let unread_len = this.engine.unread_len(this.py())?;
    let whole_len = unread_len.saturating_sub(this.framing.get().partial_len());
    this.capacity.set(whole_len);
    // An upper bound is enough, because the reads also stop when there is no more data.
    let records = if whole_len == 0 {
        0
    } else {
        this.records.get().max(1)
    };
    this.records.set(records);
    Ok(())
}

fn may_deliver(this: Tls<'_>) -> bool {
    matches!(this.state.get(), State::Open | State::Flushing)
        && !this.flags.has(Flags::APP_PAUSED | Flags::CLOSED | Flags::STARTED)
}

/// Decrypts and delivers the content of the BIO and then `data`. True if the peer has sent `close_notify`.
#[inline]
fn deliver(this: Tls<'_>, data: &[u8]) -> PyResult<bool> {
    let mut rest = data;
    loop {
        if !may_deliver(this) {
            feed(this, rest)?;
            if this.state.get() == State::Shutdown && !rest.is_empty() {
                lifecycle::proceed(this)?;
            }
            return Ok(false);
        }
        let is_closed = match this.calls.receiver() {
            Receiver::Buffered => fill_buffer(this, &mut rest)?,
            Receiver::Data | Receiver::Native | Receiver::Object(_) => {
                deliver_object(this, std::mem::take(&mut rest))?
            }
        };
        if is_closed || (rest.is_empty() && this.records.get() == 0) {
            return Ok(is_closed);
        }
    }
}

/// Delivers all data in one `data_received`. After the decryption, `ProtocolCalls::deliver` checks the kind of protocol
/// again, because decrypting may run Python code that replaces the protocol.
#[inline]
fn deliver_object(this: Tls<'_>, data: &[u8]) -> PyResult<bool> {
    let py = this.py();
    let (plain, is_closed) = if this.records.get() == 0 && data.len() <= FEED_LEN {
        if data.is_empty() {
            return Ok(false);
        }
        count(this, data);
        if this.records.get() == 0 {
            return this.engine.feed(py, data).map(|()| false);
        }
        let _lent = this.engine.lend(py, data)?;
        match this.records.get() {
            1 if !this.flags.has(Flags::UNCOUNTED) => read_one(this)?,
            _ => read_all(this, &[])?,
        }
    } else {
        read_all(this, data)?
    };
    if let Some(plain) = plain {
        flush_policy::corked(this, || this.calls.deliver(py, plain.cast::<PyBytes>()?))??;
    }
    Ok(is_closed)
}

/// Returns the plaintext of the only whole record in the BIO (None if the record has none), and whether `close_notify`
/// has come.
#[inline]
fn read_one(this: Tls<'_>) -> PyResult<(Option<Bound<'_, PyAny>>, bool)> {
    let capacity = this.capacity.get();
    this.records.set(0);
    this.capacity.set(0);
    Ok(match this.engine.read(this.py(), capacity)? {
        Read::Data(data) => (Some(data.into_any()), false),
        Read::Again => (None, false),
        Read::Closed => (None, true),
    })
}

/// Returns the plaintext of all whole records in the BIO and in `data` (None if they have none), and whether
/// `close_notify` has come. `data` is put into the BIO piece by piece.
#[inline(never)]
fn read_all<'py>(this: Tls<'py>, data: &[u8]) -> PyResult<(Option<Bound<'py, PyAny>>, bool)> {
    let py = this.py();
    let coming = this.framing.get().advance(data, this.overhead_len.get());
    let is_counted = !this.flags.has(Flags::UNCOUNTED);
    // One byte more than the plaintext can have, so that there is always space for a further read.
    let mut plain = NewBytes::with_capacity(py, this.capacity.get() + coming.capacity + 1)?;
    let mut filled = 0;
    let mut pieces = data.chunks(FEED_LEN);
    let mut is_closed = false;
    let mut lent = None;
    loop {
        while this.records.get() > 0 && !is_closed {
            if filled == plain.capacity() {
                // Possible only if records have more plaintext than was computed from their lengths. The buffer must
                // grow, because a read of 0 bytes would look like the end.
                plain = plain.grown(filled * 2)?;
            }
            let capacity = plain.capacity() - filled;
            // SAFETY: `capacity` bytes follow the filled part, in an object that is not shared.
            match unsafe {
                this.engine
                    .read_into(py, plain.as_mut_ptr().add(filled), capacity)?
            } {
                Read::Data(count) => {
                    filled += count;
                    if is_counted {
                        this.records.set(this.records.get().saturating_sub(1));
                    }
                }
                Read::Again => this.records.set(0),
                Read::Closed => is_closed = true,
            }
        }
        match pieces.next() {
            Some(piece) if !is_closed => {
                // End the loan of the previous piece first. This copies the part that OpenSSL has not read.
                drop(lent.take());
                count(this, piece);
                lent = this.engine.lend(py, piece)?;
            }
            _ => break,
        }
    }
    drop(lent);
    this.records.set(0);
    this.capacity.set(0);
    if filled == 0 {
        return Ok((None, is_closed));
    }
    Ok((Some(plain.finish(filled)?), is_closed))
}

/// For a BufferedProtocol: calls `get_buffer`, fills the buffer with plaintext of the whole records that have arrived,
/// and calls `buffer_updated`. The context is entered once for both calls. True if the peer has sent `close_notify`.
fn fill_buffer(this: Tls<'_>, rest: &mut &[u8]) -> PyResult<bool> {
    while this.records.get() == 0 && !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.len().min(FEED_LEN));
        *rest = later;
        feed(this, piece)?;
    }
    if this.records.get() == 0 {
        return Ok(false);
    }
    let py = this.py();
    flush_policy::corked(this, || {
        this.calls.in_context(py, || {
            let hint = this.capacity.get().into_pyobject(py)?;
            let is_closed = this.calls.fill_buffer(py, hint.as_any(), |memory, capacity| {
                if !may_deliver(this) {
                    return Ok((0, false));
                }
                // SAFETY: `ProtocolCalls::fill_buffer` keeps `capacity` bytes at `memory` writable until this closure
                // returns.
                unsafe { read_to(this, memory, capacity) }
            })?;
            Ok(is_closed.unwrap_or(false))
        })
    })?
}

/// Decrypts the whole records that have arrived, until all `capacity` bytes at `memory` are filled. Returns how many
/// bytes were filled, and whether `close_notify` has come.
///
/// # Safety
/// `capacity` bytes (at least 1) at `memory` may be written, and stay valid during the call even if Python code runs.
unsafe fn read_to(this: Tls<'_>, memory: *mut u8, capacity: usize) -> PyResult<(usize, bool)> {
    let py = this.py();
    let is_counted = !this.flags.has(Flags::UNCOUNTED);
    let mut filled = 0;
    while this.records.get() > 0 && filled < capacity {
        // SAFETY: the caller guarantees `capacity` bytes at `memory`, and `filled` is less than that.
        match unsafe { this.engine.read_into(py, memory.add(filled), capacity - filled)? } {
            Read::Data(count) => {
                filled += count;
                // If the buffer is full, a part of the record may be left.
                if is_counted && (filled < capacity || !this.engine.has_pending(py)?) {
                    this.records.set(this.records.get().saturating_sub(1));
                }
                this.capacity.set(this.capacity.get().saturating_sub(count));
            }
            Read::Again => this.records.set(0),
            Read::Closed => return Ok((filled, true)),
        }
    }
    if this.records.get() == 0 {
        this.capacity.set(0);
    }
    Ok((filled, false))
}

/// Used at the end of the stream while the application has paused reading: decrypts until there is plaintext that the
/// application must get before it is told of the end, or until no record is left.
pub(super) fn look_ahead(this: Tls<'_>) -> PyResult<()> {
    while this.flags.has(Flags::APP_PAUSED) && !this.undelivered.is_set() && this.records.get() > 0 {
        match this.engine.read(this.py(), this.capacity.get())? {
            Read::Data(data) => {
                if !this.flags.has(Flags::UNCOUNTED) {
                    this.records.set(this.records.get().saturating_sub(1));
                }
                this.capacity
                    .set(this.capacity.get().saturating_sub(data.as_bytes().len()));
                this.undelivered.set(data.into_any());
            }
            Read::Again | Read::Closed => this.records.set(0),
        }
    }
    Ok(())
}

/// Delivers the plaintext that `look_ahead` has found, unless the application still pauses reading.
pub(super) fn deliver_undelivered(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    if !may_deliver(this) {
        return Ok(());
    }
    match this.undelivered.take(py) {
        Some(data) => flush_policy::corked(this, || this.calls.deliver(py, data.cast::<PyBytes>()?))?,
        None => Ok(()),
    }
}

/// Discards data that comes after `close()`. True if the peer's `close_notify` has come.
pub(super) fn discard(this: Tls<'_>) -> PyResult<bool> {
    this.records.set(0);
    this.capacity.set(0);
    this.engine.discard(this.py())
}

/// Pauses the inner transport when too much ciphertext is waiting, and resumes it when little is left.
#[inline]
pub(super) fn control_inner(this: Tls<'_>) -> PyResult<()> {
    if !this
        .flags
        .has(Flags::APP_PAUSED | Flags::INNER_PAUSED | Flags::READ_LIMITED)
    {
        // The application is reading, so only an incomplete record can be waiting.
        return Ok(());
    }
    let py = this.py();
    let (high, low) = this.read_limits.get();
    let unread_len = this.engine.unread_len(py)?;
    let done = if unread_len >= high && !this.flags.has(Flags::INNER_PAUSED) {
        this.flags.set(Flags::INNER_PAUSED);
        this.inner.pause_reading(py)
    } else if unread_len <= low && this.flags.has(Flags::INNER_PAUSED) {
        this.flags.clear(Flags::INNER_PAUSED);
        this.inner.resume_reading(py)
    } else {
        Ok(())
    };
    match done {
        Err(error) if errors::leaves_loop(py, &error) => Err(error),
        Err(error) => lifecycle::fatal_error(this, error, "Fatal error on SSL protocol"),
        Ok(()) => Ok(()),
    }
}

/// Continues reading after the application's `resume_reading()`, which has queued this call.
///
/// # Safety
/// The loop calls this with an `SSLTransport`, to which its queue holds a reference.
pub(super) unsafe fn resume_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    if this.flags.has(Flags::APP_PAUSED) {
        return Ok(());
    }
    lifecycle::proceed(this)
}

/// Begins to deliver data once `start_tls` is done. The loop has already resumed the task that waited for the
/// handshake.
///
/// # Safety
/// The same as for `resume_queued`.
pub(super) unsafe fn start_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    this.flags.clear(Flags::STARTED);
    lifecycle::proceed(this)
}
