//! The descriptor of a transport, who else may close it, and what the loop's fd table and the poller know of it.
//!
//! Belongs to the loop's thread. The transport says what to wait for; nothing is counted.
//!
//! The socket object behind a transport may be closed by any code that has it. Then the number is unused, or another
//! file's: nothing may be read from it, written to it, closed, or changed in the poller. So each such use asks
//! `usable_fd` first, and again after each call into Python.

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
    /// Once closed its complement (`!fd`), which is negative.
    fd: Cell<RawFd>,
    token: Cell<Token>,
    /// What the poller waits for now.
    interest: Cell<Interest>,
    is_entered: Cell<bool>,
    owner: Owner,
}

#[cold]
fn closed_error() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

impl Registration {
    /// Of an open descriptor, which stays the caller's to close. Until `set_owner` nobody else can close it.
    pub(super) const fn new(fd: RawFd) -> Self {
        Self {
            fd: Cell::new(fd),
            token: Cell::new(Token(0)),
            interest: Cell::new(Interest::NONE),
            is_entered: Cell::new(false),
            owner: Owner::nobody(),
        }
    }

    /// From now on `object` owns the descriptor.
    pub(super) fn set_owner(&self, object: &Bound<'_, PyAny>) {
        self.owner.set(object, self.fd.get());
    }

    /// The object that owns the descriptor.
    pub(super) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// The descriptor for a system call that follows at once. EBADF if it is closed, by us or behind our back.
    #[inline]
    pub(super) fn usable_fd(&self, py: Python<'_>) -> io::Result<RawFd> {
        let fd = self.fd.get();
        if fd >= 0 && self.owner.has(py, fd) && fd == self.fd.get() {
            Ok(fd)
        } else {
            Err(closed_error())
        }
    }

    /// The descriptor, negative once it is closed. The number may be another file's: see `usable_fd`.
    #[inline]
    pub(super) fn fd(&self) -> RawFd {
        self.fd.get()
    }

    /// The number of the descriptor, also once it is closed.
    pub(super) fn number(&self) -> RawFd {
        let fd = self.fd.get();
        if fd < 0 { !fd } else { fd }
    }

    /// Marks the descriptor as closed and returns it, None the second time.
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

    /// Enters `this` into the fd table, which keeps it alive, and has the poller wait for `wanted`. EBADF if the
    /// descriptor was closed by somebody else.
    pub(super) fn enter<T: Source>(
        &self,
        this: This<'_, T>,
        reactor: &Reactor,
        wanted: Interest,
    ) -> io::Result<()> {
        let fd = self.usable_fd(this.py())?;
        let source = SourceRef::new::<T>(this);
        match reactor.register(this.py(), fd, FdUse::Source(source), wanted) {
            Ok(token) => {
                self.token.set(token);
                self.interest.set(wanted);
                self.is_entered.set(true);
                Ok(())
            }
            Err(error) => {
                source.release(this.py());
                Err(error)
            }
        }
    }

    /// Brings the poller in line with `wanted`; does nothing while the transport is not entered. EBADF if the
    /// descriptor was closed by somebody else: whatever the poller has under its number is left alone.
    #[inline]
    pub(super) fn sync(&self, py: Python<'_>, reactor: &Reactor, wanted: Interest) -> io::Result<()> {
        let old = self.interest.get();
        if old == wanted || !self.is_entered.get() {
            return Ok(());
        }
        let fd = self.usable_fd(py)?;
        if !reactor.is_registered(self.token.get()) {
            return Err(closed_error());
        }
        reactor.set_interest(fd, self.token.get(), old, wanted)?;
        self.interest.set(wanted);
        Ok(())
    }

    /// Takes `this` out of the poller and the fd table. The caller holds a reference of its own.
    pub(super) fn leave<T>(&self, this: This<'_, T>, reactor: &Reactor) {
        // A descriptor that was closed by somebody else is out of the poller, which may have another file there.
        let polled = if self.usable_fd(this.py()).is_ok() {
            self.interest.get()
        } else {
            Interest::NONE
        };
        if !self.is_entered.replace(false) {
            return;
        }
        self.interest.set(Interest::NONE);
        // The entry may be that of another source, which has got the number.
        if let Some(FdUse::Source(source)) = reactor.unregister(self.token.get(), polled) {
            source.release(this.py());
        }
    }

    /// The number has become that of another registration, which has taken the place of this one in the fd table: the
    /// descriptor is not ours to close any more.
    pub(super) fn displace(&self) {
        self.is_entered.set(false);
        self.interest.set(Interest::NONE);
        self.take_fd();
    }
}
