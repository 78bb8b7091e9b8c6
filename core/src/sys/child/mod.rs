//! Child processes: an fd that becomes readable when a child has ended, and a call that fetches the child's status.
//!
//! Purpose: waits for children in the poller, without SIGCHLD and without affecting other code's children.
//!
//! Owner: the loop's thread. It must not know who started a child, or why.
//!
//! What the file of an operating system must provide: `watch(pid) -> io::Result<OwnedFd>`. The fd is close-on-exec. It
//! becomes readable when the child ends, not earlier, and stays readable. If the child has ended before the call, the
//! fd is readable at once. Watching does not fetch the status: the process number belongs to the child until [`reap`].
//! `ESRCH` if there is no such process any more, because somebody else has fetched the status.
//!
//! | | fd |
//! |---|---|
//! | Linux from 5.3 on | a pidfd |
//! | macOS, BSD | a kqueue with one `EVFILT_PROC` |
//! | neither | a pipe whose other end a waiting thread closes |

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

/// What [`ExitWatch::reap`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaped {
    /// The child is running.
    Running,
    /// The child has ended: its exit code, or the negative number of the signal that ended it. Returned once.
    Ended(i32),
    /// The child has ended, and somebody else has fetched its status.
    Unknown,
}

impl ExitWatch {
    /// Watches the child process `pid` of this process.
    ///
    /// # Errors
    /// `ESRCH` if there is no such process any more, `EMFILE` or `ENFILE`.
    pub fn new(pid: libc::pid_t) -> io::Result<Self> {
        Ok(Self::of(watch(pid)?, pid))
    }

    fn of(fd: OwnedFd, pid: libc::pid_t) -> Self {
        Self {
            file: file_of(fd.as_raw_fd()),
            fd: ManuallyDrop::new(fd),
            pid,
        }
    }

    /// Whether the descriptor still names the file that was opened. Other code may have closed it; then its number is
    /// free, or names another file.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.file.is_some() && file_of(self.fd()) == self.file
    }

    /// The descriptor to watch for reading. The watch owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Fetches the status of the child if it has ended, without blocking. Then the process number of the child may
    /// become another process's.
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
            // SAFETY: dropped once, here, and nothing uses the field after it.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

/// The file of a descriptor, or None if the descriptor is not open. On older kernels all pidfds are the same file, and
/// nothing else is that file.
fn file_of(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: only looked at: it is not closed here, and a number that is not open is an error of the call.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let metadata = file.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// A wait status as Python's `os.waitstatus_to_exitcode` shows it.
fn returncode(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) {
        -libc::WTERMSIG(status)
    } else {
        libc::WEXITSTATUS(status)
    }
}
