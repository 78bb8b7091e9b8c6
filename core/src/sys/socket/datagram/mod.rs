//! Datagrams: several received by one system call, one sent to an address.
//!
//! Purpose: what a busy datagram socket needs. [`recv_batch`] takes as many as are there, up to a limit;
//! sending several at once is not offered, because it was measured to save nothing.
//!
//! Owner: any thread; the calls keep no state. It must not know who the datagrams are for.
//!
//! What the file of an operating system must provide: `receive(fd, buffer, slot_len, limit, each)` with the
//! contract of [`recv_batch`], for a `limit` of 1 to [`MAX_BATCH`] and a buffer that has the slots.
//!
//! Source: `recvmmsg(2)`, `sendto(2)`, `udp(7)`.

use std::io;
use std::os::fd::RawFd;

use super::address::Address;
use super::{SEND_FLAGS, retried};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod many;
#[cfg(any(target_os = "linux", target_os = "android"))]
use many::receive;

// The tests run it on every system.
#[cfg(any(test, not(any(target_os = "linux", target_os = "android"))))]
mod single;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
use single::receive;

#[cfg(test)]
mod tests;

/// The most datagrams that one [`recv_batch`] takes.
pub const MAX_BATCH: usize = 16;

/// A slot in which every datagram of an internet socket fits: the length field of IP has 16 bits.
pub const INTERNET_SLOT_LEN: usize = 64 * 1024;

/// How a [`recv_batch`] that has received at least one datagram has ended.
#[derive(Debug)]
pub struct Batch {
    /// Why there were no more, where the system has already forgotten it.
    pub error: Option<io::Error>,
}

/// Receives what is there, up to `limit` datagrams (at most [`MAX_BATCH`], and as many as `buffer` has slots of
/// `slot_len` bytes for), and hands each to `each` with the address of its sender, in the order of their arrival. The
/// part of a datagram that is longer than its slot is lost.
///
/// The datagrams lie in `buffer`, which is borrowed for the call. An error that comes after the first datagram is in
/// the result, unless the system keeps it for the next call.
///
/// # Errors
/// `WouldBlock` if nothing is there, or the error that the socket has kept (`ConnectionRefused` on a connected one),
/// which this call resets. `InvalidInput` if there is no slot, or `limit` is 0.
#[inline]
pub fn recv_batch(
    fd: RawFd,
    buffer: &mut [u8],
    slot_len: usize,
    limit: usize,
    each: impl FnMut(&[u8], Address),
) -> io::Result<Batch> {
    let slots = buffer.len().checked_div(slot_len).unwrap_or(0);
    match limit.min(slots).min(MAX_BATCH) {
        0 => Err(io::ErrorKind::InvalidInput.into()),
        limit => receive(fd, buffer, slot_len, limit, each),
    }
}

/// Sends `data`, which may be empty, as one datagram to `to`.
///
/// # Errors
/// `WouldBlock` if there is no space, `EMSGSIZE` if the datagram is too large, or the error that the socket has kept
/// or the network reports at once (`ConnectionRefused`, `NetworkUnreachable` ...); nothing was sent then.
#[inline]
pub fn send_to(fd: RawFd, data: &[u8], to: &Address) -> io::Result<()> {
    let (address, address_len) = to.as_raw();
    retried(|| {
        // SAFETY: data and address are live and as long as said; the kernel only reads them.
        unsafe {
            libc::sendto(
                fd,
                data.as_ptr().cast(),
                data.len(),
                SEND_FLAGS,
                address,
                address_len,
            )
        }
    })
    .map(drop)
}
