//! The calls, as a thread makes them, and two calls that do not block.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::os::fd::RawFd;

use crate::sys::socket::{retried, retried_int};

/// The most bytes that Linux reads or writes in one call. Source: `read(2)`.
pub(super) const MAX_LEN: usize = 0x7fff_f000;

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

// SAFETY: the contract of `Queue::start` keeps the memory valid until the call has ended, in whichever thread.
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

/// Not all of these systems have `fdatasync(2)`.
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

/// Closes a descriptor whose owner is gone, so there is nobody who could be told about an error.
pub(super) fn close(fd: RawFd) {
    let _ = close_checked(fd);
}

/// Reads up to `len` bytes at `offset` if the kernel has them in memory. Returns `None` if the call would wait for a
/// disk, or if the system or the file system cannot tell.
///
/// # Errors
/// An errno of `preadv2(2)`.
///
/// # Safety
/// `buffer` must be valid for writes of `len` bytes, and nothing else may access them during the call.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub unsafe fn read_now(fd: RawFd, buffer: *mut u8, len: usize, offset: i64) -> io::Result<Option<usize>> {
    let vector = libc::iovec {
        iov_base: buffer.cast(),
        iov_len: len.min(MAX_LEN),
    };
    // The offset in two halves. A 64-bit kernel uses only the first one. The system call is made by its number, because
    // old C libraries have no function for it.
    let (low, high) = (offset as libc::c_long, (offset >> 32) as libc::c_long);
    // SAFETY: the call gets one live vector, whose buffer the caller guarantees.
    let outcome = retried(|| unsafe {
        libc::syscall(
            libc::SYS_preadv2,
            fd,
            &raw const vector,
            1_usize,
            low,
            high,
            libc::RWF_NOWAIT,
        ) as isize
    });
    match outcome {
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM) => Ok(None),
            _ => Err(error),
        },
    }
}

/// These systems have no such call.
///
/// # Errors
/// None.
///
/// # Safety
/// No requirements: the buffer is not used.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub unsafe fn read_now(_: RawFd, _: *mut u8, _: usize, _: i64) -> io::Result<Option<usize>> {
    Ok(None)
}

/// Opens an existing file if the kernel has all parts of its path in memory. Returns `None` if the call would wait for
/// a disk, or if the system cannot tell.
///
/// # Errors
/// An errno of `openat2(2)`.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn open_now(path: &CStr, flags: c_int) -> io::Result<Option<RawFd>> {
    // With these flags the call may wait, and with the last one it is refused.
    if flags & (libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE) != 0 {
        return Ok(None);
    }
    // SAFETY: for this C structure of integers, all zeros are valid.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_CACHED;
    // SAFETY: the path and the structure are live, and the length is that of the structure.
    let outcome = retried(|| unsafe {
        libc::syscall(
            libc::SYS_openat2,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        ) as isize
    });
    match outcome {
        Ok(fd) => Ok(Some(fd as RawFd)),
        Err(error) => match error.raw_os_error() {
            // EINVAL: flags that this call refuses and `open(2)` ignores. EPERM: a sandbox.
            Some(libc::EAGAIN | libc::ENOSYS | libc::EINVAL | libc::EPERM | libc::E2BIG) => Ok(None),
            _ => Err(error),
        },
    }
}

/// These systems have no such call.
///
/// # Errors
/// None.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn open_now(_: &CStr, _: c_int) -> io::Result<Option<RawFd>> {
    Ok(None)
}
