//! Registrations that nobody can take out of the poller any more.
//!
//! A descriptor that is closed behind its owner's back leaves epoll only when no duplicate of it is open: a forked child,
//! or whoever called `dup`, keeps the open file alive, and `epoll_ctl` wants a descriptor that is not there any more. The
//! events of such a ghost never stop. They have the token of a registration that is over, so they reach nobody, but each
//! wakes the loop. When there have been many of them, the poller is replaced by a new one that knows only what is in
//! the fd table and is still the file that was registered.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::poller::{Interest, Poller};
use pyo3::prelude::*;

use super::{FdUse, Reactor, SIGNAL_TOKEN, WAKER_TOKEN};

/// Events that must have been in vain before the poller is replaced, for few descriptors. For many it must be one for
/// each: what a replacement costs is then a part of what they have cost.
const MIN_STALE_EVENTS: usize = 32;

impl Reactor {
    /// An event whose registration is over. Most of them come once, behind the event that has ended it.
    #[cold]
    pub(super) fn note_stale_event(&self, py: Python<'_>) {
        if !Poller::KEEPS_CLOSED {
            return;
        }
        let count = self.stale_events.get() + 1;
        if count < MIN_STALE_EVENTS.max(self.fds.borrow().len()) {
            self.stale_events.set(count);
            return;
        }
        self.stale_events.set(0);
        // Without a descriptor for the new one, or space in it, the old one goes on.
        if let Ok(Some(poller)) = self.new_poller(py) {
            let old = self.poller.borrow_mut().replace(poller);
            drop(old);
        }
    }

    /// A poller that watches what the one in use should. None if the loop is closed.
    fn new_poller(&self, py: Python<'_>) -> io::Result<Option<Poller>> {
        let old = self.poller.borrow();
        let Some(old) = old.as_ref() else { return Ok(None) };
        let new = Poller::new()?;
        let mut result = Ok(());
        self.with_waker(|waker| result = new.add(waker.fd(), WAKER_TOKEN, Interest::READ));
        result?;
        if let Some(fd) = self.signals.read_fd() {
            new.add(fd, SIGNAL_TOKEN, Interest::READ)?;
        }
        let fds = self.fds.borrow();
        for (fd, fd_use) in fds.iter() {
            let Some(token) = fds.token_of(fd) else { continue };
            let interest = match fd_use {
                FdUse::Source(source) => source.interest(py),
                FdUse::Watch(watch) => watch.armed(),
            };
            if !interest.is_empty() && old.is_watching(fd, token, interest) {
                new.add(fd, token, interest)?;
            }
        }
        Ok(Some(new))
    }

    /// Whether a descriptor is the loop's own.
    pub(super) fn is_own(&self, fd: RawFd) -> bool {
        let mut is_waker = false;
        self.with_waker(|waker| is_waker = waker.fd() == fd);
        is_waker || self.signals.read_fd() == Some(fd)
    }
}
