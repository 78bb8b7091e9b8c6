//! The limits of `loop.set_limits()`: how many connections, descriptors and coros a loop may have.
//!
//! Modules in higher layers ask this one before they open a connection or a descriptor, or start a coro. Without
//! limits, that costs one comparison. The limits belong to the loop's thread, except for the count of connections:
//! whichever thread frees a connection lowers the count. `limit_methods` has the methods of the loop.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;

/// The value of a limit that is not set.
pub(super) const UNLIMITED: usize = usize::MAX;

pub(crate) struct Limits {
    max_connections: Cell<usize>,
    /// The loop opens no descriptor with this number or a higher one. A new descriptor gets the lowest free number. If
    /// the lowest free number is not below the limit, the process has at least as many open descriptors as the limit.
    max_descriptors: Cell<usize>,
    max_coros: Cell<usize>,
    /// The number of connections that this loop's stream transports have.
    connections: AtomicUsize,
    /// Whether a pause in accepting was logged since the limits were set.
    is_pause_logged: Cell<bool>,
    /// Whether a timer is set that resumes the paused listeners.
    is_retry_set: Cell<bool>,
}

/// The limit that has been reached, with the number for its message.
#[derive(Clone, Copy)]
pub(crate) enum Reached {
    Connections(usize),
    Descriptors(usize),
    Coros(usize),
}

impl Reached {
    /// The errno and the text of the `LimitError`.
    pub(super) fn describe(self) -> (i32, String) {
        let (errno, text) = match self {
            Self::Connections(count) => (libc::EMFILE, format!("{count} connections of this loop are open")),
            Self::Descriptors(count) => (libc::EMFILE, format!("all descriptors below {count} are open")),
            Self::Coros(count) => (libc::EAGAIN, format!("{count} coros of this loop are alive")),
        };
        (errno, format!("{text}, and set_limits() allows no more"))
    }

    /// `grapeshot.LimitError`.
    #[cold]
    pub(crate) fn error(self, py: Python<'_>) -> PyErr {
        let (errno, text) = self.describe();
        let made = py
            .import("grapeshot._loop.limits")
            .and_then(|module| module.getattr("LimitError"))
            .and_then(|class| class.call1((errno, text)));
        match made {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    }
}

impl Limits {
    pub(super) const fn none() -> Self {
        Self {
            max_connections: Cell::new(UNLIMITED),
            max_descriptors: Cell::new(UNLIMITED),
            max_coros: Cell::new(UNLIMITED),
            connections: AtomicUsize::new(0),
            is_pause_logged: Cell::new(false),
            is_retry_set: Cell::new(false),
        }
    }

    pub(super) fn set(&self, connections: usize, descriptors: usize, coros: usize) {
        self.max_connections.set(connections);
        self.max_descriptors.set(descriptors);
        self.max_coros.set(coros);
        self.is_pause_logged.set(false);
    }

    pub(super) fn max_connections(&self) -> usize {
        self.max_connections.get()
    }

    pub(super) fn max_descriptors(&self) -> usize {
        self.max_descriptors.get()
    }

    pub(super) fn max_coros(&self) -> usize {
        self.max_coros.get()
    }

    pub(crate) fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn connection_closed(&self) {
        let less_one = |count: usize| Some(count.saturating_sub(1));
        let _ = self
            .connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less_one);
    }

    /// Called in the child of a fork: the counted connections and the timer belong to the parent.
    pub(super) fn forget_parent(&self) {
        self.connections.store(0, Ordering::Relaxed);
        self.is_retry_set.set(false);
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// The limit of connections, if one more connection would exceed it.
    #[inline]
    pub(crate) fn connections_reached(&self) -> Option<Reached> {
        let count = self.connections();
        (count >= self.max_connections.get()).then_some(Reached::Connections(count))
    }

    /// The limit of descriptors, if one more descriptor would exceed it. `lowest_free` returns the number that the next
    /// descriptor would get. If it returns None, the process has no free number, and no limit is needed: the system
    /// call that opens the descriptor fails anyway.
    #[inline]
    pub(super) fn descriptors_reached(&self, lowest_free: impl FnOnce() -> Option<RawFd>) -> Option<Reached> {
        let limit = self.max_descriptors.get();
        if limit == UNLIMITED {
            return None;
        }
        let number = usize::try_from(lowest_free()?).ok()?;
        (number >= limit).then_some(Reached::Descriptors(limit))
    }

    /// The limit of coros, if one more coro would exceed it. `count_of_thread` returns how many coros the thread has.
    /// `count` returns how many of them belong to the loop, and has to look at each of them.
    #[inline]
    pub(crate) fn coros_reached(
        &self,
        count_of_thread: impl FnOnce() -> usize,
        count: impl FnOnce() -> usize,
    ) -> Option<Reached> {
        let limit = self.max_coros.get();
        if limit == UNLIMITED || count_of_thread() < limit {
            return None;
        }
        let count = count();
        (count >= limit).then_some(Reached::Coros(count))
    }

    /// Returns true if the caller must set the timer that resumes the paused listeners, because it is not set yet.
    pub(super) fn begin_retry(&self) -> bool {
        !self.is_retry_set.replace(true)
    }

    /// Called by the timer for the retry.
    pub(super) fn end_retry(&self) {
        self.is_retry_set.set(false);
    }

    /// Returns true if the caller must log that accepting is paused, because that was not logged yet.
    pub(super) fn begin_pause(&self) -> bool {
        !self.is_pause_logged.replace(true)
    }
}
