//! `grapeshot._core._HubLoop`: the base class of the loop that gevent's hub runs.

use std::cell::Cell;
use std::ffi::CStr;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::descriptor;
use super::io::Io;
use crate::binding::args::Args;
use crate::binding::native_type::{NativeType, This, new_type};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{member, members_slot, methods_slot, row};
use crate::event_loop::pyloop::LoopObject;

/// In a new object, all bytes after `base` are zero, which is valid for every field.
#[repr(C)]
pub(super) struct HubLoopObject {
    base: ffi::PyObject,
    /// The grapeshot loop; empty before `_set_loop`.
    pub(super) event_loop: ObjectCell,
    /// How many things keep `run()` from returning: active watchers whose `ref` is true, callbacks, and calls of
    /// `ref()`.
    references: Cell<isize>,
    /// Whether `run()` returns after the next watcher or callback.
    pub(super) is_once: Cell<bool>,
    pub(super) is_destroyed: Cell<bool>,
}

pub(super) type HubLoop<'py> = This<'py, HubLoopObject>;

static HUB_LOOP_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for HubLoopObject {
    const NAME: &'static CStr = c"grapeshot._core._HubLoop";
    const DOC: &'static CStr = c"The native part of grapeshot.gevent.Loop.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.event_loop]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

/// Whether the object is a loop of the hub.
pub(super) fn is_hub_loop(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: attached, with a live object and a type that is never freed.
    unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), HUB_LOOP_TYPE.load(Ordering::Relaxed)) != 0 }
}

/// `object` as a loop of the hub.
///
/// # Safety
/// `is_hub_loop(object)`.
#[inline]
pub(super) unsafe fn cast<'a>(object: &'a Bound<'_, PyAny>) -> HubLoop<'a> {
    debug_assert!(is_hub_loop(object));
    // SAFETY: an instance of the type, or of a subclass, has the layout, and `object` keeps it alive.
    unsafe { This::new(object.py(), object.as_ptr()) }
}

impl HubLoopObject {
    /// Called when a watcher whose `ref` is true becomes active.
    pub(super) fn add_reference(&self) {
        self.references.set(self.references.get() + 1);
    }
}

/// Called when a watcher whose `ref` is true is no longer active. If nothing is left that keeps `run()` from returning,
/// the loop first runs the callbacks that are ready now, and then stops unless they have added something.
pub(super) fn drop_reference(this: HubLoop<'_>) -> PyResult<()> {
    this.references.set(this.references.get() - 1);
    if this.references.get() <= 0 && !this.is_destroyed.get() {
        this.to_bound().call_method0("_stop_soon_if_unused")?;
    }
    Ok(())
}

fn set_loop<'py>(this: HubLoop<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [event_loop] = args.exactly()?;
    if this.event_loop.is_set() {
        return Err(PyRuntimeError::new_err(
            "the hub's loop has its grapeshot loop already",
        ));
    }
    if !LoopObject::is_loop(&event_loop) {
        return Err(PyTypeError::new_err(format!(
            "expected a grapeshot loop, got {}",
            event_loop.repr()?
        )));
    }
    this.event_loop.set(event_loop);
    Ok(none(this.py()))
}

/// Takes the watchers off a descriptor that is about to be closed.
fn take_io<'py>(this: HubLoop<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, [fd]) = (this.py(), args.exactly()?);
    let fd: RawFd = fd.extract()?;
    let watchers = match this.event_loop.get(py) {
        Some(event_loop) => descriptor::take_watchers(py, &event_loop, fd),
        None => Vec::new(),
    };
    Ok(PyList::new(py, watchers)?.into_any())
}

/// Takes the watchers off all descriptors.
fn take_all_io<'py>(this: HubLoop<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, [is_forked]) = (this.py(), args.exactly()?);
    let watchers = match this.event_loop.get(py) {
        Some(event_loop) => descriptor::take_all_watchers(py, &event_loop, is_forked.is_truthy()?),
        None => Vec::new(),
    };
    Ok(PyList::new(py, watchers)?.into_any())
}

/// Lets the hub wake a watcher whose descriptor is closed.
pub(super) fn wake_closed(this: HubLoop<'_>, watcher: Io<'_>) -> PyResult<()> {
    this.to_bound()
        .call_method1("_wake_soon", (watcher.to_bound(), -1))
        .map(drop)
}

/// Passes the exception of a watcher's callback to the hub.
#[cold]
pub(super) fn report(this: HubLoop<'_>, watcher: Io<'_>, error: PyErr) -> PyResult<()> {
    let error = error.into_value(this.py());
    this.to_bound()
        .call_method1("_failed", (watcher.to_bound(), error))
        .map(drop)
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(
            method,
            set_loop,
            _HubLoop._set_loop,
            "Set the grapeshot loop, once."
        ),
        row!(
            method,
            take_io,
            _HubLoop._take_io,
            "Take the active io watchers off a descriptor, and stop watching it."
        ),
        row!(
            method,
            take_all_io,
            _HubLoop._take_all_io,
            "Take the active io watchers off all descriptors."
        ),
    ];
    let members = vec![
        member(
            c"asyncio_loop",
            ffi::Py_T_OBJECT_EX,
            offset_of!(HubLoopObject, event_loop),
            ffi::Py_READONLY,
        ),
        member(
            c"_references",
            ffi::Py_T_PYSSIZET,
            offset_of!(HubLoopObject, references),
            0,
        ),
        member(c"_is_once", ffi::Py_T_BOOL, offset_of!(HubLoopObject, is_once), 0),
        member(
            c"_is_destroyed",
            ffi::Py_T_BOOL,
            offset_of!(HubLoopObject, is_destroyed),
            0,
        ),
    ];
    let slots = [methods_slot(methods), members_slot(members)];
    // SAFETY: the functions and members are for this layout, which is valid when zeroed; the tables live forever.
    let kind = unsafe { new_type::<HubLoopObject>(module, None, &slots)? };
    HUB_LOOP_TYPE.store(kind.clone().into_ptr().cast(), Ordering::Release);
    module.add("_HubLoop", kind)
}
