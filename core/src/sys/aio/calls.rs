//! The calls on files, and how a thread makes them.

use std::ffi::{c_char, c_int};
use std::io;
use std::os::fd::RawFd;

use crate::sys::socket::{retried, retried_int};

/// The most bytes that Linux reads or writes in one call. Source: `read(2)`.
pub const MAX_LEN: usize = 0x7fff_f000;

/// A call on a file. An offset of -1 means the file's own position, which the call moves.
#[derive(Clone, Copy)]
pub enum Call {
    /// `open(2)`, with `O_CLOEXEC`. The outcome is the descriptor.
    Open {
        /// Ends with a null byte.
        path: *const c_char,
        /// `O_*`.
        flags: c_int,
        /// The permissions of a new file.
        mode: libc::mode_t,
    },
    /// `close(2)`.
    Close {
        /// The descriptor.
        fd: RawFd,
    },
    /// `pread(2)`. The outcome is the number of bytes; 0 at the end of the file.
    Read {
        /// The file.
        fd: RawFd,
        /// Valid for writes of `len` bytes.
        buffer: *mut u8,
        /// How many bytes to read at most.
        len: usize,
        /// Where to read, in bytes from the start.
        offset: i64,
    },
    /// `pwrite(2)`. The outcome is the number of bytes.
    Write {
        /// The file.
        fd: RawFd,
        /// Valid for reads of `len` bytes.
        data: *const u8,
        /// How many bytes to write at most.
        len: usize,
        /// Where to write, in bytes from the start.
        offset: i64,
    },
    /// `fsync(2)`, or `fdatasync(2)`.
    Sync {
        /// The file.
        fd: RawFd,
        /// Leave out metadata that is not needed for reading the data.
        only_data: bool,
    },
    /// `ftruncate(2)`.
    Truncate {
        /// The file.
        fd: RawFd,
        /// Its new length in bytes.
        len: i64,
    },
}

/// A call that another thread makes.
pub(super) struct SendCall(pub(super) Call);

// SAFETY: the contract of `Queue::start` keeps the memory valid until the call has ended, whichever thread makes it.
unsafe impl Send for SendCall {}

impl SendCall {
    /// Makes the call. It blocks.
    ///
    /// # Safety
    /// The call's pointers are valid until this returns, and nothing else writes to the buffer of a read.
    pub(super) unsafe fn make(self) -> io::Result<usize> {
        // SAFETY: by the contract. Wrong descriptors give an error.
        unsafe {
            match self.0 {
                Call::Open { path, flags, mode } => {
                    retried_int(|| libc::open(path, flags | libc::O_CLOEXEC, libc::c_uint::from(mode)))
                }
                Call::Close { fd } => close_checked(fd),
                Call::Read {
                    fd,
                    buffer,
                    len,
                    offset,
                } => {
                    let len = len.min(MAX_LEN);
                    retried(|| match offset {
                        -1 => libc::read(fd, buffer.cast(), len),
                        _ => libc::pread(fd, buffer.cast(), len, offset),
                    })
                }
                Call::Write {
                    fd,
                    data,
                    len,
                    offset,
                } => {
                    let len = len.min(MAX_LEN);
                    retried(|| match offset {
                        -1 => libc::write(fd, data.cast(), len),
                        _ => libc::pwrite(fd, data.cast(), len, offset),
                    })
                }
                Call::Sync { fd, only_data } => retried_int(|| sync(fd, only_data)),
                Call::Truncate { fd, len } => retried_int(|| libc::ftruncate(fd, len)),
            }
        }
    }
}

/// # Safety
/// None; a wrong descriptor gives an error.
#[cfg(any(target_os = "linux", target_os = "android"))]
unsafe fn sync(fd: RawFd, only_data: bool) -> c_int {
    // SAFETY: the calls take no pointers.
    unsafe {
        if only_data {
            libc::fdatasync(fd)
        } else {
            libc::fsync(fd)
        }
    }
}

/// Always calls `fsync(2)`, because not all systems other than Linux have `fdatasync(2)`.
///
/// # Safety
/// None; a wrong descriptor gives an error.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
unsafe fn sync(fd: RawFd, _: bool) -> c_int {
    // SAFETY: the call takes no pointers.
    unsafe { libc::fsync(fd) }
}

/// A close is never repeated: the descriptor is free even after `EINTR`. Source: `close(2)`.
fn close_checked(fd: RawFd) -> io::Result<usize> {
    // SAFETY: the descriptor belongs to the caller, who gives it up.
    match unsafe { libc::close(fd) } {
        0 => Ok(0),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes a descriptor whose owner is gone. Ignores errors, because no caller could handle them.
pub(super) fn close(fd: RawFd) {
    let _ = close_checked(fd);
}
