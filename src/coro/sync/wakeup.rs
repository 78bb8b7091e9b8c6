//! `wakeup`: a callback that wakes one coro, for the parts of the package that wait for a future or for another coro.
//!
//! The coro may wait for something else between `add_done_callback(wakeup)` and `wakeup.wait()`: a signal handler or a
//! finalizer that runs there may wait. The wake-up does not end such a wait, and `wait` finds that it has come.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::limit::{Deadline, Limit};
use super::object::{
    Call, Head, Primitive, call_in_steps, check_thread, dealloc, end, grant, make_type as make,
};
use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, slot, with_critical_section};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getter, row};
use crate::coro::coroutine::Outcome;
use crate::coro::suspension;
use crate::coro::wait_queue::WaitQueue;
use crate::event_loop::progress::Progress;

#[repr(C)]
pub(super) struct WakeupObject {
    head: Head,
    has_come: Cell<bool>,
    /// The coro, while it waits.
    waiters: WaitQueue,
}

type Wakeup<'py> = This<'py, WakeupObject>;

impl NativeType for WakeupObject {
    const NAME: &'static CStr = c"grapeshot._core.wakeup";
    const DOC: &'static CStr = c"wakeup()\n--\n\nA callback that wakes the coro that waits for it.";
    const FLAGS: u64 = 0;
    const DEALLOC: ffi::destructor = dealloc::<Self>;

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

/// One step of `wait` or `wait_quietly`. Err: the wait was interrupted.
#[inline]
fn step(this: Wakeup<'static>, call: &mut Call, outcome: Option<Outcome<'static>>) -> PyResult<Progress<()>> {
    if let Some(outcome) = outcome {
        end(suspension::running(this.py())?, outcome).result?;
        return Ok(Progress::Done(()));
    }
    check_thread(this)?;
    let coro = suspension::suspendable(this.py())?;
    // Making the deadline may run destructors, so the state is read afterwards.
    call.deadline = Some(Deadline::new(coro, Limit::Endless)?);
    if this.has_come.get() || !call.wait_in(&this.waiters, coro, 0)? {
        return Ok(Progress::Done(()));
    }
    Ok(Progress::MustWait(()))
}

fn wait(
    this: Wakeup<'static>,
    _: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    Ok(match step(this, call, outcome)? {
        Progress::Done(()) => Progress::Done(none(this.py())),
        Progress::MustWait(()) => Progress::MustWait(()),
    })
}

/// `wait_quietly()`: like `wait`, but returns an interruption instead of raising it. It raises only if the coro cannot
/// wait.
fn wait_quietly(
    this: Wakeup<'static>,
    args: Args<'_, 'static>,
    call: &mut Call,
    outcome: Option<Outcome<'static>>,
) -> PyResult<Progress<Bound<'static, PyAny>>> {
    let py = this.py();
    let is_begun = outcome.is_some();
    match wait(this, args, call, outcome) {
        // Only interruptions are left once there is a deadline.
        Err(interruption) if is_begun || call.deadline.is_some() => Ok(Progress::Done(
            interruption.into_value(py).into_bound(py).into_any(),
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
                if let Some(waiter) = this.waiters.first(py) {
                    grant(waiter, None);
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
