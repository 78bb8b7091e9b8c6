//! The fd table and the poller: which object waits for which descriptor.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::heap;
use grapeshot_core::sys::poller::{Interest, Poller, Token};
use pyo3::prelude::*;

use super::iteration::MAX_UNPOLLED_ITERATIONS;
use super::{FdUse, Reactor};
use crate::event_loop::source::SourceRef;

/// The size of the buffer for small reads.
const SCRATCH_LEN: usize = 256 * 1024;

/// Releases the fd table's entry for a number that now belongs to another file.
fn displace(py: Python<'_>, fd_use: FdUse) {
    match fd_use {
        FdUse::Source(source) => source.displace(py),
        FdUse::Watch(watch) => watch.release(py),
    }
}

impl Reactor {
    /// Calls `action` with the poller; an error if the loop is closed.
    pub(super) fn with_poller<R>(&self, action: impl FnOnce(&Poller) -> io::Result<R>) -> io::Result<R> {
        match self.poller.borrow().as_ref() {
            Some(poller) => action(poller),
            None => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    /// Makes the next iteration poll, even if other work is ready. A descriptor with a new wait may already have data,
    /// and that data is handled before any work that is scheduled from now on.
    #[inline]
    pub(crate) fn poll_next(&self, interest: Interest) {
        if !interest.is_empty() {
            self.unpolled_iterations.set(MAX_UNPOLLED_ITERATIONS);
        }
    }

    pub(crate) fn fd_use(&self, fd: RawFd) -> Option<FdUse> {
        self.fds.borrow().get_fd(fd)
    }

    /// The source that is registered for `fd`, with its token.
    pub(crate) fn source(&self, fd: RawFd) -> Option<(Token, SourceRef)> {
        let fds = self.fds.borrow();
        match fds.get_fd(fd) {
            Some(FdUse::Source(source)) => Some((fds.token_of(fd)?, source)),
            _ => None,
        }
    }

    /// Whether the registration with this token is still in force.
    #[inline]
    pub(crate) fn is_registered(&self, token: Token) -> bool {
        self.fds.borrow().get(token).is_some()
    }

    /// Registers `fd_use` for `fd`. If the table still has an entry for this number, its descriptor was closed without
    /// being removed: the entry is replaced, and its source is notified. With interest NONE, the poller does not watch
    /// the descriptor.
    pub(crate) fn register(
        &self,
        py: Python<'_>,
        fd: RawFd,
        fd_use: FdUse,
        interest: Interest,
    ) -> io::Result<Token> {
        let stale = self.fds.borrow_mut().remove(fd);
        let token = self.fds.borrow_mut().insert(fd, fd_use);
        // After `sock_connect`, the poller may already know the socket that a transport now takes over.
        let is_known = matches!(stale, Some(FdUse::Watch(watch)) if watch.is_armed(py));
        self.poll_next(interest);
        let told = self.with_poller(|poller| match (interest.is_empty(), is_known) {
            (true, false) => Ok(()),
            (true, true) => poller.remove(fd),
            (false, false) => poller.add(fd, token, interest),
            (false, true) => poller.modify(fd, token, interest),
        });
        if told.is_err() {
            // On failure, the caller still owns what it passed.
            self.fds.borrow_mut().remove(fd);
        }
        // Last, because releasing the stale entry may run any code.
        if let Some(stale) = stale {
            self.note_all_displaced(py, stale);
            displace(py, stale);
        }
        told.map(|()| token)
    }

    /// Changes what the poller waits for on a registered descriptor.
    pub(crate) fn set_interest(
        &self,
        fd: RawFd,
        token: Token,
        old: Interest,
        new: Interest,
    ) -> io::Result<()> {
        if old == new {
            return Ok(());
        }
        self.poll_next(new);
        self.with_poller(|poller| {
            if new.is_empty() {
                poller.remove(fd)
            } else if old.is_empty() {
                poller.add(fd, token, new)
            } else {
                poller.modify(fd, token, new)
            }
        })
    }

    /// Removes a registration from the fd table, and its descriptor from the poller if `interest` is not NONE. Does
    /// nothing if the registration is no longer in force: its number may belong to another one.
    pub(crate) fn unregister(&self, token: Token, interest: Interest) -> Option<FdUse> {
        let (fd, fd_use) = self.fds.borrow_mut().remove_token(token)?;
        if !interest.is_empty() {
            self.unwatch(fd);
        }
        Some(fd_use)
    }

    /// Removes a descriptor from the poller, unless it is one of the loop's own. After other code has closed a
    /// descriptor, one of the loop's own may have got its number.
    pub(super) fn unwatch(&self, fd: RawFd) {
        if !self.is_own(fd) {
            // A failure means that the kernel no longer knows the descriptor, which is the goal.
            let _ = self.with_poller(|poller| poller.remove(fd));
        }
    }

    /// Removes the fd table's entry of a source whose descriptor other code has closed, and notifies the source. The
    /// number now belongs to another file.
    pub(crate) fn displace(&self, py: Python<'_>, token: Token) {
        let displaced = self.fds.borrow_mut().remove_token(token);
        if let Some((_, fd_use)) = displaced {
            displace(py, fd_use);
        }
    }

    /// Calls `read` with the loop's scratch buffer (256 KiB, allocated on first use). A nested call gets a buffer of
    /// its own.
    #[inline]
    pub(crate) fn with_scratch<R>(&self, read: impl FnOnce(&mut [u8]) -> R) -> R {
        self.with_scratch_of(SCRATCH_LEN, read)
    }

    /// `with_scratch` with `len_bytes` of the buffer, which grows if necessary. Pages that were never written take no
    /// memory.
    #[inline]
    pub(crate) fn with_scratch_of<R>(&self, len_bytes: usize, read: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut scratch = self.scratch.take();
        if scratch.len() < len_bytes {
            scratch = vec![0; len_bytes.max(SCRATCH_LEN)];
            heap::keep_freed_buffers();
        }
        let result = read(&mut scratch[..len_bytes]);
        self.scratch.set(scratch);
        result
    }

    /// New references to all registered sources.
    pub(crate) fn sources<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let fds = self.fds.borrow();
        fds.iter()
            .filter_map(|(_, fd_use)| match fd_use {
                FdUse::Source(source) => Some(source.to_bound(py)),
                FdUse::Watch(_) => None,
            })
            .collect()
    }
}
