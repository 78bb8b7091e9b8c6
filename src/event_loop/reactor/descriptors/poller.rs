//! The loop's poller: the descriptors that it watches, and the events of the last poll.

use std::cell::RefCell;
use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::file;
use grapeshot_core::sys::poller::{Event, Events, Interest, Poller, Token};

/// The maximum number of events that one poll returns.
const EVENTS_PER_POLL: usize = 256;
/// The token of the waker's descriptor. No entry of the fd table has it: the lower half of an entry's token is the
/// descriptor, and here it would be -1.
pub(crate) const WAKER_TOKEN: Token = Token(u64::MAX);
/// The token of the pipe that receives signal numbers.
pub(crate) const SIGNAL_TOKEN: Token = Token(u64::MAX - 1);

pub(crate) struct LoopPoller {
    /// None once the loop is closed.
    poller: RefCell<Option<Poller>>,
    /// The loop's own descriptors, which are not in the fd table, with their tokens. The waker's is the first one.
    own: RefCell<Vec<(RawFd, Token)>>,
    events: RefCell<Events>,
}

impl LoopPoller {
    /// A poller that watches the waker.
    pub(super) fn new(waker_fd: RawFd) -> io::Result<Self> {
        let poller = Self {
            poller: RefCell::new(Some(Poller::new()?)),
            own: RefCell::new(Vec::new()),
            events: RefCell::new(Events::with_capacity(EVENTS_PER_POLL)),
        };
        poller.add_own(waker_fd, WAKER_TOKEN)?;
        Ok(poller)
    }

    /// Calls `action` with the poller; an error if the loop is closed.
    pub(super) fn with<R>(&self, action: impl FnOnce(&Poller) -> io::Result<R>) -> io::Result<R> {
        match self.poller.borrow().as_ref() {
            Some(poller) => action(poller),
            None => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    /// Calls `wait` with the poller and the list that it fills; None if the loop is closed. The cells are borrowed
    /// during the whole call, so `wait` may give up the GIL without another thread changing them.
    #[inline]
    pub(crate) fn with_events<R>(&self, wait: impl FnOnce(&Poller, &mut Events) -> R) -> Option<R> {
        let poller = self.poller.borrow();
        let poller = poller.as_ref()?;
        Some(wait(poller, &mut self.events.borrow_mut()))
    }

    /// Event number `index` of the last poll.
    #[inline]
    pub(crate) fn event(&self, index: usize) -> Event {
        self.events.borrow().get(index)
    }

    /// Changes what is watched on a descriptor from `old` to `new`. Either of them may be NONE.
    pub(super) fn change(&self, fd: RawFd, token: Token, old: Interest, new: Interest) -> io::Result<()> {
        self.with(|poller| match (old.is_empty(), new.is_empty()) {
            (true, true) => Ok(()),
            (false, true) => poller.remove(fd),
            (true, false) => poller.add(fd, token, new),
            (false, false) => poller.modify(fd, token, new),
        })
    }

    /// Removes a descriptor from the poller, unless the number now belongs to one of the loop's own descriptors. That
    /// is possible if other code has closed the descriptor that had the number before.
    pub(super) fn remove(&self, fd: RawFd) {
        let is_own = self.own.borrow().iter().any(|(own, _)| *own == fd);
        if !is_own {
            // A failure means that the kernel no longer knows the descriptor, which is the goal.
            let _ = self.with(|poller| poller.remove(fd));
        }
    }

    /// Watches one of the loop's own descriptors. The descriptor must stay open for as long as the poller is open.
    pub(crate) fn add_own(&self, fd: RawFd, token: Token) -> io::Result<()> {
        self.with(|poller| poller.add(fd, token, Interest::READ))?;
        self.own.borrow_mut().push((fd, token));
        Ok(())
    }

    /// The number that the next descriptor of the process would get; None if the system refuses to open one, or if the
    /// loop is closed.
    pub(crate) fn lowest_free_fd(&self) -> Option<RawFd> {
        let (fd, _) = *self.own.borrow().first()?;
        file::lowest_free(fd).ok()
    }

    /// Puts a new poller in the place of the current one. It watches the loop's own descriptors, and the descriptors in
    /// `entries` that the current poller watches. Does nothing if the loop is closed.
    pub(super) fn replace(&self, entries: impl Iterator<Item = (RawFd, Token, Interest)>) -> io::Result<()> {
        let new = {
            let old = self.poller.borrow();
            let Some(old) = old.as_ref() else { return Ok(()) };
            let new = Poller::new()?;
            for (fd, token) in self.own.borrow().iter() {
                new.add(*fd, *token, Interest::READ)?;
            }
            for (fd, token, interest) in entries {
                if !interest.is_empty() && old.is_watching(fd, token, interest) {
                    new.add(fd, token, interest)?;
                }
            }
            new
        };
        drop(self.poller.borrow_mut().replace(new));
        Ok(())
    }

    /// Called in the child of a fork. The child shares the current poller with its parent, so this replaces it with a
    /// new one, which watches only the waker. After an error, nothing has changed.
    pub(super) fn forget_parent(&self, waker_fd: RawFd) -> io::Result<()> {
        let poller = Poller::new()?;
        poller.add(waker_fd, WAKER_TOKEN, Interest::READ)?;
        drop(self.poller.borrow_mut().replace(poller));
        *self.own.borrow_mut() = vec![(waker_fd, WAKER_TOKEN)];
        Ok(())
    }

    pub(super) fn close(&self) {
        drop(self.poller.borrow_mut().take());
        self.own.borrow_mut().clear();
    }
}
