//! Ghosts: registrations that cannot be removed from the poller any more.
//!
//! If other code closes a descriptor that epoll watches, epoll forgets it only if no duplicate of it is open. A forked
//! child, or any code that called `dup`, may keep the open file alive, and `epoll_ctl` cannot remove it, because it
//! needs the descriptor that was closed. The events of such a ghost never stop. They carry the token of an outdated
//! registration, so they reach no watcher, but each of them wakes the loop. After many such events, a new poller
//! replaces the old one. It watches only those entries of the fd table whose number still belongs to the file that was
//! registered.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::poller::{Interest, Poller};
use pyo3::prelude::*;

use super::{FdUse, Reactor, SIGNAL_TOKEN, WAKER_TOKEN};

/// The poller is replaced after this many stale events, or after as many as there are descriptors, if that is more. So
/// replacing it, which costs a call per descriptor, never costs much more than the events before it.
const MIN_STALE_EVENTS: usize = 32;

impl Reactor {
    /// Counts an event whose registration has ended. Most such events are harmless: they come once, in the same poll as
    /// the event that ended the registration.
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
        // If there is no descriptor or no memory for a new poller, the old one stays in use.
        if let Ok(Some(poller)) = self.new_poller(py) {
            let old = self.poller.borrow_mut().replace(poller);
            drop(old);
        }
    }

    /// A new poller that watches what the current one should watch. None if the loop is closed.
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
