//! The read side: ciphertext from the inner transport is decrypted and delivered at once.
//!
//! Everything that one call brings is delivered in one `data_received`, or straight into the buffers of a
//! BufferedProtocol. `SSL_read` is called as often as whole records have come (`queue/records`).

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::engine::Read;
use super::{Flags, State, Tls, lifecycle, shutdown, writing};
use crate::binding::errors;
use crate::binding::native_type::This;
use crate::binding::new_bytes::NewBytes;
use crate::transports::protocol::Receiver;

/// Ciphertext that goes into the BIO before it is read: a BIO keeps the memory that it once needed.
const FEED_LEN: usize = 64 * 1024;
/// What a peer may send after our `close_notify` before the connection is cut: more than what was on the way already,
/// and no endless download.
const TRAILING_LEN: usize = 4 * 1024 * 1024;

/// The entry for native inner transports: see `protocol::register_native`.
///
/// # Safety
/// `object` is a live `SSLTransport`.
pub(super) unsafe fn received_raw(py: Python<'_>, object: *mut ffi::PyObject, data: &[u8]) -> PyResult<()> {
    // SAFETY: the caller's contract.
    received(unsafe { This::new(py, object) }, data)
}

/// Ciphertext has come. Faults of the connection are dealt with inside; Err is only for what must leave the loop.
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
    lifecycle::go_on(this)
}

/// Data for the application, and what follows from it.
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

/// Puts ciphertext into the BIO and counts its records.
#[inline]
pub(super) fn feed(this: Tls<'_>, data: &[u8]) -> PyResult<()> {
    if data.is_empty() {
        return Ok(());
    }
    let mut framing = this.framing.get();
    let counted = framing.advance(data, this.overhead_len.get());
    this.framing.set(framing);
    this.records.set(this.records.get() + counted.records);
    this.capacity.set(this.capacity.get() + counted.capacity);
    this.engine.feed(this.py(), data)
}

/// Right after the handshake: what lies in the BIO is not known record by record any more.
pub(super) fn recount(this: Tls<'_>) -> PyResult<()> {
    let unread_len = this.engine.unread_len(this.py())?;
    let whole_len = unread_len.saturating_sub(this.framing.get().partial_len());
    this.capacity.set(whole_len);
    // Each record is counted at most; the reads end with what there is.
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

/// Decrypts and delivers what is in the BIO and `data` after it. True if the peer has sent `close_notify`.
#[inline]
fn deliver(this: Tls<'_>, data: &[u8]) -> PyResult<bool> {
    let mut rest = data;
    loop {
        if !may_deliver(this) {
            feed(this, rest)?;
            if this.state.get() == State::Shutdown && !rest.is_empty() {
                lifecycle::go_on(this)?;
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

/// One `data_received` with all there is. What kind of protocol gets it is asked after decrypting, which may run
/// Python.
#[inline]
fn deliver_object(this: Tls<'_>, data: &[u8]) -> PyResult<bool> {
    let py = this.py();
    let (plain, is_closed) = if this.records.get() == 0 && data.len() <= FEED_LEN {
        feed(this, data)?;
        match this.records.get() {
            0 => return Ok(false),
            1 if !this.flags.has(Flags::UNCOUNTED) => read_one(this)?,
            _ => read_all(this, &[])?,
        }
    } else {
        read_all(this, data)?
    };
    if let Some(plain) = plain {
        writing::corked(this, || this.calls.deliver(py, plain.cast::<PyBytes>()?))?;
    }
    Ok(is_closed)
}

/// The plaintext of the one whole record in the BIO: None if it held none.
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

/// The plaintext of all whole records in the BIO and in `data`, which is fed piece by piece. None if they held none.
#[inline(never)]
fn read_all<'py>(this: Tls<'py>, data: &[u8]) -> PyResult<(Option<Bound<'py, PyAny>>, bool)> {
    let py = this.py();
    let coming = this.framing.get().advance(data, this.overhead_len.get());
    let is_counted = !this.flags.has(Flags::UNCOUNTED);
    // One byte more than can come, so that there is always space to ask for more.
    let mut plain = NewBytes::with_capacity(py, this.capacity.get() + coming.capacity + 1)?;
    let mut filled = 0;
    let mut pieces = data.chunks(FEED_LEN);
    let mut is_closed = false;
    loop {
        while this.records.get() > 0 && !is_closed {
            if filled == plain.capacity() {
                // Only where records do not tell. A read of nothing would look like the end.
                plain = plain.grown(filled * 2)?;
            }
            let capacity = plain.capacity() - filled;
            // SAFETY: `capacity` bytes follow what is filled already, in an object that is not shared.
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
            Some(piece) if !is_closed => feed(this, piece)?,
            _ => break,
        }
    }
    this.records.set(0);
    this.capacity.set(0);
    if filled == 0 {
        return Ok((None, is_closed));
    }
    Ok((Some(plain.finish(filled)?), is_closed))
}

/// BufferedProtocol: one round of `get_buffer` and `buffer_updated`, filled as far as whole records reach. Both calls
/// are one visit to the protocol's context.
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
    writing::corked(this, || {
        this.calls.in_context(py, || {
            let hint = this.capacity.get().into_pyobject(py)?;
            let is_closed = this.calls.fill_buffer(py, hint.as_any(), |memory, capacity| {
                if !may_deliver(this) {
                    return Ok((0, false));
                }
                // SAFETY: `capacity` bytes may be written, until this returns.
                unsafe { read_to(this, memory, capacity) }
            })?;
            Ok(is_closed.unwrap_or(false))
        })
    })
}

/// Fills `capacity` bytes at `memory` from the whole records: how many bytes, and whether `close_notify` has come.
///
/// # Safety
/// `capacity` bytes (at least 1) at `memory` may be written, and stay valid whatever Python code does meanwhile.
unsafe fn read_to(this: Tls<'_>, memory: *mut u8, capacity: usize) -> PyResult<(usize, bool)> {
    let py = this.py();
    let is_counted = !this.flags.has(Flags::UNCOUNTED);
    let mut filled = 0;
    while this.records.get() > 0 && filled < capacity {
        // SAFETY: the caller vouches for the memory, of which `capacity - filled` bytes follow.
        match unsafe { this.engine.read_into(py, memory.add(filled), capacity - filled)? } {
            Read::Data(count) => {
                filled += count;
                // A full buffer may have cut the record.
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

/// After the end of the stream: if the application has paused reading, decrypts until there is something that it must
/// get before it may hear of the end.
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

/// Delivers what `look_ahead` has found, if the application reads again.
pub(super) fn deliver_undelivered(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    if !may_deliver(this) {
        return Ok(());
    }
    match this.undelivered.take(py) {
        Some(data) => writing::corked(this, || this.calls.deliver(py, data.cast::<PyBytes>()?)),
        None => Ok(()),
    }
}

/// Discards what comes after `close()`. True if the peer's `close_notify` has come.
pub(super) fn discard(this: Tls<'_>) -> PyResult<bool> {
    this.records.set(0);
    this.capacity.set(0);
    this.engine.discard(this.py())
}

/// Pauses the inner transport while too much ciphertext waits, and lets it go on when little does.
#[inline]
pub(super) fn control_inner(this: Tls<'_>) -> PyResult<()> {
    if !this
        .flags
        .has(Flags::APP_PAUSED | Flags::INNER_PAUSED | Flags::READ_LIMITED)
    {
        // Only a record that is not whole can be waiting.
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

/// `resume_reading()` of the application, from the loop.
///
/// # Safety
/// Called by the loop with an `SSLTransport` whose reference the queue holds.
pub(super) unsafe fn resume_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    if this.flags.has(Flags::APP_PAUSED) {
        return Ok(());
    }
    lifecycle::go_on(this)
}

/// Called after the waiter of `start_tls` has run.
///
/// # Safety
/// As for `resume_queued`.
pub(super) unsafe fn start_queued(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    this.flags.clear(Flags::STARTED);
    lifecycle::go_on(this)
}
