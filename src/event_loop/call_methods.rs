//! `call_soon`, `call_later`, `call_at`, `call_soon_threadsafe`, `time`: the loop's hottest methods.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::clock;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::handle::{Handle, HandleRef, check_callback};
use super::loop_clock::time_s;
use super::pyloop::LoopObject;
use crate::binding::args::Args;
use crate::binding::names::names;
use crate::binding::native_type::This;
use crate::binding::object_result::ObjectResult;
use crate::binding::rows::row;
use crate::binding::{HAS_GIL, current_thread, errors, new_objects};

/// The `context` keyword as a borrowed pointer; null if it is absent or None. Raises TypeError for any other keyword.
#[inline(always)]
pub(super) fn context_keyword(args: &Args<'_, '_>) -> PyResult<*mut ffi::PyObject> {
    let kwnames = args.kwnames();
    if kwnames.is_null() {
        return Ok(ptr::null_mut());
    }
    if kwnames == ASYNCIO_KWNAMES.load(Ordering::Acquire) {
        // One name, so there is one value after the positional ones.
        return checked_context(args.values()[args.positional().len()]);
    }
    find_context(args)
}

/// The tuple `("context",)` that CPython's own tasks and futures pass. Null until a call has passed this tuple, which
/// is then kept forever. The string in the tuple is not the interned one, so the string cannot be recognized by its
/// address. Comparing the address of the tuple is just as cheap.
static ASYNCIO_KWNAMES: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// Called with the tuple of a call's keyword names if the string "context" in the tuple is not the interned one. Keeps
/// the tuple if it has no other name and no tuple is kept yet.
#[cold]
fn keep_kwnames(kwnames: *mut ffi::PyObject) {
    // SAFETY: the live tuple of the running call.
    if unsafe { ffi::PyTuple_GET_SIZE(kwnames) } != 1 {
        return;
    }
    let kept =
        ASYNCIO_KWNAMES.compare_exchange(ptr::null_mut(), kwnames, Ordering::Release, Ordering::Relaxed);
    if kept.is_ok() {
        // SAFETY: attached, with the live tuple of the running call.
        unsafe { ffi::Py_INCREF(kwnames) };
    }
}

fn find_context(args: &Args<'_, '_>) -> PyResult<*mut ffi::PyObject> {
    let mut context = ptr::null_mut();
    let context_name = names(args.py()).context.as_ptr();
    for (name, value) in args.keywords() {
        let is_known = name.as_ptr() == context_name;
        // SAFETY: two live strings; keyword names are strings by the calling convention.
        if !is_known && unsafe { ffi::PyUnicode_Compare(name.as_ptr(), context_name) != 0 } {
            return Err(PyTypeError::new_err(format!(
                "{}() got an unexpected keyword argument '{name}'",
                args.name()
            )));
        }
        if !is_known {
            keep_kwnames(args.kwnames());
        }
        context = value;
    }
    checked_context(context)
}

/// The value of the `context` keyword; null for None. Raises TypeError for an object that is not a context.
#[inline]
fn checked_context(context: *mut ffi::PyObject) -> PyResult<*mut ffi::PyObject> {
    // SAFETY: None is immortal or at least alive; only its address is compared.
    if context == unsafe { ffi::Py_None() } {
        return Ok(ptr::null_mut());
    }
    // SAFETY: a keyword value is alive for the length of the call.
    if !context.is_null() && unsafe { ffi::PyContext_CheckExact(context) } == 0 {
        return Err(PyTypeError::new_err(
            "context must be a contextvars.Context or None",
        ));
    }
    Ok(context)
}

#[cold]
fn check_debug(this: &LoopObject, args: &Args<'_, '_>, index: usize, method: &str) -> PyResult<()> {
    if method != "call_soon_threadsafe" {
        this.check_thread()?;
    }
    match args.get(index) {
        Some(callback) => check_callback(&callback, method),
        None => Ok(()),
    }
}

/// In debug mode, stores where the handle was created: the stack of the caller, as asyncio stores it.
#[cold]
pub(super) fn remember_source(handle: Handle<'_>) -> PyResult<()> {
    let helpers = handle.py().import("asyncio.format_helpers")?;
    handle.set_source_traceback(helpers.call_method0("extract_stack")?);
    Ok(())
}

/// The handle for a call whose positional argument `index` is the callback; the callback's arguments follow it.
#[inline(always)]
fn make_handle(
    this: This<'_, LoopObject>,
    args: &Args<'_, '_>,
    index: usize,
    when_s: Option<f64>,
    method: &str,
) -> PyResult<HandleRef> {
    let py = this.py();
    let is_debug = this.reactor().probe.is_debug();
    let context = context_keyword(args)?;
    if is_debug {
        check_debug(&this, args, index, method)?;
    }
    let values = args.positional();
    let (callback, rest) = (values[index], &values[index + 1..]);
    let handle = HandleRef::create(py, this.as_ptr().cast(), callback, rest, context, when_s)?;
    if is_debug {
        remember_source(handle.this(py))?;
    }
    Ok(handle)
}

/// Puts a new reference to the handle into the ready queue. In a free-threaded build, the handle goes through the inbox
/// if another thread runs the loop; such a call of `call_soon` is an error only in debug mode.
#[inline(always)]
fn push(this: This<'_, LoopObject>, handle: &HandleRef) {
    let (py, reactor) = (this.py(), this.reactor());
    let pushed = this.with_loop_access(py, || {
        reactor.ready.push_soon(handle.new_ref());
        Ok(())
    });
    if pushed.is_err() {
        reactor.push_from_outside(handle.new_ref());
    }
}

impl LoopObject {
    /// `call_soon(callback, *args, context=context)` for native callers inside `with_loop_access`.
    pub(crate) fn soon(
        &self,
        callback: &Bound<'_, PyAny>,
        args: &[*mut ffi::PyObject],
        context: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (py, reactor, event_loop) = (callback.py(), self.reactor(), self.as_ptr().cast());
        reactor.check_closed()?;
        let handle = HandleRef::create(py, event_loop, callback.as_ptr(), args, context.as_ptr(), None)?;
        reactor.ready.push_soon(handle.new_ref());
        reactor.note_made(handle.this(py));
        Ok(())
    }
}

#[inline(always)]
fn call_soon<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let reactor = this.reactor();
    reactor.check_closed()?;
    let handle = make_handle(this, &args, 0, None, "call_soon")?;
    push(this, &handle);
    reactor.note_made(handle.this(this.py()));
    Ok(handle.into_bound(this.py()))
}

fn call_soon_threadsafe<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let reactor = this.reactor();
    reactor.check_closed()?;
    let handle = make_handle(this, &args, 0, None, "call_soon_threadsafe")?;
    handle.this(this.py()).set_threadsafe();
    reactor.probe.counters.threadsafe_calls.add_anywhere(1);
    if HAS_GIL && reactor.access.owner() != current_thread() {
        reactor.push_from_outside(handle.new_ref());
    } else {
        push(this, &handle);
    }
    reactor.note_made(handle.this(this.py()));
    Ok(handle.into_bound(this.py()))
}

/// Converts a delay or deadline to seconds. `none_message` is the text of the TypeError for None.
#[inline]
fn seconds(py: Python<'_>, value: *mut ffi::PyObject, none_message: &'static str) -> PyResult<f64> {
    // SAFETY: an argument, alive for the length of the call; attached.
    let number = unsafe {
        if value == ffi::Py_None() {
            return Err(PyTypeError::new_err(none_message));
        }
        ffi::PyFloat_AsDouble(value)
    };
    // -1.0 means an error only if an exception is set.
    if number == -1.0
        && let Some(error) = PyErr::take(py)
    {
        return Err(error);
    }
    if number.is_nan() {
        return Err(PyValueError::new_err("a delay or deadline cannot be NaN"));
    }
    Ok(number)
}

#[inline(always)]
fn schedule_timer<'py>(
    this: This<'py, LoopObject>,
    args: &Args<'_, 'py>,
    when_s: f64,
    delay_s: f64,
    method: &str,
) -> ObjectResult<'py> {
    let (py, reactor) = (this.py(), this.reactor());
    let handle = make_handle(this, args, 1, Some(when_s), method)?;
    handle.allow_slack(delay_s);
    // SAFETY: an argument, alive for the length of the call.
    if method == "call_at" && unsafe { ffi::PyLong_Check(args.positional()[0]) } != 0 {
        handle.set_when_int();
    }
    let pushed = this.with_loop_access(py, || {
        reactor.push_timer(handle.new_ref());
        Ok(())
    });
    if pushed.is_err() {
        // A free-threaded build, and another thread runs the loop. Only debug mode forbids this call.
        reactor.push_timer_from_outside(py, handle.new_ref());
    }
    reactor.note_made(handle.this(py));
    Ok(handle.into_bound(py))
}

#[inline(always)]
fn call_later<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let delay_s = seconds(this.py(), args.positional()[0], "delay must not be None")?;
    this.reactor().check_closed()?;
    if !this.clock().is_native(this.py()) {
        return call_later_by_clock(this, &args);
    }
    // Here the nanoseconds are multiplied by 1e-9, but `time()` divides them by 1e9. The results differ by less than
    // the margin that is added to deadlines (`timers::deadline_key`).
    schedule_timer(
        this,
        &args,
        clock::now_ns() as f64 * 1e-9 + delay_s,
        delay_s,
        "call_later",
    )
}

/// `call_later` for a loop whose `time` or `call_at` the program has replaced.
#[cold]
fn call_later_by_clock<'py>(this: This<'py, LoopObject>, args: &Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let now = this
        .to_bound()
        .call_method0(names(py).time.bind(py).cast_into::<PyString>()?)?;
    let when = now.add(args.get(0))?;
    let mut call = vec![ptr::null_mut(), this.as_ptr()];
    call.extend_from_slice(args.values());
    call[2] = when.as_ptr();
    // SAFETY: the values are the arguments of the running call, behind `self`, with the deadline instead of the delay.
    // call[0] is the free place that the offset flag requires.
    unsafe {
        let made = ffi::PyObject_VectorcallMethod(
            names(py).call_at.as_ptr(),
            call[1..].as_ptr(),
            (1 + args.positional().len()) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            args.kwnames(),
        );
        Bound::from_owned_ptr_or_err(py, made)
    }
}

fn call_at<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let when_s = seconds(this.py(), args.positional()[0], "when cannot be None")?;
    this.reactor().check_closed()?;
    // No slack: the program has asked for this exact time.
    schedule_timer(this, &args, when_s, 0.0, "call_at")
}

fn time<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    new_objects::float(this.py(), time_s())
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            threadsafe_method,
            call_soon,
            Loop.call_soon,
            "Run callback(*args) in the next iteration; returns a Handle."
        ),
        row!(
            threadsafe_method,
            call_soon_threadsafe,
            Loop.call_soon_threadsafe,
            "call_soon() from any thread; wakes the loop."
        ),
        row!(
            threadsafe_method,
            call_later,
            Loop.call_later,
            "Run callback(*args) after delay seconds; returns a TimerHandle."
        ),
        row!(
            threadsafe_method,
            call_at,
            Loop.call_at,
            "Run callback(*args) when loop.time() reaches when; returns a TimerHandle."
        ),
        row!(
            threadsafe_method,
            time,
            Loop.time,
            "The time in seconds, from the clock of time.monotonic()."
        ),
    ]
}

/// Turns the error of a failed system call into an exception.
pub(super) fn os_result<T>(result: std::io::Result<T>) -> PyResult<T> {
    result.map_err(|error| errors::os_error(&error))
}
