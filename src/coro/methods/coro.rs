//! Native methods and attributes of `Coro`.

use std::ffi::c_void;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyType};

use super::functions::acts;
use super::{stacks, task_api};
use crate::binding::args::Args;
use crate::binding::native_type::{new_type, slot, with_critical_section};
use crate::binding::new_objects;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{
    class_getitem, getset_slot, getter, members_slot, methods_slot, row, threadsafe_getter,
};
use crate::coro::coroutine::{Coro, CoroObject, Status, finalize};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::{fiber, interruption, scheduler};
use crate::event_loop::pyloop::LoopObject;

/// Raises `ScheduleError` unless the coro belongs to this thread.
pub(super) fn check_thread(coro: Coro<'_>) -> PyResult<()> {
    coro.check_thread(coro.py())
}

/// Does the same as `check_thread`. Also raises `RuntimeError` if the coro's loop is closed, because nothing could run
/// the coro.
fn check_schedulable(coro: Coro<'_>) -> PyResult<()> {
    check_thread(coro)?;
    match coro.event_loop.get(coro.py()) {
        Some(event_loop) => LoopObject::of(&event_loop).reactor().check_closed(),
        None => Ok(()),
    }
}

/// `_check_thread()`: raises `ScheduleError` in any thread except the coro's own.
fn require_thread<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    Ok(none(this.py()))
}

fn start<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.status.get() != Status::New {
        return Err(coro_errors::new(
            this.py(),
            ErrorClass::ScheduleError,
            "the coro has already been started",
        ));
    }
    check_schedulable(this)?;
    scheduler::start(this)?;
    Ok(none(this.py()))
}

/// `_wake(value=None)`: makes a waiting coro continue; its wait returns `value`. Raises `ScheduleError` if the coro is
/// not waiting.
fn wake<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [value] = args.bind()?;
    check_thread(this)?;
    match this.status.get() {
        Status::Waiting if this.wait_node.is_queued() => Err(coro_errors::new(
            this.py(),
            ErrorClass::ScheduleError,
            "the coro waits in a queue, for example for a lock: it can be interrupted, but not scheduled",
        )),
        Status::Waiting => {
            check_schedulable(this)?;
            if let Some(value) = value {
                this.wake_value.set(value);
            }
            scheduler::make_ready(this);
            Ok(none(this.py()))
        }
        status => Err(wrong_status(this, status)),
    }
}

/// `_throw_later(exception)`: raises the exception in the coro's current or next wait. With None, it removes a pending
/// cancellation.
fn throw_later<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    match args.get(0) {
        Some(exception) if !exception.is_none() => match this.status.get() {
            Status::Waiting => return throw(this, args),
            Status::Done => return Err(wrong_status(this, Status::Done)),
            _ => interruption::push(this, exception)?,
        },
        _ => {
            interruption::take_back(this, |exception| {
                coro_errors::is_exactly(exception, ErrorClass::Cancelled)
            });
        }
    }
    Ok(none(this.py()))
}

/// `_take_back(exception)`: removes a pending exception. Returns whether it was still pending.
fn take_back<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let Some(meant) = args.get(0) else {
        return Ok(bool_object(this.py(), false));
    };
    let found =
        this.wake_exception.is_set() && interruption::take_back(this, |exception| exception.is(&meant));
    Ok(bool_object(this.py(), found))
}

/// `_throw(exception)`: raises the exception in the coro's wait. If the coro is running, this call raises it. If the
/// coro has been started but has not run yet, the exception replaces the call of its function.
fn throw<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let Some(exception) = args.get(0) else {
        return Ok(none(this.py()));
    };
    if !exception.is_instance_of::<pyo3::exceptions::PyBaseException>() {
        return Err(PyTypeError::new_err("an exception is required"));
    }
    match this.status.get() {
        Status::Waiting => {
            check_schedulable(this)?;
            interruption::push(this, exception)?;
            scheduler::make_ready(this);
        }
        Status::Ready => interruption::push(this, exception)?,
        Status::Running => return Err(PyErr::from_value(exception)),
        status => return Err(wrong_status(this, status)),
    }
    Ok(none(this.py()))
}

#[cold]
fn wrong_status(this: Coro<'_>, status: Status) -> PyErr {
    let (kind, message) = match status {
        Status::New => (ErrorClass::NotStarted, "the coro has not been started"),
        Status::Done => (ErrorClass::DeadCoroutine, "the coro has ended"),
        Status::Ready => (ErrorClass::ScheduleError, "the coro is already scheduled"),
        Status::Running | Status::Waiting => (ErrorClass::ScheduleError, "the coro is running"),
    };
    coro_errors::new(this.py(), kind, message)
}

fn done<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.is_done()))
}

fn failure<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.is_unseen.set(false);
    Ok(this.exception.get(this.py()).unwrap_or_else(|| none(this.py())))
}

/// The exception, if it has not been retrieved yet; else None.
fn failure_unseen<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    Ok(this
        .exception
        .get(py)
        .filter(|_| this.is_unseen.get())
        .unwrap_or_else(|| none(py)))
}

/// The innermost frame of a suspended coro, or None.
fn frame<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    fiber::frame(this).map(|frame| frame.unwrap_or_else(|| none(py)))
}

fn id(this: Coro<'_>) -> ObjectResult<'_> {
    Ok(this.id.get().into_pyobject(this.py())?.into_any())
}

fn name(this: Coro<'_>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(match with_critical_section(this, || this.name.get(py)) {
        Some(name) => name,
        None => PyString::new(py, &format!("coro {}", this.id.get())).into_any(),
    })
}

fn set_name<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(name) = args.get(0) {
        let name = name.str()?.into_any();
        // The old name is dropped outside of the section.
        drop(with_critical_section(this, || {
            this.name.replace(Some(name), this.py())
        }));
    }
    Ok(none(this.py()))
}

/// `_make_daemon()`: marks the coro as one that stands for a daemon thread.
fn make_daemon<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    this.make_daemon();
    Ok(none(this.py()))
}

/// `set_max_selfish_acts(n)`: None restores the thread's limit.
fn set_max_selfish_acts<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit = match args.get(0) {
        Some(count) if !count.is_none() => acts(&count)? + 1,
        _ => 0,
    };
    this.max_acts.set(limit);
    Ok(none(this.py()))
}

/// A copy of the list of callbacks, so that no caller can change the list itself.
fn callbacks(this: Coro<'_>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(match this.callbacks.get(py) {
        Some(callbacks) => {
            let callbacks = callbacks.cast_into::<PyList>()?;
            callbacks.get_slice(0, callbacks.len()).into_any()
        }
        None => none(py),
    })
}

fn status(this: Coro<'_>) -> ObjectResult<'_> {
    let text = match this.status.get() {
        Status::New => "new",
        Status::Ready => "ready",
        Status::Running => "running",
        Status::Waiting => "waiting",
        Status::Done => "done",
    };
    Ok(new_objects::string(this.py(), text)?.into_any())
}

fn event_loop(this: Coro<'_>) -> ObjectResult<'_> {
    Ok(this.event_loop.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn context(this: Coro<'_>) -> ObjectResult<'_> {
    Ok(this.context.get(this.py()).unwrap_or_else(|| none(this.py())))
}

/// Whether a cancellation by `cancel()` is pending.
fn must_cancel(this: Coro<'_>) -> ObjectResult<'_> {
    Ok(bool_object(
        this.py(),
        interruption::contains(this, ErrorClass::Cancelled),
    ))
}

/// The exception that the function has raised. Reading it does not count as retrieving it.
fn exception(this: Coro<'_>) -> ObjectResult<'_> {
    Ok(this.exception.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(method, start, Coro.start, "Schedule a new coro."),
        row!(
            threadsafe_method,
            require_thread,
            Coro._check_thread,
            "Raise ScheduleError in any thread except the coro's own."
        ),
        row!(method, wake, Coro._wake, "Make a waiting coro continue."),
        row!(
            method,
            throw,
            Coro._throw,
            "Raise an exception in the call in which the coro waits."
        ),
        row!(
            method,
            throw_later,
            Coro._throw_later,
            "Raise an exception in the coro's current or next call that waits."
        ),
        row!(
            method,
            take_back,
            Coro._take_back,
            "Withdraw a pending exception. Return whether it was pending."
        ),
        row!(
            method,
            make_daemon,
            Coro._make_daemon,
            "Mark the coro as a daemon: nothing waits for its end."
        ),
        row!(
            method,
            set_max_selfish_acts,
            Coro.set_max_selfish_acts,
            "Let the coro yield after `count` I/O operations in a row that did not wait. None: use the thread's limit."
        ),
        row!(
            method,
            stacks::coro_info,
            Coro.stack_info,
            "Return where the coro's stack is."
        ),
        row!(
            threadsafe_method,
            done,
            Coro.done,
            "Return whether the function has returned or raised."
        ),
        row!(
            method,
            failure,
            Coro._failure,
            "Return the exception that the function has raised, or None."
        ),
        row!(
            method,
            failure_unseen,
            Coro._failure_unseen,
            "Return the exception if it has not been retrieved yet, else None."
        ),
        row!(
            method,
            frame,
            Coro.get_frame,
            "Return the innermost frame of a suspended coro. None if the coro is not suspended."
        ),
        row!(
            threadsafe_method,
            set_name,
            Coro.set_name,
            "Change the name of the coro."
        ),
        class_getitem(),
    ]
}

fn getters() -> Vec<ffi::PyGetSetDef> {
    vec![
        threadsafe_getter(
            c"id",
            id,
            c"A number that is unique among the coros of the process.",
        ),
        threadsafe_getter(c"name", name, c"The name of the coro."),
        threadsafe_getter(
            c"_status",
            status,
            c"The status: new, ready, running, waiting or done.",
        ),
        threadsafe_getter(c"_loop", event_loop, c"The loop that runs the coro."),
        getter(
            c"_context",
            context,
            c"The contextvars.Context in which the coro runs. None after its end.",
        ),
        getter(
            c"_callbacks",
            callbacks,
            c"A list of (callback, context), or None if there is none. asyncio's tasks have this attribute, too.",
        ),
        getter(
            c"_must_cancel",
            must_cancel,
            c"Whether a CancelledError of cancel() is pending. A later call that waits raises it.",
        ),
        getter(
            c"_exception",
            exception,
            c"The exception that the function has raised, or None. Reading this does not retrieve \
              the exception.",
        ),
    ]
}

/// Makes the native type.
pub(super) fn make_type<'py>(module: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyType>> {
    // SAFETY: the functions are for this layout, the tables are leaked.
    unsafe {
        new_type::<CoroObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_finalize, finalize as *mut c_void),
                methods_slot([methods(), task_api::methods()].concat()),
                getset_slot(getters()),
                members_slot(CoroObject::members()),
                slot(ffi::Py_am_await, task_api::am_await as *mut c_void),
                slot(ffi::Py_tp_iter, task_api::am_await as *mut c_void),
            ],
        )
    }
}
