//! Calls on sockets that other code has opened and configured. They do not block, even if the socket is in blocking
//! mode. Any thread may make them; they keep no state.
//!
//! Source: `recv(2)`, `send(2)`.

use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;

use super::address::{Address, Storage};
use super::{SEND_FLAGS, retried};

/// Like [`super::recv`], but never blocks.
///
/// # Errors
/// As for [`super::recv`].
///
/// # Safety
/// As for [`super::recv`].
#[inline]
pub unsafe fn recv_now(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the caller guarantees that the buffer is valid; the kernel writes at most `len` bytes to it.
        unsafe { direct::recv(fd, buf.cast(), len, libc::MSG_DONTWAIT) }
    })
}

/// The two calls of the hot path, made with `syscall` instead of the C library's `recv` and `send`. Those functions are
/// cancellation points, which cost four locked instructions for each pair of calls once the process has a second
/// thread. Nothing cancels the threads that make the calls, so no cancellation points are needed.
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
        // SAFETY: the caller upholds the contract of this function. Null pointers mean that no address is requested.
        unsafe { libc::syscall(libc::SYS_recvfrom, fd, buf, len, flags, address, address) as isize }
    }

    /// # Safety
    /// As for `send(2)`.
    #[inline]
    pub(super) unsafe fn send(fd: RawFd, buf: *const c_void, len: usize, flags: c_int) -> isize {
        let address = ptr::null::<c_void>();
        // SAFETY: the caller upholds the contract of this function. The null pointer means that there is no address.
        unsafe { libc::syscall(libc::SYS_sendto, fd, buf, len, flags, address, 0_usize) as isize }
    }
}
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
use libc as direct;

/// Receives one datagram without blocking. Returns its length, at most `len`, and the address of its sender. If the
/// kernel does not report a sender, the family of the address is `AF_UNSPEC`.
///
/// # Errors
/// As for [`super::recv`], and errors of datagrams that were sent before (`ConnectionRefused` ...).
///
/// # Safety
/// As for [`super::recv`].
pub unsafe fn recv_from_now(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<(usize, Address)> {
    let mut storage = Storage::new();
    let mut address_len = Storage::LEN;
    let received = retried(|| {
        address_len = Storage::LEN;
        // SAFETY: the caller guarantees that the buffer is valid, and the kernel writes at most `len` bytes to it;
        // `storage` is live, aligned for any address and as long as `address_len` says.
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

/// Like [`super::send`], but never blocks.
///
/// # Errors
/// As for [`super::send`].
#[inline]
pub fn send_now(fd: RawFd, data: &[u8]) -> io::Result<usize> {
    send_with(fd, data, 0)
}

/// Like [`send_now`], with additional flags of `send(2)`.
///
/// # Errors
/// As for [`super::send`], and `EOPNOTSUPP` or `EINVAL` for flags that the socket does not support.
#[inline]
pub fn send_with(fd: RawFd, data: &[u8], flags: c_int) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the slice is live and has the given length; the kernel only reads it.
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

/// Whether the descriptor is in blocking mode. Another process that shares it may have changed the mode.
#[inline]
#[must_use]
pub fn is_blocking(fd: RawFd) -> bool {
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK == 0
}

/// Whether the socket is a stream socket, where a read may return any part of the data.
#[must_use]
pub fn is_stream(fd: RawFd) -> bool {
    super::int_option(fd, libc::SOL_SOCKET, libc::SO_TYPE).is_ok_and(|kind| kind == libc::SOCK_STREAM)
}
