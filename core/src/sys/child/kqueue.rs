//! The end of a child on macOS and the BSDs: each child has a kqueue of its own with one `EVFILT_PROC`. A kqueue with a
//! pending event is readable in another kqueue, so the loop waits for it as for any descriptor.
//!
//! Purpose: the contract of [`super`].
//!
//! Owner: the loop's thread.
//!
//! Source: `kqueue(2)` of macOS, FreeBSD, NetBSD, OpenBSD.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

pub(super) fn watch(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no arguments.
    let fd = unsafe { libc::kqueue() };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened, and nothing else knows it.
    let queue = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl(&queue, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    match add_filter(&queue, pid) {
        // macOS does not find a child that has ended, even if nobody has fetched its status.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) && is_process(pid) => {
            add_timer(&queue)?;
            Ok(queue)
        }
        Err(error) => Err(error),
        Ok(()) => Ok(queue),
    }
}

fn add_filter(queue: &OwnedFd, pid: libc::pid_t) -> io::Result<()> {
    let mut change = empty_change();
    change.ident = pid as libc::uintptr_t;
    change.filter = libc::EVFILT_PROC as _;
    change.fflags = libc::NOTE_EXIT as _;
    apply(queue, change)
}

/// Adds a timer whose event comes every millisecond, until the status can be fetched.
fn add_timer(queue: &OwnedFd) -> io::Result<()> {
    let mut change = empty_change();
    change.filter = libc::EVFILT_TIMER as _;
    change.data = 1;
    apply(queue, change)
}

fn empty_change() -> libc::kevent {
    // SAFETY: `kevent` is plain data, for which all zeroes is a value.
    let mut change: libc::kevent = unsafe { MaybeUninit::zeroed().assume_init() };
    change.flags = libc::EV_ADD as _;
    change
}

fn apply(queue: &OwnedFd, change: libc::kevent) -> io::Result<()> {
    // SAFETY: one live change, no space for events, no timeout needed as none are waited for.
    let result = unsafe {
        libc::kevent(
            queue.as_raw_fd(),
            &raw const change,
            1,
            ptr::null_mut(),
            0,
            ptr::null(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether `pid` is a process, or a process that has ended and whose status nobody has fetched.
fn is_process(pid: libc::pid_t) -> bool {
    // SAFETY: the call takes two integers; signal 0 is not sent.
    unsafe { libc::kill(pid, 0) == 0 }
}
