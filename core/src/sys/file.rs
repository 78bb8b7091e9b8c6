//! Files: their length and position, sending them to a socket with `sendfile`, checking or removing a path, and the
//! lowest free descriptor number.
//!
//! The functions that take a path are for the files of Unix sockets. All calls may block on a disk, but not on a
//! nonblocking socket. Any thread may make them; they keep no state.
//!
//! Source: `fstat(2)`, `lseek(2)`, `sendfile(2)`, `stat(2)`, `unlink(2)`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The type and identity of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Whether it is the file of a Unix socket.
    pub is_socket: bool,
    /// Its inode number in the file system.
    pub inode: u64,
}

/// The status of the file at `path`. Symbolic links are followed.
///
/// # Errors
/// `NotFound`, `PermissionDenied`, or another errno of `stat(2)`.
pub fn status(path: &OsStr) -> io::Result<Status> {
    let metadata = fs::metadata(path)?;
    Ok(Status {
        is_socket: metadata.file_type().is_socket(),
        inode: metadata.ino(),
    })
}

/// Removes the file at `path`.
///
/// # Errors
/// `NotFound`, `PermissionDenied`, or another errno of `unlink(2)`.
pub fn remove(path: &OsStr) -> io::Result<()> {
    fs::remove_file(path)
}

/// `fd` as a `File` that does not close it.
fn borrowed(fd: RawFd) -> io::Result<ManuallyDrop<File>> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the descriptor is not -1. It belongs to the caller, is used for one call and never closed here.
    Ok(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
}

/// The lowest free descriptor number, which is found by duplicating `fd` for a moment.
///
/// # Errors
/// `EMFILE` if the process has no free descriptors, or `EBADF`.
pub fn lowest_free(fd: RawFd) -> io::Result<RawFd> {
    // SAFETY: the call takes only integers.
    let number = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else knows it.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
    Ok(number)
}

/// The length in bytes of the regular file `fd`; 0 for most other files.
///
/// # Errors
/// `EBADF`, or another errno of `fstat(2)`.
pub fn len_bytes(fd: RawFd) -> io::Result<u64> {
    Ok(borrowed(fd)?.metadata()?.len())
}

/// Sets the position of `fd` to `offset` bytes from the start.
///
/// # Errors
/// `ESPIPE` for a pipe, `EBADF`, or another errno of `lseek(2)`.
pub fn set_position(fd: RawFd, offset: u64) -> io::Result<()> {
    borrowed(fd)?.seek(SeekFrom::Start(offset)).map(|_| ())
}

/// Sends up to `count` bytes of `file`, from `offset` on, to `socket`. Returns how many bytes were sent; 0 means the
/// end of the file. The file's position does not change. The call is not repeated after a signal; the caller must do
/// that.
///
/// # Errors
/// `WouldBlock` if there is no space; `Interrupted`; `EINVAL`, `ENOSYS` and others if the system cannot send this kind
/// of file on this kind of socket; or the socket's error.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn send(socket: RawFd, file: RawFd, offset: i64, count: usize) -> io::Result<usize> {
    let mut offset = offset;
    // SAFETY: `offset` lives during the call, which reads and writes it; bad descriptors give an error.
    let sent = unsafe { libc::sendfile64(socket, file, &raw mut offset, count) };
    // -1 is the only value that does not fit.
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Does the same as the function for Linux if `count` is not 0. These systems report how many bytes were sent even if
/// the call was interrupted or would block. In that case this function returns the number instead of the error, unless
/// the number is 0.
#[cfg(any(target_vendor = "apple", target_os = "freebsd", target_os = "dragonfly"))]
pub fn send(socket: RawFd, file: RawFd, offset: i64, count: usize) -> io::Result<usize> {
    // On Apple systems `sent` is also the length to send, and zero would mean the whole file.
    let mut sent: libc::off_t = if cfg!(target_vendor = "apple") {
        count as libc::off_t
    } else {
        0
    };
    #[cfg(target_vendor = "apple")]
    // SAFETY: `sent` lives during the call, which reads and writes it; there are no headers.
    let result = unsafe { libc::sendfile(file, socket, offset, &raw mut sent, std::ptr::null_mut(), 0) };
    #[cfg(not(target_vendor = "apple"))]
    // SAFETY: `sent` lives during the call, which writes it; there are no headers.
    let result = unsafe {
        libc::sendfile(
            file,
            socket,
            offset,
            count,
            std::ptr::null_mut(),
            &raw mut sent,
            0,
        )
    };
    let error = io::Error::last_os_error();
    let is_partial = matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)
    );
    if result == 0 || (is_partial && sent > 0) {
        Ok(sent as usize)
    } else {
        Err(error)
    }
}

/// Fails with `ENOSYS`, because these systems have no such call.
#[cfg(any(target_os = "netbsd", target_os = "openbsd"))]
pub fn send(_socket: RawFd, _file: RawFd, _offset: i64, _count: usize) -> io::Result<usize> {
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::{len_bytes, remove, send, set_position, status};

    fn folder() -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!(
            "grapeshot-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn socket_files_are_told_from_others_and_removed() {
        let folder = folder();
        let (socket, plain) = (folder.join("socket"), folder.join("plain"));
        let _listener = UnixListener::bind(&socket).unwrap();
        File::create(&plain).unwrap();
        assert!(status(socket.as_os_str()).unwrap().is_socket);
        assert!(!status(plain.as_os_str()).unwrap().is_socket);
        assert_ne!(
            status(socket.as_os_str()).unwrap().inode,
            status(plain.as_os_str()).unwrap().inode
        );
        for path in [&socket, &plain] {
            remove(path.as_os_str()).unwrap();
            assert_eq!(
                status(path.as_os_str()).unwrap_err().kind(),
                std::io::ErrorKind::NotFound
            );
            assert_eq!(
                remove(path.as_os_str()).unwrap_err().kind(),
                std::io::ErrorKind::NotFound
            );
        }
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn sending_part_of_a_file_keeps_its_position() {
        let folder = folder();
        let path = folder.join("file");
        let mut file = File::create_new(&path).unwrap();
        file.write_all(b"0123456789").unwrap();
        let mut file = File::options().read(true).open(&path).unwrap();
        assert_eq!(len_bytes(file.as_raw_fd()).unwrap(), 10);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(send(ours.as_raw_fd(), file.as_raw_fd(), 3, 4).unwrap(), 4);
        assert_eq!(send(ours.as_raw_fd(), file.as_raw_fd(), 8, 100).unwrap(), 2);
        assert_eq!(send(ours.as_raw_fd(), file.as_raw_fd(), 10, 100).unwrap(), 0);
        assert_eq!(file.stream_position().unwrap(), 0);
        set_position(file.as_raw_fd(), 7).unwrap();
        assert_eq!(file.stream_position().unwrap(), 7);
        drop(ours);
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"345689");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_full_socket_would_block() {
        let folder = folder();
        let path = folder.join("file");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut sent = 0;
        let error = loop {
            match send(ours.as_raw_fd(), file.as_raw_fd(), 0, 1 << 20) {
                Ok(count) => sent += count,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        assert!(sent > 0);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn closed_descriptors_are_errors() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        for result in [
            len_bytes(-1).map(|_| ()),
            set_position(-1, 0),
            send(ours.as_raw_fd(), -1, 0, 1).map(|_| ()),
        ] {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
    }
}
