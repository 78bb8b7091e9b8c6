//! Makes coros: `new` and `spawn`.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

use crate::binding::args::Args;
use crate::binding::current_thread;
use crate::binding::object_result::{ObjectResult, none};
use crate::coro::runtime::with_runtime;
use crate::coro::{hooks, pystate, scheduler, visibility};
use crate::event_loop::pyloop::LoopObject;

/// The class of new coros: `grapeshot.coro.Coro`, a subclass of the native type.
static CORO_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Sets the class of new coros, which is never freed.
pub(super) fn set_type(kind: Bound<'_, PyType>) {
    CORO_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
}

/// The keyword arguments that `spawn` itself uses.
struct Options<'py> {
    name: Option<Bound<'py, PyAny>>,
    context: Option<Bound<'py, PyAny>>,
    has_own_stack: bool,
}

/// Separates the keyword arguments: `name`, `context` and `stack` are for `spawn`, all others are for the function.
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
        // SAFETY: keyword values stay alive during the call.
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

/// Returns the running loop, which must be a grapeshot loop. If no loop is running, returns the loop that the thread's
/// next `coro.run()` or `coro.event_loop()` will run.
fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    if with_runtime(|runtime| runtime.is_forked.get()) {
        return Err(PyRuntimeError::new_err(
            "this process was forked by a coro: it cannot start coros before that coro has ended",
        ));
    }
    if with_runtime(|runtime| runtime.is_ending(py)) {
        return Err(PyRuntimeError::new_err(
            "the thread is ending and cannot start any more coros",
        ));
    }
    let event_loop = visibility::running_loop(py)?;
    let event_loop = if event_loop.is_none() {
        hooks::pending_loop(py)?
    } else {
        event_loop
    };
    if !LoopObject::is_loop(&event_loop) {
        return Err(PyRuntimeError::new_err(
            "coros need a grapeshot loop, but another event loop is running",
        ));
    }
    visibility::check_can_host(&event_loop)?;
    Ok(event_loop)
}

// From `classobject.h`, which pyo3 does not cover.
unsafe extern "C" {
    static mut PyMethod_Type: ffi::PyTypeObject;
    fn PyMethod_Function(method: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// Raises `TypeError` if `function` cannot be called. Also refuses an async function: calling it would only make a
/// coroutine that nothing awaits, or an async generator that nothing iterates over.
#[inline]
fn check_function(function: &Bound<'_, PyAny>, caller: &str) -> PyResult<()> {
    let mut pointer = function.as_ptr();
    // SAFETY: live objects of the types that the functions expect; a method keeps its function.
    let is_fine = unsafe {
        if ffi::Py_TYPE(pointer) == &raw mut PyMethod_Type {
            pointer = PyMethod_Function(pointer);
        }
        if ffi::PyFunction_Check(pointer) != 0 {
            !pystate::is_async_function(pointer)
        } else {
            ffi::PyCFunction_CheckExact(pointer) != 0
        }
    };
    if is_fine {
        return Ok(());
    }
    check_callable(function, caller)
}

/// The full check, for an object that the quick check in `check_function` has not accepted.
#[cold]
fn check_callable(function: &Bound<'_, PyAny>, caller: &str) -> PyResult<()> {
    if !function.is_callable() {
        // SAFETY: a live object.
        let is_coroutine = unsafe { ffi::PyCoro_CheckExact(function.as_ptr()) } != 0;
        let remedy = if is_coroutine {
            ": run a coroutine with coro.await_() in a coro, asyncio.create_task() in a task, or grapeshot.run() \
             elsewhere"
        } else {
            ""
        };
        return Err(PyTypeError::new_err(format!(
            "{caller}() needs a function, not {}{remedy}",
            function.repr()?
        )));
    }
    if is_async(function)? {
        return Err(PyTypeError::new_err(format!(
            "{caller}() needs an ordinary function, and {} is async: call an async function, and pass the result \
             to coro.await_() in a coro, or to asyncio.create_task()",
            function.repr()?
        )));
    }
    Ok(())
}

/// Whether calling `function` makes a coroutine or an async generator. This is so for an async function, for a method
/// or a `partial` whose function is async, and for an object with an async `__call__`.
fn is_async(function: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = function.py();
    let partial = py.import("functools")?.getattr("partial")?;
    let mut function = function.clone();
    while function.is_instance(&partial)? {
        function = function.getattr("func")?;
    }
    // SAFETY: live objects of the types that the functions expect.
    let is_async = |function: &Bound<'_, PyAny>| unsafe {
        ffi::PyFunction_Check(function.as_ptr()) != 0 && pystate::is_async_function(function.as_ptr())
    };
    // SAFETY: as above.
    if unsafe { ffi::Py_TYPE(function.as_ptr()) == &raw mut PyMethod_Type } {
        function = function.getattr("__func__")?;
    }
    Ok(is_async(&function) || is_async(&function.get_type().getattr("__call__")?))
}

/// `_coro_check_function(function, caller)`: raises `TypeError` unless a coro can run the function.
pub(super) fn check<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let (Some(function), Some(caller)) = (args.get(0), args.get(1)) {
        check_function(&function, caller.extract()?)?;
    }
    Ok(none(py))
}

/// Makes a coro for the loop that `running_loop` returns. `args`: `function, *args, name=, context=, stack=, **kwargs`.
fn make<'py>(py: Python<'py>, args: &Args<'_, 'py>, function_name: &str) -> ObjectResult<'py> {
    let kind = CORO_TYPE.load(Ordering::Acquire);
    if kind.is_null() {
        return Err(PyRuntimeError::new_err("import grapeshot.coro first"));
    }
    let values = args.positional();
    // SAFETY: an argument, which stays alive during the call.
    let function = unsafe { Bound::from_borrowed_ptr(py, values[0]) };
    check_function(&function, function_name)?;
    let event_loop = running_loop(py)?;
    // SAFETY: the type is a subclass of the native one; the allocation comes zeroed.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_GenericAlloc(kind, 0))? };
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
        let context = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())? };
        coro.context.set(context);
    }
    // SAFETY: arguments stay alive during the call, and each item gets its own reference.
    let tuple = unsafe {
        let tuple = Bound::from_owned_ptr_or_err(py, ffi::PyTuple_New(values.len() as ffi::Py_ssize_t - 1))?;
        for (index, value) in values[1..].iter().enumerate() {
            ffi::PyTuple_SET_ITEM(tuple.as_ptr(), index as ffi::Py_ssize_t, ffi::Py_NewRef(*value));
        }
        tuple
    };
    coro.event_loop.set(event_loop);
    coro.function.set(function);
    coro.args.set(tuple);
    coro.thread.set(current_thread());
    coro.id.set(NEXT_ID.fetch_add(1, Ordering::Relaxed));
    Ok(object)
}

pub(super) fn new<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    make(py, &args, "new")
}

pub(super) fn spawn<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let object = make(py, &args, "spawn")?;
    scheduler::start(scheduler::coro_of(&object))?;
    Ok(object)
}

/// `_coro_spawn_hiding`: like `spawn`, for a coro that hides the loop.
pub(super) fn spawn_hiding<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let object = make(py, &args, "run_blocking")?;
    let coro = scheduler::coro_of(&object);
    coro.hides_loop.set(true);
    scheduler::start(coro)?;
    Ok(object)
}
