//! Nonblocking sockets: `recv`, `send`, `sendmsg`, `accept` and a few more, on raw fds that the caller owns. The calls
//! of datagram sockets are in [`datagram`].
//!
//! Every function retries after `EINTR` and returns `EAGAIN` as `ErrorKind::WouldBlock`. No function raises
//! `SIGPIPE`. Any thread may make the calls; they keep no state.
//!
//! Source: `recv(2)`, `send(2)`, `sendmsg(2)`, `accept(2)`, `getsockname(2)`, `socket(7)`, `tcp(7)`.

mod address;
mod borrowed;
pub mod datagram;
#[cfg(test)]
mod tests;

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

pub use address::{Address, AddressView, ipv6_text};
pub use borrowed::{is_blocking, is_stream, recv_from_now, recv_now, send_now, send_with};

use address::Storage;

/// The most slices that one [`send_vectored`] uses: `IOV_MAX` of Linux, macOS and the BSDs.
pub const MAX_SLICES: usize = 1024;

/// The flags of every send. Apple systems suppress `SIGPIPE` per socket instead, see [`suppress_sigpipe`].
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: c_int = 0;
#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: c_int = libc::MSG_NOSIGNAL;

/// The flag in the type argument of `socket(2)` that makes the descriptor nonblocking, or 0 if the system has none.
#[cfg(not(target_vendor = "apple"))]
pub const NONBLOCKING_TYPE: c_int = libc::SOCK_NONBLOCK;
/// The flag in the type argument of `socket(2)` that makes the descriptor nonblocking, or 0 if the system has none.
#[cfg(target_vendor = "apple")]
pub const NONBLOCKING_TYPE: c_int = 0;

/// Repeats the call as long as it fails with `EINTR`. The call returns a count, or -1 with an error in `errno`.
#[inline]
pub(super) fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        // -1 is the only result that does not fit into a usize.
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Like [`retried`], for calls that return an int.
#[inline]
pub(super) fn retried_int(mut call: impl FnMut() -> c_int) -> io::Result<usize> {
    retried(|| call() as isize)
}

/// Reads up to `len` bytes into `buf` and returns how many were read; 0 means the end of the stream (or a `len` of 0).
/// The rest of the buffer is not changed.
///
/// # Errors
/// `WouldBlock` if there is nothing to read, or the socket's error (`ConnectionReset` ...).
///
/// # Safety
/// `buf` must be valid for writes of `len` bytes, and nothing else may access them during the call.
#[inline]
pub unsafe fn recv(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the caller guarantees that the buffer is valid; the kernel writes at most `len` bytes to it.
        unsafe { libc::recv(fd, buf.cast(), len, 0) }
    })
}

/// Sends the front of `data` and returns how many bytes the kernel took.
///
/// # Errors
/// `WouldBlock` if there is no space, `BrokenPipe`, or the socket's error.
#[inline]
pub fn send(fd: RawFd, data: &[u8]) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the slice is live and has the given length; the kernel only reads it.
        unsafe { libc::send(fd, data.as_ptr().cast(), data.len(), SEND_FLAGS) }
    })
}

/// Sends the front of the concatenated `slices` and returns how many bytes the kernel took. At most the first
/// [`MAX_SLICES`] slices are used.
///
/// # Errors
/// `WouldBlock` if there is no space, `BrokenPipe`, or the socket's error.
#[inline]
pub fn send_vectored(fd: RawFd, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: `msghdr` is plain data, and a value whose bytes are all zero is valid: it has no address and no control
    // data. (On some systems `msghdr` has private padding, so its fields cannot be listed one by one.)
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    // sendmsg does not write to the slices, and IoSlice is guaranteed to have the layout of iovec.
    message.msg_iov = slices.as_ptr().cast_mut().cast();
    // The field is an int on some systems and a size on others.
    message.msg_iovlen = slices.len().min(MAX_SLICES) as _;
    retried(|| {
        // SAFETY: the header and the slices it points to live during the call, which only reads them.
        unsafe { libc::sendmsg(fd, &raw const message, SEND_FLAGS) }
    })
}

/// Whether this error of `accept` means that no connection was waiting, that a signal interrupted the call, or that the
/// connection was aborted before it could be accepted.
#[must_use]
pub fn is_no_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

/// Whether this error of `accept` concerns only one connection, which the call has taken off the queue and which is
/// lost. The next call may succeed.
///
/// Source: `accept(2)`, "Error handling": Linux passes on network errors of the new connection, and programs should
/// treat them like `EAGAIN`. `EPERM` comes from firewall rules.
#[must_use]
pub fn is_of_connection(error: &io::Error) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if error.raw_os_error() == Some(libc::ENONET) {
        return true;
    }
    matches!(
        error.raw_os_error(),
        Some(
            libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENETDOWN
                | libc::ENETUNREACH
                | libc::ENOPROTOOPT
                | libc::EOPNOTSUPP
                | libc::EPERM
                | libc::EPROTO
        )
    )
}

/// Takes one connection off the queue of a listening socket. Returns its descriptor, which is nonblocking and
/// close-on-exec, and the peer's address.
///
/// # Errors
/// - `WouldBlock` if the queue is empty.
/// - `EMFILE`, `ENFILE`, `ENOBUFS`, `ENOMEM` if descriptors or memory have run out. The connection stays in the queue,
///   and the socket stays readable.
/// - `ConnectionAborted` if the peer has aborted the connection.
/// - On Linux, also the network errors that `accept(2)` lists. They concern only this connection.
pub fn accept(fd: RawFd) -> io::Result<(OwnedFd, Address)> {
    let mut storage = Storage::new();
    let mut len = Storage::LEN;
    let accepted = retried_int(|| {
        len = Storage::LEN;
        // SAFETY: `storage` is live, aligned for any address and as long as `len` says; the call writes
        // no more than that, and stores the true length in `len`.
        unsafe { accept_call(fd, storage.as_mut_ptr(), &raw mut len) }
    })?;
    // SAFETY: the descriptor (which the call returned as an int) was just opened, and nothing else knows it.
    let accepted = unsafe { OwnedFd::from_raw_fd(accepted as RawFd) };
    #[cfg(target_vendor = "apple")]
    prepare(&accepted)?;
    Ok((accepted, storage.to_address(len)))
}

/// # Safety
/// As for `accept(2)`: `address` must be valid for writes of `*len` bytes.
#[cfg(not(target_vendor = "apple"))]
#[inline]
unsafe fn accept_call(fd: RawFd, address: *mut libc::sockaddr, len: *mut libc::socklen_t) -> c_int {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the caller upholds the contract of this function.
    unsafe { libc::accept4(fd, address, len, flags) }
}

/// # Safety
/// As for `accept(2)`: `address` must be valid for writes of `*len` bytes.
#[cfg(target_vendor = "apple")]
#[inline]
unsafe fn accept_call(fd: RawFd, address: *mut libc::sockaddr, len: *mut libc::socklen_t) -> c_int {
    // SAFETY: the caller upholds the contract of this function.
    unsafe { libc::accept(fd, address, len) }
}

/// Does what `accept4` and `MSG_NOSIGNAL` do on other systems.
#[cfg(target_vendor = "apple")]
fn prepare(accepted: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

    fcntl(accepted, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    fcntl(accepted, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    suppress_sigpipe(accepted.as_raw_fd())
}

/// Makes sure that sending on this socket cannot raise `SIGPIPE`. Call it once before the first send, for a socket
/// that did not come from [`accept`]. It does nothing on systems where each send has a flag for this.
///
/// # Errors
/// Any errno of `setsockopt(2)` (Apple systems only).
#[inline]
pub fn suppress_sigpipe(fd: RawFd) -> io::Result<()> {
    #[cfg(target_vendor = "apple")]
    {
        set_flag(fd, libc::SOL_SOCKET, libc::SO_NOSIGPIPE)
    }
    #[cfg(not(target_vendor = "apple"))]
    {
        let _ = fd;
        Ok(())
    }
}

/// The address that the socket is bound to (`getsockname`).
///
/// # Errors
/// `EBADF`, `ENOTSOCK`, or `EINVAL` for a socket that was shut down (BSD).
pub fn local_address(fd: RawFd) -> io::Result<Address> {
    address_from(fd, libc::getsockname)
}

/// The address that the socket is connected to (`getpeername`).
///
/// # Errors
/// `NotConnected`, `EBADF`, `ENOTSOCK`, or `EINVAL` for a socket that was shut down (BSD).
pub fn peer_address(fd: RawFd) -> io::Result<Address> {
    address_from(fd, libc::getpeername)
}

type AddressCall = unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> c_int;

fn address_from(fd: RawFd, call: AddressCall) -> io::Result<Address> {
    let mut storage = Storage::new();
    let mut len = Storage::LEN;
    retried_int(|| {
        len = Storage::LEN;
        // SAFETY: `storage` is live, aligned for any address and as long as `len` says; `getsockname` and `getpeername`
        // write no more than that, and store the true length in `len`.
        unsafe { call(fd, storage.as_mut_ptr(), &raw mut len) }
    })?;
    Ok(storage.to_address(len))
}

/// Shuts down the writing half. The peer then reads the end of the stream, and can still send.
///
/// # Errors
/// `NotConnected` if the connection is gone, `EBADF`, `ENOTSOCK`.
pub fn shutdown_write(fd: RawFd) -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    retried_int(|| unsafe { libc::shutdown(fd, libc::SHUT_WR) }).map(drop)
}

/// Makes the socket send small segments at once (`TCP_NODELAY`).
///
/// # Errors
/// `EOPNOTSUPP` or `ENOPROTOOPT` for a socket that is not TCP, `EINVAL` for a socket that was shut down (macOS),
/// `EBADF`, `ENOTSOCK`.
pub fn set_nodelay(fd: RawFd) -> io::Result<()> {
    set_flag(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY)
}

fn set_flag(fd: RawFd, level: c_int, option: c_int) -> io::Result<()> {
    let value: c_int = 1;
    // SAFETY: `value` lives during the call, which reads one int.
    retried_int(|| unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), INT_LEN) })
        .map(drop)
}

/// Takes the pending error of the socket (`SO_ERROR`), such as the error of a nonblocking connect. Returns `None` if no
/// error is pending.
///
/// # Errors
/// `EBADF` or `ENOTSOCK` if the call itself fails.
#[cfg(test)]
pub fn take_error(fd: RawFd) -> io::Result<Option<io::Error>> {
    let errno = int_option(fd, libc::SOL_SOCKET, libc::SO_ERROR)?;
    Ok((errno != 0).then(|| io::Error::from_raw_os_error(errno)))
}

fn int_option(fd: RawFd, level: c_int, option: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = INT_LEN;
    retried_int(|| {
        // SAFETY: `value` and `len` live during the call, which writes one int to each.
        unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &raw mut len) }
    })?;
    Ok(value)
}

const INT_LEN: libc::socklen_t = size_of::<c_int>() as libc::socklen_t;
