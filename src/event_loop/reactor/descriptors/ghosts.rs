//! Ghosts: registrations that cannot be removed from the poller any more.
//!
//! When other code closes a descriptor, epoll stops watching it only if no duplicate of it is open. A forked child, or
//! any code that called `dup`, may keep the open file alive. Then nothing can remove the registration: `epoll_ctl`
//! needs the descriptor, and the descriptor is closed. Such a ghost goes on reporting events. These events carry the
//! token of an outdated registration, so they reach no watcher, but each of them wakes the loop. After many such
//! events, a new poller replaces the old one. The new one watches only the entries of the fd table whose number still
//! belongs to the file that was registered.

use grapeshot_core::sys::poller::Poller;
use pyo3::prelude::*;

use super::{Descriptors, FdUse};

/// The poller is replaced after this many stale events. If the fd table has more entries than this, the poller is
/// replaced after as many stale events as there are entries. The replacement costs at most two system calls per entry,
/// so it never costs much more than the stale events did.
const MIN_STALE_EVENTS: usize = 32;

impl Descriptors {
    /// Counts an event whose registration has ended. Most such events are harmless: they come once, in the same poll as
    /// the event that ended the registration.
    #[cold]
    pub(crate) fn note_stale_event(&self, py: Python<'_>) {
        if !Poller::KEEPS_CLOSED {
            return;
        }
        let table = self.table.borrow();
        let count = self.stale_events.get() + 1;
        if count < MIN_STALE_EVENTS.max(table.len()) {
            self.stale_events.set(count);
            return;
        }
        self.stale_events.set(0);
        let entries = table.iter().filter_map(|(fd, fd_use)| {
            let interest = match fd_use {
                FdUse::Source(source) => source.interest(py),
                FdUse::Watch(watch) => watch.get().armed(),
            };
            Some((fd, table.token_of(fd)?, interest))
        });
        // If no descriptor or no memory is available for a new poller, the old one stays in use.
        let _ = self.poller.replace(entries);
    }
}
