//! The descriptors that the loop watches: the fd table, which says what each of them is for, and the poller, which must
//! be told of every change.
//!
//! The table has an entry for each source (a transport, a listener) and for each watch (`add_reader`, the socket
//! operations, coros). It owns a reference to everything in it. An event of the poller is looked up by its token, which
//! finds nothing once the registration has ended.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::os::fd::RawFd;

use grapeshot_core::queue::fd_table::FdTable;
use grapeshot_core::sys::poller::{Interest, Token};
use grapeshot_core::sys::readiness;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::event_loop::source::SourceRef;

mod displaced;
mod ghosts;
mod pacing;
mod poller;
mod waiting;
mod watch;
mod watcher;

use displaced::Displaced;
pub(super) use pacing::Pacing;
pub(super) use poller::{LoopPoller, SIGNAL_TOKEN, WAKER_TOKEN};
use watch::{OwnedWatch, WatchRef};
pub(crate) use watcher::{Direction, Watcher};

/// The use of a descriptor in the fd table. Dropping it may run any code, so an entry is taken out of the table first
/// and dropped when the table is not borrowed any more.
pub(crate) enum FdUse {
    /// It belongs to a native source, such as a transport or a listener.
    Source(SourceRef),
    /// The program owns it and the loop only watches it: for `add_reader`, `add_writer`, a socket operation or a coro.
    Watch(OwnedWatch),
}

impl FdUse {
    /// Releases an entry whose number now belongs to another file. The caller has already taken the entry out of the
    /// table.
    fn displace(self, py: Python<'_>) {
        match self {
            Self::Source(source) => source.displace(py),
            Self::Watch(watch) => drop(watch),
        }
    }
}

/// An entry that was looked up. A source comes with a reference of its own, because calling the source may end the
/// registration, and thereby drop the table's reference.
pub(super) enum Registered {
    Source(SourceRef),
    Watch(WatchRef),
}

pub(crate) struct Descriptors {
    table: RefCell<FdTable<FdUse>>,
    pub(super) poller: LoopPoller,
    pub(super) pacing: Pacing,
    displaced: Displaced,
    /// The number of events without a registration: see `ghosts`.
    stale_events: Cell<usize>,
}

impl Descriptors {
    pub(super) fn new(waker_fd: RawFd) -> io::Result<Self> {
        Ok(Self {
            table: RefCell::new(FdTable::new()),
            poller: LoopPoller::new(waker_fd)?,
            pacing: Pacing::new(),
            displaced: Displaced::new(),
            stale_events: Cell::new(0),
        })
    }

    /// Makes the next iteration poll even if other work is ready, unless `interest` is NONE. A descriptor with a new
    /// wait may already have data. As in asyncio, the next iteration handles that data, even if it has other work.
    #[inline]
    pub(crate) fn poll_next(&self, interest: Interest) {
        if !interest.is_empty() {
            self.pacing.poll_next();
        }
    }

    // ---- the table -------------------------------------------------------------------------------------------

    /// The use of the descriptor that is registered with this token; None if the registration has ended.
    #[inline]
    pub(super) fn get(&self, token: Token) -> Option<Registered> {
        Some(match self.table.borrow().get(token)? {
            FdUse::Source(source) => Registered::Source(source.new_ref()),
            FdUse::Watch(watch) => Registered::Watch(watch.get()),
        })
    }

    /// The source that is registered for `fd`, with its token.
    pub(crate) fn source(&self, fd: RawFd) -> Option<(Token, SourceRef)> {
        let table = self.table.borrow();
        match table.get_fd(fd) {
            Some(FdUse::Source(source)) => Some((table.token_of(fd)?, source.new_ref())),
            _ => None,
        }
    }

    /// New references to all registered sources.
    pub(crate) fn sources<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let table = self.table.borrow();
        table
            .iter()
            .filter_map(|(_, fd_use)| match fd_use {
                FdUse::Source(source) => Some(source.to_bound(py)),
                FdUse::Watch(_) => None,
            })
            .collect()
    }

    /// Whether any descriptor that something waits for is ready. Asks the kernel, not the loop's poller.
    pub(super) fn is_any_ready(&self, py: Python<'_>) -> bool {
        readiness::is_any_ready(self.table.borrow().iter().map(|(fd, fd_use)| {
            let interest = match fd_use {
                FdUse::Source(source) => source.interest(py),
                FdUse::Watch(watch) => watch.get().waited_for(),
            };
            (fd, interest)
        }))
    }

    // ---- registrations ---------------------------------------------------------------------------------------

    /// Whether the registration with this token is still in the fd table.
    #[inline]
    pub(crate) fn is_registered(&self, token: Token) -> bool {
        self.table.borrow().get(token).is_some()
    }

    /// Whether the number `fd` still belongs to the file that was registered with this token and interest. Costs a
    /// system call.
    pub(crate) fn is_in_force(&self, fd: RawFd, token: Token, interest: Interest) -> bool {
        !interest.is_empty()
            && self
                .poller
                .with(|poller| Ok(poller.is_watching(fd, token, interest)))
                .unwrap_or(false)
    }

    /// Registers `fd_use` for `fd`. If the table still has an entry for this number, `fd_use` replaces it. The old
    /// entry is either the watch of an earlier wait on the same socket, or belongs to a descriptor that was closed
    /// without being removed. If the old entry is a source, it is notified. With interest NONE, the poller does not
    /// watch the descriptor. After an error, `fd_use` is dropped.
    pub(crate) fn register(
        &self,
        py: Python<'_>,
        fd: RawFd,
        fd_use: FdUse,
        interest: Interest,
    ) -> io::Result<Token> {
        let (token, stale) = self.table.borrow_mut().insert(fd, fd_use);
        // After `sock_connect`, the poller may already know the socket that a transport now takes over.
        let mut _last_socket = None;
        let known = match &stale {
            Some(FdUse::Watch(watch)) => {
                _last_socket = watch.get().check_armed(py);
                watch.get().armed()
            }
            _ => Interest::NONE,
        };
        self.poll_next(interest);
        let told = self.poller.change(fd, token, known, interest);
        let refused = match told {
            Ok(()) => None,
            Err(_) => self.table.borrow_mut().remove(fd),
        };
        // The stale entry and the refused one are released last, because that may run any code.
        if let Some(stale) = stale {
            self.note_all_displaced(py, &stale);
            stale.displace(py);
        }
        drop(refused);
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
        self.poller.change(fd, token, old, new)
    }

    /// Removes a registration from the fd table, and its descriptor from the poller if `interest` is not NONE. Does
    /// nothing if the table no longer has the registration: the descriptor's number may have a new registration. The
    /// caller must drop the result at a point where any code may run.
    #[must_use = "dropping it may run any code"]
    pub(crate) fn unregister(&self, token: Token, interest: Interest) -> Option<FdUse> {
        let (fd, fd_use) = self.table.borrow_mut().remove_token(token)?;
        if !interest.is_empty() {
            self.poller.remove(fd);
        }
        Some(fd_use)
    }

    /// Removes the fd table's entry of a source whose descriptor other code has closed, and notifies the source. The
    /// number now belongs to another file.
    pub(crate) fn displace(&self, py: Python<'_>, token: Token) {
        let displaced = self.table.borrow_mut().remove_token(token);
        if let Some((_, fd_use)) = displaced {
            fd_use.displace(py);
        }
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Frees the poller.
    pub(super) fn close_poller(&self) {
        self.poller.close();
    }

    pub(super) fn forget_displaced(&self, py: Python<'_>) {
        self.displaced.forget(py);
    }

    /// Releases all registrations.
    pub(super) fn drop_work(&self) {
        let fds: Vec<RawFd> = self.table.borrow().iter().map(|(fd, _)| fd).collect();
        for fd in fds {
            let fd_use = self.table.borrow_mut().remove(fd);
            drop(fd_use);
        }
    }

    /// Called in the child of a fork: leaks the parent's registrations, and puts a new poller in the place of the
    /// parent's. After an error, nothing has changed.
    pub(super) fn forget_parent(&self, waker_fd: RawFd) -> io::Result<()> {
        self.poller.forget_parent(waker_fd)?;
        mem::forget(self.table.replace(FdTable::new()));
        self.stale_events.set(0);
        Ok(())
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Ok(table) = self.table.try_borrow() else {
            return 0;
        };
        for (_, fd_use) in table.iter() {
            // SAFETY: the table holds a reference to each entry; visit and arg are the collector's.
            let result = unsafe {
                match fd_use {
                    FdUse::Source(source) => visit(source.as_ptr(), arg),
                    FdUse::Watch(watch) => watch.get().traverse(visit, arg),
                }
            };
            if result != 0 {
                return result;
            }
        }
        0
    }
}
