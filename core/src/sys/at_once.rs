//! Reads and writes that do not block, even if the pipe, socket or terminal is in blocking mode.
//!
//! Other processes may share a descriptor, such as stdin. Then it is not enough to wait until the descriptor is ready
//! and to read from it afterwards: the read blocks if another process has taken the data in between. Nonblocking mode
//! cannot be used either, because it belongs to the open file and would affect the other processes too. The calls in
//! this module do not block, and do not change the mode. On Linux they first try the flag `RWF_NOWAIT`, which the
//! kernel supports for some kinds of files (for pipes and sockets since Linux 6.5). Without that flag, the method
//! depends on the kind of file:
//!
//! | kind of file | method |
//! |---|---|
//! | sockets | `MSG_DONTWAIT` |
//! | FIFOs, and pipes on older kernels | opened a second time through `/proc/self/fd`, in nonblocking mode |
//! | the slave side of a pseudo-terminal | the same; a plain call (which cannot block) if the terminal was hung up |
//! | the master side of a pseudo-terminal | none, because a second `open` would make a new terminal |
//! | all other files; on other systems, everything except sockets | none |
//!
//! Any thread may call these functions; they keep no state. A write to a pipe without a reader raises `SIGPIPE`, as in
//! [`super::pipe`].
//!
//! Source: `preadv2(2)`, `recv(2)`, `proc_pid_fd(5)`, `fifo(7)`, `pts(4)`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::pipe::{self, FileKind, file_kind};
use super::socket;

/// The direction of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// The action to take if the kernel does not support `RWF_NOWAIT` for a file.
enum Fallback {
    /// `MSG_DONTWAIT`.
    Socket,
    /// A call on the same file, which was opened a second time in nonblocking mode.
    Reopened(OwnedFd),
    /// A plain call, which does not block because the terminal was hung up.
    Plain,
}

/// Reads up to `len` bytes into `buf`. Returns the number of bytes that were read, which is 0 at the end of the
/// stream, or `None` if this descriptor cannot be read without blocking.
///
/// # Errors
/// `WouldBlock` if there is no data, or another errno of `read(2)`.
///
/// # Safety
/// `buf` must be valid for writes of `len` bytes, and nothing else may access them during the call.
pub unsafe fn read_now(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<Option<usize>> {
    // SAFETY: the caller upholds the contract of this function.
    if let Some(outcome) = unsafe { flagged::read(fd, buf, len) } {
        return outcome.map(Some);
    }
    let Some(fallback) = fallback_for(fd, Access::Read)? else {
        return Ok(None);
    };
    // SAFETY: the caller upholds the contract of this function.
    let outcome = unsafe {
        match fallback {
            Fallback::Socket => socket::recv_now(fd, buf, len),
            Fallback::Reopened(file) => pipe::read(file.as_raw_fd(), buf, len),
            Fallback::Plain => pipe::read(fd, buf, len),
        }
    };
    outcome.map(Some)
}

/// Writes the front of `data`. Returns the number of bytes that were written, or `None` if this descriptor cannot be
/// written without blocking.
///
/// # Errors
/// `WouldBlock` if there is no space, or another errno of `write(2)`.
pub fn write_now(fd: RawFd, data: &[u8]) -> io::Result<Option<usize>> {
    if data.is_empty() {
        // An empty datagram must be sent, but a call with `RWF_NOWAIT` and an empty vector would not send it. For other
        // files an empty write does not block.
        return match file_kind(fd)? {
            FileKind::Socket => socket::send_now(fd, data).map(Some),
            _ => pipe::write(fd, data).map(Some),
        };
    }
    if let Some(outcome) = flagged::write(fd, data) {
        return outcome.map(Some);
    }
    let Some(fallback) = fallback_for(fd, Access::Write)? else {
        return Ok(None);
    };
    let outcome = match fallback {
        Fallback::Socket => socket::send_now(fd, data),
        Fallback::Reopened(file) => pipe::write(file.as_raw_fd(), data),
        Fallback::Plain => pipe::write(fd, data),
    };
    outcome.map(Some)
}

fn fallback_for(fd: RawFd, access: Access) -> io::Result<Option<Fallback>> {
    Ok(match file_kind(fd)? {
        FileKind::Socket => Some(Fallback::Socket),
        FileKind::Fifo { .. } => reopening::reopened(fd, access).map(Fallback::Reopened),
        FileKind::CharacterDevice if reopening::is_terminal(fd)? => match reopening::readiness(fd, access)? {
            reopening::Readiness::HungUp => Some(Fallback::Plain),
            reopening::Readiness::Ready => reopening::reopened(fd, access).map(Fallback::Reopened),
            reopening::Readiness::Busy => return Err(io::Error::from_raw_os_error(libc::EAGAIN)),
        },
        FileKind::CharacterDevice | FileKind::Other => None,
    })
}

/// Calls with `RWF_NOWAIT`. They return `None` if the kernel does not support this flag for this kind of file.
#[cfg(any(target_os = "linux", target_os = "android"))]
mod flagged {
    use std::io;
    use std::os::fd::RawFd;

    use super::super::socket::retried;

    /// The offset -1, in two halves. It means the file's own position, as for `read` and `write`.
    const POSITION: [libc::c_long; 2] = [-1, -1];

    /// # Safety
    /// As for `read_now`.
    pub(super) unsafe fn read(fd: RawFd, buf: *mut u8, len: usize) -> Option<io::Result<usize>> {
        // SAFETY: the caller upholds the contract of this function.
        unsafe { call(libc::SYS_preadv2, fd, buf, len) }
    }

    pub(super) fn write(fd: RawFd, data: &[u8]) -> Option<io::Result<usize>> {
        // SAFETY: the slice is live and has the given length; the kernel only reads it.
        unsafe { call(libc::SYS_pwritev2, fd, data.as_ptr().cast_mut(), data.len()) }
    }

    /// Makes the system call by its number, because old C libraries have no function for it.
    ///
    /// # Safety
    /// `buf` is valid for `len` bytes: for writes if the call reads from the file, and for reads if it writes.
    unsafe fn call(number: libc::c_long, fd: RawFd, buf: *mut u8, len: usize) -> Option<io::Result<usize>> {
        let vector = libc::iovec {
            iov_base: buf.cast(),
            iov_len: len,
        };
        let [low, high] = POSITION;
        // SAFETY: the call gets one live vector, whose buffer the caller guarantees.
        let outcome = retried(|| unsafe {
            libc::syscall(
                number,
                fd,
                &raw const vector,
                1_usize,
                low,
                high,
                libc::RWF_NOWAIT,
            ) as isize
        });
        match outcome.as_ref().err().and_then(io::Error::raw_os_error) {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM) => None,
            _ => Some(outcome),
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod flagged {
    use std::io;
    use std::os::fd::RawFd;

    /// # Safety
    /// No requirements: the buffer is not used.
    pub(super) unsafe fn read(_: RawFd, _: *mut u8, _: usize) -> Option<io::Result<usize>> {
        None
    }

    pub(super) fn write(_: RawFd, _: &[u8]) -> Option<io::Result<usize>> {
        None
    }
}

mod reopening {
    use std::ffi::CString;
    use std::io;
    use std::mem::MaybeUninit;
    use std::os::fd::{FromRawFd, OwnedFd, RawFd};

    use super::super::socket::retried_int;
    use super::Access;

    pub(super) enum Readiness {
        Ready,
        Busy,
        HungUp,
    }

    /// Whether the descriptor is the slave side of a pseudo-terminal.
    pub(super) fn is_terminal(fd: RawFd) -> io::Result<bool> {
        if !cfg!(any(target_os = "linux", target_os = "android")) {
            return Ok(false);
        }
        let mut status = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `status` is live and large enough for what the call writes.
        retried_int(|| unsafe { libc::fstat(fd, status.as_mut_ptr()) })?;
        // SAFETY: the call has succeeded, so it has filled the struct.
        let device = unsafe { status.assume_init() }.st_rdev;
        // The numbers of Unix98 terminals, see `Documentation/admin-guide/devices.txt` of the kernel.
        Ok((136..144).contains(&libc::major(device)))
    }

    /// Whether a call would block now.
    pub(super) fn readiness(fd: RawFd, access: Access) -> io::Result<Readiness> {
        let events = if access == Access::Write {
            libc::POLLOUT
        } else {
            libc::POLLIN
        };
        let mut entry = libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        // SAFETY: the call gets one live entry and writes only to it.
        let count = retried_int(|| unsafe { libc::poll(&raw mut entry, 1, 0) })?;
        Ok(if entry.revents & (libc::POLLHUP | libc::POLLERR) != 0 {
            Readiness::HungUp
        } else if count > 0 {
            Readiness::Ready
        } else {
            Readiness::Busy
        })
    }

    /// Opens the same file a second time, in nonblocking mode. Returns `None` if that is not possible: without `/proc`,
    /// without permission, or on systems where opening would only duplicate the descriptor.
    pub(super) fn reopened(fd: RawFd, access: Access) -> Option<OwnedFd> {
        if !cfg!(any(target_os = "linux", target_os = "android")) {
            return None;
        }
        let path = CString::new(format!("/proc/self/fd/{fd}")).ok()?;
        let mode = if access == Access::Write {
            libc::O_WRONLY
        } else {
            libc::O_RDONLY
        };
        let flags = mode | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        // SAFETY: the path is a live string; without O_CREAT there is no third argument.
        let opened = retried_int(|| unsafe { libc::open(path.as_ptr(), flags) }).ok()?;
        // SAFETY: the descriptor (which the call returned as an int) is new, and nothing else knows it.
        Some(unsafe { OwnedFd::from_raw_fd(opened as RawFd) })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::ffi::CString;
    use std::io::{ErrorKind, Write, pipe};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::time::{Duration, Instant};

    use super::{read_now, write_now};

    fn read(fd: RawFd) -> std::io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; 64];
        // SAFETY: the buffer is live and has the given length.
        let len = unsafe { read_now(fd, buffer.as_mut_ptr(), buffer.len())? };
        Ok(len.map(|len| buffer[..len].to_vec()))
    }

    fn would_block<T>(outcome: std::io::Result<T>) -> bool {
        outcome
            .err()
            .is_some_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    fn is_blocking(fd: RawFd) -> bool {
        // SAFETY: F_GETFL takes no argument.
        unsafe { libc::fcntl(fd, libc::F_GETFL) & libc::O_NONBLOCK == 0 }
    }

    fn check(reader: RawFd, writer: RawFd) {
        assert!(would_block(read(reader)));
        assert!(matches!(write_now(writer, b"words"), Ok(Some(5))));
        assert!(matches!(read(reader), Ok(Some(data)) if data == b"words"));
        while !would_block(write_now(writer, &[7; 4096])) {}
        assert!(is_blocking(reader) && is_blocking(writer));
    }

    #[test]
    fn pipes_and_sockets_do_not_block() {
        let (reader, mut writer) = pipe().unwrap();
        check(reader.as_raw_fd(), writer.as_raw_fd());
        drop(reader);
        assert_eq!(writer.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(
            write_now(writer.as_raw_fd(), b"x").unwrap_err().kind(),
            ErrorKind::BrokenPipe
        );
        let (near, far) = UnixStream::pair().unwrap();
        check(near.as_raw_fd(), far.as_raw_fd());
        assert_eq!(write_now(far.as_raw_fd(), b"").unwrap(), Some(0));
        let (near, far) = UnixDatagram::pair().unwrap();
        assert_eq!(write_now(near.as_raw_fd(), b"").unwrap(), Some(0));
        assert_eq!(read(far.as_raw_fd()).unwrap().unwrap(), b"");
        assert!(would_block(read(far.as_raw_fd())));
    }

    #[test]
    fn a_fifo_does_not_block() {
        let path = std::env::temp_dir().join(format!("grapeshot-fifo-{}", std::process::id()));
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the path is a live string; the descriptor is new, and nothing else owns it.
        let both = unsafe {
            assert_eq!(libc::mkfifo(name.as_ptr(), 0o600), 0);
            OwnedFd::from_raw_fd(libc::open(name.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC))
        };
        std::fs::remove_file(&path).unwrap();
        check(both.as_raw_fd(), both.as_raw_fd());
    }

    #[test]
    fn a_terminal_does_not_block() {
        let (mut master, mut slave) = (0, 0);
        let null = std::ptr::null_mut();
        // SAFETY: the call gets two live ints; the other arguments may be null. The descriptors are new, and nothing
        // else owns them.
        let (master, slave) = unsafe {
            assert_eq!(
                libc::openpty(&raw mut master, &raw mut slave, null, null.cast(), null.cast()),
                0
            );
            for fd in [master, slave] {
                assert_eq!(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC), 0);
            }
            (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
        };
        assert!(would_block(read(slave.as_raw_fd())));
        assert_eq!(read(master.as_raw_fd()).unwrap(), None);
        assert_eq!(super::pipe::write(master.as_raw_fd(), b"line\n").unwrap(), 5);
        assert_eq!(read(slave.as_raw_fd()).unwrap().unwrap(), b"line\n");
        while !would_block(write_now(slave.as_raw_fd(), &[b'x'; 4096])) {}
        drop(master);
        // A process that another test is starting may hold a copy of the master side until it calls `exec`.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !read(slave.as_raw_fd()).is_ok_and(|data| data.is_some_and(|data| data.is_empty())) {
            assert!(Instant::now() < deadline, "the slave side was not hung up");
            std::thread::yield_now();
        }
        assert_eq!(
            write_now(slave.as_raw_fd(), b"x").unwrap_err().raw_os_error(),
            Some(libc::EIO)
        );
    }
}
