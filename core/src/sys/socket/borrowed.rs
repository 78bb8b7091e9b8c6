//! Calls on sockets that other code has opened and configured. They never block, even on a blocking socket.
//!
//! Purpose: [`super::recv`] and [`super::send`] for descriptors that may be blocking, and receiving a datagram with its
//! sender.
//!
//! Owner: any thread; the calls keep no state. It must not know who opened the socket.
//!
//! Source: `recv(2)`, `send(2)`.

use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;

use super::address::{Address, Storage};
use super::{SEND_FLAGS, retried};

/// Does what [`super::recv`] does, and never blocks.
///
/// # Errors
/// As for [`super::recv`].
///
/// # Safety
/// As for [`super::recv`].
#[inline]
pub unsafe fn recv_now(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the caller vouches for the buffer; the kernel writes at most `len` bytes to it.
        unsafe { direct::recv(fd, buf.cast(), len, libc::MSG_DONTWAIT) }
    })
}

/// The two calls of the hot path without the C library's points of cancellation, which cost four locked instructions
/// per pair of calls as soon as the process has a second thread. No thread here is ever cancelled.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod direct {
    use std::ffi::{c_int, c_void};
    use std::os::fd::RawFd;
    use std::ptr;

    /// # Safety
    /// As for `recv(2)`.
    #[inline]
    pub(super) unsafe fn recv(fd: RawFd, buf: *mut c_void, len: usize, flags: c_int) -> isize {
        let address = ptr::null_mut::<c_void>();
        // SAFETY: by the contract; no address is asked for.
        unsafe { libc::syscall(libc::SYS_recvfrom, fd, buf, len, flags, address, address) as isize }
    }

    /// # Safety
    /// As for `send(2)`.
    #[inline]
    pub(super) unsafe fn send(fd: RawFd, buf: *const c_void, len: usize, flags: c_int) -> isize {
        let address = ptr::null::<c_void>();
        // SAFETY: by the contract; no address is given.
        unsafe { libc::syscall(libc::SYS_sendto, fd, buf, len, flags, address, 0_usize) as isize }
    }
}
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
use libc as direct;

/// Receives one datagram without blocking. Returns its length, at most `len`, and its sender. The sender is an address
/// without a family if the kernel gives none.
///
/// # Errors
/// As for [`super::recv`], and the errors of datagrams that were sent before (`ConnectionRefused` ...).
///
/// # Safety
/// As for [`super::recv`].
pub unsafe fn recv_from_now(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<(usize, Address)> {
    let mut storage = Storage::new();
    let mut address_len = Storage::LEN;
    let received = retried(|| {
        address_len = Storage::LEN;
        // SAFETY: the caller vouches for the buffer, of which the kernel writes at most `len` bytes; `storage` is
        // live, aligned for any address and as long as `address_len` says.
        unsafe {
            libc::recvfrom(
                fd,
                buf.cast(),
                len,
                libc::MSG_DONTWAIT,
                storage.as_mut_ptr(),
                &raw mut address_len,
            )
        }
    })?;
    Ok((received, storage.to_address(address_len)))
}

/// Does what [`super::send`] does, and never blocks.
///
/// # Errors
/// As for [`super::send`].
#[inline]
pub fn send_now(fd: RawFd, data: &[u8]) -> io::Result<usize> {
    send_with(fd, data, 0)
}

/// [`send_now`] with more flags of `send(2)`.
///
/// # Errors
/// As for [`super::send`], and `EOPNOTSUPP` or `EINVAL` for flags that the socket does not know.
#[inline]
pub fn send_with(fd: RawFd, data: &[u8], flags: c_int) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the slice is live and as long as said; the kernel only reads it.
        unsafe {
            direct::send(
                fd,
                data.as_ptr().cast(),
                data.len(),
                SEND_FLAGS | libc::MSG_DONTWAIT | flags,
            )
        }
    })
}

/// Whether the descriptor is in blocking mode: another process that shares it may have set that.
#[inline]
#[must_use]
pub fn is_blocking(fd: RawFd) -> bool {
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK == 0
}

/// Whether the socket is a stream socket. A read from a stream may return any part of the data.
#[must_use]
pub fn is_stream(fd: RawFd) -> bool {
    super::int_option(fd, libc::SOL_SOCKET, libc::SO_TYPE).is_ok_and(|kind| kind == libc::SOCK_STREAM)
}
