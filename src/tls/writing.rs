//! The write side: plaintext is encrypted and passed to the inner transport.
//!
//! Small writes are corked or held, so that they share records and their ciphertext goes to the inner transport in one
//! write; `flush_policy` decides when. All other writes are encrypted at once. While the inner transport is full,
//! plaintext waits in the backlog here, under the control of the watermarks.

use std::io::IoSlice;
use std::mem::MaybeUninit;

use grapeshot_core::queue::outbuf;
use pyo3::prelude::*;

use super::{Flags, State, Tls, TlsObject, lifecycle, shutdown};
use crate::binding::flags::FlagCell;
use crate::event_loop::reactor::Held;
use crate::event_loop::reactor::flush_policy::{self, Flushable};
use crate::transports::flow;
use crate::transports::outgoing::Data;

/// The length of a full record's plaintext in bytes. Smaller writes are joined into records of up to this length.
const RECORD_LEN: usize = 16 * 1024;
/// The amount of plaintext to encrypt before the ciphertext is passed down, so that backpressure of the inner transport
/// is noticed in time.
const STEP_LEN: usize = 64 * 1024;

impl Flushable for TlsObject {
    type Flags = Flags;
    const CORKED: Flags = Flags::CORKED;
    const HELD: Flags = Flags::HELD;
    const HELD_LEN: usize = flush_policy::HELD_TLS_LEN;

    #[inline]
    fn flags(&self) -> &FlagCell<Flags> {
        &self.flags
    }

    #[inline]
    fn held(&self) -> &Held {
        &self.reactor().held
    }

    #[inline]
    fn unsent_len(&self) -> usize {
        self.backlog.len_bytes()
    }

    #[inline]
    fn high_watermark(&self) -> usize {
        self.backlog.watermarks.high()
    }

    #[inline]
    fn flush(this: Tls<'_>) -> PyResult<()> {
        if this.backlog.is_empty() {
            return Ok(());
        }
        flush(this)
    }

    /// Usually leaves the flush to the caller of `corked`, which may deliver more data first. But if the callback has
    /// raised, the caller does not flush, because the connection ends or the exception leaves the loop. So in that case
    /// the writes are sent here.
    #[inline]
    fn uncork(this: Tls<'_>, has_raised: bool) -> PyResult<()> {
        if has_raised { send_collected(this) } else { Ok(()) }
    }
}

/// Encrypts and sends all plaintext that was held or corked. If there is no such plaintext, nothing is sent, not even
/// handshake messages that OpenSSL has written. The reason: data may have arrived together with the peer's last
/// handshake message, and the application gets it after this call. If sending failed here, the application would learn
/// of the error first.
pub(super) fn send_collected(this: Tls<'_>) -> PyResult<()> {
    if this.state.get() == State::Open && !this.backlog.is_empty() {
        return flush(this);
    }
    Ok(())
}

/// `write(data)`.
#[inline]
pub(super) fn write(this: Tls<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
    let source = Data::new(data)?;
    let new_len = source.as_slice().len();
    if new_len == 0 {
        return Ok(());
    }
    if !may_write(this)? {
        return Ok(());
    }
    if must_wait(this) {
        this.backlog.push(&source)?;
        return after_push(this, new_len);
    }
    if flush_policy::may_hold(this, new_len) {
        this.backlog.push(&source)?;
        flush_policy::hold(this, new_len);
        return Ok(());
    }
    this.flags.set(Flags::ENCRYPTING);
    let sent = encrypt_now(this, source.as_slice());
    this.flags.clear(Flags::ENCRYPTING);
    let sent = match sent {
        Ok(sent) => sent,
        Err(error) => return lifecycle::fatal_error(this, error, "Fatal error on SSL protocol"),
    };
    if sent < new_len {
        this.backlog.push_rest(&source, sent)?;
    } else if this.backlog.is_empty() {
        return close_if_held(this);
    }
    after_push(this, new_len)
}

/// `write(data)` for another TLS transport above this one. That transport has already collected its data. So this
/// transport does not hold `data`, and also sends the writes that it has held before.
pub(super) fn write_collected(this: Tls<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
    write(this, data)?;
    flush_policy::send_held(this)
}

/// `writelines(list_of_data)`: encrypts all objects together.
pub(super) fn writelines(this: Tls<'_>, items: &Bound<'_, PyAny>) -> PyResult<()> {
    let items: Vec<_> = items.try_iter()?.collect::<PyResult<_>>()?;
    let mut sources = Vec::with_capacity(items.len());
    for item in &items {
        let source = Data::new(item)?;
        if !source.as_slice().is_empty() {
            sources.push(source);
        }
    }
    if sources.is_empty() || !may_write(this)? {
        return Ok(());
    }
    let must_wait = must_wait(this);
    let mut new_len = 0;
    for source in &sources {
        new_len += source.as_slice().len();
        this.backlog.push(source)?;
    }
    if !must_wait && flush_policy::may_hold(this, new_len) {
        flush_policy::hold(this, new_len);
        return Ok(());
    }
    after_push(this, new_len)
}

/// Whether a write must go into the backlog: it cannot be sent now, other data goes first, or writes are collected.
#[inline]
fn must_wait(this: Tls<'_>) -> bool {
    this.state.get() != State::Open
        || this
            .flags
            .has(Flags::CORKED | Flags::INNER_FULL | Flags::ENCRYPTING | Flags::HELD)
        || !this.backlog.is_empty()
}

/// Returns false after `close()` and after the end of the connection. The caller then ignores the write. After a few
/// such writes, each further one logs a warning, as in asyncio (`flow::note_lost_write`).
#[inline]
fn may_write(this: Tls<'_>) -> PyResult<bool> {
    if !matches!(this.state.get(), State::Flushing | State::Shutdown | State::Over) {
        return Ok(true);
    }
    flow::note_lost_write(this.py(), &this.lost_writes, "SSL connection is closed")?;
    Ok(false)
}

/// To be called after `new_len` bytes of plaintext were put into the backlog: flushes the backlog, unless it may wait.
fn after_push(this: Tls<'_>, new_len: usize) -> PyResult<()> {
    if flush_policy::may_wait(this, new_len) {
        return Ok(());
    }
    flush(this)
}

/// Encrypts data that need not wait for other data, and passes it down. Returns the number of bytes that were
/// encrypted. This is less than the length of the data if the inner transport became full, a callback has closed the
/// connection, or the peer must send something first. The caller must have set ENCRYPTING.
fn encrypt_now(this: Tls<'_>, data: &[u8]) -> PyResult<usize> {
    let py = this.py();
    let mut sent = 0;
    while sent < data.len() && this.state.get() == State::Open && !this.flags.has(Flags::INNER_FULL) {
        let step = &data[sent..data.len().min(sent + STEP_LEN)];
        this.engine.prepare(py, step.len(), this.overhead_len.get())?;
        let written = this.engine.write(py, step)?;
        send_ciphertext(this)?;
        match written {
            Some(count) => sent += count,
            None => break,
        }
    }
    Ok(sent)
}

/// Passes the ciphertext that OpenSSL has written to the inner transport.
#[inline]
pub(super) fn send_ciphertext(this: Tls<'_>) -> PyResult<()> {
    while let Some(ciphertext) = this.engine.ciphertext(this.py())? {
        this.inner.write(&ciphertext)?;
    }
    Ok(())
}

/// Encrypts the backlog as far as the inner transport takes it, sends the ciphertext, and tells the application to
/// pause or to resume writing. A fault ends the connection; Err is only for exceptions that must leave the loop.
#[inline]
pub(super) fn flush(this: Tls<'_>) -> PyResult<()> {
    if this.flags.has(Flags::ENCRYPTING) {
        return Ok(());
    }
    if let Err(error) = encrypt_backlog(this).and_then(|()| send_ciphertext(this)) {
        return lifecycle::fatal_error(this, error, "Fatal error on SSL protocol");
    }
    control_app(this)?;
    close_if_held(this)
}

/// Continues a `close()` that was called during the encryption.
#[inline]
fn close_if_held(this: Tls<'_>) -> PyResult<()> {
    if !this.flags.has(Flags::CLOSE_HELD) || this.flags.has(Flags::ENCRYPTING) {
        return Ok(());
    }
    this.flags.clear(Flags::CLOSE_HELD);
    shutdown::continue_shutdown(this)
}

/// Encrypts the backlog until it is empty, the inner transport is full, or the peer must send something first.
fn encrypt_backlog(this: Tls<'_>) -> PyResult<()> {
    let mut unsent_len = 0;
    while matches!(this.state.get(), State::Open | State::Flushing)
        && !this.flags.has(Flags::INNER_FULL)
        && !this.backlog.is_empty()
    {
        let next_len = this.backlog.len_bytes().min(STEP_LEN);
        this.engine
            .prepare(this.py(), next_len, this.overhead_len.get())?;
        this.flags.set(Flags::ENCRYPTING);
        let written = encrypt_front(this);
        this.flags.clear(Flags::ENCRYPTING);
        let Some(count) = written? else {
            // Renegotiation: when the peer has answered, the backlog is flushed again.
            return Ok(());
        };
        this.backlog.advance(count);
        unsent_len += count;
        if unsent_len >= STEP_LEN {
            unsent_len = 0;
            send_ciphertext(this)?;
        }
    }
    Ok(())
}

/// Encrypts from the front of the backlog: up to `STEP_LEN` bytes of one chunk, or one record made of several small
/// chunks. None if the peer must send something first.
fn encrypt_front(this: Tls<'_>) -> PyResult<Option<usize>> {
    let py = this.py();
    let (data, chunk) = this.backlog.peek(|backlog| {
        let mut slices = [const { MaybeUninit::<IoSlice<'_>>::uninit() }; 2];
        match (backlog.slices(&mut slices), backlog.iter().next()) {
            ([first, _], _) if first.len() < RECORD_LEN => (None, None),
            ([first, ..], Some(chunk)) => {
                let data: *const [u8] = &raw const first[..first.len().min(STEP_LEN)];
                (Some(data), Some(chunk.to_bound(py)))
            }
            _ => (None, None),
        }
    });
    let Some(data) = data else {
        return encrypt_joined(this);
    };
    // SAFETY: the bytes belong to the chunk, which the reference in `chunk` keeps alive even if Python code runs.
    let written = this.engine.write(py, unsafe { &*data });
    drop(chunk);
    written
}

/// Encrypts one record made of several chunks.
#[inline(never)]
fn encrypt_joined(this: Tls<'_>) -> PyResult<Option<usize>> {
    let mut record = [const { MaybeUninit::uninit() }; RECORD_LEN];
    let joined = this.backlog.peek(|backlog| {
        let mut slices = [const { MaybeUninit::<IoSlice<'_>>::uninit() }; 64];
        outbuf::join(backlog.slices(&mut slices), &mut record)
    });
    this.engine.write(this.py(), joined)
}

// ---- flow control --------------------------------------------------------------------------------------------

/// Calls `pause_writing` or `resume_writing` if the size of the backlog requires it.
#[inline]
pub(super) fn control_app(this: Tls<'_>) -> PyResult<()> {
    if this.backlog.must_pause() {
        return flush_policy::corked(this, || {
            flow::pause(&this.event_loop, &this.calls, &this.to_bound())
        })?;
    }
    if this.backlog.must_resume() {
        flush_policy::corked(this, || {
            flow::resume(&this.event_loop, &this.calls, &this.to_bound())
        })??;
        // Data that `resume_writing` has written may still be in the backlog. If another callback of the application is
        // still running, the backlog is flushed when that callback returns; otherwise it must be flushed here.
        if !this.flags.has(Flags::CORKED) && !this.backlog.is_empty() {
            return flush(this);
        }
    }
    Ok(())
}

/// `resume_writing()` of the inner transport.
pub(super) fn inner_drained(this: Tls<'_>) -> PyResult<()> {
    this.flags.clear(Flags::INNER_FULL);
    flush(this)?;
    if this.state.get() == State::Flushing {
        // The connection was closed while the inner transport was full.
        return shutdown::continue_shutdown(this);
    }
    Ok(())
}
