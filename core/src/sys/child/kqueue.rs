//! Watches a child on macOS and the BSDs with a kqueue that has one `EVFILT_PROC`. A kqueue with a pending event is
//! readable for another kqueue, so the loop's poller can wait for it as for any descriptor. [`super`] has the
//! contract.
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
        // macOS reports ESRCH for a child that has ended, even if its status was not fetched yet.
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

/// Adds a timer with an event every millisecond, which keeps the kqueue readable until it is closed.
fn add_timer(queue: &OwnedFd) -> io::Result<()> {
    let mut change = empty_change();
    change.filter = libc::EVFILT_TIMER as _;
    change.data = 1;
    apply(queue, change)
}

fn empty_change() -> libc::kevent {
    // SAFETY: `kevent` is plain data, and a value whose bytes are all zero is valid.
    let mut change: libc::kevent = unsafe { MaybeUninit::zeroed().assume_init() };
    change.flags = libc::EV_ADD as _;
    change
}

fn apply(queue: &OwnedFd, change: libc::kevent) -> io::Result<()> {
    // SAFETY: the call gets one live change and no space for events, so it does not wait and needs no timeout.
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

/// Whether `pid` is a running process, or an ended one whose status was not fetched yet.
fn is_process(pid: libc::pid_t) -> bool {
    // SAFETY: the call takes two integers. Signal 0 sends nothing.
    unsafe { libc::kill(pid, 0) == 0 }
}
