//! What Python sees: the methods of `Coro` and the functions of the native module that the package `coro` is built on.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};

use super::coroutine::{Coro, CoroObject, Status, dealloc};
use super::errors::{self as coro_errors, Kind};
use super::scheduler::{self, with_runtime};
use super::{pystate, tasks};
use crate::event_loop::errors;
use crate::event_loop::native_type::{
    Args, This, bool_object, getter, leak_table, method, new_type, none, slot, weaklist_member,
};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::current_thread;

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// The class of new coros: `grapeshot.coro.Coro`, a subclass of the native type.
static CORO_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

// ---- Coro ----------------------------------------------------------------------------------------------------

/// `ScheduleError` unless the coro is of this thread.
fn check_thread(coro: Coro<'_>) -> PyResult<()> {
    let owner = coro.thread.get();
    if owner == 0 || owner == current_thread() {
        return Ok(());
    }
    Err(coro_errors::new(
        coro.py(),
        Kind::ScheduleError,
        "a coro belongs to the thread of its loop: use loop.call_soon_threadsafe()",
    ))
}

fn start<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("start", 0)?;
    if this.status.get() != Status::New {
        return Err(coro_errors::new(
            this.py(),
            Kind::ScheduleError,
            "the coro was started before",
        ));
    }
    if let Some(event_loop) = this.event_loop.get(this.py()) {
        LoopObject::of(&event_loop).reactor().check_closed()?;
    }
    scheduler::start(this);
    Ok(none(this.py()))
}

/// `_wake(value=None)`: a waiting coro goes on, and its wait returns `value`. `ScheduleError` if it does not wait.
fn wake<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    let [value] = args.bind("_wake", ["value"])?;
    check_thread(this)?;
    match this.status.get() {
        Status::Waiting => {
            if let Some(value) = value {
                this.wake_value.set(value);
            }
            scheduler::make_ready(this);
            Ok(none(this.py()))
        }
        status => Err(wrong_status(this, status)),
    }
}

/// `_throw_later(exception)`: raised where the coro waits next, or waits now; None takes it back.
fn throw_later<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_throw_later", 1)?;
    check_thread(this)?;
    let py = this.py();
    match args.get(0) {
        Some(exception) if !exception.is_none() => match this.status.get() {
            Status::Waiting => return throw(this, args),
            Status::Done => return Err(wrong_status(this, Status::Done)),
            _ => this.wake_exception.set(exception),
        },
        _ => drop(this.wake_exception.take(py)),
    }
    Ok(none(py))
}

/// `_throw(exception)`: raised where the coro waits; at once if it runs, before its function if it has not begun.
fn throw<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_throw", 1)?;
    check_thread(this)?;
    let Some(exception) = args.get(0) else {
        return Ok(none(this.py()));
    };
    if !exception.is_instance_of::<pyo3::exceptions::PyBaseException>() {
        return Err(PyTypeError::new_err("an exception is required"));
    }
    match this.status.get() {
        Status::Waiting => {
            this.wake_exception.set(exception);
            scheduler::make_ready(this);
        }
        Status::Ready => this.wake_exception.set(exception),
        Status::Running => return Err(PyErr::from_value(exception)),
        status => return Err(wrong_status(this, status)),
    }
    Ok(none(this.py()))
}

#[cold]
fn wrong_status(this: Coro<'_>, status: Status) -> PyErr {
    let (kind, message) = match status {
        Status::New => (Kind::NotStarted, "the coro was not started"),
        Status::Done => (Kind::DeadCoroutine, "the coro has ended"),
        Status::Ready => (Kind::ScheduleError, "the coro is scheduled already"),
        Status::Running | Status::Waiting => (Kind::ScheduleError, "the coro is running"),
    };
    coro_errors::new(this.py(), kind, message)
}

fn done<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("done", 0)?;
    Ok(bool_object(this.py(), this.is_done()))
}

/// The result or the exception of a coro that has ended.
fn outcome<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_outcome", 0)?;
    let py = this.py();
    if let Some(exception) = this.exception.get(py) {
        this.is_unseen.set(false);
        return Err(PyErr::from_value(exception));
    }
    Ok(this.result.get(py).unwrap_or_else(|| none(py)))
}

fn failure<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_failure", 0)?;
    this.is_unseen.set(false);
    Ok(this.exception.get(this.py()).unwrap_or_else(|| none(this.py())))
}

/// `_on_done(callback, context)`: as a callback of a Future, in order.
fn on_done<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_on_done", 2)?;
    let py = this.py();
    let entry = PyTuple::new(py, [args.get(0), args.get(1)])?;
    match this.callbacks.get(py) {
        Some(callbacks) => callbacks.cast::<PyList>()?.append(entry)?,
        None => this.callbacks.set(PyList::new(py, [entry])?.into_any()),
    }
    Ok(none(py))
}

/// `_forget_done(callback)`: takes callbacks back; their number.
fn forget_done<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_forget_done", 1)?;
    let py = this.py();
    let (Some(callbacks), Some(callback)) = (this.callbacks.get(py), args.get(0)) else {
        return Ok(0_usize.into_pyobject(py)?.into_any());
    };
    let kept = PyList::empty(py);
    let callbacks = callbacks.cast_into::<PyList>()?;
    for entry in callbacks.iter() {
        if !entry.get_item(0)?.eq(&callback)? {
            kept.append(entry)?;
        }
    }
    let removed = callbacks.len() - kept.len();
    this.callbacks.set(kept.into_any());
    Ok(removed.into_pyobject(py)?.into_any())
}

/// `_undelivered()`: what an interrupted wait would have returned, None if it was not over yet.
fn undelivered<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_undelivered", 0)?;
    Ok(this.wake_value.take(this.py()).unwrap_or_else(|| none(this.py())))
}

/// The exception if it went to nobody yet, else None.
fn failure_unseen<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_failure_unseen", 0)?;
    let py = this.py();
    Ok(this
        .exception
        .get(py)
        .filter(|_| this.is_unseen.get())
        .unwrap_or_else(|| none(py)))
}

/// The innermost frame of a suspended coro, or None.
fn frame<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("get_frame", 0)?;
    let py = this.py();
    scheduler::frame(this).map(|frame| frame.unwrap_or_else(|| none(py)))
}

fn id(this: Coro<'_>) -> Object<'_> {
    Ok(this.id.get().into_pyobject(this.py())?.into_any())
}

fn name(this: Coro<'_>) -> Object<'_> {
    let py = this.py();
    Ok(match this.name.get(py) {
        Some(name) => name,
        None => PyString::new(py, &format!("coro {}", this.id.get())).into_any(),
    })
}

fn set_name<'py>(this: Coro<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("set_name", 1)?;
    if let Some(name) = args.get(0) {
        this.name.set(name.str()?.into_any());
    }
    Ok(none(this.py()))
}

fn status(this: Coro<'_>) -> Object<'_> {
    let text = match this.status.get() {
        Status::New => "new",
        Status::Ready => "ready",
        Status::Running => "running",
        Status::Waiting => "waiting",
        Status::Done => "done",
    };
    Ok(PyString::intern(this.py(), text).into_any())
}

fn event_loop(this: Coro<'_>) -> Object<'_> {
    Ok(this.event_loop.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn context(this: Coro<'_>) -> Object<'_> {
    Ok(this.context.get(this.py()).unwrap_or_else(|| none(this.py())))
}

fn is_unseen(this: Coro<'_>) -> Object<'_> {
    Ok(bool_object(this.py(), this.is_unseen.get()))
}

// ---- functions of the module ---------------------------------------------------------------------------------

/// A row of a function table around `fn(Python, Args)`.
macro_rules! function {
    ($name:literal, $body:path, $doc:literal) => {{
        unsafe extern "C" fn raw(
            _: *mut ffi::PyObject,
            args: *const *mut ffi::PyObject,
            nargs: ffi::Py_ssize_t,
            kwnames: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject {
            // SAFETY: only CPython calls this, attached, through a METH_FASTCALL|METH_KEYWORDS function.
            unsafe {
                let py = Python::assume_attached();
                errors::at_boundary(py, ptr::null_mut(), || {
                    $body(py, Args::from_fastcall(py, args, nargs, kwnames)).map(Bound::into_ptr)
                })
            }
        }
        ffi::PyMethodDef {
            ml_name: $name.as_ptr(),
            ml_meth: ffi::PyMethodDefPointer {
                PyCFunctionFastWithKeywords: raw,
            },
            ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
            ml_doc: $doc.as_ptr(),
        }
    }};
}

/// The keywords of `spawn` that are not the function's.
struct Options<'py> {
    name: Option<Bound<'py, PyAny>>,
    context: Option<Bound<'py, PyAny>>,
    has_own_stack: bool,
}

/// Sorts the keywords: `name`, `context` and `stack` are ours, the rest goes to the function.
fn sort_keywords<'py>(
    py: Python<'py>,
    args: &Args<'_, 'py>,
) -> PyResult<(Options<'py>, Option<Bound<'py, PyDict>>)> {
    let mut options = Options {
        name: None,
        context: None,
        has_own_stack: false,
    };
    let mut rest: Option<Bound<'py, PyDict>> = None;
    for (keyword, value) in args.keywords() {
        // SAFETY: keyword values are alive for the length of the call.
        let value = unsafe { Bound::from_borrowed_ptr(py, value) };
        match keyword.cast::<PyString>()?.to_string_lossy().as_ref() {
            "name" => options.name = (!value.is_none()).then_some(value),
            "context" => options.context = (!value.is_none()).then_some(value),
            "stack" => {
                options.has_own_stack = match value.extract::<String>()?.as_str() {
                    "shared" => false,
                    "own" => true,
                    other => {
                        return Err(PyValueError::new_err(format!(
                            "stack must be 'shared' or 'own', not {other:?}"
                        )));
                    }
                };
            }
            _ => rest
                .get_or_insert_with(|| PyDict::new(py))
                .set_item(keyword, value)?,
        }
    }
    Ok((options, rest))
}

/// The running loop, which must be ours.
fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let event_loop = tasks::running_loop(py)?;
    if event_loop.is_none() {
        return Err(PyRuntimeError::new_err("no running event loop"));
    }
    if !LoopObject::is_loop(&event_loop) {
        return Err(PyRuntimeError::new_err(
            "coros run on a grapeshot loop, and another event loop is running",
        ));
    }
    Ok(event_loop)
}

/// Makes a coro of the running loop: `function, *args, name=, context=, stack=, **kwargs`.
fn make<'py>(py: Python<'py>, args: &Args<'_, 'py>, function_name: &str) -> PyResult<Bound<'py, PyAny>> {
    args.at_least(function_name, 1)?;
    let event_loop = running_loop(py)?;
    let values = args.positional();
    // SAFETY: an argument, alive for the length of the call; the type is set before the package calls this; the
    // allocation comes zeroed.
    let (function, object) = unsafe {
        let function = Bound::from_borrowed_ptr(py, values[0]);
        if !function.is_callable() {
            return Err(PyTypeError::new_err(format!(
                "{function_name}() needs a function, not {}",
                function.repr()?
            )));
        }
        let kind = CORO_TYPE.load(Ordering::Relaxed);
        (function, errors::owned(py, ffi::PyType_GenericAlloc(kind, 0))?)
    };
    let coro = scheduler::coro_of(&object);
    coro.init();
    if !args.kwnames().is_null() {
        let (options, kwargs) = sort_keywords(py, args)?;
        if let Some(name) = options.name {
            coro.name.set(name.str()?.into_any());
        }
        if let Some(context) = options.context {
            // SAFETY: a live object.
            if unsafe { ffi::PyContext_CheckExact(context.as_ptr()) } == 0 {
                return Err(PyTypeError::new_err(
                    "context must be a contextvars.Context or None",
                ));
            }
            coro.context.set(context);
        }
        coro.has_own_stack.set(options.has_own_stack);
        if let Some(kwargs) = kwargs {
            coro.kwargs.set(kwargs.into_any());
        }
    }
    if !coro.context.is_set() {
        // SAFETY: attached; a new reference or null with an exception set.
        coro.context
            .set(unsafe { errors::owned(py, ffi::PyContext_CopyCurrent())? });
    }
    // SAFETY: arguments are alive for the length of the call, each item gets a reference of its own.
    let tuple = unsafe {
        let tuple = errors::owned(py, ffi::PyTuple_New(values.len() as ffi::Py_ssize_t - 1))?;
        for (index, value) in values[1..].iter().enumerate() {
            ffi::PyTuple_SET_ITEM(tuple.as_ptr(), index as ffi::Py_ssize_t, ffi::Py_NewRef(*value));
        }
        tuple
    };
    coro.event_loop.set(event_loop);
    coro.function.set(function);
    coro.args.set(tuple);
    coro.id.set(NEXT_ID.fetch_add(1, Ordering::Relaxed));
    Ok(object)
}

fn new<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    make(py, &args, "new")
}

fn spawn<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    let object = make(py, &args, "spawn")?;
    scheduler::start(scheduler::coro_of(&object));
    Ok(object)
}

fn current<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("current", 0)?;
    match scheduler::current(py) {
        Some(coro) => Ok(coro.to_bound()),
        None => Err(coro_errors::new(
            py,
            Kind::YieldFromMain,
            "no coro is running: this is the thread's own stack",
        )),
    }
}

fn current_or_none<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_current_or_none", 0)?;
    Ok(scheduler::current(py).map_or_else(|| none(py), This::to_bound))
}

fn yield_slice<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("yield_slice", 0)?;
    scheduler::yield_slice(scheduler::suspendable(py)?)
}

fn wait<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_wait", 0)?;
    scheduler::wait(scheduler::suspendable(py)?)
}

fn sleep_until<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("sleep_absolute", 1)?;
    let when_s = args.get(0).map_or(Ok(0.0), |when| when.extract::<f64>())?;
    scheduler::sleep_until(scheduler::suspendable(py)?, when_s)
}

fn sleep_for<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("sleep_relative", 1)?;
    let delay_s = args.get(0).map_or(Ok(0.0), |delay| delay.extract::<f64>())?;
    let coro = scheduler::suspendable(py)?;
    scheduler::sleep_until(coro, crate::event_loop::reactor::time_s() + delay_s)
}

/// What a timer of `sleep_until` calls.
fn end_sleep<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_end_sleep", 1)?;
    if let Some(object) = args.get(0) {
        let coro = scheduler::coro_of(&object);
        if coro.status.get() == Status::Waiting {
            scheduler::make_ready(coro);
        }
    }
    Ok(none(py))
}

fn live<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_live", 0)?;
    Ok(PyList::new(py, with_runtime(|runtime| runtime.live(py)))?.into_any())
}

fn statistics<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_statistics", 0)?;
    let dict = PyDict::new(py);
    with_runtime(|runtime| -> PyResult<()> {
        let stats = &runtime.stats;
        dict.set_item("switches", stats.switches.get())?;
        dict.set_item("evacuations", stats.evacuations.get())?;
        dict.set_item("bytes_copied", stats.copied_len.get())?;
        dict.set_item("bytes_saved", stats.saved_len.get())?;
        dict.set_item("started", stats.started.get())?;
        dict.set_item("slots", runtime.options.slots.get())?;
        dict.set_item("evicts_always", runtime.options.evicts_always.get())
    })?;
    Ok(dict.into_any())
}

fn set_slots<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("set_stack_slots", 1)?;
    let count: usize = args.get(0).map_or(Ok(1), |count| count.extract())?;
    if count == 0 || count > 4096 {
        return Err(PyValueError::new_err("between 1 and 4096 slots"));
    }
    with_runtime(|runtime| runtime.options.slots.set(count));
    Ok(none(py))
}

fn evict_always<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_evict_always", 1)?;
    let is_on = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    with_runtime(|runtime| runtime.options.evicts_always.set(is_on));
    Ok(none(py))
}

fn fail_evacuations<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_fail_evacuations", 1)?;
    let count: u32 = args.get(0).map_or(Ok(0), |count| count.extract())?;
    with_runtime(|runtime| runtime.options.failing_evacuations.set(count));
    Ok(none(py))
}

/// `_coro_setup(errors, kind)`: the package hands its exception classes and its Coro over. None, or why there are no
/// coros here.
fn set_up<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_coro_setup", 2)?;
    if !super::arch::IS_SUPPORTED {
        return Ok(PyString::new(py, "coros know x86-64 and AArch64 only").into_any());
    }
    if let Some(reason) = pystate::self_check(py)? {
        return Ok(PyString::new(py, reason).into_any());
    }
    if let (Some(module), Some(kind)) = (args.get(0), args.get(1)) {
        coro_errors::set_classes(&module)?;
        tasks::set_up(py)?;
        let kind = kind.cast_into::<PyType>()?;
        CORO_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    }
    Ok(none(py))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        method!(CoroObject, c"start", start, c"Schedule a new coro."),
        method!(CoroObject, c"_wake", wake, c"Let a waiting coro go on."),
        method!(
            CoroObject,
            c"_throw",
            throw,
            c"Raise an exception where the coro waits."
        ),
        method!(
            CoroObject,
            c"_throw_later",
            throw_later,
            c"Raise an exception where the coro waits next."
        ),
        method!(CoroObject, c"done", done, c"True once it has returned or raised."),
        method!(
            CoroObject,
            c"_outcome",
            outcome,
            c"What it has returned, or raised."
        ),
        method!(CoroObject, c"_failure", failure, c"What it has raised, or None."),
        method!(
            CoroObject,
            c"_on_done",
            on_done,
            c"Call callback(coro) in a context once it has ended."
        ),
        method!(
            CoroObject,
            c"_forget_done",
            forget_done,
            c"Take callbacks back; how many there were."
        ),
        method!(
            CoroObject,
            c"_undelivered",
            undelivered,
            c"What an interrupted wait would have returned."
        ),
        method!(
            CoroObject,
            c"_failure_unseen",
            failure_unseen,
            c"The exception if it went to nobody, else None."
        ),
        method!(
            CoroObject,
            c"get_frame",
            frame,
            c"The innermost frame while it is suspended, else None."
        ),
        method!(CoroObject, c"set_name", set_name, c"Give it another name."),
    ];
    let getters = vec![
        getter!(
            CoroObject,
            c"id",
            id,
            c"A number that no other coro of the process has."
        ),
        getter!(CoroObject, c"name", name, c"Its name."),
        getter!(
            CoroObject,
            c"_status",
            status,
            c"new, ready, running, waiting or done."
        ),
        getter!(CoroObject, c"_loop", event_loop, c"Its loop."),
        getter!(
            CoroObject,
            c"_context",
            context,
            c"Its contextvars.Context while it runs."
        ),
        getter!(
            CoroObject,
            c"_is_unseen",
            is_unseen,
            c"Its exception went to nobody."
        ),
    ];
    // SAFETY: the functions are those of this layout, the tables are leaked.
    let kind = unsafe {
        new_type::<CoroObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
                slot(
                    ffi::Py_tp_methods,
                    leak_table(methods, ffi::PyMethodDef::zeroed()),
                ),
                slot(
                    ffi::Py_tp_getset,
                    leak_table(getters, ffi::PyGetSetDef::default()),
                ),
                slot(ffi::Py_tp_members, weaklist_member(CoroObject::weakrefs_offset())),
            ],
        )?
    };
    module.add("Coro", kind)?;
    let functions = vec![
        function!(
            c"_coro_new",
            new,
            c"new(function, *args, name=None, context=None, stack='shared', **kwargs)"
        ),
        function!(
            c"_coro_spawn",
            spawn,
            c"spawn(function, *args, name=None, context=None, stack='shared', **kwargs)"
        ),
        function!(
            c"_coro_current",
            current,
            c"The coro that runs; YieldFromMain if none does."
        ),
        function!(
            c"_coro_current_or_none",
            current_or_none,
            c"The coro that runs, or None."
        ),
        function!(
            c"_coro_yield_slice",
            yield_slice,
            c"Let everything run that is ready."
        ),
        function!(c"_coro_wait", wait, c"Wait until somebody wakes this coro."),
        function!(
            c"_coro_sleep_absolute",
            sleep_until,
            c"Wait until loop.time() is there."
        ),
        function!(c"_coro_sleep_relative", sleep_for, c"Wait for so many seconds."),
        function!(c"_coro_end_sleep", end_sleep, c"What a timer calls."),
        function!(
            c"_coro_live",
            live,
            c"The coros of this thread between start and end."
        ),
        function!(
            c"_coro_statistics",
            statistics,
            c"Counters of this thread's coros."
        ),
        function!(
            c"_coro_set_stack_slots",
            set_slots,
            c"How many stacks coros share from now on."
        ),
        function!(
            c"_coro_evict_always",
            evict_always,
            c"Whether this thread's stacks are moved away after each switch."
        ),
        function!(
            c"_coro_fail_evacuations",
            fail_evacuations,
            c"Let evacuations fail, for tests."
        ),
        function!(
            c"_coro_setup",
            set_up,
            c"Take the package's classes; why there are no coros, or None."
        ),
    ];
    for definition in functions {
        let definition = Box::leak(Box::new(definition));
        // SAFETY: the definition is leaked, its name a C string literal.
        let (name, made) = unsafe {
            let name = std::ffi::CStr::from_ptr(definition.ml_name);
            let made = ffi::PyCFunction_NewEx(definition, ptr::null_mut(), ptr::null_mut());
            (name, errors::owned(module.py(), made)?)
        };
        module.add(name.to_string_lossy().as_ref(), made)?;
    }
    scheduler::set_end_sleep(&module.getattr("_coro_end_sleep")?);
    Ok(())
}
