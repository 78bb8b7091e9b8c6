//! The Python interface of handles: the same methods, comparison and repr as `asyncio.Handle` and
//! `asyncio.TimerHandle` have.

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::atomic::Ordering;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyTuple};

use super::{HANDLE_TYPE, HandleObject, TIMER_TYPE, dealloc, flag, slots};
use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::names::names;
use crate::binding::native_type::{NativeType, This, new_type, slot, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getset_slot, getter, members_slot, methods_slot, offset_member, row};
use crate::event_loop::pyloop::LoopObject;

#[inline(always)]
fn cancel<'py>(this: This<'py, HandleObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    this.wait_until_not_running()?;
    let text = text_if_cancelled(this);
    // Take the loop out first: cancelling drops the reference to it, and this function still needs the loop.
    let event_loop = this.event_loop.take(py);
    if this.cancel_showing(text)
        && this.has(flag::SCHEDULED)
        && let Some(event_loop) = event_loop
    {
        let event_loop = LoopObject::of(&event_loop);
        // In a free-threaded build, this fails if another thread runs the loop. The loop then finds the cancelled timer
        // in the heap once the timer is due.
        let _ = event_loop.with_loop_access(py, || {
            event_loop.reactor().timers.note_cancelled(this);
            Ok(())
        });
    }
    Ok(none(py))
}

fn cancelled<'py>(this: This<'py, HandleObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.wait_until_not_running()?;
    get_cancelled(this)
}

fn get_cancelled(this: This<'_, HandleObject>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.has(flag::CANCELLED)))
}

fn get_context<'py>(this: This<'py, HandleObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    slots::context(this)
}

fn asyncio_class(this: This<'_, HandleObject>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(match names(py).threadsafe_handle_type {
        Some(kind) if this.has(flag::THREADSAFE) => kind.bind(py),
        _ if this.has(flag::TIMER) => names(py).timer_handle_type.bind(py),
        _ => names(py).handle_type.bind(py),
    })
}

fn run_once<'py>(this: This<'py, HandleObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.run_by_hand()?;
    Ok(none(this.py()))
}

fn when<'py>(this: This<'py, HandleObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    get_when(this)
}

pub(super) fn get_when(this: This<'_, HandleObject>) -> ObjectResult<'_> {
    let when = PyFloat::new(this.py(), this.when_s()).into_any();
    if this.has(flag::WHEN_IS_INT) {
        return this.py().get_type::<PyInt>().call1((when,));
    }
    Ok(when)
}

/// `<Handle foo() at file.py:3>` and so on, built as `asyncio.Handle._repr_info` builds it.
unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::<HandleObject>::new(py, slf);
            with_critical_section(this, || {
                if let Some(text) = slots::fixed_text(this)? {
                    return Ok(text.into_ptr());
                }
                Ok(describe(this, this.has(flag::CANCELLED))?
                    .into_pyobject(py)?
                    .into_ptr())
            })
        })
    }
}

/// The text for `repr`.
fn describe(this: This<'_, HandleObject>, is_cancelled: bool) -> PyResult<String> {
    let py = this.py();
    let mut text = String::from(if this.has(flag::TIMER) {
        "<TimerHandle"
    } else {
        "<Handle"
    });
    if is_cancelled {
        text.push_str(" cancelled");
    }
    if this.has(flag::TIMER) {
        let when = get_when(this)?.repr()?;
        write!(text, " when={when}").map_err(fmt_error)?;
    }
    if !this.has(flag::HAS_TEXT)
        && let Some(callback) = this.callback.get(py)
    {
        text.push(' ');
        text += &describe_call(&callback, &this.args_tuple(py)?, this.is_debug())?;
    }
    if let Some(frames) = slots::source_traceback(this)?
        && frames.len()? > 0
    {
        let last = frames.get_item(frames.len()? - 1)?;
        let (file, line) = (last.get_item(0)?.str()?, last.get_item(1)?.str()?);
        write!(text, " created at {file}:{line}").map_err(fmt_error)?;
    }
    text.push('>');
    Ok(text)
}

/// `foo(1, 2) at file.py:3`. From Python 3.13 on, only debug mode shows the arguments, which may hold secrets.
pub(super) fn describe_call(
    callback: &Bound<'_, PyAny>,
    args: &Bound<'_, PyTuple>,
    is_debug: bool,
) -> PyResult<String> {
    let py = callback.py();
    let options = PyDict::new(py);
    if py.version_info() >= (3, 13) {
        options.set_item("debug", is_debug)?;
    }
    py.import("asyncio.format_helpers")?
        .call_method("_format_callback_source", (callback, args), Some(&options))?
        .extract()
}

/// The text that a handle shows once it is cancelled and has dropped its callback and arguments. None if the loop is
/// not in debug mode, as in asyncio, or if the handle is already cancelled.
#[inline]
pub(super) fn text_if_cancelled(this: This<'_, HandleObject>) -> Option<Bound<'_, PyAny>> {
    with_critical_section(this, || {
        if !this.is_debug() || this.has(flag::CANCELLED) {
            return None;
        }
        cancelled_text(this)
    })
}

#[cold]
fn cancelled_text(this: This<'_, HandleObject>) -> Option<Bound<'_, PyAny>> {
    let py = this.py();
    let text = describe(this, true).and_then(|text| Ok(text.into_pyobject(py)?.into_any()));
    match text {
        Ok(text) => Some(text),
        Err(error) => {
            error.write_unraisable(py, None);
            None
        }
    }
}

/// The exception for an error of `write!`. The calls here return no error: they write to a String, and pyo3's Display
/// writes a substitute text if `str()` raises an exception.
fn fmt_error(_: std::fmt::Error) -> PyErr {
    PyTypeError::new_err("cannot format an object")
}

/// The callback of a handle and its arguments.
fn call_of(this: This<'_, HandleObject>) -> PyResult<(Bound<'_, PyAny>, Bound<'_, PyTuple>)> {
    with_critical_section(this, || {
        Ok((slots::callback_or_none(this), this.args_tuple(this.py())?))
    })
}

/// Orders timers by deadline. Two timers are equal if their deadlines, callbacks, arguments and cancelled flags are
/// equal, as with `asyncio.TimerHandle`.
unsafe extern "C" fn compare_timers(
    a: *mut ffi::PyObject,
    b: *mut ffi::PyObject,
    op: c_int,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_richcompare attached; `a` is a TimerHandle, `b` any live object.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            if ffi::PyObject_TypeCheck(b, TIMER_TYPE.load(Ordering::Relaxed)) == 0 {
                return Ok(ffi::Py_NewRef(ffi::Py_NotImplemented()));
            }
            let (left, right) = (This::<HandleObject>::new(py, a), This::<HandleObject>::new(py, b));
            let (left_s, right_s) = (left.when_s(), right.when_s());
            let is_same = || -> PyResult<bool> {
                let (left_call, right_call) = (call_of(left)?, call_of(right)?);
                Ok(left_s == right_s
                    && left_call.0.eq(&right_call.0)?
                    && left_call.1.eq(&right_call.1)?
                    && left.has(flag::CANCELLED) == right.has(flag::CANCELLED))
            };
            let result = match op {
                ffi::Py_LT => left_s < right_s,
                ffi::Py_LE => left_s < right_s || is_same()?,
                ffi::Py_GT => left_s > right_s,
                ffi::Py_GE => left_s > right_s || is_same()?,
                ffi::Py_EQ => is_same()?,
                _ => !is_same()?,
            };
            Ok(bool_object(py, result).into_ptr())
        })
    }
}

/// `hash(when)`, as in asyncio.
unsafe extern "C" fn hash_timer(slf: *mut ffi::PyObject) -> ffi::Py_hash_t {
    // SAFETY: CPython calls tp_hash, attached, with a TimerHandle.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            PyFloat::new(py, This::<HandleObject>::new(py, slf).when_s())
                .hash()
                .map(|hash| hash as ffi::Py_hash_t)
        })
    }
}

/// The methods of both types.
fn common_methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            cancel,
            Handle.cancel,
            "Cancel the callback; it will not run."
        ),
        row!(
            method,
            cancelled,
            Handle.cancelled,
            "True if the callback was cancelled."
        ),
        row!(
            method,
            get_context,
            Handle.get_context,
            "The contextvars.Context the callback runs in."
        ),
        row!(
            method,
            run_once,
            Handle._run,
            "Run the callback now, in its context. Does nothing if the loop has already run it, except in debug mode."
        ),
    ]
}

/// Creates the type `Handle` first, because `TimerHandle` inherits from it.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let (mut getters, timer_getters) = slots::rows();
    getters.push(getter(
        c"__class__",
        asyncio_class,
        c"asyncio's class, so that isinstance() is true.",
    ));
    let weakrefs = offset_member(
        c"__weaklistoffset__",
        std::mem::offset_of!(HandleObject, weakrefs),
    );
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let handle_type = unsafe {
        new_type::<HandleObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                methods_slot(common_methods()),
                getset_slot(getters),
                members_slot(vec![weakrefs]),
            ],
        )?
    };
    // The base type's methods are repeated here: a method found on the exact type skips the subtype check.
    let mut timer_methods = common_methods();
    timer_methods.push(row!(
        method,
        when,
        TimerHandle.when,
        "The deadline in seconds of loop.time()."
    ));
    // SAFETY: as above; TimerHandle has the same layout as its base.
    let timer_type = unsafe {
        new_type::<TimerLayout>(
            module,
            Some(&PyTuple::new(module.py(), [&handle_type])?),
            &[
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                slot(ffi::Py_tp_richcompare, compare_timers as *mut c_void),
                slot(ffi::Py_tp_hash, hash_timer as *mut c_void),
                methods_slot(timer_methods),
                getset_slot(timer_getters),
            ],
        )?
    };
    module.add("Handle", &handle_type)?;
    module.add("TimerHandle", &timer_type)?;
    HANDLE_TYPE.store(handle_type.into_ptr().cast(), Ordering::Release);
    TIMER_TYPE.store(timer_type.into_ptr().cast(), Ordering::Release);
    Ok(())
}

/// The layout of `HandleObject` under a type name of its own, for `TimerHandle`.
#[repr(transparent)]
struct TimerLayout(HandleObject);

impl NativeType for TimerLayout {
    const NAME: &'static CStr = c"grapeshot._core.TimerHandle";
    const DOC: &'static CStr = c"A callback scheduled for a time; the interface of asyncio.TimerHandle.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc;

    #[inline]
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        self.0.cells()
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: passed on unchanged.
        unsafe { self.0.traverse_rest(visit, arg) }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }

    fn clear(this: This<'_, Self>) {
        // SAFETY: the layouts are the same (repr(transparent)).
        HandleObject::clear(unsafe { This::new(this.py(), this.as_ptr()) });
    }
}

/// Raises asyncio's TypeError for an object that cannot be a callback. Called in debug mode.
#[cold]
pub(crate) fn check_callback(callback: &Bound<'_, PyAny>, method: &str) -> PyResult<()> {
    let coroutines = callback.py().import("asyncio.coroutines")?;
    if coroutines.call_method1("iscoroutine", (callback,))?.is_truthy()?
        || coroutines
            .py()
            .import("inspect")?
            .call_method1("iscoroutinefunction", (callback,))?
            .is_truthy()?
    {
        return Err(PyTypeError::new_err(format!(
            "coroutines cannot be used with {method}()"
        )));
    }
    if !callback.is_callable() {
        return Err(PyTypeError::new_err(format!(
            "a callable object was expected by {method}(), got {}",
            callback.repr()?
        )));
    }
    Ok(())
}
