//! Pipes, FIFOs and terminals: nonblocking reads and writes of descriptors that need not be sockets.
//!
//! The module has `read`, `write` and `write_vectored` for raw fds that the caller owns. It also finds out what kind of
//! file an fd is, makes an fd nonblocking, and duplicates it. All calls are retried after `EINTR`, and return `EAGAIN`
//! as `ErrorKind::WouldBlock`. A write to a pipe without a reader raises `SIGPIPE`. No flag prevents that, so the
//! process must ignore the signal, as Python does.
//!
//! Any thread may make the calls; they keep no state.
//!
//! Source: `read(2)`, `write(2)`, `writev(2)`, `fstat(2)`, `pipe(7)`, `fifo(7)`, `tty(4)`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::socket::{MAX_SLICES, retried, retried_int};

/// The kind of file that a descriptor refers to, as far as it matters for polling.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// One end of a pipe or of a FIFO.
    Fifo {
        /// Whether its link count is above 0. That is true for a FIFO that has a name in the file system and, on some
        /// systems including Linux, for unnamed pipes too.
        is_linked: bool,
    },
    /// A socket of any family.
    Socket,
    /// A terminal, or another device that is read as a stream.
    CharacterDevice,
    /// Something else: a regular file, a directory, a block device.
    Other,
}

impl FileKind {
    /// Whether a descriptor for writing becomes readable when the last reader is gone. A pipe has no other reason to
    /// become readable. A socket also becomes readable when its peer sends data.
    ///
    /// On Apple systems the writing end of a named FIFO does not report a lost reader, and is readable whenever the
    /// FIFO contains data. Pipes have no link in the file system there, so the two can be told apart. Devices never
    /// report a lost reader.
    #[must_use]
    pub fn tells_of_lost_reader(self) -> bool {
        match self {
            Self::Socket => true,
            Self::Fifo { is_linked } => !(is_linked && cfg!(target_vendor = "apple")),
            Self::CharacterDevice | Self::Other => false,
        }
    }
}

/// The kind of file that `fd` refers to.
///
/// # Errors
/// `EBADF`, or another errno of `fstat(2)`.
pub fn file_kind(fd: RawFd) -> io::Result<FileKind> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is live and large enough for what the call writes.
    retried_int(|| unsafe { libc::fstat(fd, status.as_mut_ptr()) })?;
    // SAFETY: the call has succeeded, so it has filled the struct.
    let status = unsafe { status.assume_init() };
    Ok(match status.st_mode & libc::S_IFMT {
        libc::S_IFIFO => FileKind::Fifo {
            is_linked: status.st_nlink > 0,
        },
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFCHR => FileKind::CharacterDevice,
        _ => FileKind::Other,
    })
}

/// Makes reads and writes fail with `WouldBlock` instead of waiting. This affects every descriptor of the open file, in
/// other processes too.
///
/// # Errors
/// `EBADF`, or another errno of `fcntl(2)`.
pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: F_GETFL takes no argument.
    let flags = retried_int(|| unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // The call returned the flags as an int, so they fit.
    let flags = flags as libc::c_int;
    if flags & libc::O_NONBLOCK == 0 {
        // SAFETY: F_SETFL takes an int.
        retried_int(|| unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    }
    Ok(())
}

/// A second descriptor of the same open file, close-on-exec.
///
/// # Errors
/// `EBADF`, `EMFILE`.
pub fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes an int, the lowest number to use.
    let copy = retried_int(|| unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) })?;
    // SAFETY: the descriptor (which the call returned as an int) is new, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy as RawFd) })
}

/// Reads up to `len` bytes into `buf` and returns how many were read; 0 means the end of the stream (or a `len` of 0).
///
/// # Errors
/// `WouldBlock` if there is no data, `EIO` for the master side of a pseudo-terminal whose slave side is closed (Linux),
/// or another errno of `read(2)`.
///
/// # Safety
/// `buf` must be valid for writes of `len` bytes, and nothing else may access them during the call.
pub unsafe fn read(fd: RawFd, buf: *mut u8, len: usize) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the caller guarantees that the buffer is valid; the kernel writes at most `len` bytes to it.
        unsafe { libc::read(fd, buf.cast(), len) }
    })
}

/// Writes the front of `data` and returns how many bytes were written.
///
/// # Errors
/// `WouldBlock` if there is no space, `BrokenPipe` if there is no reader, or another errno of `write(2)`.
pub fn write(fd: RawFd, data: &[u8]) -> io::Result<usize> {
    retried(|| {
        // SAFETY: the slice is live and has the given length; the kernel only reads it.
        unsafe { libc::write(fd, data.as_ptr().cast(), data.len()) }
    })
}

/// Writes the front of the concatenated `slices` and returns how many bytes were written. At most the first
/// [`MAX_SLICES`] slices are used.
///
/// # Errors
/// As for [`write()`].
pub fn write_vectored(fd: RawFd, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
    let count = slices.len().min(MAX_SLICES) as libc::c_int;
    retried(|| {
        // SAFETY: IoSlice is guaranteed to have the layout of iovec; the slices live during the call, which only reads
        // them.
        unsafe { libc::writev(fd, slices.as_ptr().cast(), count) }
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{ErrorKind, IoSlice, PipeReader, PipeWriter, Read, pipe};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::{FileKind, duplicate, file_kind, read, set_nonblocking, write, write_vectored};

    fn nonblocking_pipe() -> (PipeReader, PipeWriter) {
        let (reader, writer) = pipe().unwrap();
        set_nonblocking(reader.as_raw_fd()).unwrap();
        set_nonblocking(writer.as_raw_fd()).unwrap();
        (reader, writer)
    }

    fn read_some(fd: i32) -> std::io::Result<Vec<u8>> {
        let mut buffer = [0; 64];
        // SAFETY: the buffer is live and has the given length.
        let len = unsafe { read(fd, buffer.as_mut_ptr(), buffer.len())? };
        Ok(buffer[..len].to_vec())
    }

    #[test]
    fn kinds_of_files_are_recognized() {
        let (reader, writer) = pipe().unwrap();
        for end in [reader.as_raw_fd(), writer.as_raw_fd()] {
            let found = file_kind(end).unwrap();
            assert!(matches!(found, FileKind::Fifo { .. }) && found.tells_of_lost_reader());
        }
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(file_kind(socket.as_raw_fd()).unwrap(), FileKind::Socket);
        assert!(FileKind::Socket.tells_of_lost_reader());
        let null = File::open("/dev/null").unwrap();
        assert_eq!(file_kind(null.as_raw_fd()).unwrap(), FileKind::CharacterDevice);
        assert!(!FileKind::CharacterDevice.tells_of_lost_reader());
        let directory = File::open("/").unwrap();
        assert_eq!(file_kind(directory.as_raw_fd()).unwrap(), FileKind::Other);
        assert_eq!(file_kind(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn reads_what_was_written_and_then_would_block() {
        let (reader, writer) = nonblocking_pipe();
        assert_eq!(write(writer.as_raw_fd(), b"one").unwrap(), 3);
        let slices = [IoSlice::new(b" two"), IoSlice::new(b" three")];
        assert_eq!(write_vectored(writer.as_raw_fd(), &slices).unwrap(), 10);
        assert_eq!(read_some(reader.as_raw_fd()).unwrap(), b"one two three");
        assert_eq!(
            read_some(reader.as_raw_fd()).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        drop(writer);
        assert_eq!(read_some(reader.as_raw_fd()).unwrap(), b"");
    }

    #[test]
    fn a_write_to_a_full_pipe_is_partial_and_the_next_would_block() {
        let (mut reader, writer) = nonblocking_pipe();
        let large = vec![7; 1 << 20];
        let taken = write(writer.as_raw_fd(), &large).unwrap();
        assert!((1..large.len()).contains(&taken));
        let error = write(writer.as_raw_fd(), b"more").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let error = write_vectored(writer.as_raw_fd(), &[IoSlice::new(b"more")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        drop(writer);
        let mut arrived = Vec::new();
        reader.read_to_end(&mut arrived).unwrap();
        assert_eq!(arrived.len(), taken);
    }

    #[test]
    fn a_duplicate_is_the_same_open_file() {
        let (reader, writer) = nonblocking_pipe();
        let copy = duplicate(writer.as_raw_fd()).unwrap();
        drop(writer);
        // SAFETY: F_GETFD takes no argument.
        let flags = unsafe { libc::fcntl(copy.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        assert_eq!(write(copy.as_raw_fd(), b"x").unwrap(), 1);
        drop(copy);
        assert_eq!(read_some(reader.as_raw_fd()).unwrap(), b"x");
        assert_eq!(read_some(reader.as_raw_fd()).unwrap(), b"");
    }
}
