//! Watches a child on Linux with a pidfd, which is readable once the process has ended. [`super`] has the contract.
//!
//! Source: `pidfd_open(2)`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::thread;

pub(super) fn watch(pid: libc::pid_t) -> io::Result<OwnedFd> {
    match open(pid) {
        // The kernel is older than 5.3 and lacks the call, or a sandbox refuses it.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOSYS | libc::EPERM | libc::EACCES)
            ) =>
        {
            thread::watch(pid)
        }
        result => result,
    }
}

fn open(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers. It goes through `syscall`, because some supported C libraries have no
    // function for it.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened (close-on-exec, like every pidfd), and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
