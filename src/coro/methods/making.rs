//! Making coros: `new` and `spawn`.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

use super::Object;
use crate::coro::runtime::with_runtime;
use crate::coro::{hooks, scheduler, tasks};
use crate::event_loop::errors;
use crate::event_loop::native_type::Args;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::current_thread;

/// The class of new coros: `grapeshot.coro.Coro`, a subclass of the native type.
static CORO_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Takes the class of new coros; it stays for good.
pub(super) fn set_type(kind: Bound<'_, PyType>) {
    CORO_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
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

/// The running loop, which must be ours; if none runs, the one that `coro.event_loop()` is going to run.
fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    if with_runtime(|runtime| runtime.is_forked.get()) {
        return Err(PyRuntimeError::new_err(
            "this process was forked by a coro: it cannot have coros while that one runs",
        ));
    }
    if with_runtime(|runtime| runtime.is_ending.get()) {
        return Err(PyRuntimeError::new_err(
            "the thread is ending: it has no more coros",
        ));
    }
    let event_loop = tasks::running_loop(py)?;
    if event_loop.is_none() {
        return hooks::pending_loop(py);
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
    coro.thread.set(current_thread());
    coro.id.set(NEXT_ID.fetch_add(1, Ordering::Relaxed));
    Ok(object)
}

pub(super) fn new<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    make(py, &args, "new")
}

pub(super) fn spawn<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    let object = make(py, &args, "spawn")?;
    scheduler::start(scheduler::coro_of(&object))?;
    Ok(object)
}
