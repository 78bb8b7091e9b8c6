//! Readiness of file descriptors: the portable types, and the choice of the implementation.
//!
//! Each loop has one poller, which belongs to the loop's thread. The poller watches each fd for an [`Interest`] under
//! a [`Token`], and [`Poller::wait_since`] fills an [`Events`] with the fds that are ready. The poller is
//! level-triggered unless the caller asks for changes only.
//!
//! The file of each operating system must provide:
//!
//! - `Events`: `with_capacity(n)`, `len()`, `is_empty()`, `get(index) -> Event`. It allocates its memory once; a wait
//!   allocates nothing.
//! - `Poller`, close-on-exec, with
//!   - `new()`, `as_raw_fd()`;
//!   - `add(fd, token, interest)`. If the fd is watched already, `add` does what `modify` does;
//!   - `modify(fd, token, interest)`. If the fd is not watched, `modify` does what `add` does;
//!   - `remove(fd)`. It also succeeds if the fd is not watched, or is closed;
//!   - `is_watching(fd, token, interest)`: whether `fd` still refers to the open file for which `add` was called. If
//!     so, the call also does what `modify` does. If `fd` refers to another file now, a poller whose `KEEPS_CLOSED` is
//!     false may add that file, and return true;
//!   - `KEEPS_CLOSED`: whether a closed fd stays watched while a duplicate of it is open, for instance in a forked
//!     child. Such an fd cannot be removed any more, and its events continue until the last duplicate or the poller is
//!     closed;
//!   - `wait_since(events, timeout_ns, began_ns)`: `None` blocks, and `Some(0)` does not wait. With any other timeout
//!     the call waits at least that many nanoseconds, unless an fd becomes ready. Each poller decides whether the
//!     timeout counts from `began_ns` or from the call. The caller has usually just read the clock, and passes the time
//!     as `began_ns`, so that the poller need not read the clock again. A signal ends the wait with
//!     `ErrorKind::Interrupted`.
//!
//! The poller must also follow these rules:
//!
//! - [`Interest::NONE`] removes the fd. If the fd stayed in the poller, a hangup would keep the loop busy, although
//!   nobody reads from the fd or writes to it.
//! - [`Interest::on_change`] asks for an event when the state changes, instead of events for as long as the state
//!   lasts. A poller may ignore it, unless `KEEPS_CLOSED` is true: the events of a closed fd that cannot be removed
//!   must not repeat.
//! - A wait may end early without an event if the system limits the length of one sleep (to weeks). It never ends early
//!   for an ordinary deadline.
//!
//! The poller reports a hangup or an error as readable *and* writable, whatever the interest was.
//! `selectors.EpollSelector` does the same, but then drops the directions that the interest does not contain. The read
//! or write that follows finds out what happened. One wait may report an fd in two events (kqueue).

#[cfg(any(target_os = "linux", target_os = "android"))]
mod epoll;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub use epoll::{Events, Poller};

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod kqueue;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub use kqueue::{Events, Poller};

#[cfg(test)]
mod tests;

#[cfg(test)]
impl Poller {
    /// `wait_since` with a timeout that counts from now.
    pub(crate) fn wait(&self, events: &mut Events, timeout_ns: Option<u64>) -> std::io::Result<usize> {
        self.wait_since(events, timeout_ns, crate::sys::clock::now_ns())
    }
}

/// A number that the loop stores with an fd and gets back with its events. The poller does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(pub u64);

/// The directions in which an fd is watched, and whether only changes are reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interest(u8);

impl Interest {
    /// No direction: the fd is not watched at all.
    pub const NONE: Self = Self(0);
    /// Reading: there is data, a connection to accept, or the end of the stream.
    pub const READ: Self = Self(1);
    /// Writing: there is space for data.
    pub const WRITE: Self = Self(2);
    /// Both directions.
    pub const BOTH: Self = Self(3);
    const ON_CHANGE: u8 = 4;

    /// The same directions. Each is reported once when it becomes ready, and not for as long as it is ready. `add` and
    /// `modify` also report directions that are ready at that time.
    #[inline]
    #[must_use]
    pub const fn on_change(self) -> Self {
        Self(self.0 | Self::ON_CHANGE)
    }

    /// Whether the poller reports only changes.
    #[inline]
    #[must_use]
    pub const fn is_on_change(self) -> bool {
        self.0 & Self::ON_CHANGE != 0
    }

    /// Whether reading is watched.
    #[inline]
    #[must_use]
    pub const fn has_read(self) -> bool {
        self.0 & Self::READ.0 != 0
    }

    /// Whether writing is watched.
    #[inline]
    #[must_use]
    pub const fn has_write(self) -> bool {
        self.0 & Self::WRITE.0 != 0
    }

    /// The directions of `self` and of `other`.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The directions of `self` that are not in `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether no direction is watched.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 & Self::BOTH.0 == 0
    }
}

/// The operations that an fd is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness(u8);

impl Readiness {
    /// Ready for nothing.
    pub const NONE: Self = Self(0);
    /// A read will not block.
    pub const READ: Self = Self(1);
    /// A write will not block.
    pub const WRITE: Self = Self(2);
    /// Both directions are shut down, or the fd has an error. The poller reports this together with READ and WRITE.
    pub const HANGUP: Self = Self(4);
    /// The stream has ended or, with epoll, urgent data of TCP has arrived. If there is ordinary data in front of the
    /// end or of the urgent data, a read returns only that data. So a read that returns less than it was asked for does
    /// not mean that nothing is left. The poller reports this together with READ: epoll only for an interest in
    /// changes, kqueue for each interest in reading.
    pub const MORE: Self = Self(8);

    /// Ready for everything that `self` or `other` is ready for.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether a read will not block.
    #[inline]
    #[must_use]
    pub const fn is_readable(self) -> bool {
        self.0 & Self::READ.0 != 0
    }

    /// Whether a write will not block.
    #[inline]
    #[must_use]
    pub const fn is_writable(self) -> bool {
        self.0 & Self::WRITE.0 != 0
    }

    /// Whether there is more than ordinary data to read, such as the end of the stream or an error.
    #[inline]
    #[must_use]
    pub const fn has_more(self) -> bool {
        self.0 & (Self::MORE.0 | Self::HANGUP.0) != 0
    }

    /// Whether both directions are shut down, or the fd has an error.
    #[cfg(test)]
    pub const fn is_hangup(self) -> bool {
        self.0 & Self::HANGUP.0 != 0
    }
}

/// One entry of an [`Events`]: a registration, and what its fd is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The token that the fd was registered with.
    pub token: Token,
    /// The operations that the fd is ready for. After a hangup this includes directions that are not watched.
    pub readiness: Readiness,
}
