//! Readiness of file descriptors: the portable types, and the choice of what implements them.
//!
//! Purpose: one poller per loop, level-triggered unless asked otherwise. Each fd is watched for an [`Interest`] under a
//! [`Token`], and [`Poller::wait`] fills an [`Events`] with what is ready.
//!
//! Owner: the loop's thread. It must not know what a token stands for.
//!
//! What the file of an operating system must provide
//!
//! - `Events`: `with_capacity(n)`, `len()`, `is_empty()`, `get(index) -> Event`; its memory is allocated
//!   once, a wait allocates nothing.
//! - `Poller`, close-on-exec, with
//!   - `new()`, `as_raw_fd()`;
//!   - `add(fd, token, interest)`, which on an fd already watched does what `modify` does;
//!   - `modify(fd, token, interest)`, which on an fd not watched does what `add` does;
//!   - `remove(fd)`, which succeeds on an fd not watched, or closed meanwhile;
//!   - `is_watching(fd, token, interest)`: whether it is this very open file that was added under the number `fd`; if
//!     so, a `modify`;
//!   - `KEEPS_CLOSED`: whether a closed fd stays watched while a duplicate of it is open, in a forked child for
//!     instance. Nobody can take it out any more, and its events come until the poller is closed;
//!   - `wait(events, timeout_ns)`: `None` blocks, `Some(0)` only looks, anything else waits at least that
//!     long in nanoseconds unless an fd becomes ready. A signal ends it with `ErrorKind::Interrupted`.
//! - [`Interest::NONE`] takes the fd out, so that a hangup on an fd nobody reads or writes cannot turn
//!   the loop into a busy one.
//! - [`Interest::on_change`] asks for an event when the state changes rather than for as long as it lasts.
//!   A poller may ignore it, unless it keeps closed fds.
//! - A wait may end early without an event where the system limits the length of one sleep (weeks); it
//!   never ends early for an ordinary deadline.
//!
//! A hangup or an error is reported as readable *and* writable, whatever the interest was, as
//! `selectors.EpollSelector` does before it masks by interest: the read or write that follows finds out
//! what happened. One fd may be reported in two events of the same wait (kqueue).

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

/// What the loop stores with an fd and gets back with its events; the poller never looks inside.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(pub u64);

/// The directions in which an fd is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interest(u8);

impl Interest {
    /// Nothing: the fd is not watched at all.
    pub const NONE: Self = Self(0);
    /// Data, a connection or the end of the stream can be read.
    pub const READ: Self = Self(1);
    /// There is space to write.
    pub const WRITE: Self = Self(2);
    /// Both directions.
    pub const BOTH: Self = Self(3);
    const ON_CHANGE: u8 = 4;

    /// The same directions, reported when they become ready rather than for as long as they are. Adding or
    /// modifying reports what is ready at that time.
    #[inline]
    #[must_use]
    pub const fn on_change(self) -> Self {
        Self(self.0 | Self::ON_CHANGE)
    }

    /// Whether only changes are to be reported.
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

    /// The directions of both.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The directions of this one that are not in `other`.
    #[cfg(test)]
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

/// What an fd is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness(u8);

impl Readiness {
    /// Ready for nothing.
    pub const NONE: Self = Self(0);
    /// A read will not block.
    pub const READ: Self = Self(1);
    /// A write will not block.
    pub const WRITE: Self = Self(2);
    /// Both sides are shut down, or the fd carries an error. Reported together with the other two.
    pub const HANGUP: Self = Self(4);

    /// Everything that either of them says.
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

    /// Whether both sides are shut down or the fd carries an error.
    #[cfg(test)]
    pub const fn is_hangup(self) -> bool {
        self.0 & Self::HANGUP.0 != 0
    }
}

/// One entry of an [`Events`]: which registration, and what it is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The token that the fd was registered with.
    pub token: Token,
    /// What it is ready for. May name a direction that was not asked for (a hangup).
    pub readiness: Readiness,
}
