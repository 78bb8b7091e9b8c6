//! The waits of one call on one descriptor.
//!
//! A coro waits in the fd table of its loop. The entry is the coro itself, and an event makes the coro ready. In a
//! thread in which no coro runs, the thread blocks instead, without the GIL.

use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;
use std::ptr;

use grapeshot_core::sys::clock::now_ns;
use grapeshot_core::sys::readiness;
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::This;
use crate::binding::spin_lock::SpinLock;
use crate::binding::{HAS_GIL, current_thread, errors};
use crate::coro::coroutine::{Coro, CoroObject, Status};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::scheduler::{self, reactor_of};
use crate::coro::suspension;
use crate::coro::sync::{Deadline, Limit};
use crate::coro::{interruption, threads};
use crate::event_loop::progress::Progress;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::{Descriptors, Direction, Watcher};
use crate::event_loop::source::DeferredCall;
use crate::event_loop::watching;

/// The coros that wait on a socket object, at most one for each direction: owned references, or null. If all bytes are
/// zero, no coro waits. In the child of a fork, a record from before the fork counts as empty: the recorded waits, and
/// the registrations in the kernel, belong to the parent.
#[repr(C)]
pub(super) struct Waiting {
    reader: Cell<*mut ffi::PyObject>,
    writer: Cell<*mut ffi::PyObject>,
    /// The fd table's mark for the last wait on this object, for `Descriptors::wait_again`; 0 if there was none.
    stamp: Cell<u64>,
    /// The value of `forks()` when this record was last used.
    forks: Cell<u32>,
    /// The descriptor that a coro waits for, or waited for last. The object may have been closed since then.
    fd: Cell<RawFd>,
    /// The descriptor is being closed, or is closed.
    is_closing: Cell<bool>,
    /// Protects `reader`, `writer`, `forks`, `fd` and `is_closing`, because another thread may close the socket, or
    /// wait on it in a loop of its own.
    lock: SpinLock,
}

/// Why a coro cannot begin to wait on a socket.
enum Refusal {
    IsClosing,
    /// A coro of another thread waits.
    IsTaken,
}

impl Waiting {
    fn place(&self, direction: Direction) -> &Cell<*mut ffi::PyObject> {
        let forks = threads::forks();
        if self.forks.replace(forks) != forks {
            // The recorded coros are copies of the parent's coros and never run here. The references to them are not
            // dropped.
            self.reader.set(ptr::null_mut());
            self.writer.set(ptr::null_mut());
        }
        match direction {
            Direction::Read => &self.reader,
            Direction::Write => &self.writer,
        }
    }

    /// The waiting coro, if there is one.
    pub(super) fn get<'py>(&self, py: Python<'py>, direction: Direction) -> Option<Bound<'py, PyAny>> {
        self.lock.with(|| {
            // SAFETY: null, or a coro whose reference is held here; from_borrowed adds one for the result.
            unsafe { Bound::from_borrowed_ptr_or_opt(py, self.place(direction).get()) }
        })
    }

    fn is_free(&self, direction: Direction) -> bool {
        self.lock.with(|| self.place(direction).get().is_null())
    }

    /// Records that `coro` waits. Replaces a recorded coro of the same thread. If the wait is refused, nothing changes.
    fn set(&self, fd: RawFd, direction: Direction, coro: Coro<'_>) -> Result<(), Refusal> {
        let new = coro.to_bound().into_ptr();
        let (rest, result) = self.lock.with(|| {
            let place = self.place(direction);
            // SAFETY: null, or a coro whose reference is held here.
            let is_elsewhere = unsafe { place.get().cast::<CoroObject>().as_ref() }
                .is_some_and(|other| other.thread.get() != coro.thread.get());
            if self.is_closing.get() {
                (new, Err(Refusal::IsClosing))
            } else if is_elsewhere {
                (new, Err(Refusal::IsTaken))
            } else {
                self.fd.set(fd);
                (place.replace(new), Ok(()))
            }
        });
        // SAFETY: `rest` is null, the reference that was held here before, or the new one if it was not needed.
        drop(unsafe { Bound::from_owned_ptr_or_opt(coro.py(), rest) });
        result
    }

    /// The descriptor that a coro waits for; the object itself may be closed already.
    pub(super) fn fd(&self) -> RawFd {
        self.lock.with(|| self.fd.get())
    }

    /// From now on, no coro can begin to wait. The caller then ends the waits that have begun, and closes the
    /// descriptor. Without a GIL, a coro in another thread may be about to wait: either the caller finds it, or `set`
    /// refuses it.
    pub(super) fn close(&self) {
        self.lock.with(|| self.is_closing.set(true));
    }

    /// Removes the waiting coro if it is the given one. Returns whether it was.
    #[inline]
    fn take_if(&self, coro: Coro<'_>, direction: Direction) -> bool {
        let is_its = self.lock.with(|| {
            let place = self.place(direction);
            let is_its = place.get() == coro.as_ptr();
            if is_its {
                place.set(ptr::null_mut());
            }
            is_its
        });
        if is_its {
            // SAFETY: this reference was held here until now.
            drop(unsafe { Bound::from_owned_ptr(coro.py(), coro.as_ptr()) });
        }
        is_its
    }

    /// Called when the object gets another descriptor: forgets the last wait, and lets coros wait again after `close`.
    pub(super) fn forget_stamp(&self) {
        self.stamp.set(0);
        self.lock.with(|| self.is_closing.set(false));
    }

    /// Removes and returns the waiting coro.
    pub(super) fn take<'py>(&self, py: Python<'py>, direction: Direction) -> Option<Bound<'py, PyAny>> {
        let object = self.lock.with(|| self.place(direction).replace(ptr::null_mut()));
        // SAFETY: the reference moves into the result.
        unsafe { Bound::from_owned_ptr_or_opt(py, object) }
    }
}

/// The descriptor and direction that a call waits for. The call keeps the descriptor's object alive.
#[derive(Clone, Copy)]
pub(super) struct Target<'a, 'py> {
    pub(super) object: &'a Bound<'py, PyAny>,
    /// The socket object's record of its waiting coros; None for other objects.
    pub(super) waiting: Option<&'a Waiting>,
    pub(super) fd: RawFd,
    pub(super) direction: Direction,
    /// Whether to register the descriptor with the poller again. The poller then reports it if it is ready now, even
    /// without a change. An event that the last poll has returned does not end this wait.
    pub(super) is_anew: bool,
}

/// The time limit for all waits of one call together.
#[derive(Clone, Copy)]
enum TimeLimit {
    /// The limit, counted from the start of the first wait.
    For(Limit),
    /// The time at which the waits end. Set when the first wait begins, if no coro runs in the thread.
    Until(BlockingEnd),
}

/// The waits of one call. This value stays on the coro's stack during a wait.
pub(super) struct Wait {
    time_limit: TimeLimit,
    /// Set when the call's first wait begins in a coro.
    deadline: Option<Deadline<'static>>,
    fd: RawFd,
    direction: Direction,
}

impl Wait {
    pub(super) const fn new() -> Self {
        Self {
            time_limit: TimeLimit::For(Limit::Endless),
            deadline: None,
            fd: -1,
            direction: Direction::Read,
        }
    }

    /// Sets the time limit for all waits of the call together, counted from the start of the first one.
    pub(super) fn set_limit(&mut self, limit: Limit) {
        self.time_limit = TimeLimit::For(limit);
    }

    /// Begins a wait. Unless `target.is_anew` is set, the caller has made a system call that would have blocked.
    /// `MustWait`: the coro must leave its stack now. `Done`: no coro runs here, or the running coro has no loop to
    /// wait on (`suspension::current_on_loop`), so the thread has blocked until the descriptor was ready.
    ///
    /// Raises `TimeoutError` if the time is over, and `SimultaneousError` if another coro already waits for the same
    /// event.
    pub(super) fn begin(&mut self, target: Target<'_, 'static>) -> PyResult<Progress<()>> {
        let py = target.object.py();
        if suspension::current_on_loop(py).is_some() {
            self.begin_in(suspension::suspendable(py)?, target)?;
            return Ok(Progress::MustWait(()));
        }
        let end = match self.time_limit {
            TimeLimit::For(limit) => BlockingEnd::new(limit),
            TimeLimit::Until(end) => end,
        };
        self.time_limit = TimeLimit::Until(end);
        if block_until_ready(py, target.fd, target.direction, end)? {
            Ok(Progress::Done(()))
        } else {
            Err(timed_out())
        }
    }

    /// `begin` in the running coro, which can be suspended here.
    #[inline]
    pub(super) fn begin_in(&mut self, coro: Coro<'static>, target: Target<'_, 'static>) -> PyResult<()> {
        // Both branches may run destructors, which can interrupt this coro. So the checks come afterwards.
        if self.deadline.is_none() {
            let limit = match self.time_limit {
                TimeLimit::For(limit) => limit,
                TimeLimit::Until(_) => Limit::Endless,
            };
            self.deadline = Some(Deadline::outside_of_queues(coro, limit)?);
        } else {
            suspension::forget_wake_value(coro);
        }
        interruption::raise_pending(coro)?;
        self.check_time()?;
        enter(coro, target)?;
        (self.fd, self.direction) = (target.fd, target.direction);
        coro.has_event.set(false);
        coro.status.set(Status::Waiting);
        Ok(())
    }

    /// A fast `begin_in` for a read that would find nothing. Does nothing and returns false unless
    ///
    /// - the call has no limit,
    /// - no interruption and no value of an earlier wait is pending,
    /// - no other coro waits to read,
    /// - there was a wait on the socket before, and
    /// - no read event has come since the last read that emptied the socket.
    #[inline]
    pub(super) fn begin_again(&mut self, coro: Coro<'static>, fd: RawFd, waiting: &Waiting) -> bool {
        let is_plain = matches!(self.time_limit, TimeLimit::For(Limit::Endless))
            && !coro.wake_value.is_set()
            && !coro.wake_exception.is_set();
        if !is_plain || !waiting.is_free(Direction::Read) {
            return false;
        }
        let entry = || DeferredCall::new(coro.to_bound(), wake);
        let has_begun = reactor_of(coro).is_some_and(|reactor| {
            reactor
                .descriptors
                .wait_again(fd, waiting.stamp.get(), Direction::Read, true, entry)
        });
        if has_begun {
            if waiting.set(fd, Direction::Read, coro).is_err() {
                // The caller then calls `begin_in`. The socket refuses that wait, too, so `begin_in` raises an error.
                forget(coro, fd, Direction::Read);
                return false;
            }
            (self.fd, self.direction) = (fd, Direction::Read);
            coro.has_event.set(false);
            coro.status.set(Status::Waiting);
        }
        has_begun
    }

    /// Ends the wait of a coro that runs again, no matter what has woken it. Returns true if there was an event
    /// or the object was closed, so that the call must try again.
    #[inline]
    pub(super) fn end(&self, coro: Coro<'_>, waiting: Option<&Waiting>) -> bool {
        if let Some(waiting) = waiting
            && !waiting.take_if(coro, self.direction)
        {
            // The object was closed during the wait, and that has ended the wait. Leave the fd table alone: the
            // descriptor's number may belong to another file by now.
            return true;
        }
        // If there was an event, it has removed the entry from the fd table.
        coro.has_event.replace(false) || self.leave(coro)
    }

    /// Removes the coro from the fd table. Returns true if something else had already removed it.
    #[cold]
    fn leave(&self, coro: Coro<'_>) -> bool {
        let Some(event_loop) = coro.event_loop.get(coro.py()) else {
            return false;
        };
        let reactor = LoopObject::of(&event_loop).reactor();
        !reactor
            .descriptors
            .forget_waiter(self.fd, self.direction, coro.as_ptr())
    }

    /// Raises `TimeoutError` if the time of the call is over.
    pub(super) fn check_time(&self) -> PyResult<()> {
        if self.deadline.as_ref().is_some_and(Deadline::is_over) {
            return Err(timed_out());
        }
        Ok(())
    }
}

#[cold]
fn timed_out() -> PyErr {
    PyTimeoutError::new_err("timed out")
}

/// Enters the coro into the fd table of its loop.
fn enter(coro: Coro<'_>, target: Target<'_, '_>) -> PyResult<()> {
    let py = coro.py();
    let (fd, direction) = (target.fd, target.direction);
    let Some(event_loop) = coro.event_loop.get(py) else {
        return Err(PyRuntimeError::new_err("the coro has lost its loop"));
    };
    let owner = LoopObject::of(&event_loop);
    owner.reactor().check_closed()?;
    let descriptors = &owner.reactor().descriptors;
    if fd < 0 {
        // The object was closed before the wait.
        return Err(errors::os_error(&io::Error::from_raw_os_error(libc::EBADF)));
    }
    let entry = || DeferredCall::new(coro.to_bound(), wake);
    let is_free = target.waiting.is_none_or(|waiting| waiting.is_free(direction));
    if let Some(waiting) = target.waiting
        && is_free
        && !target.is_anew
        && descriptors.wait_again(fd, waiting.stamp.get(), direction, false, entry)
    {
        return record(coro, waiting, fd, direction);
    }
    watching::refuse_transport(owner, py, fd)?;
    if !is_free {
        return Err(simultaneous(py, fd, direction));
    }
    if descriptors.is_watched_for_other(fd, target.object) || descriptors.is_watched(fd, direction) {
        end_stale(py, descriptors, fd, direction)?;
    }
    // If the stamp is 0, the object may have got another file since its last wait, under the same descriptor number.
    let is_anew = target.is_anew || target.waiting.is_some_and(|waiting| waiting.stamp.get() == 0);
    let replaced = descriptors
        .wait_once(target.object, fd, direction, entry(), is_anew)
        .map_err(|error| errors::os_error(&error))?;
    if let Some(replaced) = replaced {
        replaced.end(py);
    }
    // The code that ran above may have interrupted this coro. It may also have let another coro wait on the same
    // object. Then `record` refuses this coro if the other one belongs to another thread, and otherwise replaces the
    // other one.
    if let Err(interruption) = interruption::raise_pending(coro) {
        descriptors.forget_waiter(fd, direction, coro.as_ptr());
        return Err(interruption);
    }
    if let Some(waiting) = target.waiting {
        waiting.stamp.set(descriptors.stamp(fd));
        record(coro, waiting, fd, direction)?;
    }
    Ok(())
}

/// Records in the socket that the coro waits. The coro is in the fd table already. If the socket refuses, the coro is
/// removed from the table, and this returns an error.
#[inline]
fn record(coro: Coro<'_>, waiting: &Waiting, fd: RawFd, direction: Direction) -> PyResult<()> {
    waiting.set(fd, direction, coro).map_err(|refusal| {
        forget(coro, fd, direction);
        match refusal {
            Refusal::IsClosing => closed(coro.py()),
            Refusal::IsTaken => simultaneous(coro.py(), fd, direction),
        }
    })
}

#[cold]
fn closed(py: Python<'_>) -> PyErr {
    let message = "the descriptor was closed while a coro waited on it";
    coro_errors::new(py, ErrorClass::Closed, message)
}

/// Called when the descriptor has an event, or its file is gone. The entry holds a reference to the coro.
///
/// # Safety
/// `object` is a coro.
unsafe fn wake(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: by the contract.
    let coro: Coro<'_> = unsafe { This::new(py, object) };
    // A coro that continues leaves the fd table before it does anything else. So a coro that waits now is waiting for
    // this event.
    let is_here = HAS_GIL || coro.thread.get() == current_thread();
    if is_here && coro.status.get() == Status::Waiting && !coro.wait_node.is_queued() {
        coro.has_event.set(true);
        scheduler::make_ready(coro);
    }
    Ok(())
}

#[cold]
fn simultaneous(py: Python<'_>, fd: RawFd, direction: Direction) -> PyErr {
    let what = match direction {
        Direction::Read => "read from",
        Direction::Write => "write to",
    };
    let message = format!("another coro or callback is already waiting to {what} descriptor {fd}");
    coro_errors::new(py, ErrorClass::Simultaneous, &message)
}

/// Deals with an earlier waiter on the same descriptor number. If that waiter's file is still open, two waiters for the
/// same direction are an error, and two for different directions are not. If the file was closed without the waiter's
/// knowledge and its number was given to another file, the earlier waits end.
#[cold]
fn end_stale(py: Python<'_>, descriptors: &Descriptors, fd: RawFd, direction: Direction) -> PyResult<()> {
    if descriptors.is_watch_in_force(fd) {
        return if descriptors.is_watched(fd, direction) {
            Err(simultaneous(py, fd, direction))
        } else {
            Ok(())
        };
    }
    for direction in [Direction::Read, Direction::Write] {
        let ended = descriptors
            .set_closed_watcher(fd, direction, None)
            .map_err(|error| errors::os_error(&error))?;
        match ended {
            Some(Watcher::Once(waiter)) => {
                let object = waiter.to_bound(py);
                if scheduler::is_coro(&object) {
                    end_closed(scheduler::coro_of(&object));
                } else {
                    waiter.call(py)?;
                }
            }
            Some(handle @ Watcher::Handle(..)) => handle.end(py),
            None => {}
        }
    }
    Ok(())
}

/// Raises `ClosedError` in a coro of this thread whose descriptor was closed during its wait.
#[cold]
pub(super) fn end_closed(coro: Coro<'_>) {
    let py = coro.py();
    if !matches!(coro.status.get(), Status::Waiting | Status::Ready) || coro.wake_exception.is_set() {
        return;
    }
    let exception = closed(py).into_value(py).into_bound(py).into_any();
    if let Err(error) = interruption::push(coro, exception) {
        error.write_unraisable(py, None);
    }
    if coro.status.get() == Status::Waiting {
        scheduler::make_ready(coro);
    }
}

/// Removes a coro of this thread from the fd table of its loop.
pub(super) fn forget(coro: Coro<'_>, fd: RawFd, direction: Direction) {
    if let Some(event_loop) = coro.event_loop.get(coro.py()) {
        let event_loop = LoopObject::of(&event_loop);
        // If another thread runs the loop now, the entry stays. When an event calls `wake` for the entry, `wake` finds
        // that the coro no longer waits there.
        let _ = event_loop.with_loop_access(coro.py(), || {
            let descriptors = &event_loop.reactor().descriptors;
            descriptors.forget_waiter(fd, direction, coro.as_ptr());
            Ok(())
        });
    }
}

// ---- without coros -------------------------------------------------------------------------------------------------

/// When a wait of a thread has to end, on the clock of `now_ns`. The largest number means never.
#[derive(Clone, Copy)]
struct BlockingEnd(u64);

impl BlockingEnd {
    /// The end of waits that begin now.
    fn new(limit: Limit) -> Self {
        Self(match limit {
            Limit::Endless => u64::MAX,
            Limit::AtOnce => 0,
            // The cast saturates: a limit of centuries is as good as no limit.
            Limit::For { timeout_s } => now_ns().saturating_add((timeout_s * 1e9).ceil() as u64),
        })
    }
}

/// Blocks until the descriptor is ready or the end is reached. Returns whether it is ready. Python signal handlers run
/// during the wait; an exception from one ends the wait.
fn block_until_ready(py: Python<'_>, fd: RawFd, direction: Direction, end: BlockingEnd) -> PyResult<bool> {
    let is_write = direction == Direction::Write;
    let end_ns = (end.0 != u64::MAX).then_some(end.0);
    loop {
        match py.detach(|| readiness::wait_ready(fd, is_write, end_ns)) {
            Ok(is_ready) => return Ok(is_ready),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                // SAFETY: attached.
                if unsafe { ffi::PyErr_CheckSignals() } != 0 {
                    return Err(PyErr::fetch(py));
                }
            }
            Err(error) => return Err(errors::os_error(&error)),
        }
    }
}
