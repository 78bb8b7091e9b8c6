//! `wakeup`: a callback that wakes one coro, for the parts of the package that wait for a future or for another coro.
//!
//! Between `add_done_callback(wakeup)` and `wakeup.wait()`, a signal handler or a finalizer may run in the coro and
//! wait for something else. If the wake-up comes during that wait, the wait goes on, and the later `wakeup.wait()`
//! returns at once.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::object::{Head, Primitive, call_in_steps, check_thread, make_type as make};
use crate::binding::args::Args;
use crate::binding::deallocation::clear_weakrefs_drop_and_free;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getter, row};
use crate::coro::coroutine::{Coro, CoroObject, Outcome, Status};
use crate::coro::{scheduler, suspension};
use crate::event_loop::progress::Progress;

#[repr(C)]
pub(super) struct WakeupObject {
    head: Head,
    has_come: Cell<bool>,
    /// The coro, from the moment when it is suspended until it runs again; else null.
    waiter: Cell<*mut CoroObject>,
}

type Wakeup<'py> = This<'py, WakeupObject>;

impl NativeType for WakeupObject {
    const NAME: &'static CStr = c"grapeshot._core.wakeup";
    const DOC: &'static CStr = c"wakeup()\n--\n\nA callback that wakes the coro that waits for it.";
    const FLAGS: u64 = 0;
    const DEALLOC: ffi::destructor = clear_weakrefs_drop_and_free::<Self>;

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

// SAFETY: repr(C), and the first field is the head.
unsafe impl Primitive for WakeupObject {
    fn head(&self) -> &Head {
        &self.head
    }

    unsafe fn init(_: *mut Self) {}

    fn state(this: This<'_, Self>) -> String {
        let state = if this.has_come.get() {
            "has come"
        } else {
            "pending"
        };
        state.to_owned()
    }
}

/// One step of `wait` or `wait_quietly`. `has_begun` is the state of the call. If it is true when a step fails, the
/// error is an interruption.
#[inline]
fn step(
    this: Wakeup<'static>,
    has_begun: &mut bool,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    if let Some(outcome) = outcome {
        this.waiter.set(ptr::null_mut());
        return outcome.map(|_| Progress::Done(none(this.py())));
    }
    check_thread(this)?;
    let coro = suspension::suspendable(this.py())?;
    *has_begun = true;
    // This may run destructors, so the state is read afterwards.
    suspension::forget_wake_value(coro);
    if this.has_come.get() {
        return Ok(Progress::Done(none(this.py())));
    }
    let begun = suspension::begin_wait(coro)?;
    this.waiter.set(coro.as_ptr().cast());
    Ok(begun)
}

fn wait(
    this: Wakeup<'static>,
    _: Args<'_, 'static>,
    has_begun: &mut bool,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    step(this, has_begun, outcome)
}

/// `wait_quietly()`: like `wait`, but returns an interruption instead of raising it. It raises only if the coro cannot
/// wait.
fn wait_quietly(
    this: Wakeup<'static>,
    _: Args<'_, 'static>,
    has_begun: &mut bool,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    match step(this, has_begun, outcome) {
        Err(interruption) if *has_begun => Ok(Progress::Done(
            interruption
                .into_value(this.py())
                .into_bound(this.py())
                .into_any(),
        )),
        progress => progress,
    }
}

fn has_come(this: Wakeup<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.has_come.get()))
}

/// The callback. It ignores its arguments.
///
/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn call(
    slf: *mut ffi::PyObject,
    _args: *mut ffi::PyObject,
    _kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the object is alive.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Wakeup<'_> = This::new(py, slf);
            WakeupObject::with_access(this, || {
                check_thread(this)?;
                this.has_come.set(true);
                let waiter = this.waiter.get();
                if !waiter.is_null() {
                    // SAFETY: the coro has not run since it was suspended, so the runtime keeps it alive.
                    let coro: Coro<'_> = This::new(py, waiter.cast());
                    if coro.status.get() == Status::Waiting {
                        scheduler::make_ready(coro);
                    }
                }
                Ok(none(py).into_ptr())
            })
        })
    }
}

pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    make::<WakeupObject>(
        module,
        vec![
            row!(
                method(call_in_steps),
                wait,
                wakeup.wait,
                "Wait until the object was called, or the coro is woken in another way."
            ),
            row!(
                method(call_in_steps),
                wait_quietly,
                wakeup.wait_quietly,
                "Like wait(), but return an interruption instead of raising it."
            ),
        ],
        vec![getter(c"has_come", has_come, c"Whether the object was called.")],
        &[slot(ffi::Py_tp_call, call as *mut c_void)],
    )
}
