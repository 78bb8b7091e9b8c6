//! `grapeshot._core._HubIo`: the base class of gevent's io watchers.
//!
//! When a greenlet waits for a descriptor, it starts a watcher. The watcher's callback switches back to the greenlet,
//! which then stops the watcher.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::descriptor::{self, Descriptor};
use super::hub_loop::{self, HubLoop, HubLoopObject};
use super::running_loops;
use crate::binding::HAS_GIL;
use crate::binding::args::Args;
use crate::binding::attributes::set_value;
use crate::binding::names::names;
use crate::binding::native_type::{NativeType, This, new_type};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getset_slot, getter, member, members_slot, methods_slot, row};
use crate::event_loop::pyloop::LoopObject;

/// The events of gevent's interface, as bits.
pub(super) const READ: c_int = 1;
pub(super) const WRITE: c_int = 2;

/// In a new object, all bytes after `base` are zero, which is valid for every field.
#[repr(C)]
pub(super) struct IoObject {
    base: ffi::PyObject,
    /// A `HubLoopObject`, which `_set` has checked. Python code can only read it. Empty before `_set`, and after the
    /// collector has cleared the watcher.
    hub_loop: ObjectCell,
    /// The callback that `start` was given, and its arguments. Python code can set both attributes.
    callback: ObjectCell,
    args: ObjectCell,
    /// The `DescriptorObject` on which this watcher is active, or was active last. Empty before the
    /// first start, after `_set` and `close`, and if the descriptor was closed or the process was forked since.
    descriptor: ObjectCell,
    pub(super) fd: Cell<c_int>,
    pub(super) events: Cell<c_int>,
    /// How many polls the loop had made when the watcher was started.
    pub(super) started_at: Cell<u64>,
    has_reference: Cell<bool>,
    pub(super) is_active: Cell<bool>,
}

pub(super) type Io<'py> = This<'py, IoObject>;

/// A placeholder. If it is the first argument of a callback, the events that have happened are passed in its place.
static EVENTS: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for IoObject {
    const NAME: &'static CStr = c"grapeshot._core._HubIo";
    const DOC: &'static CStr = c"The native part of gevent's io watchers.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.hub_loop, &self.callback, &self.args, &self.descriptor]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        if HAS_GIL {
            return body();
        }
        match this.hub_loop.get(this.py()) {
            // SAFETY: the cell has only loops of the hub.
            Some(hub_loop) => HubLoopObject::with_access(unsafe { hub_loop::cast(&hub_loop) }, body),
            None => body(),
        }
    }
}

fn events_marker(py: Python<'_>) -> Bound<'_, PyAny> {
    // SAFETY: attached; `register` has stored an object that is never freed.
    unsafe { Bound::from_borrowed_ptr(py, EVENTS.load(Ordering::Relaxed)) }
}

/// Calls `body` with the watcher's hub loop. Raises ValueError if there is none.
fn with_hub_loop<R>(this: Io<'_>, body: impl FnOnce(HubLoop<'_>) -> PyResult<R>) -> PyResult<R> {
    match this.hub_loop.get(this.py()) {
        // SAFETY: the cell has only loops of the hub.
        Some(hub_loop) => body(unsafe { hub_loop::cast(&hub_loop) }),
        None => Err(PyValueError::new_err("the io watcher has no loop")),
    }
}

/// Calls `body` with the descriptor on which the watcher is active, or was active last. None if there is none.
fn with_descriptor<R>(this: Io<'_>, body: impl FnOnce(Descriptor<'_>) -> R) -> Option<R> {
    let kept = this.descriptor.get(this.py())?;
    descriptor::of(&kept).map(body)
}

/// `_set(loop, fd, events)`: sets the loop, the descriptor and the events of an inactive watcher.
fn set<'py>(this: Io<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, [hub_loop, fd, events]) = (this.py(), args.exactly()?);
    if !hub_loop::is_hub_loop(&hub_loop) {
        return Err(PyTypeError::new_err(format!(
            "expected a loop of gevent's hub, got {}",
            hub_loop.repr()?
        )));
    }
    let (fd, events) = (fd.extract::<c_int>()?, events.extract::<c_int>()?);
    if fd < 0 {
        return Err(PyValueError::new_err(format!("fd must be non-negative: {fd}")));
    }
    if this.is_active.get() {
        return Err(PyValueError::new_err("the io watcher is active"));
    }
    this.fd.set(fd);
    this.events.set(events & (READ | WRITE));
    // Dropped last, because that may run any code.
    let _last_descriptor = this.descriptor.take(py);
    let _last_loop = this.hub_loop.replace(Some(hub_loop), py);
    Ok(none(py))
}

/// Whether `start` was called with `pass_events=True`, its only keyword.
fn passes_events(args: &Args<'_, '_>) -> PyResult<bool> {
    let mut passes = false;
    for (name, value) in args.keywords() {
        if !name.eq("pass_events")? {
            return Err(args.wrong_count("", Some(&(name, value))));
        }
        // SAFETY: the values of a call are alive until it returns; from_borrowed adds a reference.
        passes = unsafe { Bound::from_borrowed_ptr(args.py(), value) }.is_truthy()?;
    }
    Ok(passes)
}

/// The arguments for the callback: the ones that follow the callback in the call of `start`. With `pass_events`, the
/// object that stands for the events comes before them.
fn callback_args<'py>(args: &Args<'_, 'py>) -> PyResult<Bound<'py, PyTuple>> {
    let py = args.py();
    let given = &args.positional()[1..];
    let marker = passes_events(args)?.then(|| events_marker(py));
    let first = usize::from(marker.is_some());
    // SAFETY: attached. The new tuple has a free place for each value; the arguments are alive.
    unsafe {
        let tuple =
            Bound::from_owned_ptr_or_err(py, ffi::PyTuple_New((given.len() + first) as ffi::Py_ssize_t))?;
        if let Some(marker) = marker {
            ffi::PyTuple_SET_ITEM(tuple.as_ptr(), 0, marker.into_ptr());
        }
        for (index, value) in given.iter().enumerate() {
            ffi::PyTuple_SET_ITEM(
                tuple.as_ptr(),
                (index + first) as ffi::Py_ssize_t,
                ffi::Py_NewRef(*value),
            );
        }
        Ok(tuple.cast_into_unchecked())
    }
}

fn start<'py>(this: Io<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    let Some(callback) = args.get(0) else {
        return Ok(none(py)); // not reached: the row in the method table requires a callback
    };
    if !callback.is_callable() {
        return Err(PyTypeError::new_err(format!(
            "callback must be callable, not {}",
            callback.repr()?
        )));
    }
    let callback_args = callback_args(&args)?;
    with_hub_loop(this, |hub_loop| {
        if hub_loop.is_destroyed.get() && !this.is_active.get() {
            return Err(PyValueError::new_err("operation on destroyed loop"));
        }
        if !this.is_active.get() {
            begin_on(this, hub_loop)?;
            this.is_active.set(true);
            if this.has_reference.get() {
                hub_loop.add_reference();
            }
        }
        let _last_callback = this.callback.replace(Some(callback), py);
        let _last_args = this.args.replace(Some(callback_args.into_any()), py);
        Ok(none(py))
    })
}

/// Puts the watcher on its descriptor.
fn begin_on(this: Io<'_>, hub_loop: HubLoop<'_>) -> PyResult<()> {
    let is_known = with_descriptor(this, |descriptor| descriptor::rejoin(descriptor, this));
    if is_known == Some(true) {
        return Ok(());
    }
    let Some(event_loop) = hub_loop.event_loop.get(this.py()) else {
        return Err(PyValueError::new_err("operation on destroyed loop"));
    };
    match descriptor::watch(&event_loop, this)? {
        Some(descriptor) => {
            drop(this.descriptor.replace(Some(descriptor), this.py()));
            Ok(())
        }
        None => hub_loop::wake_closed(hub_loop, this),
    }
}

/// Whether `descriptor` is the one on which the watcher is active, or was active last.
pub(super) fn is_on(this: Io<'_>, descriptor: Descriptor<'_>) -> bool {
    this.descriptor.as_ptr() == descriptor.as_ptr()
}

/// Called when the watcher joins a descriptor. `poll_count` is how many polls the loop has made.
pub(super) fn note_start(this: Io<'_>, poll_count: u64) {
    this.started_at.set(poll_count);
}

/// Called when the watcher was taken off its descriptor, whose number may belong to another file from now on.
pub(super) fn forget_descriptor(this: Io<'_>) {
    drop(this.descriptor.take(this.py()));
}

/// Lets the hub wake the watcher, because its descriptor is closed.
pub(super) fn wake_closed(this: Io<'_>) -> PyResult<()> {
    with_hub_loop(this, |hub_loop| hub_loop::wake_closed(hub_loop, this))
}

/// `_begin()`, called in the child of a fork: puts an active watcher back on its descriptor, if it was taken off.
fn begin<'py>(this: Io<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.is_active.get() && !this.descriptor.is_set() {
        with_hub_loop(this, |hub_loop| begin_on(this, hub_loop))?;
    }
    Ok(none(this.py()))
}

/// Stops the watcher if it is active, and forgets its callback.
fn end(this: Io<'_>) -> PyResult<()> {
    let py = this.py();
    let _callback = this.callback.take(py);
    let _args = this.args.take(py);
    if !this.is_active.replace(false) {
        return Ok(());
    }
    with_descriptor(this, |descriptor| descriptor::leave(descriptor, this));
    if this.has_reference.get() {
        with_hub_loop(this, hub_loop::drop_reference)?;
    }
    Ok(())
}

fn stop<'py>(this: Io<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    end(this)?;
    Ok(none(this.py()))
}

/// `close()`: the descriptor may be closed next, so it is deregistered if no other watcher needs it.
fn close<'py>(this: Io<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    end(this)?;
    with_descriptor(this, descriptor::end_if_idle);
    drop(this.descriptor.take(this.py()));
    Ok(none(this.py()))
}

/// Calls the watcher's callback for these events (-1: the descriptor is closed). The callback may switch to another
/// greenlet, and then returns when the hub runs again. `is_polled` says whether a poll has found these events.
#[inline]
pub(super) fn fire(this: Io<'_>, events: c_int, is_polled: bool) -> PyResult<()> {
    let py = this.py();
    let (Some(callback), Some(args)) = (this.callback.get(py), this.args.get(py)) else {
        return Ok(());
    };
    if is_polled
        && let Some(greenlet) = running_loops::target_of(&callback)?
        && let Some(event_loop) = hide_loop(this, &callback)?
        && let Some(value) = only_item(&args)
    {
        let result = switch(&greenlet, value);
        running_loops::note_return(&event_loop, &greenlet)?;
        if let Err(error) = result {
            pass_error(this, &callback, &greenlet, error)?;
        }
    } else {
        call(this, &callback, args, events)?;
    }
    with_hub_loop(this, |hub_loop| {
        if hub_loop.is_once.get() {
            hub_loop.to_bound().call_method0("break_")?;
        }
        Ok(())
    })
}

/// Hides the running loop from the greenlet to which `callback` switches, and returns the loop. None if the loop cannot
/// be hidden.
fn hide_loop<'py>(this: Io<'py>, callback: &Bound<'_, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = this.py();
    let event_loop = with_hub_loop(this, |hub_loop| Ok(hub_loop.event_loop.get(py)))?;
    match event_loop {
        Some(event_loop) if running_loops::hide(&event_loop, callback)? => Ok(Some(event_loop)),
        _ => Ok(None),
    }
}

/// The only item of a tuple. None if the tuple does not have exactly one item, or if the item stands for the events.
fn only_item<'a, 'py>(args: &'a Bound<'py, PyAny>) -> Option<Borrowed<'a, 'py, PyAny>> {
    let args = args.cast::<PyTuple>().ok()?;
    let item = args.get_borrowed_item(0).ok()?;
    (args.len() == 1 && !item.is(events_marker(args.py()))).then_some(item)
}

/// Switches to a greenlet. Returns when the hub runs again.
#[inline]
fn switch(greenlet: &Bound<'_, PyAny>, value: Borrowed<'_, '_, PyAny>) -> PyResult<()> {
    let py = greenlet.py();
    let values = [greenlet.as_ptr(), value.as_ptr()];
    // SAFETY: attached; live objects. The result is a new reference, or null with an exception set.
    unsafe {
        let name = names(py).switch.as_ptr();
        let result = ffi::PyObject_VectorcallMethod(name, values.as_ptr(), 2, ptr::null_mut());
        Bound::from_owned_ptr_or_err(py, result).map(drop)
    }
}

/// Passes to the hub the exception that a switch has raised. `Waiter.switch` in gevent's `_waiter.py` does the same.
#[cold]
#[inline(never)]
fn pass_error(
    this: Io<'_>,
    callback: &Bound<'_, PyAny>,
    greenlet: &Bound<'_, PyAny>,
    error: PyErr,
) -> PyResult<()> {
    let py = this.py();
    show(this)?;
    let (kind, traceback) = (error.get_type(py), error.traceback(py));
    let args = (greenlet.getattr("switch")?, kind, error.into_value(py), traceback);
    let hub = callback.getattr("__self__")?.getattr("hub")?;
    match hub.call_method1("handle_error", args) {
        Ok(_) => Ok(()),
        Err(error) => with_hub_loop(this, |hub_loop| hub_loop::report(hub_loop, this, error)),
    }
}

/// Makes the hub's loop the running one, if it is hidden.
fn show(this: Io<'_>) -> PyResult<()> {
    let py = this.py();
    with_hub_loop(this, |hub_loop| match hub_loop.event_loop.get(py) {
        Some(event_loop) => {
            let native = LoopObject::of(&event_loop);
            native.reactor().show(py, native)
        }
        None => Ok(()),
    })
}

/// Calls the callback of a watcher, which may be any function.
#[inline(never)]
fn call<'py>(
    this: Io<'py>,
    callback: &Bound<'py, PyAny>,
    args: Bound<'py, PyAny>,
    events: c_int,
) -> PyResult<()> {
    let py = this.py();
    let Ok(mut args) = args.cast_into::<PyTuple>() else {
        return Ok(()); // Python code has set `args` to None, so there is nothing to call
    };
    if !args.is_empty() && args.get_item(0)?.is(events_marker(py)) {
        let mut given: Vec<_> = args.iter().collect();
        given[0] = events.into_pyobject(py)?.into_any();
        args = PyTuple::new(py, given)?;
    }
    show(this)?;
    // SAFETY: attached; a live object and a live tuple. The result is a new reference, or null with an exception set.
    let result = unsafe {
        let result = ffi::PyObject_Call(callback.as_ptr(), args.as_ptr(), ptr::null_mut());
        Bound::from_owned_ptr_or_err(py, result)
    };
    match result {
        Ok(_) => Ok(()),
        Err(error) => with_hub_loop(this, |hub_loop| hub_loop::report(hub_loop, this, error)),
    }
}

/// The getter of `callback`.
fn callback(this: Io<'_>) -> ObjectResult<'_> {
    let py = this.py();
    Ok(this.callback.get(py).unwrap_or_else(|| none(py)))
}

unsafe extern "C" fn set_callback(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    _: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls this setter, attached, with an object of this type.
    unsafe {
        set_value(slf, value, "cannot delete callback", |this: Io<'_>, value| {
            if !value.is_none() && !value.is_callable() {
                return Err(PyTypeError::new_err(format!(
                    "Expected callable, not {}",
                    value.repr()?
                )));
            }
            drop(this.callback.replace(Some(value), this.py()));
            Ok(())
        })
    }
}

/// `_fire(events=0)`: calls the callback now.
fn fire_now<'py>(this: Io<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [events] = args.bind()?;
    let events = match events {
        Some(events) => events.extract()?,
        None => 0,
    };
    fire(this, events, false)?;
    Ok(none(this.py()))
}

fn members() -> Vec<ffi::PyMemberDef> {
    #[expect(deprecated, reason = "unlike Py_T_OBJECT_EX, it reads an empty cell as None")]
    let object = ffi::_Py_T_OBJECT;
    vec![
        member(c"loop", object, offset_of!(IoObject, hub_loop), ffi::Py_READONLY),
        member(c"_callback", object, offset_of!(IoObject, callback), 0),
        member(c"_args", object, offset_of!(IoObject, args), 0),
        member(c"_fd", ffi::Py_T_INT, offset_of!(IoObject, fd), ffi::Py_READONLY),
        member(
            c"_events",
            ffi::Py_T_INT,
            offset_of!(IoObject, events),
            ffi::Py_READONLY,
        ),
        member(
            c"_descriptor",
            object,
            offset_of!(IoObject, descriptor),
            ffi::Py_READONLY,
        ),
        member(c"_ref", ffi::Py_T_BOOL, offset_of!(IoObject, has_reference), 0),
        member(
            c"_is_active",
            ffi::Py_T_BOOL,
            offset_of!(IoObject, is_active),
            ffi::Py_READONLY,
        ),
    ]
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(
            method,
            set,
            _HubIo._set,
            "Set the loop, the descriptor and the events of an inactive watcher."
        ),
        row!(
            method,
            start,
            _HubIo.start,
            "Call callback(*args) in the hub whenever the descriptor is ready."
        ),
        row!(method, stop, _HubIo.stop, "Stop, and forget the callback."),
        row!(
            method,
            close,
            _HubIo.close,
            "Stop. The watcher is not used again, and its descriptor may be closed next."
        ),
        row!(
            method,
            begin,
            _HubIo._begin,
            "Watch again, in the child of a fork."
        ),
        row!(method, fire_now, _HubIo._fire, "Call the callback now."),
    ];
    let mut getters = vec![getter(
        c"callback",
        callback,
        c"The function that is called when the descriptor is ready, or None.",
    )];
    getters[0].set = Some(set_callback);
    let slots = [
        methods_slot(methods),
        members_slot(members()),
        getset_slot(getters),
    ];
    // SAFETY: the functions and members are for this layout, which is valid when zeroed; the tables live forever.
    let kind = unsafe { new_type::<IoObject>(module, None, &slots)? };
    module.add("_HubIo", kind)?;
    let marker = module.py().import("builtins")?.getattr("object")?.call0()?;
    EVENTS.store(marker.clone().into_ptr(), Ordering::Release);
    module.add("_HUB_EVENTS", marker)
}

/// `object` as a watcher.
///
/// # Safety
/// `object` is an entry of a descriptor's list, which only has watchers.
pub(super) unsafe fn of<'a>(object: &'a Bound<'_, PyAny>) -> Io<'a> {
    // SAFETY: by the contract.
    unsafe { This::new(object.py(), object.as_ptr()) }
}
