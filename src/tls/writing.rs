//! The write side: plaintext is encrypted and handed to the inner transport.
//!
//! Writes inside the application's own callback are collected and encrypted when it returns (corked), small ones in
//! anything else that the loop runs at the end of that step (held): they share records, and everything leaves in one
//! write to the inner transport. Other writes are encrypted at once. While the inner transport is full, plaintext waits
//! here, under the watermarks.

use std::io::IoSlice;
use std::mem::MaybeUninit;

use grapeshot_core::queue::outbuf;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Flags, State, Tls, lifecycle, shutdown};
use crate::binding::native_type::This;
use crate::transports::flow;
use crate::transports::outgoing::Data;

/// The plaintext of a full record; smaller writes are put together up to it.
const RECORD_LEN: usize = 16 * 1024;
/// Plaintext that is encrypted before the ciphertext is handed down, so that backpressure is seen in time.
const STEP_LEN: usize = 64 * 1024;
/// Collected writes beyond this are encrypted at once.
const CORK_LEN: usize = 64 * 1024;

/// Runs the application's callback `call` with its writes collected; the caller flushes. If the callback raises, that
/// ends the connection or leaves the loop, so what it has written is sent here.
#[inline]
pub(super) fn corked<R>(this: Tls<'_>, call: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
    let was_corked = this.flags.has(Flags::CORKED);
    this.flags.set(Flags::CORKED);
    let result = call();
    if !was_corked {
        this.flags.clear(Flags::CORKED);
        if result.is_err() {
            send_collected(this)?;
        }
    }
    result
}

/// Whether a write of `new_len` bytes may wait for the end of the running step, in a backlog of `len_bytes` then.
#[inline]
fn may_hold(this: Tls<'_>, new_len: usize, len_bytes: usize) -> bool {
    new_len <= RECORD_LEN
        && len_bytes <= CORK_LEN
        && this.backlog.watermarks.may_hold(len_bytes)
        && this.reactor().may_hold()
}

/// The backlog waits for the end of the running step.
#[inline]
fn hold(this: Tls<'_>, len_bytes: usize) {
    this.flags.set(Flags::HELD);
    this.reactor().hold(this.to_bound(), len_bytes, end_hold);
}

/// Encrypts and sends held plaintext, so that the caller sees the transport as if each write had left at once.
/// Plaintext of the application's own callback stays.
#[inline]
pub(super) fn send_held(this: Tls<'_>) -> PyResult<()> {
    if this.flags.has(Flags::HELD) && !this.flags.has(Flags::CORKED) {
        return flush(this);
    }
    Ok(())
}

/// The same for all plaintext that is only collected. Messages of TLS itself stay: an error that they meet must not come
/// before the data that was received with the end of the handshake.
pub(super) fn send_collected(this: Tls<'_>) -> PyResult<()> {
    if this.state.get() == State::Open && !this.backlog.is_empty() {
        return flush(this);
    }
    Ok(())
}

/// The step that has written to the transport is over.
///
/// # Safety
/// The loop calls this with a TLS transport, whose reference it holds.
unsafe fn end_hold(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: Tls<'_> = unsafe { This::new(py, object) };
    // Still held meanwhile: what callbacks of the context write goes behind it.
    let sent = if this.backlog.is_empty() {
        Ok(())
    } else {
        flush(this)
    };
    this.flags.clear(Flags::HELD);
    sent
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
    if may_hold(this, new_len, new_len) {
        this.backlog.push(&source)?;
        hold(this, new_len);
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

/// The same for another TLS transport above this one, which has collected data itself: neither that nor what waits
/// before it is held.
pub(super) fn write_collected(this: Tls<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
    write(this, data)?;
    send_held(this)
}

/// `writelines(list_of_data)`: encrypted together.
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
    if !must_wait && may_hold(this, new_len, new_len) {
        hold(this, new_len);
        return Ok(());
    }
    after_push(this, new_len)
}

/// Whether something comes before a write, so that it goes behind the backlog.
#[inline]
fn must_wait(this: Tls<'_>) -> bool {
    this.state.get() != State::Open
        || this
            .flags
            .has(Flags::CORKED | Flags::INNER_FULL | Flags::ENCRYPTING | Flags::HELD)
        || !this.backlog.is_empty()
}

/// False after the end, where a write is ignored; from the sixth on with a warning, as in asyncio.
#[inline]
fn may_write(this: Tls<'_>) -> PyResult<bool> {
    if !matches!(this.state.get(), State::Flushing | State::Shutdown | State::Over) {
        return Ok(true);
    }
    flow::note_lost_write(this.py(), &this.lost_writes, "SSL connection is closed")?;
    Ok(false)
}

/// After plaintext of `new_len` bytes was put into the backlog.
fn after_push(this: Tls<'_>, new_len: usize) -> PyResult<()> {
    let len_bytes = this.backlog.len_bytes();
    let may_wait = if this.flags.has(Flags::CORKED) {
        len_bytes <= CORK_LEN
    } else {
        this.flags.has(Flags::HELD)
            && may_hold(this, new_len, len_bytes)
            && this.reactor().may_hold_more(new_len)
    };
    if may_wait { Ok(()) } else { flush(this) }
}

/// Encrypts data that nothing waits before and hands it down: how much, less than all if the inner transport became
/// full, a callback has closed, or the peer must send something first. To be called with ENCRYPTING up.
fn encrypt_now(this: Tls<'_>, data: &[u8]) -> PyResult<usize> {
    let py = this.py();
    let mut sent = 0;
    while sent < data.len() && this.state.get() == State::Open && !this.flags.has(Flags::INNER_FULL) {
        let step = &data[sent..data.len().min(sent + STEP_LEN)];
        let written = this.engine.write(py, step)?;
        send_ciphertext(this)?;
        match written {
            Some(count) => sent += count,
            None => break,
        }
    }
    Ok(sent)
}

/// Hands the ciphertext that waits to the inner transport.
#[inline]
pub(super) fn send_ciphertext(this: Tls<'_>) -> PyResult<()> {
    match this.engine.ciphertext(this.py())? {
        Some(ciphertext) => this.inner.write(&ciphertext),
        None => Ok(()),
    }
}

/// Encrypts the backlog as far as the inner transport takes it, sends what the engine has produced, and tells the
/// application to pause or to go on. A fault ends the connection; Err is only for what must leave the loop.
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

/// Goes on with a `close()` that has come from inside of the encryption.
#[inline]
fn close_if_held(this: Tls<'_>) -> PyResult<()> {
    if !this.flags.has(Flags::CLOSE_HELD) || this.flags.has(Flags::ENCRYPTING) {
        return Ok(());
    }
    this.flags.clear(Flags::CLOSE_HELD);
    shutdown::continue_shutdown(this)
}

fn encrypt_backlog(this: Tls<'_>) -> PyResult<()> {
    let py = this.py();
    let mut unsent_len = 0;
    while matches!(this.state.get(), State::Open | State::Flushing)
        && !this.flags.has(Flags::INNER_FULL)
        && !this.backlog.is_empty()
    {
        this.flags.set(Flags::ENCRYPTING);
        let written = encrypt_front(this);
        this.flags.clear(Flags::ENCRYPTING);
        let Some(count) = written? else {
            // Renegotiation: the answer of the peer brings us back here.
            return Ok(());
        };
        this.backlog.advance(count);
        unsent_len += count;
        if unsent_len >= STEP_LEN {
            unsent_len = 0;
            if let Some(ciphertext) = this.engine.ciphertext(py)? {
                this.inner.write(&ciphertext)?;
            }
        }
    }
    Ok(())
}

/// Encrypts from the front of the backlog: up to `STEP_LEN` bytes of one chunk, or one record out of small chunks.
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
    // SAFETY: bytes of the chunk, which the reference in `chunk` keeps alive whatever Python code does meanwhile.
    let written = this.engine.write(py, unsafe { &*data });
    drop(chunk);
    written
}

/// One record out of several chunks.
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

/// Calls `pause_writing` or `resume_writing` if the backlog calls for it.
#[inline]
pub(super) fn control_app(this: Tls<'_>) -> PyResult<()> {
    if this.backlog.must_pause() {
        return corked(this, || {
            flow::pause(&this.event_loop, &this.calls, &this.to_bound())
        });
    }
    if this.backlog.must_resume() {
        corked(this, || {
            flow::resume(&this.event_loop, &this.calls, &this.to_bound())
        })?;
        // What it has written may still lie here, if this was not inside a callback that is flushed after.
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
        // It was closed while the inner transport was full.
        return shutdown::continue_shutdown(this);
    }
    Ok(())
}
