//! `_thread.lock` and `_thread.RLock` for coros and real threads.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::limit;
use super::waiters::{Party, Source, Waiters, take_or_wait, take_undisturbed};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{
    NativeType, This, alloc_without_arguments, new_type, represent, slot, with_critical_section,
};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{members_slot, methods_slot, offset_member, row};
use crate::coro::sync::limit::Limit;

/// In the initial state, all bytes are zero, except those of `waiters`.
#[repr(C)]
struct LockObject<const RECURSIVE: bool> {
    base: ffi::PyObject,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// The coro or thread that holds the lock. A waiter that was granted the lock holds it even before it runs.
    holder: Cell<Party>,
    /// How often the holder has taken the lock again after the first time.
    depth: Cell<usize>,
    waiters: Waiters,
}

type Lock<'py, const R: bool> = This<'py, LockObject<R>>;

impl<const R: bool> NativeType for LockObject<R> {
    const NAME: &'static CStr = if R {
        c"grapeshot._core.thread_rlock"
    } else {
        c"grapeshot._core.thread_lock"
    };
    const DOC: &'static CStr = if R {
        c"thread_rlock()\n--\n\nA lock that its holder, a coro or a real thread, may acquire again."
    } else {
        c"thread_lock()\n--\n\nA lock for coros and real threads. Any coro or thread may release it."
    };
    const FLAGS: u64 = if R { ffi::Py_TPFLAGS_BASETYPE } else { 0 };
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    fn with_access<T>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        with_critical_section(this, body)
    }
}

impl<const R: bool> Source for LockObject<R> {
    fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    #[inline]
    fn take(&self, py: Python<'_>) -> bool {
        let holder = self.holder.get();
        if holder.is_nobody() {
            self.holder.set(Party::running(py));
            return true;
        }
        if R && holder == Party::running(py) {
            self.depth.set(self.depth.get() + 1);
            return true;
        }
        false
    }

    #[inline]
    fn give_back(&self, py: Python<'_>) {
        self.depth.set(0);
        self.holder
            .set(self.waiters.grant_first(py).unwrap_or(Party::NOBODY));
    }

    fn holder(&self) -> Party {
        self.holder.get()
    }

    fn what(&self) -> &'static str {
        "no real thread holds the lock"
    }
}

fn acquire<'py, const R: bool>(this: Lock<'py, R>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit = if args.values().is_empty() {
        Limit::Endless
    } else {
        let [blocking, timeout] = args.bind()?;
        let is_timed = timeout.is_some();
        let limit = limit::of_acquire(blocking, timeout)?;
        if !R && !is_timed && limit.is_at_once() && this.holder.get() == Party::running(this.py()) {
            // `threading.Condition.notify` uses this call to find out whether its caller holds the lock. `notify` must
            // not be interrupted. So this call does not go through `take_or_wait`, where a failed attempt may yield.
            return Ok(bool_object(this.py(), false));
        }
        limit
    };
    Ok(bool_object(this.py(), take_or_wait(this.py(), &*this, limit)?))
}

fn release<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let holder = this.holder.get();
    if R && holder != Party::running(py) {
        return Err(not_acquired());
    }
    if holder.is_nobody() {
        return Err(not_locked());
    }
    if R && this.depth.get() > 0 {
        this.depth.set(this.depth.get() - 1);
    } else {
        this.give_back(py);
    }
    Ok(none(py))
}

#[cold]
fn not_locked() -> PyErr {
    PyRuntimeError::new_err("release unlocked lock")
}

#[cold]
fn not_acquired() -> PyErr {
    PyRuntimeError::new_err("cannot release un-acquired lock")
}

fn locked<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), !this.holder.get().is_nobody()))
}

/// Called in the child of a fork: makes the lock free again.
fn at_fork_reinit<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.waiters.clear();
    this.depth.set(0);
    this.holder.set(Party::NOBODY);
    Ok(none(this.py()))
}

// ---- for `threading.Condition` ---------------------------------------------------------------------------------

/// Releases all levels of the lock. Returns the argument for `_acquire_restore`.
fn release_save<'py, const R: bool>(this: Lock<'py, R>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let holder = this.holder.get();
    if holder.is_nobody() {
        return Err(if R { not_acquired() } else { not_locked() });
    }
    let state = (this.depth.get() + 1, holder.ident())
        .into_pyobject(py)?
        .into_any();
    this.give_back(py);
    Ok(state)
}

/// Acquires the lock with as many levels as before. An interruption does not end this wait, because `Condition.wait`
/// has promised to return with the lock held.
fn acquire_restore<'py, const R: bool>(this: Lock<'py, R>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let state = args
        .get(0)
        .ok_or_else(|| PyTypeError::new_err("a tuple is required"))?;
    let (count, _): (usize, u64) = state.cast::<PyTuple>()?.extract()?;
    let taken = take_undisturbed(py, &*this);
    if this.holder.get() == Party::running(py) {
        // Also if a signal handler has raised an exception during the wait.
        this.depth.set(count.saturating_sub(1));
    }
    taken.map(|()| none(py))
}

// ---- methods of the RLock only -----------------------------------------------------------------------------------

fn is_owned<'py>(this: Lock<'py, true>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(
        this.py(),
        this.holder.get() == Party::running(this.py()),
    ))
}

fn recursion_count<'py>(this: Lock<'py, true>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let is_owned = this.holder.get() == Party::running(this.py());
    let count = if is_owned { this.depth.get() + 1 } else { 0 };
    Ok(count.into_pyobject(this.py())?.into_any())
}

// ---- the types ------------------------------------------------------------------------------------------------

/// The methods of both types.
fn methods<const R: bool>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            <const R: bool> acquire::<R>,
            thread_lock.acquire,
            "\
                Acquire the lock. Return whether it was acquired.\n\n\
                A coro waits while other coros run; a real thread blocks. If blocking is false, the call returns\n\
                at once. A timeout in seconds limits the wait; -1 means no limit."
        ),
        row!(
            method,
            <const R: bool> release::<R>,
            thread_lock.release,
            "Release the lock. The first waiter gets it."
        ),
        row!(
            method,
            <const R: bool> at_fork_reinit::<R>,
            thread_lock._at_fork_reinit,
            "Free the lock in the child of a fork."
        ),
        row!(
            method,
            <const R: bool> acquire::<R>,
            thread_lock.__enter__,
            "Acquire the lock."
        ),
        row!(method, <const R: bool> release::<R>, thread_lock.__exit__, "Release the lock."),
        row!(
            method,
            <const R: bool> release_save::<R>,
            thread_lock._release_save,
            "Release the lock completely, for Condition.wait()."
        ),
        row!(
            method,
            <const R: bool> acquire_restore::<R>,
            thread_lock._acquire_restore,
            "Acquire the lock again, as many times as it was held before, for Condition.wait()."
        ),
    ]
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let mut methods = methods::<false>();
    methods.extend([
        row!(
            method,
            locked::<false>,
            thread_lock.locked,
            "Return whether the lock is held."
        ),
        row!(
            method,
            locked::<false>,
            thread_lock.locked_lock,
            "An obsolete synonym of locked()."
        ),
        row!(
            method,
            acquire::<false>,
            thread_lock.acquire_lock,
            "An obsolete synonym of acquire()."
        ),
        row!(
            method,
            release::<false>,
            thread_lock.release_lock,
            "An obsolete synonym of release()."
        ),
    ]);
    make::<false>(module, methods)
}

pub(super) fn make_recursive_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    let mut methods = methods::<true>();
    methods.extend([
        row!(
            method,
            is_owned,
            thread_rlock._is_owned,
            "Return whether the running coro or thread holds the lock."
        ),
        row!(
            method,
            recursion_count,
            thread_rlock._recursion_count,
            "Return how often the running coro or thread has acquired the lock."
        ),
    ]);
    if module.py().version_info() >= (3, 14) {
        methods.push(row!(
            method,
            locked::<true>,
            thread_rlock.locked,
            "Return whether the lock is held."
        ));
    }
    make::<true>(module, methods)
}

fn make<'py, const R: bool>(
    module: &Bound<'py, PyModule>,
    methods: Vec<ffi::PyMethodDef>,
) -> PyResult<Bound<'py, PyType>> {
    let slots = [
        slot(ffi::Py_tp_new, new::<R> as *mut c_void),
        slot(ffi::Py_tp_repr, repr::<R> as *mut c_void),
        methods_slot(methods),
        members_slot(vec![offset_member(
            c"__weaklistoffset__",
            std::mem::offset_of!(LockObject<R>, weakrefs),
        )]),
    ];
    // SAFETY: the functions are for this layout; the tables are leaked.
    unsafe { new_type::<LockObject<R>>(module, None, &slots) }
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new<const R: bool>(
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the arguments are as described above; the allocation is zeroed and large enough for the
    // layout.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            // Up to 3.14 `RLock` ignores arguments.
            let object = if R && py.version_info() < (3, 15) {
                Bound::from_owned_ptr_or_err(py, ffi::PyType_GenericAlloc(kind, 0))?
            } else {
                alloc_without_arguments(py, kind, args, kwargs)?
            };
            Waiters::init(&raw mut (*object.as_ptr().cast::<LockObject<R>>()).waiters);
            Ok(object.into_ptr())
        })
    }
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn repr<const R: bool>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and the object has this layout and is alive.
    unsafe {
        represent::<LockObject<R>>(slf, |this| {
            let holder = this.holder.get();
            let state = if holder.is_nobody() { "unlocked" } else { "locked" };
            let kind = Bound::from_borrowed_ptr(this.py(), ffi::Py_TYPE(slf).cast())
                .cast_into_unchecked::<PyType>()
                .fully_qualified_name()?;
            let waiting = match this.waiters.len() {
                0 => String::new(),
                count => format!("waiting={count} "),
            };
            let owner = if R {
                let count = if holder.is_nobody() {
                    0
                } else {
                    this.depth.get() + 1
                };
                format!("owner={} count={count} ", holder.ident())
            } else {
                String::new()
            };
            Ok(format!("<{state} {kind} object {owner}{waiting}at {slf:p}>"))
        })
    }
}
