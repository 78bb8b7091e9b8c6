//! The coroutine of one socket operation: its object, its states, and the coroutine protocol.
//!
//! ```text
//!   [ created ] --- first step: the checks, then the system call ---> done at once: [ closed ]
//!                          | it would block
//!                          v
//!                     [ suspended ] <--- yields a waiter ---.
//!                          | step after the event            | it would block
//!                          '------- the system call again ---+---> done: [ closed ]
//!   throw() and close() from any state end in [ closed ], and take the waiter out of the fd table
//! ```
//! A native type that counts as a coroutine: `collections.abc.Coroutine` knows it by its methods, tasks
//! step it through `am_send`, `await` through `tp_iternext`. It has no frame. Belongs to the loop's thread.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use pyo3::exceptions::{
    PyImportError, PyRuntimeError, PyRuntimeWarning, PyStopIteration, PyTypeError, PyValueError,
};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::attempts::{self, Attempt, OperationKind};
use super::plain_socket;
use super::waiter;
use crate::binding::deallocation::free_memory;
use crate::binding::freelist::Freelist;
use crate::binding::native_type::{
    Args, NativeType, This, bool_object, getset_slot, getter, method, methods_slot, new_type, none,
    represent, slot, threadsafe_getter,
};
use crate::binding::object_cell::ObjectCell;
use crate::binding::{base_socket, errors};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Direction;
use crate::event_loop::watching;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Created,
    Running,
    Suspended,
    Closed,
}

/// The order of the first fields matters: `python -m asyncio ps` reads the coroutine of a task from outside, and takes
/// any for one of Python code. Where it looks for the state of that one's frame there must be "cleared", or it goes on
/// to read a frame.
#[repr(C)]
pub(super) struct OperationObject {
    base: ffi::PyObject,
    pub(super) event_loop: ObjectCell,
    pub(super) socket: ObjectCell,
    /// The argument: a number of bytes, a buffer, or data.
    pub(super) first: ObjectCell,
    /// The further argument, or what an operation keeps between its steps.
    pub(super) second: ObjectCell,
    /// What was yielded last, while suspended.
    waiter: ObjectCell,
    /// Where the coroutine was made, if the interpreter keeps that. Any thread may read it: it stays until nobody can.
    origin: ObjectCell,
    /// Never changes, so that any thread may read it.
    pub(super) kind: Cell<OperationKind>,
    state: Cell<State>,
    /// Whether it has waited: the checks of the first step are done.
    pub(super) has_waited: Cell<bool>,
    /// The byte that is a generator's `gi_frame_state`.
    frame_state: Cell<u8>,
    /// The exported buffer of data that waits to be sent; null if there is none.
    pub(super) view: Cell<*mut ffi::Py_buffer>,
    pub(super) sent: Cell<usize>,
}

/// `FRAME_CLEARED` of the running version (`Include/internal/pycore_frame.h`); what is read from outside knows it.
fn cleared_frame(py: Python<'_>) -> u8 {
    if py.version_info() >= (3, 15) { 5 } else { 4 }
}

pub(super) type Operation<'py> = This<'py, OperationObject>;
type Object<'py> = PyResult<Bound<'py, PyAny>>;

static OPERATION_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// What `cleared_frame` has found.
static CLEARED_FRAME: AtomicU8 = AtomicU8::new(0);
static FREE: Freelist = Freelist::new();

/// The coroutine of an operation that nothing has been done for yet.
pub(super) fn new_operation<'py>(
    event_loop: This<'py, LoopObject>,
    kind: OperationKind,
    socket: Option<Bound<'py, PyAny>>,
    first: Option<Bound<'py, PyAny>>,
    second: Option<Bound<'py, PyAny>>,
) -> Object<'py> {
    let py = event_loop.py();
    let origin = if event_loop.reactor().is_debug() {
        attempts::origin(py)?
    } else {
        None
    };
    // SAFETY: attached; the type is made by `register` for this layout. The object comes with its cells empty.
    unsafe {
        let object =
            Bound::from_owned_ptr_or_err(py, FREE.take_or_alloc(OPERATION_TYPE.load(Ordering::Relaxed)))?;
        let operation = &*object.as_ptr().cast::<OperationObject>();
        operation.event_loop.put_new(event_loop.to_bound().into_ptr());
        operation
            .socket
            .put_new(socket.map_or(ptr::null_mut(), Bound::into_ptr));
        operation
            .first
            .put_new(first.map_or(ptr::null_mut(), Bound::into_ptr));
        operation
            .second
            .put_new(second.map_or(ptr::null_mut(), Bound::into_ptr));
        operation
            .origin
            .put_new(origin.map_or(ptr::null_mut(), Bound::into_ptr));
        operation.sent.set(0);
        operation.kind.set(kind);
        operation.state.set(State::Created);
        operation.has_waited.set(false);
        operation.frame_state.set(CLEARED_FRAME.load(Ordering::Relaxed));
        if !Freelist::IS_TRACKED {
            ffi::PyObject_GC_Track(object.as_ptr().cast());
        }
        Ok(object)
    }
}

/// How a step ended.
enum Step<'py> {
    Yield(Bound<'py, PyAny>),
    Return(Bound<'py, PyAny>),
}

impl OperationObject {
    pub(super) fn loop_object(&self) -> &LoopObject {
        // SAFETY: the operation holds a reference to its loop from its creation to its deallocation.
        unsafe { &*self.event_loop.as_ptr().cast::<LoopObject>() }
    }
}

/// Drops what the operation worked with.
fn finish(this: Operation<'_>) {
    let py = this.py();
    this.state.set(State::Closed);
    attempts::release_view(&this);
    for cell in [&this.socket, &this.first, &this.second] {
        drop(cell.take(py));
    }
}

#[inline]
fn step(this: Operation<'_>) -> PyResult<Step<'_>> {
    match this.state.get() {
        State::Created => {}
        State::Suspended => resume(this)?,
        State::Running => return Err(PyValueError::new_err("coroutine already executing")),
        State::Closed => return Err(PyRuntimeError::new_err("cannot reuse already awaited coroutine")),
    }
    this.state.set(State::Running);
    match attempts::attempt(this) {
        Ok(Attempt::Done(value)) => {
            finish(this);
            Ok(Step::Return(value))
        }
        Ok(Attempt::Blocked(direction)) => suspend(this, direction, true),
        Ok(Attempt::Again(direction)) => suspend(this, direction, false),
        Err(error) => {
            finish(this);
            Err(error)
        }
    }
}

/// The wait is over, or something other than its task drives the coroutine.
fn resume(this: Operation<'_>) -> PyResult<()> {
    let Some(yielded) = this.waiter.get(this.py()) else {
        return Ok(());
    };
    let waiter = waiter::waiter_of(&yielded);
    if waiter.is_pending() {
        return Err(PyRuntimeError::new_err("await wasn't used with future"));
    }
    drop(this.waiter.take(this.py()));
    waiter::check_outcome(waiter).inspect_err(|_| finish(this))
}

/// Yields a waiter: for the event, or for the next iteration if the operation only lets others run.
fn suspend(this: Operation<'_>, direction: Direction, is_for_event: bool) -> PyResult<Step<'_>> {
    match new_wait(this, direction, is_for_event) {
        Ok(waiter) => {
            this.has_waited.set(true);
            this.waiter.set(waiter.clone());
            this.state.set(State::Suspended);
            Ok(Step::Yield(waiter))
        }
        Err(error) => {
            finish(this);
            Err(error)
        }
    }
}

fn new_wait(this: Operation<'_>, direction: Direction, is_for_event: bool) -> Object<'_> {
    let py = this.py();
    let (Some(event_loop), Some(socket)) = (this.event_loop.get(py), this.socket.get(py)) else {
        return Err(PyRuntimeError::new_err("the operation has no socket any more"));
    };
    let owner = this.loop_object();
    owner.reactor().check_closed()?;
    let mut fd = -1;
    if plain_socket::is_plain(&socket) {
        fd = base_socket::descriptor(&socket)?;
    }
    if fd < 0 {
        // The general function raises the right error for a closed socket.
        fd = watching::descriptor(&socket)?;
    }
    watching::refuse_transport(owner, py, fd)?;
    let waiter = waiter::new_waiter(&event_loop, fd, direction)?;
    if !is_for_event {
        waiter::go_on(waiter::waiter_of(&waiter));
        return Ok(waiter);
    }
    let entry = waiter::entry(&waiter);
    let is_anew = this.kind.get() == OperationKind::Writable;
    match owner.reactor().wait_once(&socket, fd, direction, entry, is_anew) {
        Ok(replaced) => {
            if let Some(replaced) = replaced {
                replaced.end(py);
            }
            Ok(waiter)
        }
        Err(error) => {
            entry.release(py);
            waiter::go_on(waiter::waiter_of(&waiter));
            Err(errors::os_error(&error))
        }
    }
}

/// Ends the operation wherever it is.
fn end(this: Operation<'_>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        waiter::leave(waiter::waiter_of(&waiter));
    }
    finish(this);
}

/// Ends an operation that nobody can use any more. Any thread may free it, or collect it.
fn end_unreferenced(this: Operation<'_>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        // Where another thread runs the loop the waiter stays: the next event finds that nothing waits.
        let _ = OperationObject::with_access(this, || {
            waiter::leave(waiter::waiter_of(&waiter));
            Ok(())
        });
    }
    finish(this);
    drop(this.origin.take(this.py()));
}

// ---- the coroutine protocol --------------------------------------------------------------------------------------

/// TypeError for a value that is sent before the first step.
fn check_sent(this: Operation<'_>, value: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: only the address of None is compared.
    if this.state.get() == State::Created && value != unsafe { ffi::Py_None() } {
        return Err(PyTypeError::new_err(
            "can't send non-None value to a just-started coroutine",
        ));
    }
    Ok(())
}

unsafe extern "C" fn am_send(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    result: *mut *mut ffi::PyObject,
) -> ffi::PySendResult {
    // SAFETY: CPython calls am_send attached with an object of this type and a place for the result.
    unsafe {
        let py = Python::assume_attached();
        let this: Operation<'_> = This::new(py, slf);
        let (object, outcome) =
            errors::at_boundary(py, (ptr::null_mut(), ffi::PySendResult::PYGEN_ERROR), || {
                let made = OperationObject::with_access(this, || {
                    check_sent(this, value)?;
                    step(this)
                });
                Ok(match made? {
                    Step::Yield(waiter) => (waiter.into_ptr(), ffi::PySendResult::PYGEN_NEXT),
                    Step::Return(value) => (value.into_ptr(), ffi::PySendResult::PYGEN_RETURN),
                })
            });
        *result = object;
        outcome
    }
}

unsafe extern "C" fn am_await(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_await attached with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Operation<'_> = This::new(py, slf);
            OperationObject::with_access(this, || match this.state.get() {
                State::Suspended | State::Running => {
                    Err(PyRuntimeError::new_err("coroutine is being awaited already"))
                }
                State::Created | State::Closed => Ok(ffi::Py_NewRef(slf)),
            })
        })
    }
}

unsafe extern "C" fn iternext(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_iternext attached with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        let this: Operation<'_> = This::new(py, slf);
        errors::at_boundary(py, ptr::null_mut(), || {
            match OperationObject::with_access(this, || step(this))? {
                Step::Yield(waiter) => Ok(waiter.into_ptr()),
                // The end of an iterator without an exception stands for None.
                Step::Return(value) if value.is_none() => Ok(ptr::null_mut()),
                // A tuple would become the exception's arguments.
                Step::Return(value) if value.is_instance_of::<PyTuple>() => Err(stop(value)),
                Step::Return(value) => {
                    ffi::PyErr_SetObject(ffi::PyExc_StopIteration, value.as_ptr());
                    Ok(ptr::null_mut())
                }
            }
        })
    }
}

/// `StopIteration(value)`, the way in which an iterator returns.
fn stop(value: Bound<'_, PyAny>) -> PyErr {
    PyStopIteration::new_err((value.unbind(),))
}

fn send<'py>(this: Operation<'py>, args: Args<'_, 'py>) -> Object<'py> {
    check_sent(this, args.positional()[0])?;
    match step(this)? {
        Step::Yield(waiter) => Ok(waiter),
        Step::Return(value) => Err(stop(value)),
    }
}

/// `throw(exception)` or `throw(type, value, traceback)`: nothing is caught here, so it comes out again.
fn throw<'py>(this: Operation<'py>, args: Args<'_, 'py>) -> Object<'py> {
    let given = |index: usize| args.get(index).filter(|value| !value.is_none());
    let Some(kind) = args.get(0) else {
        return Ok(none(this.py()));
    };
    let value = given(1);
    let error = match (kind.is_instance_of::<pyo3::types::PyType>(), value) {
        (false, Some(_)) => {
            return Err(PyTypeError::new_err(
                "instance exception may not have a separate value",
            ));
        }
        (true, Some(value)) if !value.is_instance(&kind)? => kind.call1((value,))?,
        (true, None) => kind.call0()?,
        (_, Some(value)) => value,
        (false, None) => kind,
    };
    if let Some(traceback) = given(2) {
        error.setattr("__traceback__", traceback)?;
    }
    match this.state.get() {
        State::Running => Err(PyValueError::new_err("coroutine already executing")),
        State::Closed => Err(PyRuntimeError::new_err("cannot reuse already awaited coroutine")),
        State::Created | State::Suspended => {
            end(this);
            Err(PyErr::from_value(error))
        }
    }
}

fn close<'py>(this: Operation<'py>, _: Args<'_, 'py>) -> Object<'py> {
    if this.state.get() == State::Running {
        return Err(PyValueError::new_err("coroutine already executing"));
    }
    end(this);
    Ok(none(this.py()))
}

fn name(this: Operation<'_>) -> Object<'_> {
    Ok(this.kind.get().name().into_pyobject(this.py())?.into_any())
}

fn qualified_name(this: Operation<'_>) -> Object<'_> {
    let name = format!("Loop.{}", this.kind.get().name());
    Ok(name.into_pyobject(this.py())?.into_any())
}

fn is_running(this: Operation<'_>) -> Object<'_> {
    Ok(bool_object(this.py(), this.state.get() == State::Running))
}

fn is_suspended(this: Operation<'_>) -> Object<'_> {
    Ok(bool_object(this.py(), this.state.get() == State::Suspended))
}

/// `cr_frame` and `cr_code`: there is no Python code behind it.
fn nothing(this: Operation<'_>) -> Object<'_> {
    Ok(none(this.py()))
}

fn origin(this: Operation<'_>) -> Object<'_> {
    Ok(this.origin.get(this.py()).unwrap_or_else(|| none(this.py())))
}

unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr attached with an object of this type.
    unsafe {
        represent::<OperationObject>(slf, |this| {
            let name = this.kind.get().name();
            Ok(format!("<coroutine object Loop.{name} at {slf:p}>"))
        })
    }
}

// ---- the object --------------------------------------------------------------------------------------------------

impl NativeType for OperationObject {
    const NAME: &'static CStr = c"grapeshot._core._SocketOperation";
    const DOC: &'static CStr = c"The coroutine of one sock_* call.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc;

    /// One that has ended holds its loop, whose own deallocation counts the depth, and tuples of strings.
    #[inline]
    fn is_empty(&self) -> bool {
        self.state.get() == State::Closed && !self.waiter.is_set()
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.socket,
            &self.first,
            &self.second,
            &self.waiter,
            &self.origin,
        ]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's; the view holds a reference of its own to its exporter.
        unsafe { attempts::traverse_view(self, visit, arg) }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }

    fn clear(this: This<'_, Self>) {
        end_unreferenced(this);
    }
}

/// Warns as CPython does for a coroutine of Python code. At the end of the interpreter nothing can be imported, and the
/// warning does not show where the coroutine was made.
fn warn_never_awaited(this: Operation<'_>) -> PyResult<()> {
    let py = this.py();
    match py.import("warnings") {
        Ok(warnings) => warnings
            .call_method1("_warn_unawaited_coroutine", (this.to_bound(),))
            .map(drop),
        Err(error) if error.is_instance_of::<PyImportError>(py) => {
            let name = this.kind.get().name();
            let message = CString::new(format!("coroutine 'Loop.{name}' was never awaited"))?;
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
        }
        Err(error) => Err(error),
    }
}

/// A coroutine that was never awaited causes a warning, as one of Python code does.
unsafe extern "C" fn finalize(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize attached with an object of this type; the current exception is kept aside as
    // PEP 442 asks.
    unsafe {
        let py = Python::assume_attached();
        let this: Operation<'_> = This::new(py, slf);
        if this.state.get() != State::Created {
            return;
        }
        let pending = PyErr::take(py);
        errors::at_boundary(py, (), || {
            if let Err(error) = warn_never_awaited(this) {
                error.write_unraisable(py, Some(&this.to_bound()));
            }
            Ok(())
        });
        if let Some(pending) = pending {
            pending.restore(py);
        }
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached with an unreferenced operation; the finalizer may revive one that was never
    // started, otherwise its cells are emptied and the memory goes to the freelist or back to the allocator.
    unsafe {
        let py = Python::assume_attached();
        let this: Operation<'_> = This::new(py, slf);
        if this.state.get() == State::Created && ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        ffi::PyObject_GC_UnTrack(slf.cast());
        end_unreferenced(this);
        drop(this.event_loop.take(py));
        if ffi::PyObject_GC_IsFinalized(slf) == 0 {
            FREE.give(slf);
        } else {
            // The collector's mark stays with the memory: another operation in it would never be finalized.
            free_memory(slf);
        }
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    CLEARED_FRAME.store(cleared_frame(module.py()), Ordering::Relaxed);
    let methods = vec![
        method!(
            OperationObject,
            send,
            "send(value, /)",
            "Go on; StopIteration holds the result."
        ),
        method!(
            OperationObject,
            throw,
            "throw(type, value=None, traceback=None, /)",
            "End the operation with an exception."
        ),
        method!(OperationObject, close, "close()", "End the operation."),
    ];
    let getters = vec![
        threadsafe_getter!(OperationObject, c"__name__", name, c"The loop's method."),
        threadsafe_getter!(
            OperationObject,
            c"__qualname__",
            qualified_name,
            c"The loop's method."
        ),
        getter!(
            OperationObject,
            c"cr_running",
            is_running,
            c"True inside of a step."
        ),
        getter!(
            OperationObject,
            c"cr_suspended",
            is_suspended,
            c"True while it waits."
        ),
        threadsafe_getter!(
            OperationObject,
            c"cr_frame",
            nothing,
            c"None: no Python code runs."
        ),
        threadsafe_getter!(
            OperationObject,
            c"cr_code",
            nothing,
            c"None: no Python code runs."
        ),
        threadsafe_getter!(
            OperationObject,
            c"cr_origin",
            origin,
            c"Where it was made, or None."
        ),
    ];
    // SAFETY: the functions are those of this layout, the tables are leaked.
    let kind = unsafe {
        new_type::<OperationObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_finalize, finalize as *mut c_void),
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                slot(ffi::Py_tp_iternext, iternext as *mut c_void),
                slot(ffi::Py_am_await, am_await as *mut c_void),
                slot(ffi::Py_am_send, am_send as *mut c_void),
                methods_slot(methods),
                getset_slot(getters),
            ],
        )?
    };
    OPERATION_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
