//! The poller of the raw servers: level-triggered, without a timeout; it watches stdin, too.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

const STDIN: RawFd = 0;

/// Converts a result of the C library: a negative one means that errno is set.
pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub(super) struct Ready {
    pub(super) fd: RawFd,
    pub(super) is_writable: bool,
}

pub(super) struct Epoll {
    owned: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Epoll {
    /// # Errors
    /// If a call of epoll fails.
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: `check` rejects an invalid descriptor before it is owned, and nothing else owns it.
        let owned = unsafe { OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
        let epoll = Self {
            owned,
            events: vec![libc::epoll_event { events: 0, u64: 0 }; 1024],
        };
        match epoll.control(libc::EPOLL_CTL_ADD, STDIN, libc::EPOLLIN) {
            Err(error) if error.raw_os_error() != Some(libc::EPERM) => Err(error),
            _ => Ok(epoll), // EPERM: stdin is a file or /dev/null, whose end cannot be waited for
        }
    }

    #[allow(clippy::cast_sign_loss)] // a descriptor in use is not negative
    fn control(&self, operation: libc::c_int, fd: RawFd, interest: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: interest as u32,
            u64: fd as u64,
        };
        // SAFETY: `event` outlives the call; the call returns an error for a descriptor that is not open.
        check(unsafe { libc::epoll_ctl(self.owned.as_raw_fd(), operation, fd, &raw mut event) }).map(drop)
    }

    pub(super) fn watch_readable(&self, fd: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN)
    }

    /// Watches a descriptor for writability instead of readability, or for readability again.
    pub(super) fn choose(&self, fd: RawFd, is_writable: bool) -> io::Result<()> {
        let interest = if is_writable {
            libc::EPOLLOUT
        } else {
            libc::EPOLLIN
        };
        self.control(libc::EPOLL_CTL_MOD, fd, interest)
    }

    /// Waits, and lists the descriptors that are ready. Returns false if stdin is one of them.
    ///
    /// # Errors
    /// If a call of epoll fails.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )] // fds and event counts
    pub(super) fn wait(&mut self, ready: &mut Vec<Ready>) -> io::Result<bool> {
        ready.clear();
        // SAFETY: the events are live, and there are as many as the length says.
        let count = unsafe {
            libc::epoll_wait(
                self.owned.as_raw_fd(),
                self.events.as_mut_ptr(),
                self.events.len() as libc::c_int,
                -1,
            )
        };
        let count = match check(count) {
            Ok(count) => count as usize,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        ready.extend(self.events[..count].iter().map(|event| Ready {
            fd: event.u64 as RawFd,
            is_writable: event.events as libc::c_int & libc::EPOLLOUT != 0,
        }));
        Ok(!ready.iter().any(|ready| ready.fd == STDIN))
    }
}
