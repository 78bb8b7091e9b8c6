//! `semaphore`: a number of permits, of which a coro acquires one or several at a time.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit::{Deadline, Limit};
use super::object::{
    FLAGS, Head, Primitive, argument, check_thread, count, grant, make_type as make, wait_in_queue, waiting,
};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getter, row};
use crate::coro::suspension;
use crate::coro::wait_queue::WaitQueue;

#[repr(C)]
pub(super) struct SemaphoreObject {
    head: Head,
    available: Cell<i64>,
    /// Each waiting coro's request is a number of permits. While coros wait, fewer permits are available than the first
    /// coro requests.
    waiters: WaitQueue,
}

type Semaphore<'py> = This<'py, SemaphoreObject>;

impl NativeType for SemaphoreObject {
    const NAME: &'static CStr = c"grapeshot.coro.semaphore";
    const DOC: &'static CStr =
        c"semaphore(value=1)\n--\n\nPermits that coros acquire and release. `avail` is the number of free permits.";
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for SemaphoreObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(object: *mut Self) {
        // SAFETY: by the contract; all other fields start as zeroes. There is one permit if a subclass does not call
        // `__init__`.
        unsafe { (*object).available.set(1) };
    }

    fn state(this: This<'_, Self>) -> String {
        format!(
            "{} available{}",
            this.available.get(),
            waiting(this.waiters.len())
        )
    }
}

impl SemaphoreObject {
    /// Grants permits to the coros at the front of the queue while the permits suffice.
    #[inline]
    fn pass_on(this: Semaphore<'_>) {
        while let Some(first) = this.waiters.first(this.py()) {
            let left = this.available.get() - first.wait_node.request.get();
            if left < 0 {
                return;
            }
            this.available.set(left);
            grant(first, None);
        }
    }

    /// Takes permits if they are available and no coro waits.
    #[inline]
    fn take(&self, count: i64) -> bool {
        let left = self.available.get() - count;
        let is_taken = left >= 0 && self.waiters.is_empty();
        if is_taken {
            self.available.set(left);
        }
        is_taken
    }
}

fn acquire<'py>(this: Semaphore<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (count, limit) = if args.values().is_empty() {
        (1, Limit::Endless)
    } else {
        let [value, block, timeout] = args.bind()?;
        (count(value, "acquire")?, Limit::new(block, timeout)?)
    };
    check_thread(this)?;
    Ok(bool_object(this.py(), wait_for(this, count, limit)?))
}

/// Takes permits, waiting for them if necessary. Returns false if the limit is reached first.
#[inline]
fn wait_for(this: Semaphore<'_>, count: i64, limit: Limit) -> PyResult<bool> {
    if this.take(count) {
        return Ok(true);
    }
    if limit.is_at_once() {
        return Ok(false);
    }
    let coro = suspension::suspendable(this.py())?;
    let deadline = Deadline::new(coro, limit)?;
    while !this.take(count) {
        let wait = wait_in_queue(&this.waiters, coro, count, &deadline);
        if wait.is_granted && wait.result.is_ok() {
            break;
        }
        if wait.is_granted {
            this.available.set(this.available.get() + count);
        }
        if wait.is_late || wait.result.is_err() {
            // The coros behind this one may have waited only because this one was first.
            SemaphoreObject::pass_on(this);
        }
        wait.result?;
        if wait.is_late {
            return Ok(false);
        }
    }
    Ok(true)
}

fn try_acquire<'py>(this: Semaphore<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [value] = args.bind()?;
    let count = count(value, "try_acquire")?;
    check_thread(this)?;
    Ok(bool_object(this.py(), this.take(count)))
}

fn release<'py>(this: Semaphore<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [value] = args.bind()?;
    let count = count(value, "release")?;
    check_thread(this)?;
    give(this, count)?;
    Ok(none(this.py()))
}

fn give(this: Semaphore<'_>, count: i64) -> PyResult<()> {
    // This check counts only free permits. If nearly `i64::MAX` permits are free, a later release of permits that coros
    // still hold may fail here. And when `wait_for` gives permits back, the sum may overflow, because it is not checked
    // there. No program uses that many permits.
    let Some(sum) = this.available.get().checked_add(count) else {
        return Err(PyOverflowError::new_err("too many permits"));
    };
    this.available.set(sum);
    SemaphoreObject::pass_on(this);
    Ok(())
}

fn enter<'py>(this: Semaphore<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    wait_for(this, 1, Limit::Endless)?;
    Ok(this.to_bound())
}

fn exit<'py>(this: Semaphore<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    give(this, 1)?;
    Ok(none(this.py()))
}

fn available(this: Semaphore<'_>) -> ObjectResult<'_> {
    Ok(this.available.get().into_pyobject(this.py())?.into_any())
}

/// # Safety
/// Called by CPython with an object of this type, a tuple, and a dict or null.
unsafe extern "C" fn init(
    slf: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> c_int {
    // SAFETY: attached, and the arguments are as described above.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let this: Semaphore<'_> = This::new(py, slf);
            let value = argument(py, args, kwargs, "semaphore", "value")?
                .map_or(Ok(1), |value| value.extract::<i64>())?;
            if value < 0 {
                return Err(PyValueError::new_err(format!(
                    "a semaphore must have 0 or more permits, got {value}"
                )));
            }
            SemaphoreObject::with_access(this, || {
                check_thread(this)?;
                this.available.set(value);
                SemaphoreObject::pass_on(this);
                Ok(0)
            })
        })
    }
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn int(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and the object is alive.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::new(py, slf);
            SemaphoreObject::with_access(this, || available(this)).map(Bound::into_ptr)
        })
    }
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<SemaphoreObject>(
        module,
        vec![
            row!(
                method,
                acquire,
                semaphore.acquire,
                "Wait until `value` permits are free, and take them. Waiting coros are served in order of arrival."
            ),
            row!(
                method,
                try_acquire,
                semaphore.try_acquire,
                "Take the permits without waiting. Return False if that is not possible."
            ),
            row!(
                method,
                release,
                semaphore.release,
                "Give back `value` permits. Waiting coros get them first."
            ),
            row!(method, enter, semaphore.__enter__, "Acquire one permit."),
            row!(method, exit, semaphore.__exit__, "Release the permit."),
        ],
        vec![getter(c"avail", available, c"The number of free permits.")],
        &[
            slot(ffi::Py_tp_init, init as *mut c_void),
            slot(ffi::Py_nb_int, int as *mut c_void),
        ],
    )
}
