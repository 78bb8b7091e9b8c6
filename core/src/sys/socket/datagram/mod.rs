//! Datagrams: receiving several at a time (on Linux with one system call), and sending one to an address.
//!
//! [`recv_batch`] receives as many datagrams as have arrived, up to a limit. There is no function that sends several at
//! once, because measurements showed no gain. Any thread may make the calls; they keep no state.
//!
//! The file of each operating system must provide `receive(fd, buffer, slot_len, limit, each)` with the contract of
//! [`recv_batch`], for a `limit` of 1 to [`MAX_BATCH`] and a buffer that has space for `limit` slots.
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

// The tests run this implementation on every system.
#[cfg(any(test, not(any(target_os = "linux", target_os = "android"))))]
mod single;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
use single::receive;

#[cfg(test)]
mod tests;

/// The most datagrams that one [`recv_batch`] takes.
pub const MAX_BATCH: usize = 16;

/// The length of a slot that has space for any datagram of an internet socket: the length field of IP has 16 bits.
pub const INTERNET_SLOT_LEN: usize = 64 * 1024;

/// The result of a [`recv_batch`] that has received at least one datagram.
#[derive(Debug)]
pub struct Batch {
    /// The error that ended the batch, if the system does not keep it for the next call.
    pub error: Option<io::Error>,
}

/// Receives the datagrams that have arrived. Their number is limited by `limit`, by [`MAX_BATCH`], and by the number of
/// slots of `slot_len` bytes in `buffer`. Passes each datagram to `each` with the address of its sender, in the order
/// of arrival. If a datagram is longer than its slot, the rest of it is lost.
///
/// The datagrams that `each` gets are slices of `buffer`. If an error occurs after the first datagram, it is in the
/// result, unless the system keeps it for the next call.
///
/// # Errors
/// `WouldBlock` if no datagram has arrived. The pending error of the socket (such as `ConnectionRefused` on a connected
/// socket); this call resets it. `InvalidInput` if there is no slot, or `limit` is 0.
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
/// `WouldBlock` if there is no space, `EMSGSIZE` if the datagram is too large, an error that is pending on the socket,
/// or one that the network reports at once (`ConnectionRefused` ...). After an error the datagram was not sent.
#[inline]
pub fn send_to(fd: RawFd, data: &[u8], to: &Address) -> io::Result<()> {
    let (address, address_len) = to.as_raw();
    retried(|| {
        // SAFETY: data and address are live and have the given lengths; the kernel only reads them.
        unsafe {
            libc::sendto(
                fd,
                data.as_ptr().cast(),
                data.len(),
                SEND_FLAGS | libc::MSG_DONTWAIT,
                address,
                address_len,
            )
        }
    })
    .map(drop)
}
