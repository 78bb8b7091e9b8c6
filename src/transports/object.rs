//! The Python object of a transport: the header of `asyncio.BaseTransport`, the fields that every transport has, and a
//! body for each kind of transport. This module creates such objects, lets the garbage collector traverse them, warns
//! if a transport was left open, and frees them.
//!
//! ```text
//!   | object header | _extra |  weakrefs  dict  event_loop  |  body ...  |
//!   '- asyncio.BaseTransport -'
//! ```
//! The type inherits from asyncio's, so that `isinstance()` works.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::{ManuallyDrop, offset_of};
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyImportError, PyResourceWarning};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

use super::protocol::ProtocolCalls;
use crate::binding::args::Args;
use crate::binding::attributes::{HasInstanceDict, InstanceDict, dict_row};
use crate::binding::deallocation::free_memory;
use crate::binding::log;
use crate::binding::names::{Kept, names};
use crate::binding::native_type::{NativeType, This, new_type, represent, slot, traverse_cells};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getset_slot, members_slot, methods_slot, offset_member};
use crate::binding::{errors, new_objects};
use crate::event_loop::probe::Mode;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Reactor;

/// The part of the object that a kind of transport adds. Python code may run during any call and re-enter the
/// transport, so every field that changes is a cell or an atomic.
pub(crate) trait Body: Sized {
    /// Fully qualified name of the type.
    const NAME: &'static CStr;
    const DOC: &'static CStr;

    /// The text of `repr()`.
    fn describe(this: This<'_, TransportObject<Self>>) -> String;

    /// Whether the transport is still open. The finalizer warns about an open transport and closes it.
    fn is_open(&self) -> bool;

    /// Closes the descriptor, or the object that owns it. Does nothing the second time.
    fn close(&self, py: Python<'_>);

    /// The protocol and its callbacks.
    fn calls(&self) -> &ProtocolCalls;

    /// The cells with the references of the body, except those in `calls` and those that `traverse_rest` reports.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell>;

    /// The same as `NativeType::traverse_rest`, for the body.
    ///
    /// # Safety
    /// Only the collector may call this. The method must not run Python code.
    unsafe fn traverse_rest(&self, _visit: ffi::visitproc, _arg: *mut c_void) -> c_int {
        0
    }

    /// Called when the object is being freed, after `close`.
    fn on_freed(_: &TransportObject<Self>) {}

    /// Drops the references that can be part of a cycle, except the references in `calls` and those that `close` needs.
    fn clear(&self, py: Python<'_>);

    /// Drops all references except the ones in `calls`, before the body itself is dropped.
    fn release(&self, py: Python<'_>) {
        self.clear(py);
        for cell in self.cells() {
            drop(cell.take(py));
        }
    }
}

#[repr(C)]
pub(crate) struct TransportObject<B> {
    base: ffi::PyObject,
    /// The slot `_extra` of asyncio.BaseTransport: a dict, made when first needed.
    extra: ObjectCell,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// The attributes that Python code has set on the transport.
    pub(crate) dict: InstanceDict,
    pub(crate) event_loop: ObjectCell,
    body: ManuallyDrop<B>,
    /// False until the body is written. The collector may visit the object before that.
    is_body_live: Cell<bool>,
}

impl<B> Deref for TransportObject<B> {
    type Target = B;

    #[inline]
    fn deref(&self) -> &B {
        &self.body
    }
}

impl<B: Body> TransportObject<B> {
    #[inline]
    pub(crate) fn loop_object(&self) -> &LoopObject {
        // SAFETY: the transport holds a reference to its loop from its creation to its deallocation (tp_clear does not
        // drop it), and the loop has the layout of LoopObject (checked where transports are made).
        unsafe { &*self.event_loop.as_ptr().cast::<LoopObject>() }
    }

    #[inline]
    pub(crate) fn reactor(&self) -> &Reactor {
        self.loop_object().reactor()
    }
}

impl<B: Body> NativeType for TransportObject<B> {
    const NAME: &'static CStr = B::NAME;
    const DOC: &'static CStr = B::DOC;
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc::<B>;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.extra, &self.event_loop]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's.
        unsafe {
            let result = self.dict.traverse(visit, arg);
            if result != 0 || !self.is_body_live.get() {
                return result;
            }
            let result = traverse_cells(self.body.cells(), visit, arg);
            if result != 0 {
                return result;
            }
            let result = self.body.traverse_rest(visit, arg);
            if result != 0 {
                return result;
            }
            self.body.calls().traverse(visit, arg)
        }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }

    fn clear(this: This<'_, Self>) {
        let py = this.py();
        drop(this.extra.take(py));
        this.dict.clear(py);
        if this.is_body_live.get() {
            this.calls().drop_all(py);
            this.body.clear(py);
        }
    }
}

impl<B: Body> HasInstanceDict for TransportObject<B> {
    fn instance_dict(&self) -> &InstanceDict {
        &self.dict
    }
}

/// Makes an object of the type in `kind` around `body`.
pub(crate) fn make<'py, B: Body>(
    kind: &AtomicPtr<ffi::PyTypeObject>,
    event_loop: &Bound<'py, PyAny>,
    body: B,
) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    // SAFETY: `make_type` made the type for this layout. The allocation comes zeroed, so the object is valid for the
    // collector before the body is written.
    unsafe {
        let object = ffi::PyType_GenericAlloc(kind.load(Ordering::Relaxed), 0);
        if object.is_null() {
            let error = PyErr::fetch(py);
            body.calls().drop_all(py);
            body.release(py);
            return Err(error);
        }
        let transport = object.cast::<TransportObject<B>>();
        (*transport).event_loop.set(event_loop.clone());
        (*transport).dict.prepare(py);
        ptr::write(&raw mut (*transport).body, ManuallyDrop::new(body));
        (*transport).is_body_live.set(true);
        Ok(Bound::from_owned_ptr(py, object))
    }
}

/// `tp_finalize`: if the transport is still open, issues a ResourceWarning and closes the descriptor. This happens here
/// and not in `dealloc`, because here the other objects of the same garbage cycle are still intact.
unsafe extern "C" fn finalize<B: Body>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize, attached, with an object of this type. The current exception is saved and
    // restored, as PEP 442 requires.
    unsafe {
        let py = Python::assume_attached();
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            let this: This<'_, TransportObject<B>> = This::new(py, slf);
            if this.is_body_live.get() && this.is_open() {
                let message = format!("unclosed transport {}", B::describe(this));
                let category = py.get_type::<PyResourceWarning>();
                let warned = names(py)
                    .warn
                    .bind(py)
                    .call1((message, category, 1, this.to_bound()));
                if let Err(error) = warned {
                    error.write_unraisable(py, Some(&this.to_bound()));
                }
                this.close(py);
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

unsafe extern "C" fn dealloc<B: Body>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this, attached, with an unreferenced transport. If the finalizer revives the transport,
    // nothing more is done; otherwise the fields are dropped in place and the memory goes back to the allocator.
    unsafe {
        if ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let transport = slf.cast::<TransportObject<B>>();
        if !(*transport).weakrefs.get().is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        if (*transport).is_body_live.get() {
            let body = &(*transport).body;
            body.close(py);
            B::on_freed(&*transport);
            body.calls().drop_all(py);
            body.release(py);
            ManuallyDrop::drop(&mut (*transport).body);
        }
        (*transport).dict.clear(py);
        drop((*transport).event_loop.take(py));
        drop((*transport).extra.take(py));
        free_memory(slf);
    }
}

unsafe extern "C" fn repr<B: Body>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of this type.
    unsafe { represent::<TransportObject<B>>(slf, |this| Ok(B::describe(this))) }
}

/// Makes the type on top of asyncio's `bases`, adds it to the module and stores it in `place`.
pub(crate) fn make_type<'py, B: Body>(
    module: &Bound<'py, PyModule>,
    bases: &[Kept],
    methods: Vec<ffi::PyMethodDef>,
    mut getters: Vec<ffi::PyGetSetDef>,
    place: &AtomicPtr<ffi::PyTypeObject>,
) -> PyResult<Bound<'py, PyType>> {
    let py = module.py();
    let bases: Vec<_> = bases.iter().map(|base| base.bind(py)).collect();
    for (index, base) in bases.iter().enumerate() {
        let base_size: usize = base.getattr("__basicsize__")?.extract()?;
        let known_size = offset_of!(TransportObject<B>, weakrefs);
        // The first base defines the start of the object's layout. A further base (TLS transports have
        // asyncio.Protocol) must not add fields to the layout.
        if base_size > known_size || (index == 0 && base_size != known_size) {
            return Err(PyImportError::new_err(format!(
                "objects of {} have {base_size} bytes in this Python, but this build of grapeshot expects {known_size}",
                base.repr()?
            )));
        }
    }
    getters.push(dict_row());
    let slots = [
        slot(ffi::Py_tp_finalize, finalize::<B> as *mut c_void),
        slot(ffi::Py_tp_repr, repr::<B> as *mut c_void),
        methods_slot(methods),
        getset_slot(getters),
        members_slot(vec![
            offset_member(c"__weaklistoffset__", offset_of!(TransportObject<B>, weakrefs)),
            offset_member(c"__dictoffset__", offset_of!(TransportObject<B>, dict)),
        ]),
    ];
    // SAFETY: the functions were written for this layout, which starts with the layout of the bases (checked above).
    let kind = unsafe { new_type::<TransportObject<B>>(module, Some(&PyTuple::new(py, bases)?), &slots)? };
    module.add(kind.name()?, &kind)?;
    place.store(kind.clone().into_ptr().cast(), Ordering::Release);
    Ok(kind)
}

// ---- what all transports have ------------------------------------------------------------------------------------

/// The attribute `_loop` of asyncio's transports.
pub(crate) fn get_loop<B: Body>(this: This<'_, TransportObject<B>>) -> ObjectResult<'_> {
    Ok(this.event_loop.get(this.py()).unwrap_or_else(|| none(this.py())))
}

/// The attribute `_protocol` of asyncio's transports.
pub(crate) fn protocol<B: Body>(this: This<'_, TransportObject<B>>) -> ObjectResult<'_> {
    Ok(this.calls().get(this.py()).unwrap_or_else(|| none(this.py())))
}

/// `transport.get_protocol()`.
pub(crate) fn get_protocol<'py, B: Body>(
    this: This<'py, TransportObject<B>>,
    _: Args<'_, 'py>,
) -> ObjectResult<'py> {
    protocol(this)
}

/// Converts a number to a Python int, for an attribute.
pub(crate) fn number(py: Python<'_>, value: impl TryInto<i64>) -> ObjectResult<'_> {
    let value = value.try_into().unwrap_or(i64::MAX);
    Ok(value.into_pyobject(py)?.into_any())
}

/// The native side of a transport object.
///
/// # Safety
/// `transport` was made by `make` with a body of this type.
pub(crate) unsafe fn object_of<'py, B: Body>(transport: &Bound<'py, PyAny>) -> This<'py, TransportObject<B>> {
    // SAFETY: the caller guarantees the layout, and its Bound keeps the object alive.
    unsafe { This::new(transport.py(), transport.as_ptr()) }
}

/// The dict in the slot `_extra`. Makes the dict if the slot is empty.
pub(crate) fn extra_dict<B: Body>(this: This<'_, TransportObject<B>>) -> PyResult<Bound<'_, PyDict>> {
    let py = this.py();
    if let Some(extra) = this.extra.get(py) {
        return Ok(extra.cast_into::<PyDict>()?);
    }
    let extra = new_objects::dict(py)?;
    this.extra.set(extra.clone().into_any());
    Ok(extra)
}

/// Puts `extra` into the slot `_extra`.
pub(crate) fn set_extra<B: Body>(this: This<'_, TransportObject<B>>, extra: Bound<'_, PyDict>) {
    this.extra.set(extra.into_any());
}

/// Takes the Future out of `waiter` and sets its result to None. Does nothing if there is no Future or if it is done
/// already.
pub(crate) fn wake(py: Python<'_>, waiter: &ObjectCell) -> PyResult<()> {
    let Some(waiter) = waiter.take(py) else {
        return Ok(());
    };
    let is_done = waiter.call_method0(names(py).done.bind(py).cast_into::<PyString>()?)?;
    if !is_done.is_truthy()? {
        let set_result = names(py).set_result.bind(py).cast_into::<PyString>()?;
        waiter.call_method1(set_result, (py.None().into_bound(py),))?;
    }
    Ok(())
}

/// Passes a fault of `this` to the loop's exception handler, with the context keys `transport` and `protocol`. Err is
/// only for exceptions that must leave the loop.
#[cold]
pub(crate) fn report<B: Body>(
    this: This<'_, TransportObject<B>>,
    error: PyErr,
    message: &str,
) -> PyResult<()> {
    let py = this.py();
    let Some(event_loop) = this.event_loop.get(py) else {
        return Ok(());
    };
    let own = this.to_bound();
    let mut details = vec![("transport", &own)];
    let protocol = this.calls().get(py);
    if let Some(protocol) = &protocol {
        details.push(("protocol", protocol));
    }
    errors::report(&event_loop, message, error, &details)
}

/// Raises RuntimeError in debug mode if another thread runs the loop. Called by methods that schedule
/// `connection_lost`.
pub(crate) fn check_thread<B: Body>(this: This<'_, TransportObject<B>>) -> PyResult<()> {
    if !this.reactor().probe.is_debug() {
        return Ok(());
    }
    match this.event_loop.get(this.py()) {
        Some(event_loop) => LoopObject::of(&event_loop).check_thread(),
        None => Ok(()),
    }
}

/// Calls `function`, which ends the transport. `name` is the name of the method that the caller implements. Without a
/// GIL, any thread may call `close()`: an `asyncio.StreamWriter` closes its transport when it is freed, which can
/// happen in any thread. So if the loop runs in another thread, the method is scheduled there; in debug mode,
/// RuntimeError is raised instead.
pub(crate) fn end<'py, B: Body>(
    this: This<'py, TransportObject<B>>,
    name: &str,
    function: impl FnOnce() -> PyResult<()>,
) -> ObjectResult<'py> {
    let py = this.py();
    match this.event_loop.get(py) {
        Some(event_loop) if LoopObject::of(&event_loop).is_owned_elsewhere() => {
            check_thread(this)?; // in debug mode, a call from another thread is an error
            let method = this.to_bound().getattr(name)?;
            event_loop.call_method1("call_soon_threadsafe", (method,))?;
        }
        _ => TransportObject::<B>::with_access(this, function)?,
    }
    Ok(none(py))
}

/// Logs a change of the transport's state in debug mode, or if I/O events are logged. `format` is the message, with
/// `%r` for the transport.
pub(crate) fn log_change<B: Body>(this: This<'_, TransportObject<B>>, format: &str) -> PyResult<()> {
    this.reactor().probe.log_event(this.py(), Mode::LOG_IO, || {
        (this.to_bound(), format.replace("%r ", ""))
    });
    if !this.reactor().probe.is_debug() {
        return Ok(());
    }
    log::debug(this.py(), format, &[this.to_bound()])
}

/// Logs a fault with its traceback, in debug mode only. This is for faults that the loop's exception handler does not
/// get.
pub(crate) fn log_fault<B: Body>(
    this: This<'_, TransportObject<B>>,
    message: &str,
    exception: &Bound<'_, PyAny>,
) -> PyResult<()> {
    if !this.reactor().probe.is_debug() {
        return Ok(());
    }
    let py = this.py();
    let args = [this.to_bound(), message.into_pyobject(py)?.into_any()];
    log::debug_exception(py, "%r: %s", &args, exception)
}
