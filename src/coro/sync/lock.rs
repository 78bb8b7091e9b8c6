//! `lock` and `mutex`: held by one coro at a time. The holder of a mutex may take it again.

use std::cell::Cell;
use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit::{Deadline, Limit};
use super::object::{FLAGS, Head, Primitive, check_thread, grant, make_type as make, wait_in_queue, waiting};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::native_type::{NativeType, This, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::coro::coroutine::Coro;
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{runtime, suspension};

#[repr(C)]
pub(super) struct LockObject<const RECURSIVE: bool> {
    head: Head,
    /// The coro that holds the lock. A coro that was granted the lock holds it even before it runs.
    holder: ObjectCell,
    /// How often the holder has taken the lock again after the first time.
    depth: Cell<usize>,
    waiters: WaitQueue,
}

type Lock<'py, const R: bool> = This<'py, LockObject<R>>;

impl<const R: bool> NativeType for LockObject<R> {
    const NAME: &'static CStr = if R {
        c"grapeshot.coro.mutex"
    } else {
        c"grapeshot.coro.lock"
    };
    const DOC: &'static CStr = if R {
        c"mutex()\n--\n\nA lock that its holder may acquire again. It is free after as many releases as acquires."
    } else {
        c"lock()\n--\n\nA lock that at most one coro holds."
    };
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.holder]
    }

    fn with_access<T>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl<const R: bool> Primitive for LockObject<R> {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(_: *mut Self) {}

    fn state(this: This<'_, Self>) -> String {
        let state = if this.holder.is_set() {
            "locked"
        } else {
            "unlocked"
        };
        format!("{state}{}", waiting(this.waiters.len()))
    }
}

/// Gives the lock to the coro that has waited longest, or frees it if no coro waits.
#[inline]
fn pass_on<const R: bool>(this: Lock<'_, R>) {
    match this.waiters.first(this.py()) {
        Some(next) => {
            // The previous holder is dropped last, so that its destructor finds the lock in a valid state.
            let before = this.holder.take(this.py());
            this.holder.put_new(next.to_bound().into_ptr());
            grant(next, None);
            drop(before);
        }
        None => drop(this.holder.take(this.py())),
    }
}

/// Takes the lock if that is possible without waiting.
#[inline]
fn take<const R: bool>(this: Lock<'_, R>, coro: Coro<'_>) -> bool {
    let holder = this.holder.as_ptr();
    if holder.is_null() {
        this.holder.put_new(coro.to_bound().into_ptr());
        return true;
    }
    if R && holder == coro.as_ptr() {
        this.depth.set(this.depth.get() + 1);
        return true;
    }
    false
}

/// The result of `hold`.
#[derive(PartialEq, Eq)]
enum Held {
    AtOnce,
    AfterAWait,
    /// The limit was reached before the lock was free.
    Not,
}

/// Takes the lock, waiting for it if necessary.
#[inline]
fn hold<const R: bool>(this: Lock<'_, R>, limit: Limit) -> PyResult<Held> {
    check_thread(this)?;
    let coro = suspension::suspendable(this.py())?;
    if take(this, coro) {
        return Ok(Held::AtOnce);
    }
    if limit.is_at_once() {
        return Ok(Held::Not);
    }
    if this.holder.as_ptr() == coro.as_ptr() {
        return Err(lock_error(
            this,
            "the coro already holds the lock: it would wait for itself",
        ));
    }
    let deadline = Deadline::new(coro, limit)?;
    while !take(this, coro) {
        let wait = wait_in_queue(&this.waiters, coro, 1, &deadline);
        match wait.result {
            Ok(_) if wait.is_granted => break,
            Ok(_) if wait.is_late => return Ok(Held::Not),
            Ok(_) => {}
            Err(interruption) => {
                if wait.is_granted {
                    pass_on(this);
                }
                return Err(interruption);
            }
        }
    }
    Ok(Held::AfterAWait)
}

/// Undoes one `hold`. Returns whether another coro has got the lock.
#[inline]
fn give<const R: bool>(this: Lock<'_, R>) -> PyResult<bool> {
    check_thread(this)?;
    let holder = this.holder.as_ptr();
    if holder.is_null() || runtime::current_ptr() != holder {
        return Err(lock_error(this, "the lock is not held by this coro"));
    }
    if R && this.depth.get() > 0 {
        this.depth.set(this.depth.get() - 1);
        return Ok(false);
    }
    let is_passed_on = !this.waiters.is_empty();
    pass_on(this);
    Ok(is_passed_on)
}

#[cold]
fn lock_error<const R: bool>(this: Lock<'_, R>, message: &str) -> PyErr {
    coro_errors::new(this.py(), ErrorClass::LockError, message)
}

fn acquire<'py, const R: bool>(this: Lock<'py, R>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit = if args.values().is_empty() {
        Limit::Endless
    } else {
        let [block, timeout] = args.bind()?;
        Limit::new(block, timeout)?
    };
    Ok(bool_object(this.py(), hold(this, limit)? != Held::Not))
}

fn lock<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let held = hold(this, Limit::Endless)?;
    Ok(bool_object(this.py(), held == Held::AfterAWait))
}

fn try_acquire<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let coro = suspension::suspendable(this.py())?;
    Ok(bool_object(this.py(), take(this, coro)))
}

fn release<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    give(this)?;
    Ok(none(this.py()))
}

fn unlock<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), give(this)?))
}

fn locked<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.holder.is_set()))
}

fn has_lock<'py, const R: bool>(this: Lock<'py, R>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [coro] = args.bind()?;
    let asked = match coro.filter(|coro| !coro.is_none()) {
        Some(coro) => coro.as_ptr(),
        None => runtime::current_ptr(),
    };
    let is_holder = !asked.is_null() && asked == this.holder.as_ptr();
    Ok(bool_object(this.py(), is_holder))
}

fn enter<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    hold(this, Limit::Endless)?;
    Ok(this.to_bound())
}

fn exit<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    give(this)?;
    Ok(none(this.py()))
}

/// The methods of both types.
fn methods<const R: bool>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            <const R: bool> acquire::<R>,
            lock.acquire,
            "Wait until the lock is free and acquire it. Waiting coros get it in order of arrival."
        ),
        row!(
            method,
            <const R: bool> try_acquire::<R>,
            lock.try_acquire,
            "Acquire the lock without waiting. Return False if that is not possible."
        ),
        row!(
            method,
            <const R: bool> release::<R>,
            lock.release,
            "\
                Undo one acquire. If that frees the lock, the coro that has waited longest gets it.\n\n\
                Raises LockError unless this coro holds the lock."
        ),
        row!(method, <const R: bool> locked::<R>, lock.locked, "Return whether a coro holds the lock."),
        row!(
            method,
            <const R: bool> has_lock::<R>,
            lock.has_lock,
            "Return whether the given coro, by default the running one, holds the lock."
        ),
        row!(method, <const R: bool> enter::<R>, lock.__enter__, "Acquire the lock."),
        row!(method, <const R: bool> exit::<R>, lock.__exit__, "Release the lock."),
    ]
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<LockObject<false>>(module, methods::<false>(), Vec::new(), &[])
}

pub(super) fn make_recursive_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let mut methods = methods::<true>();
    methods.push(row!(
        method,
        lock::<true>,
        mutex.lock,
        "Acquire the mutex. Return whether the coro had to wait."
    ));
    methods.push(row!(
        method,
        unlock::<true>,
        mutex.unlock,
        "Release the mutex. Return whether another coro now has it."
    ));
    make::<LockObject<true>>(module, methods, Vec::new(), &[])
}
