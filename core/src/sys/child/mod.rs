//! Child processes: an fd that becomes readable when a child has ended, and a call that fetches the child's status.
//!
//! With this fd the poller can wait for a child, without SIGCHLD and without affecting children that other code has
//! started. An [`ExitWatch`] belongs to the loop's thread.
//!
//! The file of each operating system must provide `watch(pid) -> io::Result<OwnedFd>`. The fd is close-on-exec. It
//! becomes readable when the child ends, not earlier, and stays readable. If the child has ended before the call, the
//! fd is readable at once. Watching does not fetch the child's status, so the process number belongs to the child
//! until [`reap`](ExitWatch::reap). If there is no such process any more, because other code has fetched the status,
//! `watch` fails with `ESRCH`. (With the thread in the last row of the table below, `watch` succeeds instead, and the
//! fd soon becomes readable.)
//!
//! | | fd |
//! |---|---|
//! | Linux from 5.3 on | a pidfd |
//! | macOS, BSD | a kqueue with one `EVFILT_PROC` |
//! | Linux before 5.3, sandboxes that refuse pidfds | a pipe; a thread waits for the child and writes a byte |

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod pidfd;
#[cfg(any(target_os = "linux", target_os = "android"))]
use pidfd::watch;

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod kqueue;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
use kqueue::watch;

// For old kernels, and for sandboxes that refuse pidfds.
#[cfg(any(test, target_os = "linux", target_os = "android"))]
mod thread;

#[cfg(test)]
mod tests;

/// A child process and the descriptor that becomes readable when it has ended.
pub struct ExitWatch {
    fd: ManuallyDrop<OwnedFd>,
    /// The file of `fd`: its device and its inode number.
    file: Option<(u64, u64)>,
    pid: libc::pid_t,
}

/// The result of [`ExitWatch::reap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaped {
    /// The child is running.
    Running,
    /// The child has ended: its exit code, or the negative number of the signal that ended it. This is returned only
    /// once.
    Ended(i32),
    /// The child has ended, and its status was already fetched.
    Unknown,
}

/// Opens a descriptor that becomes readable when the child process `pid` has ended.
///
/// # Errors
/// As for [`ExitWatch::new`].
pub fn open_watch(pid: libc::pid_t) -> io::Result<OwnedFd> {
    watch(pid)
}

impl ExitWatch {
    /// Watches the child process `pid` of this process.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`. `ESRCH` if there is no such process any more. Where a thread waits for the child,
    /// `ESRCH` never occurs, but it is an error if the thread cannot be started.
    pub fn new(pid: libc::pid_t) -> io::Result<Self> {
        Ok(Self::of(open_watch(pid)?, pid))
    }

    fn of(fd: OwnedFd, pid: libc::pid_t) -> Self {
        Self {
            file: file_of(fd.as_raw_fd()),
            fd: ManuallyDrop::new(fd),
            pid,
        }
    }

    /// Whether the descriptor still refers to the file that was opened. If other code has closed the descriptor, its
    /// number is free or refers to another file.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.file.is_some() && file_of(self.fd()) == self.file
    }

    /// The descriptor to watch for reading. The watch owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Fetches the status of the child if it has ended, without blocking. After that the system may give the child's
    /// process number to another process.
    ///
    /// Source: `waitpid(2)`.
    #[must_use]
    pub fn reap(&self) -> Reaped {
        let mut status = 0;
        loop {
            // SAFETY: `status` is a live int for the call to fill.
            let found = unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) };
            if found == self.pid {
                return Reaped::Ended(returncode(status));
            }
            if found == 0 {
                return Reaped::Running;
            }
            // Only EINTR and ECHILD are possible for these arguments.
            if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return Reaped::Unknown;
            }
        }
    }
}

impl Drop for ExitWatch {
    fn drop(&mut self) {
        if self.is_open() {
            // SAFETY: the field is dropped only here, once, and nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

/// The device and inode number of a descriptor's file, or `None` if the descriptor is not open. Kernels before 6.9 give
/// all pidfds, epoll and eventfd descriptors the same inode number, so these cannot be told apart there.
fn file_of(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: the `File` is only used to query its metadata and is never closed here. If the descriptor is not open,
    // the query fails.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let metadata = file.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Converts a wait status like Python's `os.waitstatus_to_exitcode`.
fn returncode(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) {
        -libc::WTERMSIG(status)
    } else {
        libc::WEXITSTATUS(status)
    }
}
