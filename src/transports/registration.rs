//! The descriptor of a transport: its number, the object that may close it, and its entry in the loop's fd table and in
//! the poller.
//!
//! Used on the loop's thread only. Before each update of the poller, the transport computes from its own state which
//! events to wait for.
//!
//! Any code that has a reference to the socket object behind a transport can close the socket. The descriptor's number
//! is then unused, or belongs to another file. The transport must not read or write with that number, close it, or
//! change its entry in the poller. So code that uses the number calls `usable_fd` first, and again after each call into
//! Python.

use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::poller::{Interest, Token};
use pyo3::prelude::*;

use super::owner::Owner;
use crate::binding::native_type::This;
use crate::event_loop::reactor::{FdUse, Reactor};
use crate::event_loop::source::{Source, SourceRef};

pub(super) struct Registration {
    /// The descriptor; once it is closed, its complement (`!fd`), which is negative.
    fd: Cell<RawFd>,
    token: Cell<Token>,
    /// The events that the poller waits for now.
    interest: Cell<Interest>,
    is_entered: Cell<bool>,
    owner: Owner,
}

#[cold]
fn closed_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

impl Registration {
    /// A registration for an open descriptor. Closing the descriptor remains the caller's task. Until `set_owner` is
    /// called, no other code can close it.
    pub(super) const fn new(fd: RawFd) -> Self {
        Self {
            fd: Cell::new(fd),
            token: Cell::new(Token(0)),
            interest: Cell::new(Interest::NONE),
            is_entered: Cell::new(false),
            owner: Owner::none(),
        }
    }

    /// Makes `object` the owner of the descriptor. From now on, `object` may close the descriptor.
    pub(super) fn set_owner(&self, object: &Bound<'_, PyAny>) {
        self.owner.set(object, self.fd.get());
    }

    /// The object that owns the descriptor.
    pub(super) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The descriptor, for a system call that follows at once. EBADF if it is closed, whether by the transport or by
    /// other code.
    #[inline]
    pub(super) fn usable_fd(&self, py: Python<'_>) -> io::Result<RawFd> {
        let fd = self.fd.get();
        if fd >= 0 && self.owner.has(py, fd) && fd == self.fd.get() {
            Ok(fd)
        } else {
            Err(closed_error())
        }
    }

    /// The descriptor; negative once the transport has closed it. If other code has closed it, the number may belong to
    /// another file: see `usable_fd`.
    #[inline]
    pub(super) fn fd(&self) -> RawFd {
        self.fd.get()
    }

    /// The number that the descriptor has, or had before it was closed.
    pub(super) fn number(&self) -> RawFd {
        let fd = self.fd.get();
        if fd < 0 { !fd } else { fd }
    }

    /// Marks the descriptor as closed and returns its number. None if it is marked already.
    pub(super) fn take_fd(&self) -> Option<RawFd> {
        let fd = self.fd.get();
        if fd < 0 {
            return None;
        }
        self.fd.set(!fd);
        Some(fd)
    }

    #[inline]
    pub(super) fn interest(&self) -> Interest {
        self.interest.get()
    }

    pub(super) fn is_entered(&self) -> bool {
        self.is_entered.get()
    }

    /// Enters `this` into the fd table, which keeps it alive, and makes the poller wait for `wanted`. EBADF if other
    /// code has closed the descriptor.
    pub(super) fn enter<T: Source>(
        &self,
        this: This<'_, T>,
        reactor: &Reactor,
        wanted: Interest,
    ) -> io::Result<()> {
        let fd = self.usable_fd(this.py())?;
        let source = SourceRef::new::<T>(this);
        let token = reactor
            .descriptors
            .register(this.py(), fd, FdUse::Source(source), wanted)?;
        self.token.set(token);
        self.interest.set(wanted);
        self.is_entered.set(true);
        Ok(())
    }

    /// Makes the poller wait for `wanted`. Does nothing while the transport is not in the fd table. If other code has
    /// closed the descriptor, returns EBADF and changes nothing, because the poller's entry with this number may belong
    /// to another file.
    #[inline]
    pub(super) fn sync(&self, py: Python<'_>, reactor: &Reactor, wanted: Interest) -> io::Result<()> {
        let old = self.interest.get();
        if old == wanted || !self.is_entered.get() {
            return Ok(());
        }
        let fd = self.usable_fd(py)?;
        if !reactor.descriptors.is_registered(self.token.get()) {
            return Err(closed_error());
        }
        reactor
            .descriptors
            .set_interest(fd, self.token.get(), old, wanted)?;
        self.interest.set(wanted);
        Ok(())
    }

    /// Removes `this` from the poller and from the fd table. The caller must hold a reference to `this`.
    pub(super) fn leave<T>(&self, this: This<'_, T>, reactor: &Reactor) {
        // If other code has closed the descriptor, nothing may be removed from the poller: the poller's entry with this
        // number may belong to another file.
        let polled = if self.usable_fd(this.py()).is_ok() {
            self.interest.get()
        } else {
            Interest::NONE
        };
        if !self.is_entered.replace(false) {
            return;
        }
        self.interest.set(Interest::NONE);
        // If the descriptor's number now has another registration, `unregister` changes nothing, because that
        // registration has another token.
        drop(reactor.descriptors.unregister(self.token.get(), polled));
    }

    /// Called when other code has closed the descriptor, and the fd table's entry of this registration was removed or
    /// replaced by one for another file. The number must not be closed through this registration any more.
    pub(super) fn displace(&self) {
        self.is_entered.set(false);
        self.interest.set(Interest::NONE);
        self.take_fd();
    }
}
