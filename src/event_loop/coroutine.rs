//! Coroutines written in native code: the object, its states, and the coroutine protocol. Each kind of coroutine says
//! in its `Steps` what it does.
//!
//! ```text
//!   [ created ] --- first step: an attempt ---------------------> done at once: [ closed ]
//!                          | it must wait
//!                          v
//!                     [ suspended ] <--- yields a waiter ---.
//!                          | step after the wake-up         | it must wait
//!                          '------- another attempt --------+---> done: [ closed ]
//!   throw() and close() lead from any state to [ closed ], and end the wait
//! ```
//! `collections.abc.Coroutine` recognizes the objects by their methods. A task steps one through `am_send`, and an
//! `await` through `tp_iternext`. They have no frame. They belong to the loop's thread.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use pyo3::exceptions::{
    PyImportError, PyRuntimeError, PyRuntimeWarning, PyStopIteration, PyTypeError, PyValueError,
};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::pyloop::LoopObject;
use super::waiter;
use crate::binding::args::Args;
use crate::binding::deallocation::free_memory;
use crate::binding::freelist::Freelist;
use crate::binding::lengths::ordinary_len;
use crate::binding::native_type::{NativeType, This, new_type, represent, slot, traverse_cells};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getset_slot, getter, methods_slot, row, threadsafe_getter};
use crate::binding::{errors, new_objects};

/// How an attempt ended.
pub(crate) enum Attempt<'py> {
    /// With this result of the coroutine.
    Done(Bound<'py, PyAny>),
    /// The coroutine must wait, and yields this waiter.
    Wait(Bound<'py, PyAny>),
    /// The coroutine drives another coroutine, which has yielded this, and passes it on.
    Forward(Bound<'py, PyAny>),
}

/// What the coroutines of one room do, and the fields that they add to the object. All zeroes must be a valid value.
pub(crate) trait Steps: Sized + 'static {
    /// Fully qualified name of the type.
    const NAME: &'static CStr;
    const DOC: &'static CStr;
    /// Tells the coroutines of the room apart. Must have a size of one byte: see `CoroutineObject`.
    type Kind: Copy + 'static;

    /// Where the type and its freelist are stored.
    fn place() -> &'static Place;

    /// The names of the class and of the method that returned the coroutine.
    fn names(kind: Self::Kind) -> (&'static str, &'static str);

    /// Makes one attempt. `value` is the value that was sent to the coroutine, borrowed for the call.
    fn attempt(this: Coroutine<'_, Self>, value: *mut ffi::PyObject) -> PyResult<Attempt<'_>>;

    /// Prepares the added fields for a new coroutine, whose memory may be that of one that has ended.
    fn reset(&self) {}

    /// Drops what the added fields hold, except cells, when the coroutine has ended.
    fn release(_this: Coroutine<'_, Self>) {}

    /// Throws into the coroutine that this one drives, if it drives one.
    fn throw_inside<'py>(
        _this: Coroutine<'py, Self>,
        _error: &Bound<'py, PyAny>,
    ) -> Option<PyResult<Bound<'py, PyAny>>> {
        None
    }

    /// Closes the coroutine that this one drives, if it drives one.
    fn close_inside(_this: Coroutine<'_, Self>) -> PyResult<()> {
        Ok(())
    }

    /// The cells among the added fields.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        []
    }

    /// As `NativeType::traverse_rest`.
    ///
    /// # Safety
    /// Only the collector calls this. Nothing in it may run Python code.
    unsafe fn traverse_rest(&self, _visit: ffi::visitproc, _arg: *mut c_void) -> c_int {
        0
    }

    /// As `NativeType::with_access`.
    fn with_access<R>(this: Coroutine<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

/// The type of one room's coroutines, and the freelist of its objects.
pub(crate) struct Place {
    kind: AtomicPtr<ffi::PyTypeObject>,
    free: Freelist,
}

impl Place {
    pub(crate) const fn new() -> Self {
        Self {
            kind: AtomicPtr::new(ptr::null_mut()),
            free: Freelist::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Created,
    Running,
    Suspended,
    Closed,
}

/// The offset of `frame_state` matters: `python -m asyncio ps` reads a task's coroutine from outside of the process,
/// and takes every coroutine for one of Python code, which has the state of its frame in this byte. So the byte must
/// say "cleared": otherwise the tool would go on to read a frame, and there is none.
#[repr(C)]
pub(crate) struct CoroutineObject<S: Steps> {
    base: ffi::PyObject,
    pub(crate) event_loop: ObjectCell,
    /// The object whose method was called.
    pub(crate) subject: ObjectCell,
    /// The first argument.
    pub(crate) first: ObjectCell,
    /// The second argument, or an object that the coroutine keeps between its steps.
    pub(crate) second: ObjectCell,
    /// The waiter that was yielded last, while the coroutine is suspended.
    waiter: ObjectCell,
    /// Where the coroutine was created, if the interpreter tracks that. Any thread may read the cell, because it does
    /// not change while anything refers to the coroutine.
    origin: ObjectCell,
    /// Never changes, so any thread may read it.
    pub(crate) kind: Cell<S::Kind>,
    state: Cell<State>,
    /// Whether the coroutine has been suspended at least once.
    pub(crate) has_waited: Cell<bool>,
    /// At the offset of a generator's `gi_frame_state`.
    frame_state: Cell<u8>,
    pub(crate) rest: S,
}

/// `FRAME_CLEARED` of the running version (`Include/internal/pycore_frame.h`), which the tools outside of the process
/// know.
fn cleared_frame(py: Python<'_>) -> u8 {
    if py.version_info() >= (3, 15) { 5 } else { 4 }
}

pub(crate) type Coroutine<'py, S> = This<'py, CoroutineObject<S>>;

/// The result of `cleared_frame`.
static CLEARED_FRAME: AtomicU8 = AtomicU8::new(0);

/// A new coroutine, on which no step has been taken yet.
#[inline]
pub(crate) fn new_coroutine<'py, S: Steps>(
    event_loop: Bound<'py, PyAny>,
    kind: S::Kind,
    subject: Option<Bound<'py, PyAny>>,
    first: Option<Bound<'py, PyAny>>,
    second: Option<Bound<'py, PyAny>>,
) -> ObjectResult<'py> {
    let py = event_loop.py();
    let origin = if LoopObject::is_loop(&event_loop) && LoopObject::of(&event_loop).reactor().is_debug() {
        origin_now(py)?
    } else {
        None
    };
    let place = S::place();
    // SAFETY: attached; the type is made by `register` for this layout. The object comes with its cells empty.
    unsafe {
        let object =
            Bound::from_owned_ptr_or_err(py, place.free.take_or_alloc(place.kind.load(Ordering::Relaxed)))?;
        let made = &*object.as_ptr().cast::<CoroutineObject<S>>();
        let pointer = |value: Option<Bound<'py, PyAny>>| value.map_or(ptr::null_mut(), Bound::into_ptr);
        made.event_loop.put_new(event_loop.into_ptr());
        made.subject.put_new(pointer(subject));
        made.first.put_new(pointer(first));
        made.second.put_new(pointer(second));
        made.origin.put_new(pointer(origin));
        made.rest.reset();
        made.kind.set(kind);
        made.state.set(State::Created);
        made.has_waited.set(false);
        made.frame_state.set(CLEARED_FRAME.load(Ordering::Relaxed));
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

impl<S: Steps> CoroutineObject<S> {
    /// The first argument as a number of bytes, as `ordinary_len` understands it.
    #[inline]
    pub(crate) fn first_as_len(&self) -> Option<usize> {
        // SAFETY: null, or an object that the coroutine keeps alive.
        unsafe { ordinary_len(self.first.as_ptr()) }
    }

    /// The loop, for a coroutine whose `event_loop` is a `LoopObject`.
    pub(crate) fn loop_object(&self) -> &LoopObject {
        // SAFETY: the coroutine holds a reference to its loop from its creation to its deallocation.
        unsafe { &*self.event_loop.as_ptr().cast::<LoopObject>() }
    }
}

/// Closes the coroutine and drops the objects that it worked with.
fn finish<S: Steps>(this: Coroutine<'_, S>) {
    let py = this.py();
    this.state.set(State::Closed);
    S::release(this);
    for cell in [&this.subject, &this.first, &this.second] {
        drop(cell.take(py));
    }
    for cell in this.rest.cells() {
        drop(cell.take(py));
    }
}

#[inline]
fn step<S: Steps>(this: Coroutine<'_, S>, value: *mut ffi::PyObject) -> PyResult<Step<'_>> {
    match this.state.get() {
        State::Created => {}
        State::Suspended => resume(this)?,
        State::Running => return Err(PyValueError::new_err("coroutine already executing")),
        State::Closed => return Err(PyRuntimeError::new_err("cannot reuse already awaited coroutine")),
    }
    this.state.set(State::Running);
    match errors::caught(|| S::attempt(this, value)) {
        Ok(Attempt::Done(value)) => {
            finish(this);
            Ok(Step::Return(value))
        }
        Ok(Attempt::Wait(waiter)) => {
            this.waiter.set(waiter.clone());
            Ok(suspended(this, waiter))
        }
        Ok(Attempt::Forward(yielded)) => Ok(suspended(this, yielded)),
        Err(error) => {
            finish(this);
            Err(raised(this.py(), error))
        }
    }
}

/// The exception that a coroutine raises after `error` was raised in it. `StopIteration` becomes a `RuntimeError`,
/// because it would be taken for the coroutine's result (PEP 479).
#[cold]
fn raised(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyStopIteration>(py) {
        return error;
    }
    let instead = PyRuntimeError::new_err("coroutine raised StopIteration");
    instead.set_context(py, Some(error.clone_ref(py)));
    instead.set_cause(py, Some(error));
    instead
}

fn suspended<'py, S: Steps>(this: Coroutine<'py, S>, yielded: Bound<'py, PyAny>) -> Step<'py> {
    this.has_waited.set(true);
    this.state.set(State::Suspended);
    Step::Yield(yielded)
}

/// Called for a step of a suspended coroutine: ends its wait. Raises the exception of the waiter, or `RuntimeError` if
/// the wait is not over, which happens if something other than a task drives the coroutine.
fn resume<S: Steps>(this: Coroutine<'_, S>) -> PyResult<()> {
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

/// Ends the coroutine in any state but running.
fn end<S: Steps>(this: Coroutine<'_, S>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        waiter::leave(waiter::waiter_of(&waiter));
    }
    finish(this);
}

/// Ends a coroutine to which nothing refers any more. Any thread may free or collect it.
fn end_unreferenced<S: Steps>(this: Coroutine<'_, S>) {
    if let Some(waiter) = this.waiter.take(this.py()) {
        // Fails if another thread runs the loop. The waiter then stays in the fd table until its next event, which has
        // no effect.
        let _ = S::with_access(this, || {
            waiter::leave(waiter::waiter_of(&waiter));
            Ok(())
        });
    }
    finish(this);
    drop(this.origin.take(this.py()));
}

/// The frames of the caller, as `cr_origin` shows them, if the interpreter tracks the origin of coroutines.
fn origin_now(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let sys = py.import("sys")?;
    let depth: usize = sys
        .call_method0("get_coroutine_origin_tracking_depth")?
        .extract()?;
    if depth == 0 {
        return Ok(None);
    }
    let mut frames = Vec::with_capacity(depth);
    let mut frame = sys.call_method1("_getframe", (0,))?;
    while !frame.is_none() && frames.len() < depth {
        let code = frame.getattr("f_code")?;
        frames.push((
            code.getattr("co_filename")?,
            frame.getattr("f_lineno")?,
            code.getattr("co_name")?,
        ));
        frame = frame.getattr("f_back")?;
    }
    Ok(Some(PyTuple::new(py, frames)?.into_any()))
}

// ---- the coroutine protocol --------------------------------------------------------------------------------------

/// Raises TypeError for a value that is sent before the first step.
fn check_sent<S: Steps>(this: Coroutine<'_, S>, value: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: only the address of None is compared.
    if this.state.get() == State::Created && value != unsafe { ffi::Py_None() } {
        return Err(PyTypeError::new_err(
            "can't send non-None value to a just-started coroutine",
        ));
    }
    Ok(())
}

unsafe extern "C" fn am_send<S: Steps>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    result: *mut *mut ffi::PyObject,
) -> ffi::PySendResult {
    // SAFETY: CPython calls am_send attached with an object of this type and a place for the result.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        let (object, outcome) =
            errors::at_boundary(py, (ptr::null_mut(), ffi::PySendResult::PYGEN_ERROR), || {
                let made = CoroutineObject::<S>::with_access(this, || {
                    check_sent(this, value)?;
                    step(this, value)
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

unsafe extern "C" fn am_await<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_await attached with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Coroutine<'_, S> = This::new(py, slf);
            CoroutineObject::<S>::with_access(this, || match this.state.get() {
                State::Suspended | State::Running => {
                    Err(PyRuntimeError::new_err("coroutine is being awaited already"))
                }
                State::Created | State::Closed => Ok(ffi::Py_NewRef(slf)),
            })
        })
    }
}

unsafe extern "C" fn iternext<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_iternext attached with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        errors::at_boundary(py, ptr::null_mut(), || {
            match CoroutineObject::<S>::with_access(this, || step(this, ffi::Py_None()))? {
                Step::Yield(waiter) => Ok(waiter.into_ptr()),
                // An iterator that ends without an exception has returned None.
                Step::Return(value) if value.is_none() => Ok(ptr::null_mut()),
                // Passed directly, a tuple would be taken for the exception's arguments.
                Step::Return(value) if value.is_instance_of::<PyTuple>() => Err(stop(value)),
                Step::Return(value) => {
                    ffi::PyErr_SetObject(ffi::PyExc_StopIteration, value.as_ptr());
                    Ok(ptr::null_mut())
                }
            }
        })
    }
}

/// `StopIteration(value)`, with which an iterator returns a value.
fn stop(value: Bound<'_, PyAny>) -> PyErr {
    match new_objects::tuple(value.py(), [value].into_iter()) {
        Ok(args) => PyStopIteration::new_err(args.unbind()),
        Err(error) => error,
    }
}

fn send<'py, S: Steps>(this: Coroutine<'py, S>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let value = args.positional()[0];
    check_sent(this, value)?;
    match step(this, value)? {
        Step::Yield(waiter) => Ok(waiter),
        Step::Return(value) => Err(stop(value)),
    }
}

/// `throw(exception)` or `throw(type, value, traceback)`. A native coroutine catches nothing, so the exception comes
/// out again, unless a coroutine that this one drives catches it.
fn throw<'py, S: Steps>(this: Coroutine<'py, S>, args: Args<'_, 'py>) -> ObjectResult<'py> {
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
        State::Created | State::Suspended => throw_in(this, error),
    }
}

fn throw_in<'py, S: Steps>(this: Coroutine<'py, S>, error: Bound<'py, PyAny>) -> ObjectResult<'py> {
    let before = this.state.replace(State::Running);
    match S::throw_inside(this, &error) {
        Some(Ok(yielded)) => {
            this.state.set(State::Suspended);
            Ok(yielded)
        }
        Some(Err(error)) => {
            finish(this);
            Err(raised(this.py(), error))
        }
        None => {
            this.state.set(before);
            end(this);
            Err(raised(this.py(), PyErr::from_value(error)))
        }
    }
}

fn close<'py, S: Steps>(this: Coroutine<'py, S>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.state.get() == State::Running {
        return Err(PyValueError::new_err("coroutine already executing"));
    }
    let before = this.state.replace(State::Running);
    let closed = S::close_inside(this);
    this.state.set(before);
    end(this);
    closed.map_err(|error| raised(this.py(), error))?;
    Ok(none(this.py()))
}

/// The coroutine's name with its class, such as `Loop.sock_recv`.
fn long_name<S: Steps>(this: Coroutine<'_, S>) -> String {
    let (class, name) = S::names(this.kind.get());
    format!("{class}.{name}")
}

fn name<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(S::names(this.kind.get()).1.into_pyobject(this.py())?.into_any())
}

fn qualified_name<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(long_name(this).into_pyobject(this.py())?.into_any())
}

fn is_running<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.state.get() == State::Running))
}

fn is_suspended<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.state.get() == State::Suspended))
}

/// `cr_frame` and `cr_code`: None, because no Python code is behind the coroutine.
fn nothing<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(none(this.py()))
}

fn origin<S: Steps>(this: Coroutine<'_, S>) -> ObjectResult<'_> {
    Ok(this.origin.get(this.py()).unwrap_or_else(|| none(this.py())))
}

unsafe extern "C" fn repr<S: Steps>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr attached with an object of this type.
    unsafe {
        represent::<CoroutineObject<S>>(slf, |this| {
            Ok(format!("<coroutine object {} at {slf:p}>", long_name(this)))
        })
    }
}

// ---- the object --------------------------------------------------------------------------------------------------

impl<S: Steps> NativeType for CoroutineObject<S> {
    const NAME: &'static CStr = S::NAME;
    const DOC: &'static CStr = S::DOC;
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc::<S>;

    /// A coroutine that has ended refers only to its loop, which counts the depth in its own deallocation, and to
    /// tuples of strings.
    #[inline]
    fn is_empty(&self) -> bool {
        self.state.get() == State::Closed && !self.waiter.is_set()
    }

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.subject,
            &self.first,
            &self.second,
            &self.waiter,
            &self.origin,
        ]
    }

    unsafe fn traverse_rest(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: visit and arg are the collector's.
        unsafe {
            let result = traverse_cells(self.rest.cells(), visit, arg);
            if result != 0 {
                return result;
            }
            self.rest.traverse_rest(visit, arg)
        }
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        S::with_access(this, body)
    }

    fn clear(this: This<'_, Self>) {
        end_unreferenced(this);
    }
}

/// Warns as CPython does for a coroutine of Python code. While the interpreter shuts down, nothing can be imported; the
/// warning then does not show where the coroutine was created.
fn warn_never_awaited<S: Steps>(this: Coroutine<'_, S>) -> PyResult<()> {
    let py = this.py();
    match py.import("warnings") {
        Ok(warnings) => warnings
            .call_method1("_warn_unawaited_coroutine", (this.to_bound(),))
            .map(drop),
        Err(error) if error.is_instance_of::<PyImportError>(py) => {
            let message = CString::new(format!("coroutine '{}' was never awaited", long_name(this)))?;
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
        }
        Err(error) => Err(error),
    }
}

/// Warns about a coroutine that was never awaited, as CPython does for coroutines of Python code.
unsafe extern "C" fn finalize<S: Steps>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls tp_finalize attached with an object of this type; the current exception is kept aside as
    // PEP 442 asks.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
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

unsafe extern "C" fn dealloc<S: Steps>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached with an unreferenced coroutine. The finalizer may revive one that was never
    // started. Otherwise its cells are emptied and the memory goes to the freelist or back to the allocator.
    unsafe {
        let py = Python::assume_attached();
        let this: Coroutine<'_, S> = This::new(py, slf);
        if this.state.get() == State::Created && ffi::PyObject_CallFinalizerFromDealloc(slf) < 0 {
            return;
        }
        ffi::PyObject_GC_UnTrack(slf.cast());
        end_unreferenced(this);
        drop(this.event_loop.take(py));
        if ffi::PyObject_GC_IsFinalized(slf) == 0 {
            S::place().free.give(slf);
        } else {
            // The collector's "finalized" mark stays with the memory, so a new coroutine in it would never be
            // finalized.
            free_memory(slf);
        }
    }
}

/// The methods of a coroutine type.
fn methods<S: Steps>() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            <S: Steps> send::<S>,
            "send(value, /)",
            "Take a step; at the end, StopIteration has the result."
        ),
        row!(
            method,
            <S: Steps> throw::<S>,
            "throw(type, value=None, traceback=None, /)",
            "End the coroutine with an exception."
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

/// Creates the type.
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
