//! The parts that all primitives share: the head of their objects, how they are made and shown, and the wait.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

use super::limit::{Deadline, Limit};
use crate::binding::args::Args;
use crate::binding::native_type::{
    NativeType, This, alloc_without_arguments, new_type, slot, with_critical_section,
};
use crate::binding::object_result::none;
use crate::binding::rows::{getset_slot, members_slot, methods_slot, offset_member};
use crate::binding::{current_thread, errors};
use crate::coro::coroutine::{Coro, Outcome};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{interruption, runtime, scheduler, suspension, tasks};
use crate::event_loop::progress::Progress;
use crate::event_loop::pyloop::LoopObject;

/// The flags of the public primitives: programs may derive classes from them.
pub(super) const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

/// The head of each object of a primitive. In its initial state, all bytes are zero.
#[repr(C)]
pub(super) struct Head {
    base: ffi::PyObject,
    weakrefs: Cell<*mut ffi::PyObject>,
    /// The only thread that may use the object; 0 before that thread is known.
    thread: Cell<u64>,
    /// The thread that created it.
    maker: Cell<u64>,
}

/// A native type whose layout begins with `Head`.
///
/// # Safety
/// The layout is `repr(C)`, and its first field is the `Head`.
pub(super) unsafe trait Primitive: NativeType {
    fn head(&self) -> &Head;

    /// Fills the fields whose initial state is not zero.
    ///
    /// # Safety
    /// `object` is a zeroed allocation of this layout that no other code has a pointer to.
    unsafe fn init(object: *mut Self);

    /// The text of `repr` after the name of the class.
    fn state(this: This<'_, Self>) -> String;
}

/// Raises `ScheduleError` if this thread must not use the object.
#[inline]
pub(super) fn check_thread<T: Primitive>(this: This<'_, T>) -> PyResult<()> {
    if this.head().thread.get() == current_thread() {
        return Ok(());
    }
    check_elsewhere(this.py(), this.head(), this.as_ptr())
}

/// The rare cases of `check_thread`. An object that was made while no loop was running belongs to no thread yet. The
/// first thread that uses it while a loop runs there becomes its thread; until then only the thread that made it may
/// use it.
#[cold]
fn check_elsewhere(py: Python<'_>, head: &Head, object: *mut ffi::PyObject) -> PyResult<()> {
    if head.thread.get() == 0 {
        // `has_loop` may let another thread run and take the object, so look at `thread` once more.
        if has_loop(py)? && matches!(head.thread.get(), 0) {
            head.thread.set(current_thread());
            return Ok(());
        }
        if head.maker.get() == current_thread() {
            return Ok(());
        }
    }
    // SAFETY: `object` is the receiver of a method, and stays alive during the call.
    let name = unsafe { name_of_type(py, object) };
    Err(coro_errors::new(
        py,
        ErrorClass::ScheduleError,
        &format!(
            "a {name} belongs to the thread of the loop in which it was made or first used: call \
             loop.call_soon_threadsafe() from other threads"
        ),
    ))
}

/// Whether this thread is running a loop, and that loop can have coros.
fn has_loop(py: Python<'_>) -> PyResult<bool> {
    Ok(!runtime::current_ptr().is_null() || LoopObject::is_loop(&tasks::running_loop(py)?))
}

/// The name of the object's class.
pub(super) fn type_name<T: Primitive>(this: This<'_, T>) -> String {
    // SAFETY: `this` is the receiver of a method, and stays alive during the call.
    unsafe { name_of_type(this.py(), this.as_ptr()) }
}

/// # Safety
/// `object` is alive.
unsafe fn name_of_type(py: Python<'_>, object: *mut ffi::PyObject) -> String {
    // SAFETY: by the contract; a type outlives its objects.
    let kind = unsafe { Bound::from_borrowed_ptr(py, ffi::Py_TYPE(object).cast()) };
    kind.cast::<PyType>()
        .ok()
        .and_then(|kind| kind.name().ok())
        .map_or_else(|| "primitive".to_owned(), |name| name.to_string())
}

/// How a wait in a queue has ended. If it ended without a grant, a timeout or an interruption, the waiter was woken for
/// another reason, and tries again.
pub(in crate::coro) struct EndedWait<'py> {
    /// The value of the wake, or the interruption.
    pub(in crate::coro) result: PyResult<Bound<'py, PyAny>>,
    /// The coro was granted its request. After an interruption it has to pass the grant on or give it back.
    pub(in crate::coro) is_granted: bool,
    /// The timeout expired before the request was granted.
    pub(in crate::coro) is_late: bool,
}

impl<'py> EndedWait<'py> {
    fn late(value: Bound<'py, PyAny>) -> Self {
        Self {
            result: Ok(value),
            is_granted: false,
            is_late: true,
        }
    }

    pub(in crate::coro) fn interrupted(interruption: PyErr) -> Self {
        Self {
            result: Err(interruption),
            is_granted: false,
            is_late: false,
        }
    }
}

/// Waits at the end of `queue` until the coro is woken: by a grant, by its deadline, by an interruption, or for another
/// reason, such as the close of a channel.
#[inline]
pub(in crate::coro) fn wait_in_queue<'py>(
    queue: &WaitQueue,
    coro: Coro<'py>,
    request: i64,
    deadline: &Deadline<'py>,
) -> EndedWait<'py> {
    match begin_in_queue(queue, coro, request, deadline) {
        Ok(true) => end(coro, suspension::suspend(coro)),
        Ok(false) => EndedWait::late(none(coro.py())),
        Err(interruption) => EndedWait::interrupted(interruption),
    }
}

/// The first half of `wait_in_queue`, for methods that wait in steps; `end` is the other half. Returns false if the
/// timeout has expired.
#[inline]
fn begin_in_queue<'py>(
    queue: &WaitQueue,
    coro: Coro<'py>,
    request: i64,
    deadline: &Deadline<'py>,
) -> PyResult<bool> {
    interruption::raise_pending(coro)?;
    if deadline.is_over() {
        return Ok(false);
    }
    queue.push(coro, request);
    suspension::begin_wait(coro).inspect_err(|_| coro.wait_node.unlink())?;
    Ok(true)
}

/// The state of a method that waits in a queue, in steps. It stays on the stack during the waits.
#[derive(Default)]
pub(super) struct Call {
    pub(super) limit: Limit,
    /// None before the first wait.
    pub(super) deadline: Option<Deadline<'static>>,
}

impl Call {
    /// `begin_in_queue` with the deadline of this call.
    #[inline]
    pub(super) fn wait_in(&self, queue: &WaitQueue, coro: Coro<'static>, request: i64) -> PyResult<bool> {
        match &self.deadline {
            Some(deadline) => begin_in_queue(queue, coro, request, deadline),
            None => Ok(false),
        }
    }

    /// Like `wait_in`, for a coro that offers a value. The receiver finds the value in `wake_value`.
    #[inline]
    pub(super) fn offer_in(
        &self,
        queue: &WaitQueue,
        coro: Coro<'static>,
        offer: Bound<'static, PyAny>,
    ) -> PyResult<bool> {
        // Check this before entering the queue: an error drops the offer, whose destructor must not find a running coro
        // in the queue.
        interruption::raise_pending(coro)?;
        if self.deadline.as_ref().is_none_or(Deadline::is_over) {
            return Ok(false);
        }
        queue.push(coro, 0);
        suspension::begin_offer(coro, offer);
        Ok(true)
    }
}

/// Runs a method that waits in steps. `step`, the function that the method's `row!` names, makes one step; see
/// `suspension::wait_in_steps`. `S` is the state of the method, which stays on the stack during the waits.
///
/// # Safety
/// CPython has called a method of `object` with these arguments, and `T` is the layout of `object`. A step that returns
/// `MustWait` has met the conditions of `prepare_switch`.
#[inline(always)]
pub(super) unsafe fn call_in_steps<T: Primitive + 'static, S: Default>(
    object: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    step: impl Fn(
        This<'static, T>,
        Args<'_, 'static>,
        &mut S,
        Option<Outcome<'static>>,
    ) -> PyResult<Progress<Bound<'static, PyAny>>>,
) -> *mut ffi::PyObject {
    // SAFETY: by the contract; the caller of the method keeps the object alive.
    let this = unsafe { This::new(args.py(), object) };
    // SAFETY: by the contract.
    unsafe {
        suspension::wait_in_steps(S::default(), move |_, state, outcome| {
            args.pass_to(this, |this, args| {
                T::with_access(this, || step(this, args, state, outcome))
            })
        })
    }
}

/// Like `wait_in_queue`, for a coro that offers a value. The receiver finds the value in `wake_value`.
#[inline]
pub(super) fn offer_in_queue<'py>(
    queue: &WaitQueue,
    coro: Coro<'py>,
    request: i64,
    offer: Bound<'py, PyAny>,
    deadline: &Deadline<'py>,
) -> EndedWait<'py> {
    // Check this before entering the queue: an error drops the offer, whose destructor must not find a running coro in
    // the queue.
    if let Err(interruption) = interruption::raise_pending(coro) {
        return EndedWait::interrupted(interruption);
    }
    if deadline.is_over() {
        return EndedWait::late(offer);
    }
    queue.push(coro, request);
    end(coro, suspension::wait_offering(coro, offer))
}

#[inline]
pub(super) fn end<'py>(coro: Coro<'py>, result: PyResult<Bound<'py, PyAny>>) -> EndedWait<'py> {
    let node = &coro.wait_node;
    // Normally, `make_ready` has removed the coro from the queue. It is still queued only if it could not wait.
    node.unlink();
    EndedWait {
        result,
        is_granted: node.is_granted.replace(false),
        is_late: node.is_late.replace(false),
    }
}

/// Grants a queued coro its request and wakes it; its wait returns `value`.
#[inline]
pub(super) fn grant<'py>(coro: Coro<'py>, value: Option<Bound<'py, PyAny>>) {
    if let Some(value) = value {
        coro.wake_value.set(value);
    }
    scheduler::make_ready(coro);
    coro.wait_node.is_granted.set(true);
}

/// Reads an optional count, which defaults to 1.
#[inline]
pub(super) fn count(value: Option<Bound<'_, PyAny>>, name: &str) -> PyResult<i64> {
    let count = value.map_or(Ok(1), |value| value.extract::<i64>())?;
    if count < 1 {
        return Err(PyValueError::new_err(format!(
            "{name}() takes a count of 1 or more, got {count}"
        )));
    }
    Ok(count)
}

// ---- the type ------------------------------------------------------------------------------------------------

/// Reads the argument of a primitive's `__init__`, which takes at most one.
///
/// # Safety
/// `args` is a tuple, `kwargs` a dict or null, and both stay alive during the call.
pub(super) unsafe fn argument<'py>(
    py: Python<'py>,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
    kind: &str,
    name: &str,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    // SAFETY: by the contract.
    let (args, kwargs) = unsafe {
        let args = Bound::from_borrowed_ptr(py, args).cast_into_unchecked::<PyTuple>();
        let kwargs = Bound::from_borrowed_ptr_or_opt(py, kwargs);
        (args, kwargs.map(|kwargs| kwargs.cast_into_unchecked::<PyDict>()))
    };
    let named = kwargs.as_ref().map_or(Ok(None), |kwargs| kwargs.get_item(name))?;
    let keywords = kwargs.as_ref().map_or(0, PyDictMethods::len);
    if args.len() + keywords > 1 || keywords > usize::from(named.is_some()) {
        return Err(PyTypeError::new_err(format!(
            "{kind}() takes at most one argument, {name}"
        )));
    }
    match named {
        None if !args.is_empty() => args.get_item(0).map(Some),
        named => Ok(named),
    }
}

/// Makes the type of a primitive, with `slots` in addition to the usual ones.
pub(super) fn make_type<'py, T: Primitive>(
    module: &Bound<'py, PyModule>,
    methods: Vec<ffi::PyMethodDef>,
    getters: Vec<ffi::PyGetSetDef>,
    slots: &[ffi::PyType_Slot],
) -> PyResult<Bound<'py, PyType>> {
    let mut all = vec![
        slot(ffi::Py_tp_new, new::<T> as *mut c_void),
        slot(ffi::Py_tp_repr, repr::<T> as *mut c_void),
        methods_slot(methods),
        getset_slot(getters),
        members_slot(vec![offset_member(
            c"__weaklistoffset__",
            std::mem::offset_of!(Head, weakrefs),
        )]),
    ];
    all.extend(slots.iter().map(|entry| slot(entry.slot, entry.pfunc)));
    // SAFETY: the functions are for this layout, which begins with `Head`; the tables are leaked.
    unsafe { new_type::<T>(module, None, &all) }
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new<T: Primitive>(
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the arguments are as described above; the allocation is zeroed and large enough for T.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let object = alloc_without_arguments(py, kind, args, kwargs)?;
            T::init(object.as_ptr().cast());
            let head = &*object.as_ptr().cast::<Head>();
            head.maker.set(current_thread());
            if has_loop(py)? {
                head.thread.set(current_thread());
            }
            Ok(object.into_ptr())
        })
    }
}

/// # Safety
/// Called by CPython with an object of this type.
unsafe extern "C" fn repr<T: Primitive>(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and the object is alive.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::<T>::new(py, slf);
            let state = with_critical_section(this, || T::state(this));
            let text = format!("<{} {state}>", type_name(this));
            Ok(PyString::new(py, &text).into_any().into_ptr())
        })
    }
}

/// The number of waiting coros for `repr`; empty if no coro waits.
pub(super) fn waiting(count: usize) -> String {
    match count {
        0 => String::new(),
        count => format!(", {count} waiting"),
    }
}
