//! The methods and attributes of `grapeshot._core.Loop`.
//!
//! The methods that run once per callback, per descriptor and per task are in `call_methods`, `watching` and `tasks`.
//! The methods of the limits and of the probe are in `limit_methods` and `probe::methods`. This module has the other
//! methods of `event_loop`, and makes one table of all these methods. `transports`, `process` and other modules that
//! build on `event_loop` add their own methods to the finished type. Code that runs only once per loop or per
//! connection is Python, in the package.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use super::pyloop::{self, LoopObject};
use super::{call_methods, limit_methods, loop_clock, probe, tasks, watching};
use crate::binding::args::Args;
use crate::binding::attributes::set_value;
use crate::binding::errors;
use crate::binding::native_type::{This, new_type, slot};
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getset_slot, getter, methods_slot, row, threadsafe_getter};

fn is_running<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.reactor.access.owner() != 0))
}

fn is_closed<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.reactor.is_closed()))
}

fn stop<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor.set_stopping(true);
    Ok(none(this.py()))
}

fn check_closed<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor.check_closed()?;
    Ok(none(this.py()))
}

fn check_running<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    if this.reactor.access.owner() != 0 {
        return Err(PyRuntimeError::new_err("This event loop is already running"));
    }
    let running = py.import("asyncio.events")?.call_method0("_get_running_loop")?;
    if !running.is_none() {
        return Err(PyRuntimeError::new_err(
            "Cannot run the event loop while another loop is running",
        ));
    }
    Ok(none(py))
}

fn run<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor.check_closed()?;
    if !this.claim(this.py())? {
        return Err(PyRuntimeError::new_err("This event loop is already running"));
    }
    // pyo3 drops an owned error at once only if pyo3 itself has attached the thread. Otherwise the drop waits for the
    // next such attachment, so the errors of a whole run would stay alive. That is why pyo3 attaches the thread here
    // once more.
    Python::attach(|py| this.reactor.run(py, &this))?;
    Ok(none(this.py()))
}

fn close<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.reactor.access.owner() != 0 {
        return Err(PyRuntimeError::new_err("Cannot close a running event loop"));
    }
    this.reactor.close(this.py());
    Ok(none(this.py()))
}

fn forget_parent<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor
        .forget_parent()
        .map_err(|error| errors::os_error(&error))?;
    this.forget_paused(this.py());
    Ok(none(this.py()))
}

fn signal_fd<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor.check_closed()?;
    let fd = this
        .reactor
        .signal_fd()
        .map_err(|error| errors::os_error(&error))?;
    Ok(fd.into_pyobject(this.py())?.into_any())
}

/// `_attributes_changed()`: `time` or `call_at` was set on the loop, or deleted.
fn attributes_changed<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.clock_version.forget();
    Ok(none(this.py()))
}

/// `_ready`, and `_scheduled` below, have the names of asyncio's queues, for the tools that read them. The values are
/// tuples, because the queues themselves are native: code that tries to change a queue gets an error.
fn ready_handles(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(PyTuple::new(py, this.reactor.ready.handles(py))?.into_any())
}

fn timer_handles(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(PyTuple::new(py, this.reactor.timers.handles(py))?.into_any())
}

fn is_stopping(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.reactor.is_stopping()))
}

fn thread_id(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    match this.reactor.access.owner() {
        0 => Ok(none(this.py())),
        owner => Ok(owner.into_pyobject(this.py())?.into_any()),
    }
}

unsafe extern "C" fn set_stopping(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    _: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls a setter of this type.
    unsafe {
        set_value(
            slf,
            value,
            "cannot delete _stopping",
            |this: This<'_, LoopObject>, value| {
                this.reactor.set_stopping(value.is_truthy()?);
                Ok(())
            },
        )
    }
}

/// The native methods of the loop that are in this folder.
pub(crate) fn methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = vec![
        row!(
            threadsafe_method,
            is_running,
            Loop.is_running,
            "True while a thread runs the loop."
        ),
        row!(
            threadsafe_method,
            is_closed,
            Loop.is_closed,
            "True once the loop was closed."
        ),
        row!(
            threadsafe_method,
            stop,
            Loop.stop,
            "Leave run_forever() at the end of the current iteration."
        ),
        row!(
            threadsafe_method,
            check_closed,
            Loop._check_closed,
            "Raise RuntimeError if the loop is closed."
        ),
        row!(
            threadsafe_method,
            check_running,
            Loop._check_running,
            "Raise RuntimeError if this loop is running, or if another loop is running in this thread."
        ),
        row!(threadsafe_method, run, Loop._run, "Run iterations until stop()."),
        row!(
            threadsafe_method,
            forget_parent,
            Loop._forget_parent,
            "In a forked child, forget everything that the parent has scheduled or watches."
        ),
        row!(
            threadsafe_method,
            attributes_changed,
            Loop._attributes_changed,
            "Called after time or call_at was set on the loop, or deleted."
        ),
        row!(
            method,
            signal_fd,
            Loop._signal_fd,
            "The descriptor to which the interpreter writes signal numbers."
        ),
        row!(method, close, Loop._close, "Drop all work and close the poller."),
    ];
    methods.extend(call_methods::methods());
    methods.extend(watching::methods());
    methods.extend(tasks::methods());
    methods.extend(limit_methods::methods());
    methods.extend(probe::methods::methods());
    methods
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = methods();
    loop_clock::remember(&methods);
    let mut getters = vec![
        getter(
            c"_ready",
            ready_handles,
            c"The handles that are ready to run, as a tuple. Work that has no handle is not included.",
        ),
        getter(
            c"_scheduled",
            timer_handles,
            c"The scheduled timers, the earliest first, as a tuple. Some of them may be cancelled.",
        ),
        ffi::PyGetSetDef {
            set: Some(set_stopping),
            ..getter(
                c"_stopping",
                is_stopping,
                c"True after stop() until the run has ended. Sanic sets it to False to revoke a stop.",
            )
        },
        threadsafe_getter(
            c"_thread_id",
            thread_id,
            c"The identifier of the thread that runs the loop, or None.",
        ),
    ];
    getters.extend(limit_methods::getters());
    getters.extend(probe::methods::getters());
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind: Bound<'_, PyType> = unsafe {
        new_type::<LoopObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_new, pyloop::new_loop as *mut c_void),
                methods_slot(methods),
                getset_slot(getters),
            ],
        )?
    };
    module.add("Loop", &kind)?;
    pyloop::set_type(kind);
    Ok(())
}
