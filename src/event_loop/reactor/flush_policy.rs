//! When written data leaves: the rules and their bounds, for stream transports and for TLS.
//!
//! Data that is written in several small pieces should leave together: in one system call, and under TLS in as few
//! records as possible. So a transport collects small writes instead of sending each of them at once:
//!
//! - A write in a callback of the transport's own protocol is *corked*: it leaves when the callback returns, or earlier
//!   if too much has been written.
//! - Any other small write in a step of a running loop is *held*: it leaves at the end of the step or of its batch, or
//!   earlier if too much has been written or the step takes long.
//! - All other writes are sent at once.
//!
//! This policy does not concern data that the kernel or the transport below has refused. Such data waits until there is
//! room, and all later writes wait behind it.
//!
//! A step is one call that the loop makes: of a handle (which may be a timer or continue a task), of a coro, or of a
//! source that has an event. The ready handles and coros of one iteration form a batch. Data that is held during a
//! source's event is sent when the source returns. Data that is held during the steps of a batch is sent after the last
//! step, or after an earlier one if it is due by then (`is_due`). The loop does not send after each step but all data
//! in a row. That is cheaper if the peer is a process on the same machine: a send to a sleeping process takes longer,
//! because it must wake the process, and only the first of several sends in a row finds it asleep.
//!
//! A program must not notice that a write is held. So calls that would reveal it send the held data first
//! (`send_held`), and so does a fork. The list of the transports that hold data is in `held`.
//!
//! Writes to pipes and to datagram sockets are not collected, because the reader may treat each write as a unit. Writes
//! to a coro's socket are not collected either, because `send` returns the result of the system call.

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Held;
use crate::binding::flags::FlagCell;
use crate::binding::native_type::This;

/// Corked data of more than this many bytes is sent at once. It fills whole system calls and records anyway, and memory
/// must not fill with data that the kernel would take.
const CORKED_LEN: usize = 64 * 1024;

/// A larger write is not held: it is worth a system call of its own, and fills a TLS record.
const HELD_WRITE_LEN: usize = 16 * 1024;
/// A stream sends its held data as soon as there are more than this many bytes of it, while the data is still in the
/// processor's cache.
pub(crate) const HELD_STREAM_LEN: usize = 16 * 1024;
/// TLS encrypts its held plaintext as soon as there are more than this many bytes of it. TLS may hold more than a
/// stream, so that small writes fill records.
pub(crate) const HELD_TLS_LEN: usize = 64 * 1024;
/// If a transport that holds data writes again at least this long after the first transport was put on the list, it
/// sends all of its data at once.
const LATE_NS: u64 = 1_000_000;

/// At the end of a step of a batch, the held data is due if at least this many transports hold data.
const BATCH_LEN: usize = 64;
/// The held data is also due if the transports hold more than this many bytes.
const BATCH_LEN_BYTES: usize = 256 * 1024;
/// The held data is also due if the first transport has held data for this long.
const BATCH_NS: u64 = 1_000_000;

/// A transport that collects small writes.
pub(crate) trait Flushable: Sized {
    type Flags: bitflags::Flags<Bits = u16> + Copy;
    /// Set while a callback of the transport's own protocol runs.
    const CORKED: Self::Flags;
    /// Set while the transport is on the loop's list.
    const HELD: Self::Flags;
    /// Held data of more than this many bytes is sent at once.
    const HELD_LEN: usize;

    fn flags(&self) -> &FlagCell<Self::Flags>;

    /// The loop's list of the transports that hold data.
    fn held(&self) -> &Held;

    /// The number of bytes that were written and not sent yet.
    fn unsent_len(&self) -> usize;

    /// The high watermark in bytes.
    fn high_watermark(&self) -> usize;

    /// Sends the collected data, if there is any and it can be sent now.
    fn flush(this: This<'_, Self>) -> PyResult<()>;

    /// Called at the end of a cork.
    #[inline]
    fn uncork(this: This<'_, Self>, _has_raised: bool) -> PyResult<()> {
        Self::flush(this)
    }
}

// ---- corked ----------------------------------------------------------------------------------------------------

/// Runs `call`, a callback of the protocol, with writes corked, and then ends the cork. The outer error is for
/// exceptions that must leave the loop; the inner result is the callback's.
#[inline]
pub(crate) fn corked<T: Flushable, R>(
    this: This<'_, T>,
    call: impl FnOnce() -> PyResult<R>,
) -> PyResult<PyResult<R>> {
    let was_corked = this.flags().has(T::CORKED);
    this.flags().set(T::CORKED);
    let result = call();
    if !was_corked {
        this.flags().clear(T::CORKED);
        T::uncork(this, result.is_err())?;
    }
    Ok(result)
}

// ---- held ------------------------------------------------------------------------------------------------------

/// Whether a write of `len_bytes`, before which no other data waits, may be held.
#[inline]
pub(crate) fn may_hold<T: Flushable>(this: This<'_, T>, len_bytes: usize) -> bool {
    is_small(this, len_bytes, len_bytes) && this.held().is_accepting()
}

/// Begins to hold data: puts the transport on the loop's list. `len_bytes` is the length of the first write, for which
/// `may_hold` has returned true.
#[inline]
pub(crate) fn hold<T: Flushable>(this: This<'_, T>, len_bytes: usize) {
    this.flags().set(T::HELD);
    this.held().push(this.to_bound(), len_bytes, end_hold::<T>);
}

/// Whether the last `new_len` bytes may wait together with the corked or held data before them. If not, all of it must
/// be sent now.
#[inline]
pub(crate) fn may_wait<T: Flushable>(this: This<'_, T>, new_len: usize) -> bool {
    let len_bytes = this.unsent_len();
    if this.flags().has(T::CORKED) {
        return len_bytes <= CORKED_LEN;
    }
    let held = this.held();
    if !this.flags().has(T::HELD) || !is_small(this, new_len, len_bytes) || !held.is_accepting() {
        return false;
    }
    held.add_bytes(new_len);
    // The coarse clock is cheap, but may be behind `since_ns`. So the subtraction saturates.
    clock::coarse_ns().saturating_sub(held.since_ns()) < LATE_NS
}

/// Whether a write of `new_len` bytes, after which `len_bytes` are unsent, is small enough to be held. A write that
/// brings the unsent data above the high watermark does not count as small, whatever its length: it must be sent at
/// once, because the amount that the kernel takes decides whether `pause_writing` is called.
#[inline]
fn is_small<T: Flushable>(this: This<'_, T>, new_len: usize, len_bytes: usize) -> bool {
    new_len <= HELD_WRITE_LEN && len_bytes <= T::HELD_LEN && len_bytes <= this.high_watermark()
}

/// Sends held data, so that the caller finds the transport in the state that it would have if each write had been sent
/// at once. Corked data stays.
#[inline]
pub(crate) fn send_held<T: Flushable>(this: This<'_, T>) -> PyResult<()> {
    if this.flags().has(T::HELD) && !this.flags().has(T::CORKED) {
        return T::flush(this);
    }
    Ok(())
}

/// Sends the held data of a transport that was taken off the list.
///
/// # Safety
/// `object` is a live object of layout `T`.
unsafe fn end_hold<T: Flushable>(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let this: This<'_, T> = unsafe { This::new(py, object) };
    // `flush` may run code that writes: the `fileno()` of an unusual socket object, or a callback of the SSLContext.
    // The flag stays set during the call, so that such new data goes behind the old.
    let sent = T::flush(this);
    this.flags().clear(T::HELD);
    sent
}

impl Held {
    /// Sends the held data. Called after a source has handled an event and returned `result`, before each poll, and at
    /// the end of a run. Changes `result` only if sending raises an exception that must leave the loop.
    #[inline(always)]
    pub(super) fn end_step(&self, py: Python<'_>, result: &mut PyResult<()>) {
        if !self.is_empty() {
            self.flush_into(py, result);
        }
    }

    /// `end_step` for a step of a batch: sends the held data only if this was the last step, or if it is due.
    #[inline(always)]
    pub(super) fn end_step_of_batch(&self, py: Python<'_>, result: &mut PyResult<()>, is_last: bool) {
        if !self.is_empty() && (is_last || is_due(self)) {
            self.flush_into(py, result);
        }
    }
}

/// Whether the held data must be sent although more steps of the batch follow: many transports hold data, or they hold
/// a lot of it, or they have held it for a long time.
#[inline(never)]
fn is_due(held: &Held) -> bool {
    held.len() >= BATCH_LEN
        || held.len_bytes() > BATCH_LEN_BYTES
        || clock::now_ns() - held.since_ns() >= BATCH_NS
}
