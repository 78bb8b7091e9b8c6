//! Reads and opens that do not block. A caller tries them first, and starts the call in a [`Queue`](super::Queue) only
//! if they return `None`.
//!
//! Source: `preadv2(2)`, `openat2(2)`, `open(2)`.

pub use system::{open_now, read_now};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod system {
    use std::ffi::{CStr, CString, c_int};
    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

    use super::super::calls::MAX_LEN;
    use crate::sys::pipe::{FileKind, file_kind};
    use crate::sys::socket::{retried, retried_int};

    /// Reads up to `len` bytes at `offset` if the kernel has them in memory. An offset of -1 means the file's own
    /// position, which the call moves. Returns `None` if the call would wait for a disk, or if the system or the file
    /// system cannot tell.
    ///
    /// # Errors
    /// An errno of `preadv2(2)`.
    ///
    /// # Safety
    /// `buffer` must be valid for writes of `len` bytes, and nothing else may access them during the call.
    pub unsafe fn read_now(fd: RawFd, buffer: *mut u8, len: usize, offset: i64) -> io::Result<Option<usize>> {
        let vector = libc::iovec {
            iov_base: buffer.cast(),
            iov_len: len.min(MAX_LEN),
        };
        // The offset in two halves. A 64-bit kernel uses only the first one. An offset of -1 has -1 in both halves, so
        // 32-bit and 64-bit kernels both take it for -1. The system call is made by its number, because old C libraries
        // have no function for it.
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

    /// Opens an existing file, directory or block device if the kernel has all parts of its path in memory. Returns
    /// `None` if the call would wait for a disk, or for another process that has a lease on the file. Also returns
    /// `None` for other kinds of files (opening a FIFO waits for its other end), for some flags (see the first check),
    /// and if the system cannot tell.
    ///
    /// # Errors
    /// An errno of `openat2(2)` or `open(2)`.
    pub fn open_now(path: &CStr, flags: c_int) -> io::Result<Option<RawFd>> {
        // With O_TMPFILE, O_CREAT or O_TRUNC the call may wait. With O_NOFOLLOW, the link in /proc (used below) cannot
        // be opened. O_TMPFILE contains the bit O_DIRECTORY, so all bits of O_TMPFILE must be compared.
        let is_temporary = flags & libc::O_TMPFILE == libc::O_TMPFILE;
        if is_temporary || flags & (libc::O_CREAT | libc::O_TRUNC | libc::O_NOFOLLOW) != 0 {
            return Ok(None);
        }
        let Some(place) = look_up_now(path)? else {
            return Ok(None);
        };
        if !matches!(file_kind(place.as_raw_fd()), Ok(FileKind::Other)) {
            return Ok(None);
        }
        // The file is opened through the link in /proc: the path could lead to another file by now.
        let Ok(same) = CString::new(format!("/proc/self/fd/{}", place.as_raw_fd())) else {
            return Ok(None);
        };
        // SAFETY: the path is a live string; without O_CREAT there is no third argument.
        let opened =
            retried_int(|| unsafe { libc::open(same.as_ptr(), flags | libc::O_CLOEXEC | libc::O_NONBLOCK) });
        let file = match opened {
            // SAFETY: the descriptor is new, and nothing else knows it.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd as RawFd) },
            Err(error) => {
                return match error.raw_os_error() {
                    // EWOULDBLOCK: another process has a lease on the file. ENOENT: there is no /proc.
                    Some(libc::EWOULDBLOCK | libc::ENOENT) => Ok(None),
                    _ => Err(error),
                };
            }
        };
        if flags & libc::O_NONBLOCK == 0 && !clear_nonblocking(file.as_raw_fd()) {
            return Ok(None);
        }
        Ok(Some(file.into_raw_fd()))
    }

    /// Clears `O_NONBLOCK`. Returns whether the flag is clear. Source: `F_SETFL` in `fcntl(2)`.
    fn clear_nonblocking(fd: RawFd) -> bool {
        // SAFETY: the calls take no pointers.
        unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFL);
            // `open` ignores O_NONBLOCK if O_PATH is set, so the flag may already be clear.
            flags >= 0
                && (flags & libc::O_NONBLOCK == 0
                    || libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_NONBLOCK) == 0)
        }
    }

    /// A descriptor (`O_PATH`) that refers to a file without opening it. `None` if the call would wait for a disk, or
    /// if the system cannot tell.
    fn look_up_now(path: &CStr) -> io::Result<Option<OwnedFd>> {
        // SAFETY: for this C structure of integers, all zeros are valid.
        let mut how: libc::open_how = unsafe { std::mem::zeroed() };
        how.flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
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
            // SAFETY: the descriptor is new, and nothing else knows it.
            Ok(fd) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })),
            Err(error) => match error.raw_os_error() {
                // EPERM: a sandbox. EINVAL: an old kernel.
                Some(libc::EAGAIN | libc::ENOSYS | libc::EINVAL | libc::EPERM) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod system {
    //! Other systems have no calls that give up instead of waiting for a disk.

    use std::ffi::{CStr, c_int};
    use std::io;
    use std::os::fd::RawFd;

    /// Always `None`.
    ///
    /// # Errors
    /// None.
    ///
    /// # Safety
    /// No requirements: the buffer is not used.
    pub unsafe fn read_now(_: RawFd, _: *mut u8, _: usize, _: i64) -> io::Result<Option<usize>> {
        Ok(None)
    }

    /// Always `None`.
    ///
    /// # Errors
    /// None.
    pub fn open_now(_: &CStr, _: c_int) -> io::Result<Option<RawFd>> {
        Ok(None)
    }
}
