//! The descriptor of a transport, and what the loop's fd table and the poller know of it.
//!
//! Belongs to the loop's thread. What to wait for is the transport's own business: it is told, never counted.

use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;

use crate::event_loop::native_type::This;
use crate::event_loop::reactor::{Reactor, Slot};
use crate::event_loop::source::{Source, SourceRef};
use crate::sys::poller::{Interest, Token};

pub(super) struct Registration {
    /// Once closed its complement (`!fd`), which is negative.
    fd: Cell<RawFd>,
    token: Cell<Token>,
    /// What the poller waits for now.
    interest: Cell<Interest>,
    is_entered: Cell<bool>,
}

impl Registration {
    /// Of an open descriptor, which stays the caller's to close.
    pub(super) fn new(fd: RawFd) -> Self {
        Self {
            fd: Cell::new(fd),
            token: Cell::new(Token(0)),
            interest: Cell::new(Interest::NONE),
            is_entered: Cell::new(false),
        }
    }

    /// The descriptor, negative once it is closed.
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

    /// Enters `this` into the fd table, which keeps it alive, and has the poller wait for `wanted`.
    pub(super) fn enter<T: Source>(
        &self,
        this: This<'_, T>,
        reactor: &Reactor,
        wanted: Interest,
    ) -> io::Result<()> {
        let source = SourceRef::new::<T>(this);
        match reactor.register(this.py(), self.fd.get(), Slot::Source(source), wanted) {
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

    /// Brings the poller in line with `wanted`; does nothing while the transport is not entered.
    #[inline]
    pub(super) fn sync(&self, reactor: &Reactor, wanted: Interest) -> io::Result<()> {
        let old = self.interest.get();
        if old == wanted || !self.is_entered.get() {
            return Ok(());
        }
        reactor.set_interest(self.fd.get(), self.token.get(), old, wanted)?;
        self.interest.set(wanted);
        Ok(())
    }

    /// Takes `this` out of the poller and the fd table. The caller holds a reference of its own.
    pub(super) fn leave<T>(&self, this: This<'_, T>, reactor: &Reactor) {
        if !self.is_entered.replace(false) {
            return;
        }
        let fd = self.fd.get();
        // An entry that is no longer ours belongs to whoever got the descriptor after it was closed behind our back.
        let is_ours =
            matches!(reactor.slot(fd), Some(Slot::Source(source)) if source.as_ptr() == this.as_ptr());
        if is_ours && let Some(Slot::Source(source)) = reactor.unregister(fd, self.interest.get()) {
            source.release(this.py());
        }
        self.interest.set(Interest::NONE);
    }
}
