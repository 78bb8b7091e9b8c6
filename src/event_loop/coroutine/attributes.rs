//! Native coroutines: the table of their methods, their attributes, and the creation of their types.

use std::ffi::c_void;
use std::mem::offset_of;
use std::sync::atomic::Ordering;

use pyo3::ffi;
use pyo3::prelude::*;

use super::Steps;
use super::object::{
    CLEARED_FRAME, Coroutine, CoroutineObject, CoroutineState, cleared_frame, finalize, long_name,
};
use super::protocol::{am_await, am_send, close, iternext, send, throw};
use crate::binding::native_type::{new_type, represent, slot};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getset_slot, getter, methods_slot, row, threadsafe_getter};

fn name<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(S::names(this.kind.get()).1.into_pyobject(this.py())?.into_any())
}

fn qualified_name<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(long_name(this).into_pyobject(this.py())?.into_any())
}

fn is_running<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(bool_object(
        this.py(),
        this.state.get() == CoroutineState::Running,
    ))
}

fn is_suspended<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(bool_object(
        this.py(),
        this.state.get() == CoroutineState::Suspended,
    ))
}

/// `cr_frame` and `cr_code`: None, because the coroutine has no Python code.
fn nothing<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(none(this.py()))
}

fn origin<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(this.origin.get(this.py()).unwrap_or_else(|| none(this.py())))
}

unsafe extern "C" fn repr<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and CPython calls tp_repr with an object of this type.
    unsafe {
        represent::<CoroutineObject<S>>(slf, |this| {
            Ok(format!("<coroutine object {} at {slf:p}>", long_name(this)))
        })
    }
}

/// The methods of a coroutine type.
fn methods<S: Steps>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            <S: Steps> send::<S>,
            "send(value, /)",
            "Take a step; the last step raises StopIteration with the result."
        ),
        row!(
            method,
            <S: Steps> throw::<S>,
            "throw(type, value=None, traceback=None, /)",
            "Throw an exception into the coroutine."
        ),
        row!(method, <S: Steps> close::<S>, "close()", "End the coroutine."),
    ]
}

/// The attributes of a coroutine type.
fn getters<S: Steps>() -> Vec<ffi::PyGetSetDef> {
    vec![
        threadsafe_getter(c"__name__", name::<S>, c"The method's name."),
        threadsafe_getter(
            c"__qualname__",
            qualified_name::<S>,
            c"The method's name with its class.",
        ),
        getter(c"cr_running", is_running::<S>, c"True during a step."),
        getter(c"cr_suspended", is_suspended::<S>, c"True while it waits."),
        threadsafe_getter(c"cr_frame", nothing::<S>, c"None: no Python code runs."),
        threadsafe_getter(c"cr_code", nothing::<S>, c"None: no Python code runs."),
        threadsafe_getter(
            c"cr_origin",
            origin::<S>,
            c"Where the coroutine was created, or None.",
        ),
    ]
}

/// Creates the type of the coroutines with the steps `S`.
pub(crate) fn make_type<S: Steps>(module: &Bound<'_, PyModule>) -> PyResult<()> {
    const { assert!(size_of::<S::Kind>() == 1) };
    const { assert!(offset_of!(CoroutineObject<S>, frame_state) == offset_of!(CoroutineObject<S>, kind) + 3) };
    CLEARED_FRAME.store(cleared_frame(module.py()), Ordering::Relaxed);
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<CoroutineObject<S>>(
            module,
            None,
            &[
                slot(ffi::Py_tp_finalize, finalize::<S> as *mut c_void),
                slot(ffi::Py_tp_repr, repr::<S> as *mut c_void),
                slot(ffi::Py_tp_iternext, iternext::<S> as *mut c_void),
                slot(ffi::Py_am_await, am_await::<S> as *mut c_void),
                slot(ffi::Py_am_send, am_send::<S> as *mut c_void),
                methods_slot(methods::<S>()),
                getset_slot(getters::<S>()),
            ],
        )?
    };
    S::place().kind.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
