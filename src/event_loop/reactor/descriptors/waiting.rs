//! Waiting for descriptors that the program owns and the loop only watches: `add_reader`, `add_writer`, the socket
//! operations and the sockets of coros.
//!
//! Each direction of a descriptor has at most one watcher. A watcher is either a handle, which goes to the ready queue
//! at every event, or a native object that waits for one event. Handles are level-triggered, as in asyncio. If only
//! objects wait, the poller reports changes (edge-triggered). When such a wait ends, the poller's registration stays
//! unchanged, so the next wait on that socket costs no system call. This is safe if the kernel has just reported that
//! the call would block, or if a short read has just emptied the socket: then the change that the object waits for is
//! still to come. All other waits register the descriptor again (`is_anew`). The registration ends with the first event
//! that finds no waiting object.
//!
//! ```text
//!   wait_once:  is_anew, another socket than last time, or a handle for the other direction?
//!                     | no                                   '-- yes --> update the poller
//!                     v
//!               does the poller watch this direction already?
//!                     | yes: no system call                  '-- no ---> update the poller
//! ```
//! Between two waits, a socket may be closed and its number given to another socket. So a watch keeps a weak reference
//! to the socket object of the last wait, which tells whether the registration still belongs to the same open file. A
//! duplicate of a closed socket may keep the old registration alive in the kernel. Events of that registration carry an
//! outdated token, so they reach no watcher, and they are few: one for each change. One case goes unnoticed: `os.dup2`
//! replaces a descriptor while its socket object lives on.

use std::io;
use std::os::fd::RawFd;

use grapeshot_core::sys::poller::{Event, Interest};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use super::watch::{OwnedWatch, WatchRef};
use super::watcher::{Direction, Watcher};
use super::{Descriptors, FdUse};
use crate::event_loop::reactor::ready::ReadyWork;
use crate::event_loop::source::DeferredCall;

impl Descriptors {
    #[inline]
    pub(crate) fn watch(&self, fd: RawFd) -> Option<WatchRef> {
        match self.table.borrow().get_fd(fd) {
            Some(FdUse::Watch(watch)) => Some(watch.get()),
            _ => None,
        }
    }

    /// Fails with EEXIST if a transport uses `fd`. The callers have checked that no transport does, but code that ran
    /// since then, such as a finalizer, may have made one.
    fn watch_or_new(&self, fd: RawFd) -> io::Result<WatchRef> {
        let mut table = self.table.borrow_mut();
        match table.get_fd(fd) {
            Some(FdUse::Watch(watch)) => Ok(watch.get()),
            Some(FdUse::Source(_)) => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            None => {
                let owned = OwnedWatch::new();
                let watch = owned.get();
                table.insert(fd, FdUse::Watch(owned));
                Ok(watch)
            }
        }
    }

    /// Whether `fd` has a watcher in this direction.
    pub(crate) fn is_watched(&self, fd: RawFd, direction: Direction) -> bool {
        self.watch(fd)
            .is_some_and(|watch| watch.get().side(direction).is_set())
    }

    /// The file object that the callback of `fd` in this direction was registered with.
    pub(super) fn target<'py>(
        &self,
        py: Python<'py>,
        fd: RawFd,
        direction: Direction,
    ) -> Option<Bound<'py, PyAny>> {
        self.watch(fd)?.get().side(direction).target(py)
    }

    /// Whether `fd` has a callback in this direction that was registered with this object, or with a number.
    pub(crate) fn is_registered_for(
        &self,
        fd: RawFd,
        direction: Direction,
        target: &Bound<'_, PyAny>,
    ) -> bool {
        self.watch(fd).is_some_and(|watch| {
            let side = watch.get().side(direction);
            side.has_handle() && side.target(target.py()).is_none_or(|now| now.is(target))
        })
    }

    /// Sets or removes the watcher of `fd`, which no transport uses. Returns the previous watcher. After an error,
    /// nothing has changed, and `watcher` is dropped.
    pub(crate) fn set_watcher(
        &self,
        py: Python<'_>,
        fd: RawFd,
        direction: Direction,
        watcher: Option<Watcher>,
    ) -> io::Result<Option<Watcher>> {
        if watcher.is_none() && self.watch(fd).is_none() {
            return Ok(None);
        }
        let watch = self.watch_or_new(fd)?;
        let mut _last_socket = None;
        if watch.get().is_idle() {
            // Either the watch is new, or it was left by an earlier wait on a socket, which may be closed by now. In
            // both cases, the descriptor gets a new token.
            self.table.borrow_mut().renew(fd);
            _last_socket = watch.check_armed(py);
            watch.get().forget_socket(py);
        }
        // A new handle always updates the poller: the descriptor may have been closed and its number given to another
        // file.
        let must_update = watcher.is_some();
        let before = watch.get().side(direction).replace(watcher);
        self.arm_replaced(fd, watch, direction, before, must_update)
    }

    /// `set_watcher` for a closed file object. A new watcher can only replace another one; if the direction has none,
    /// this fails with EBADF. The poller is not told of the new watcher, because it may know another file under this
    /// number.
    pub(crate) fn set_closed_watcher(
        &self,
        fd: RawFd,
        direction: Direction,
        watcher: Option<Watcher>,
    ) -> io::Result<Option<Watcher>> {
        let Some(watch) = self.watch(fd).filter(|_| self.is_watched(fd, direction)) else {
            return match watcher {
                Some(_) => Err(io::Error::from_raw_os_error(libc::EBADF)),
                None => Ok(None),
            };
        };
        let before = watch.get().side(direction).replace(watcher);
        if watch.get().is_idle() {
            self.disarm(fd, watch)?;
        }
        Ok(before)
    }

    /// Wakes `waiter` at the next event of `socket`, whose descriptor is `fd`. Returns the watcher that `waiter`
    /// replaces. After an error, `waiter` is dropped.
    ///
    /// If `is_anew` is true, the descriptor is registered with the poller again, even if the poller watches it already.
    /// Then an event that the last poll has returned does not end this wait, and the poller reports the descriptor if
    /// it is ready now, even without a change.
    pub(crate) fn wait_once(
        &self,
        socket: &Bound<'_, PyAny>,
        fd: RawFd,
        direction: Direction,
        waiter: DeferredCall,
        is_anew: bool,
    ) -> io::Result<Option<Watcher>> {
        let py = socket.py();
        self.poll_next(direction.interest());
        let is_of_socket = self.watch(fd).is_some_and(|watch| watch.get().belongs_to(socket));
        if !is_of_socket {
            self.end_displaced(fd, socket);
        }
        let is_known = !is_anew && is_of_socket;
        // The reference is made before the watch is looked up: up to CPython 3.11, an allocation may run a garbage
        // collection, whose finalizers may remove the watch.
        let reference = if is_known {
            None
        } else {
            PyWeakrefReference::new(socket).ok()
        };
        let watch = self.watch_or_new(fd)?;
        let mut _last_socket = None;
        let before = watch.get().side(direction).replace(Some(Watcher::Once(waiter)));
        if !is_known {
            // The descriptor gets a new token, so that events with the old token do not end this wait. The last poll
            // may have returned such an event, and another file that had this number before may cause more of them.
            self.table.borrow_mut().renew(fd);
            _last_socket = watch.check_armed(py);
            watch.get().note_socket(py, reference);
        }
        self.arm_replaced(fd, watch, direction, before, !is_known)
    }

    /// The stamp of the last `wait_once` on `fd`, for `wait_again`; 0 if there was no such wait.
    pub(crate) fn stamp(&self, fd: RawFd) -> u64 {
        self.watch(fd).map_or(0, |watch| watch.get().stamp.get())
    }

    /// The fast path of `wait_once`, for a socket that knows the stamp of its last wait. Does nothing and returns false
    /// if the stamp is outdated, if something waits in this direction already, or if the poller would have to be
    /// updated. With `unless_reported`, it also does nothing and returns false if there was an event for reading since
    /// the last `note_short_read`.
    #[inline]
    pub(crate) fn wait_again(
        &self,
        fd: RawFd,
        stamp: u64,
        direction: Direction,
        unless_reported: bool,
        waiter: impl FnOnce() -> DeferredCall,
    ) -> bool {
        let Some(watch) = self.watch(fd) else { return false };
        let watch = watch.get();
        let armed = watch.armed.get();
        let is_armed = armed.with(direction.interest().on_change()) == armed;
        if watch.stamp.get() != stamp
            || stamp == 0
            || !is_armed
            || watch.side(direction).is_set()
            || watch.side(direction.other()).has_handle()
            || (unless_reported && watch.is_reported.get())
        {
            return false;
        }
        self.poll_next(direction.interest());
        watch.side(direction).put_new(Watcher::Once(waiter()));
        true
    }

    /// Whether `fd` has a watcher in either direction, and the last wait on `fd` was not on `target`.
    #[inline]
    pub(crate) fn is_watched_for_other(&self, fd: RawFd, target: &Bound<'_, PyAny>) -> bool {
        self.watch(fd)
            .is_some_and(|watch| !watch.get().is_idle() && !watch.get().belongs_to(target))
    }

    /// Whether the number `fd` still belongs to the open file that its watchers wait for. Costs a system call.
    pub(crate) fn is_watch_in_force(&self, fd: RawFd) -> bool {
        let (Some(watch), Some(token)) = (self.watch(fd), self.table.borrow().token_of(fd)) else {
            return false;
        };
        self.is_in_force(fd, token, watch.get().armed.get())
    }

    /// Called after a read that returned less than it had space for. Returns whether this means that nothing is left to
    /// read. Something may be left if an event reported more than ordinary data, such as the end of the stream.
    #[inline]
    pub(crate) fn note_short_read(&self, fd: RawFd) -> bool {
        self.watch(fd).is_none_or(|watch| {
            watch.get().is_reported.set(false);
            !watch.get().has_more.get()
        })
    }

    /// Whether `fd` is watched and was reported as readable since the last `note_short_read`.
    #[inline]
    pub(crate) fn is_reported(&self, fd: RawFd) -> bool {
        self.watch(fd).is_some_and(|watch| watch.get().is_reported.get())
    }

    /// Ends the wait of `waiter` on `fd`. Returns false if `waiter` is no longer the watcher.
    pub(crate) fn forget_waiter(&self, fd: RawFd, direction: Direction, waiter: *mut ffi::PyObject) -> bool {
        let Some(watch) = self.watch(fd) else { return false };
        let side = watch.get().side(direction);
        if side.as_ptr() != waiter {
            return false;
        }
        let watcher = side.take();
        // A failure means that the descriptor is closed, so there is nothing left to update.
        let _ = self.arm(fd, watch, false);
        drop(watcher);
        true
    }

    /// The descriptor that `waiter` waits for, and the direction. Searches the whole table.
    pub(crate) fn find_waiter(&self, waiter: *mut ffi::PyObject) -> Option<(RawFd, Direction)> {
        self.table.borrow().iter().find_map(|(fd, fd_use)| {
            let FdUse::Watch(watch) = fd_use else {
                return None;
            };
            let watch = watch.get();
            Direction::BOTH
                .into_iter()
                .find(|direction| watch.get().side(*direction).as_ptr() == waiter)
                .map(|direction| (fd, direction))
        })
    }

    /// `arm` after the watcher `before` was replaced. Returns `before`, or puts it back if the poller refuses the
    /// change.
    fn arm_replaced(
        &self,
        fd: RawFd,
        watch: WatchRef,
        direction: Direction,
        before: Option<Watcher>,
        must_update: bool,
    ) -> io::Result<Option<Watcher>> {
        let Err(error) = self.arm(fd, watch, must_update) else {
            return Ok(before);
        };
        // The poller's refusal has changed nothing, so the watch is still in the table.
        let refused = watch.get().side(direction).replace(before);
        if watch.get().is_idle() && watch.get().armed.get().is_empty() {
            self.remove_watch(fd);
        }
        drop(refused);
        Err(error)
    }

    fn remove_watch(&self, fd: RawFd) {
        let removed = self.table.borrow_mut().remove(fd);
        // `removed` is dropped after the borrow has ended, because its destructors may use the table.
        drop(removed);
    }

    /// Updates the poller if `must_update` is true, or if the poller's interest is not the one that the watch wants.
    /// Removes the watch if it is not needed any more.
    fn arm(&self, fd: RawFd, watch: WatchRef, must_update: bool) -> io::Result<()> {
        let wanted = watch.get().wanted();
        if watch.get().is_idle() && !watch.get().keeps_idle() {
            return self.disarm(fd, watch);
        }
        if wanted != watch.get().armed.get() || must_update {
            self.update_poller(fd, watch, wanted)?;
        }
        Ok(())
    }

    /// Reduces the poller's interest to the directions that have a watcher. Removes the watch if neither direction has
    /// one.
    #[cold]
    fn disarm(&self, fd: RawFd, watch: WatchRef) -> io::Result<()> {
        if !watch.get().is_idle() {
            return self.update_poller(fd, watch, watch.get().waited_for());
        }
        if !watch.get().armed.get().is_empty() {
            self.poller.remove(fd);
        }
        self.remove_watch(fd);
        Ok(())
    }

    fn update_poller(&self, fd: RawFd, watch: WatchRef, wanted: Interest) -> io::Result<()> {
        let Some(token) = self.table.borrow().token_of(fd) else {
            return Ok(());
        };
        self.poll_next(wanted);
        self.poller.change(fd, token, watch.get().armed.get(), wanted)?;
        watch.get().armed.set(wanted);
        Ok(())
    }

    /// Handles an event of a watched descriptor. No callback runs here: handles go to `ready`, and waiters queue their
    /// own work. Not inlined, because that would enlarge the frame of `Reactor::dispatch`, which greenlets copy.
    #[inline(never)]
    pub(crate) fn dispatch_watch(
        &self,
        py: Python<'_>,
        event: Event,
        watch: WatchRef,
        ready: &ReadyWork,
    ) -> PyResult<()> {
        if let Some(waiter) = watch.get().take_only_reader(event) {
            return waiter.call(py);
        }
        let fd = (event.token.0 & u64::from(u32::MAX)) as RawFd;
        if event.readiness.has_more() {
            watch.get().has_more.set(true);
        }
        if event.readiness.is_readable() {
            watch.get().is_reported.set(true);
        }
        let mut woken = [None, None];
        let mut is_awaited = false;
        for (direction, woken) in Direction::BOTH.into_iter().zip(&mut woken) {
            let is_ready = match direction {
                Direction::Read => event.readiness.is_readable(),
                Direction::Write => event.readiness.is_writable(),
            };
            let side = watch.get().side(direction);
            if !is_ready || !side.is_set() {
                continue;
            }
            is_awaited = true;
            match side.pending_handle() {
                Some(handle) => ready.push(handle),
                // This watcher waited for one event, or it is a cancelled handle. As in asyncio, the first event after
                // the cancellation removes such a handle.
                None => *woken = side.take(),
            }
        }
        let told = if is_awaited {
            self.arm(fd, watch, false)
        } else {
            self.disarm(fd, watch)
        };
        // An error is ignored: the poller then reports more events than are wanted until the descriptor is closed.
        drop(told);
        let mut result = Ok(());
        for watcher in woken.into_iter().flatten() {
            if let Watcher::Once(waiter) = watcher {
                result = result.and(waiter.call(py));
            }
        }
        result
    }
}
