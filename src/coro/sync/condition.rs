//! `condition_variable`: coros wait until they are woken. The primitives that are written in Python are built on it.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyBaseException, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit::{Deadline, Limit};
use super::object::{FLAGS, Head, Primitive, check_thread, grant, make_type as make, wait_in_queue};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::row;
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{interruption, scheduler, suspension};

#[repr(C)]
pub(super) struct ConditionObject {
    head: Head,
    waiters: WaitQueue,
}

type Condition<'py> = This<'py, ConditionObject>;

/// Marks a coro that must pass its wake-up to the next coro if it is interrupted before it runs. `wake_one` and
/// `wake_n` store this as the coro's request.
const PASSES_ON: i64 = i64::MIN;

impl NativeType for ConditionObject {
    const NAME: &'static CStr = c"grapeshot.coro.condition_variable";
    const DOC: &'static CStr =
        c"condition_variable()\n--\n\nCoros wait until they are woken. A wake does not affect later waits.";
    const FLAGS: u64 = FLAGS;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for ConditionObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(_: *mut Self) {}

    fn state(this: This<'_, Self>) -> String {
        format!("{} waiting", this.waiters.len())
    }
}

/// Waits in the queue with the request `kind`, a number that `_first` returns while this coro is the first one.
/// Returns the value of the wake, or None if the timeout expires.
fn wait_for_wake(this: Condition<'_>, kind: i64, limit: Limit) -> PyResult<Option<Bound<'_, PyAny>>> {
    check_thread(this)?;
    if limit.is_at_once() {
        return Ok(None);
    }
    let coro = suspension::suspendable(this.py())?;
    let deadline = Deadline::new(coro, limit)?;
    loop {
        let wait = wait_in_queue(&this.waiters, coro, kind, &deadline);
        match wait.result {
            Ok(value) if wait.is_granted => return Ok(Some(value)),
            Ok(_) if wait.is_late => return Ok(None),
            Ok(_) => {}
            Err(interruption) => {
                if wait.is_granted && coro.wait_node.request.get() == PASSES_ON {
                    wake(this, coro.wake_value.take(this.py()), true);
                }
                return Err(interruption);
            }
        }
    }
}

/// Wakes the coro that has waited longest. Returns whether there was one.
fn wake<'py>(this: Condition<'py>, value: Option<Bound<'py, PyAny>>, passes_on: bool) -> bool {
    let Some(first) = this.waiters.first(this.py()) else {
        return false;
    };
    if passes_on {
        first.wait_node.request.set(PASSES_ON);
    }
    grant(first, value);
    true
}

fn wait<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit = if args.values().is_empty() {
        Limit::Endless
    } else {
        let [timeout, block] = args.bind()?;
        Limit::new(block, timeout)?
    };
    wait_for_wake(this, 0, limit)?.ok_or_else(|| {
        let message = format!("the coro was not woken{}", limit.describe());
        coro_errors::new(this.py(), ErrorClass::Timeout, &message)
    })
}

/// `_wait_as(kind, block, timeout)`: waits, and returns whether the coro was woken in time.
fn wait_as<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let kind: i32 = args.get(0).map_or(Ok(0), |kind| kind.extract())?;
    let limit = Limit::new(args.get(1), args.get(2))?;
    let woken = wait_for_wake(this, kind.into(), limit)?;
    Ok(bool_object(this.py(), woken.is_some()))
}

fn wake_one<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [value] = args.bind()?;
    check_thread(this)?;
    Ok(bool_object(this.py(), wake(this, value, true)))
}

fn wake_n<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [count, value] = args.bind()?;
    let Some(count) = count else {
        return Err(PyTypeError::new_err("wake_n() needs a count"));
    };
    let count: usize = count.extract()?;
    check_thread(this)?;
    let mut woken = 0_usize;
    while woken < count && wake(this, value.clone(), true) {
        woken += 1;
    }
    Ok(woken.into_pyobject(this.py())?.into_any())
}

fn wake_all<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [value] = args.bind()?;
    check_thread(this)?;
    let mut woken = 0_usize;
    while wake(this, value.clone(), false) {
        woken += 1;
    }
    Ok(woken.into_pyobject(this.py())?.into_any())
}

/// If the argument is an exception class, each coro gets its own exception.
fn raise_all<'py>(this: Condition<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let Some(given) = args.get(0) else {
        return Ok(none(this.py()));
    };
    let count = this.waiters.len();
    let mut woken = 0_usize;
    // Making an exception may run Python code, which may change the queue.
    while woken < count && !this.waiters.is_empty() {
        let exception = exception_from(&given)?;
        let Some(first) = this.waiters.first(this.py()) else {
            break;
        };
        interruption::push(first, exception)?;
        scheduler::make_ready(first);
        woken += 1;
    }
    Ok(woken.into_pyobject(this.py())?.into_any())
}

/// The exception itself, or a new one if `given` is a class. TypeError for anything else.
pub(super) fn exception_from<'py>(given: &Bound<'py, PyAny>) -> ObjectResult<'py> {
    let exception = if given.is_instance_of::<PyType>() {
        given.call0()?
    } else {
        given.clone()
    };
    if exception.is_instance_of::<PyBaseException>() {
        return Ok(exception);
    }
    Err(PyTypeError::new_err(
        "an exception or an exception class is required",
    ))
}

fn use_here<'py>(this: Condition<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    Ok(none(this.py()))
}

fn first<'py>(this: Condition<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let py = this.py();
    match this.waiters.first(py) {
        Some(first) => Ok(first.wait_node.request.get().into_pyobject(py)?.into_any()),
        None => Ok(none(py)),
    }
}

fn wake_first<'py>(this: Condition<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let py = this.py();
    match this.waiters.first(py) {
        Some(first) => {
            grant(first, None);
            Ok(first.to_bound())
        }
        None => Ok(none(py)),
    }
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn len(slf: *mut ffi::PyObject) -> ffi::Py_ssize_t {
    // SAFETY: attached, and the object is alive.
    unsafe { Condition::new(Python::assume_attached(), slf).waiters.len() as ffi::Py_ssize_t }
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<ConditionObject>(
        module,
        vec![
            row!(
                method,
                wait,
                condition_variable.wait,
                "Wait until this coro is woken. Return the value that was given to wake_one(), wake_n() or wake_all()."
            ),
            row!(
                method,
                wake_one,
                condition_variable.wake_one,
                "Wake the coro that has waited longest. Return False if no coro waits."
            ),
            row!(
                method,
                wake_n,
                condition_variable.wake_n,
                "Wake at most count coros. Return how many were woken."
            ),
            row!(
                method,
                wake_all,
                condition_variable.wake_all,
                "Wake all coros that wait now. Return how many were woken."
            ),
            row!(
                method,
                raise_all,
                condition_variable.raise_all,
                "Raise an exception in all coros that wait now. Return how many there were."
            ),
            row!(
                method,
                use_here,
                condition_variable._use,
                "Raise ScheduleError in any thread except the variable's own."
            ),
            row!(
                method,
                wait_as,
                condition_variable._wait_as,
                "Wait as a coro of the given kind, a small number. Return whether it was woken in time."
            ),
            row!(
                method,
                first,
                condition_variable._first,
                "Return the kind of the coro that has waited longest, or None."
            ),
            row!(
                method,
                wake_first,
                condition_variable._wake_first,
                "Wake and return the first coro that waits. If it is interrupted before it runs, the wake is lost."
            ),
        ],
        Vec::new(),
        &[slot(ffi::Py_sq_length, len as *mut c_void)],
    )
}
