//! The object that a suspended native coroutine yields to its task. It has the part of `asyncio.Future`'s interface
//! that tasks use.
//!
//! ```text
//!   [ pending ] --- event, set_result() ------------> [ done ]       its callbacks are queued
//!      |     |'---- finish_now(), leave() ----------> [ done ]       no callback is queued
//!      |     '----- set_exception() ----------------> [ failed ]     its callbacks are queued
//!      '----------- cancel() -----------------------> [ cancelled ]  its callbacks are queued
//! ```
//! A finished waiter carries no data. It only tells the coroutine that another attempt is worth making, and the
//! coroutine makes that attempt when its task runs. So if a wait is cancelled, even after its event, no data has been
//! read and none is lost. A waiter for a descriptor is in the fd table exactly while it is pending. Waiters belong to
//! the loop's thread.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyBaseException, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use super::call_methods::context_keyword;
use super::pyloop::LoopObject;
use super::reactor::Direction;
use super::source::DeferredCall;
use crate::binding::args::Args;
use crate::binding::attributes::set_value;
use crate::binding::freelist::Freelist;
use crate::binding::native_type::{NativeType, This, new_type, represent, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{getset_slot, getter, methods_slot, row};

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum WaiterState {
    Pending,
    Done,
    Failed,
    Cancelled,
}

/// The value of `fd` in a waiter that does not wait for a descriptor.
const NO_FD: RawFd = -1;

#[repr(C)]
pub(crate) struct WaiterObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    callback: ObjectCell,
    context: ObjectCell,
    /// A list of (callback, context) pairs: the callbacks after the first one.
    more: ObjectCell,
    /// The message given to `cancel()`, or the exception given to `set_exception()`.
    message: ObjectCell,
    fd: Cell<RawFd>,
    direction: Cell<Direction>,
    state: Cell<WaiterState>,
    /// `_asyncio_future_blocking`, which tells a task that the waiter was yielded by `await`.
    is_blocking: Cell<bool>,
}

pub(crate) type Waiter<'py> = This<'py, WaiterObject>;

static WAITER_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static FREE: Freelist = Freelist::new();

/// A pending waiter without a descriptor. Native code ends its wait with `set_done`. `event_loop` must be a
/// `grapeshot._core.Loop`.
pub(crate) fn new_signal<'py>(event_loop: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    new_waiter(event_loop, NO_FD, Direction::Read)
}

/// A pending waiter for `fd`. `event_loop` must be a `grapeshot._core.Loop`.
pub(crate) fn new_waiter<'py>(
    event_loop: &Bound<'py, PyAny>,
    fd: RawFd,
    direction: Direction,
) -> PyResult<Bound<'py, PyAny>> {
    let py = event_loop.py();
    // SAFETY: attached; the type is made by `register` for this layout. The object comes with its cells empty.
    unsafe {
        let object =
            Bound::from_owned_ptr_or_err(py, FREE.take_or_alloc(WAITER_TYPE.load(Ordering::Relaxed)))?;
        let waiter = &*object.as_ptr().cast::<WaiterObject>();
        waiter.event_loop.put_new(event_loop.clone().into_ptr());
        waiter.fd.set(fd);
        waiter.direction.set(direction);
        waiter.state.set(WaiterState::Pending);
        waiter.is_blocking.set(true);
        if !Freelist::IS_TRACKED {
            ffi::PyObject_GC_Track(object.as_ptr().cast());
        }
        Ok(object)
    }
}

/// True for a waiter.
#[inline]
pub(crate) fn is_waiter(object: &Bound<'_, PyAny>) -> bool {
    object.get_type_ptr() == WAITER_TYPE.load(Ordering::Relaxed)
}

/// The native side of `object`, which must be a waiter.
pub(crate) fn waiter_of<'py>(object: &Bound<'py, PyAny>) -> Waiter<'py> {
    debug_assert!(is_waiter(object));
    // SAFETY: the object is a waiter (checked above in debug builds), and the caller keeps it alive while it uses the
    // result.
    unsafe { This::new(object.py(), object.as_ptr()) }
}

/// The fd table's entry for a waiter.
pub(crate) fn entry(waiter: &Bound<'_, PyAny>) -> DeferredCall {
    DeferredCall::new(waiter.clone(), wake)
}

/// Called when the descriptor is ready, and for `set_done_from_anywhere`.
unsafe fn wake(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: the function is always paired with a waiter. The fd table or the queue held a reference to it until now.
    finish(unsafe { This::new(py, object) }, WaiterState::Done)
}

/// Ends the wait without an event: the coroutine's task runs in the next iteration. Does nothing if the wait is over.
#[inline]
pub(crate) fn set_done(this: Waiter<'_>) -> PyResult<()> {
    leave_table(this);
    finish(this, WaiterState::Done)
}

/// `set_done` from any thread, for a waiter without a descriptor. False if its loop is closed.
pub(crate) fn set_done_from_anywhere(waiter: &Bound<'_, PyAny>) -> bool {
    let this = waiter_of(waiter);
    let event_loop = this.loop_object();
    if event_loop.reactor().is_closed() {
        return false;
    }
    if event_loop.is_owned_here() {
        return set_done(this).is_ok();
    }
    event_loop.reactor().defer_from_anywhere(waiter.clone(), wake);
    true
}

#[inline]
fn finish(this: Waiter<'_>, state: WaiterState) -> PyResult<()> {
    if !this.is_pending() {
        return Ok(());
    }
    this.state.set(state);
    schedule(this)
}

/// Takes a pending waiter out of the fd table.
#[inline]
fn leave_table(this: Waiter<'_>) {
    if this.is_pending() && this.fd.get() != NO_FD {
        let reactor = this.loop_object().reactor();
        reactor
            .descriptors
            .forget_waiter(this.fd.get(), this.direction.get(), this.as_ptr());
    }
}

impl WaiterObject {
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.state.get() == WaiterState::Pending
    }

    /// The loop, by the contract of `new_waiter`.
    fn loop_object(&self) -> &LoopObject {
        // SAFETY: the waiter holds a reference to its loop, whose layout `new_waiter`'s caller vouches for.
        unsafe { &*self.event_loop.as_ptr().cast::<LoopObject>() }
    }
}

/// Ends the wait of a coroutine that will not run again. Queues no callback.
pub(crate) fn leave(this: Waiter<'_>) {
    leave_table(this);
    if this.is_pending() {
        this.state.set(WaiterState::Done);
    }
}

/// Marks a new waiter, which has no callbacks yet, as done. A task that gets it waits for no event and runs again in
/// the next iteration.
pub(crate) fn finish_now(this: Waiter<'_>) {
    this.state.set(WaiterState::Done);
}

/// Queues the callbacks, each in its context.
fn schedule(this: Waiter<'_>) -> PyResult<()> {
    let py = this.py();
    if let (Some(callback), Some(context)) = (this.callback.take(py), this.context.take(py)) {
        schedule_one(this, &callback, &context)?;
    }
    if let Some(more) = this.more.take(py) {
        for entry in more.cast_into::<PyList>()? {
            let (callback, context): (Bound<'_, PyAny>, Bound<'_, PyAny>) = entry.extract()?;
            schedule_one(this, &callback, &context)?;
        }
    }
    Ok(())
}

fn schedule_one(this: Waiter<'_>, callback: &Bound<'_, PyAny>, context: &Bound<'_, PyAny>) -> PyResult<()> {
    let event_loop = this.loop_object();
    if this.state.get() == WaiterState::Done {
        return event_loop.soon_after_wait(callback, this.as_ptr(), context);
    }
    event_loop.soon(callback, &[this.as_ptr()], context)
}

fn add_done_callback<'py>(this: Waiter<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    if args.positional().len() > 1 {
        return Err(args.wrong_count("exactly 1", None));
    }
    let Some(callback) = args.get(0) else {
        return Err(PyTypeError::new_err("add_done_callback() takes a callback"));
    };
    let context = context_keyword(&args)?;
    // SAFETY: attached; either a borrowed context, which the caller keeps alive, or a new reference, which is null if
    // an exception is set.
    let context = unsafe {
        if context.is_null() {
            Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())?
        } else {
            Bound::from_borrowed_ptr(py, context)
        }
    };
    if !this.is_pending() {
        schedule_one(this, &callback, &context)?;
    } else if !this.callback.is_set() && !this.more.is_set() {
        this.callback.set(callback);
        this.context.set(context);
    } else {
        if !this.more.is_set() {
            this.more.set(PyList::empty(py).into_any());
        }
        if let Some(more) = this.more.get(py) {
            more.cast_into::<PyList>()?.append((callback, context))?;
        }
    }
    Ok(none(py))
}

fn remove_done_callback<'py>(this: Waiter<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, mut removed) = (this.py(), 0_usize);
    let Some(unwanted) = args.get(0) else {
        return Ok(none(py));
    };
    // A comparison may raise, add callbacks, or end the wait. So the list is replaced only after all of its entries
    // were compared, including those that comparisons have added. The first callback, which is not in the list, is
    // taken out only after its own comparison.
    if let Some(more) = this.more.get(py) {
        let (more, kept, mut index) = (more.cast_into::<PyList>()?, PyList::empty(py), 0);
        while index < more.len() {
            let entry = more.get_item(index)?;
            if entry.cast::<PyTuple>()?.get_item(0)?.eq(&unwanted)? {
                removed += 1;
            } else {
                kept.append(entry)?;
            }
            index += 1;
        }
        if this.is_pending() {
            this.more.set(kept.into_any());
        }
    }
    if let Some(callback) = this.callback.get(py)
        && callback.eq(&unwanted)?
    {
        drop(this.callback.take(py));
        drop(this.context.take(py));
        removed += 1;
    }
    Ok(removed.into_pyobject(py)?.into_any())
}

fn cancel<'py>(this: Waiter<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [message] = args.bind()?;
    let py = this.py();
    if !this.is_pending() {
        return Ok(bool_object(py, false));
    }
    leave_table(this);
    if let Some(message) = message.filter(|message| !message.is_none()) {
        this.message.set(message);
    }
    finish(this, WaiterState::Cancelled)?;
    Ok(bool_object(py, true))
}

/// Raises `InvalidStateError` if the wait is over.
fn check_pending(this: Waiter<'_>) -> PyResult<()> {
    if this.is_pending() {
        return Ok(());
    }
    let class = this
        .py()
        .import("asyncio.exceptions")?
        .getattr("InvalidStateError")?;
    Err(PyErr::from_value(class.call1(("invalid state",))?))
}

/// `set_result(None)`, which asyncio's own code calls to wake a reader.
fn set_result<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_pending(this)?;
    set_done(this)?;
    Ok(none(this.py()))
}

fn set_exception<'py>(this: Waiter<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    check_pending(this)?;
    let Some(mut exception) = args.get(0) else {
        return Ok(none(this.py()));
    };
    if exception.is_instance_of::<PyType>() {
        exception = exception.call0()?;
        check_pending(this)?;
    }
    if !exception.is_instance_of::<PyBaseException>() {
        return Err(PyTypeError::new_err("invalid exception object"));
    }
    leave_table(this);
    this.message.set(exception);
    finish(this, WaiterState::Failed)?;
    Ok(none(this.py()))
}

/// `result()`: returns None if the wait is done, and otherwise raises.
fn outcome<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_outcome(this)?;
    Ok(none(this.py()))
}

fn exception<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    if this.state.get() == WaiterState::Failed {
        return Ok(this.message.get(this.py()).unwrap_or_else(|| none(this.py())));
    }
    check_outcome(this)?;
    Ok(none(this.py()))
}

/// Raises the exception that `set_exception()` was given, `CancelledError` after `cancel()`, or `InvalidStateError`
/// while the wait is pending.
pub(crate) fn check_outcome(this: Waiter<'_>) -> PyResult<()> {
    let class = match this.state.get() {
        WaiterState::Done => return Ok(()),
        WaiterState::Failed | WaiterState::Cancelled => "CancelledError",
        WaiterState::Pending => "InvalidStateError",
    };
    Err(failure(this, class)?)
}

#[cold]
fn failure(this: Waiter<'_>, class: &str) -> PyResult<PyErr> {
    let py = this.py();
    let message = this.message.get(py);
    if let (WaiterState::Failed, Some(exception)) = (this.state.get(), &message) {
        return Ok(PyErr::from_value(exception.clone()));
    }
    let class = py.import("asyncio.exceptions")?.getattr(class)?;
    let error = match (this.state.get(), message) {
        (WaiterState::Cancelled, Some(message)) => class.call1((message,))?,
        (WaiterState::Cancelled, None) => class.call0()?,
        _ => class.call1(("Result is not set.",))?,
    };
    Ok(PyErr::from_value(error))
}

fn is_cancelled<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.state.get() == WaiterState::Cancelled))
}

fn is_done<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), !this.is_pending()))
}

fn get_loop<'py>(this: Waiter<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this.event_loop.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn blocking(this: Waiter<'_>) -> ObjectResult<'_> {
    Ok(bool_object(this.py(), this.is_blocking.get()))
}

unsafe extern "C" fn set_blocking(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    _: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls this setter, attached, with an object of this type.
    unsafe {
        set_value(
            slf,
            value,
            "cannot delete attribute",
            |this: Waiter<'_>, value| {
                let is_blocking = value.is_truthy()?;
                WaiterObject::with_access(this, || {
                    this.is_blocking.set(is_blocking);
                    Ok(())
                })
            },
        )
    }
}

/// `<Waiter pending read fd=5>`, which the repr of the waiting task includes.
unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of this type.
    unsafe {
        represent::<WaiterObject>(slf, |this| {
            let state = match this.state.get() {
                WaiterState::Pending => "pending",
                WaiterState::Done => "done",
                WaiterState::Failed => "failed",
                WaiterState::Cancelled => "cancelled",
            };
            if this.fd.get() == NO_FD {
                return Ok(format!("<Waiter {state}>"));
            }
            let direction = match this.direction.get() {
                Direction::Read => "read",
                Direction::Write => "write",
            };
            Ok(format!("<Waiter {state} {direction} fd={}>", this.fd.get()))
        })
    }
}

impl NativeType for WaiterObject {
    const NAME: &'static CStr = c"grapeshot._core._Waiter";
    const DOC: &'static CStr = c"The future-like object that a native coroutine yields to its task.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const DEALLOC: ffi::destructor = dealloc;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.callback,
            &self.context,
            &self.more,
            &self.message,
        ]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }

    fn clear(this: This<'_, Self>) {
        let py = this.py();
        for cell in [&this.callback, &this.context, &this.more, &this.message] {
            drop(cell.take(py));
        }
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this once, in an attached thread, with a waiter to which no references are left. So the
    // waiter is in no fd table. Its cells are emptied before the memory goes to the freelist or back to the allocator.
    unsafe {
        let py = Python::assume_attached();
        ffi::PyObject_GC_UnTrack(slf.cast());
        let this: Waiter<'_> = This::new(py, slf);
        WaiterObject::clear(this);
        drop(this.event_loop.take(py));
        FREE.give(slf);
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(
            method,
            add_done_callback,
            "add_done_callback(fn, *, context=None)",
            "Call fn(self) once the wait is over."
        ),
        row!(
            method,
            remove_done_callback,
            "remove_done_callback(fn, /)",
            "Remove fn; returns the number of callbacks removed."
        ),
        row!(
            method,
            cancel,
            "cancel(msg=None)",
            "End the wait with CancelledError; False if it is already over."
        ),
        row!(method, is_cancelled, "cancelled()", "True after cancel()."),
        row!(method, is_done, "done()", "True once the wait is over."),
        row!(
            method,
            outcome,
            "result()",
            "Return None once the wait is done, or raise its exception."
        ),
        row!(
            method,
            exception,
            "exception()",
            "Return the exception given to set_exception(), None if the wait is done, or raise as result() does."
        ),
        row!(method, set_result, "set_result(result, /)", "End the wait."),
        row!(
            method,
            set_exception,
            "set_exception(exception, /)",
            "End the wait with an exception."
        ),
        row!(
            method,
            get_loop,
            "get_loop()",
            "The loop that the wait belongs to."
        ),
    ];
    let getters = vec![ffi::PyGetSetDef {
        set: Some(set_blocking),
        ..getter(
            c"_asyncio_future_blocking",
            blocking,
            c"True from the yield until the task has taken the waiter.",
        )
    }];
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<WaiterObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                methods_slot(methods),
                getset_slot(getters),
            ],
        )?
    };
    WAITER_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
