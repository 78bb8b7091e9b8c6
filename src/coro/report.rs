//! Describes, for the log, a run that has blocked its thread for too long (`pulse`): its kind, its name and where it is
//! in the code. The watchdog calls this while the run goes on; the thread itself calls it when the run has ended.
//!
//! These functions are called attached, from any thread.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCode, PyString};

use super::hooks;
use super::pulse::{Name, Place, Subject};

/// Nested `functools.partial` objects are followed to this depth.
const MAX_PARTIALS: usize = 8;

/// The file names of the import system begin with this.
const IMPORT_SYSTEM: &str = "<frozen importlib";

/// The code object and the current line of a function that a thread is in.
pub(super) type Entry<'py> = (Bound<'py, PyAny>, u32);

/// The functions that a thread is in, innermost first; empty if it is in no Python function. `run_forever` and its
/// callers are left out, and so are the functions of the import system, as in tracebacks.
///
/// `sys._current_frames` cannot be used: it also creates frame objects for the threads of other interpreters, which
/// have GILs of their own.
///
/// # Safety
/// `thread` is the state of a live thread of this interpreter.
pub(super) unsafe fn places(py: Python<'_>, thread: *mut ffi::PyThreadState) -> PyResult<Vec<Entry<'_>>> {
    let outside = hooks::run_forever(py);
    // SAFETY: by the contract; a new reference, or null without an exception.
    let mut frame = unsafe { Bound::from_owned_ptr_or_opt(py, ffi::PyThreadState_GetFrame(thread).cast()) };
    let mut places = Vec::new();
    while let Some(inner) = frame.filter(|frame| !frame.is_none()) {
        let code = inner.getattr("f_code")?;
        if outside.as_ref().is_some_and(|outside| outside.is(&code)) {
            break;
        }
        if !text(&code.getattr("co_filename")?)?.starts_with(IMPORT_SYSTEM) {
            // `f_lineno` is None while a function is between two lines.
            let line = inner.getattr("f_lineno")?.extract::<Option<u32>>()?;
            places.push((code, line.unwrap_or(0)));
        }
        frame = Some(inner.getattr("f_back")?);
    }
    Ok(places)
}

/// The file, line and function name of an entry.
pub(super) fn place(entry: &Entry<'_>) -> PyResult<Place> {
    let (code, line) = entry;
    Ok(Place {
        file: text(&code.getattr("co_filename")?)?,
        line: *line,
        function: text(&code.getattr("co_qualname")?)?,
    })
}

/// The kind and name of `object`. `outermost` is the Python function that the loop called; None if it called no Python
/// function, or if the run has ended.
pub(super) fn name(object: &Bound<'_, PyAny>, subject: Subject, outermost: Option<&Place>) -> PyResult<Name> {
    let function = outermost.map(|place| place.function.clone());
    let (kind, name) = match (subject, function) {
        (Subject::Coro, _) => ("coro", text(&object.getattr("name")?)?),
        (Subject::Callback, function) => match (task(object), function) {
            (Some(task), _) => ("task", text(&task.call_method0("get_name")?)?),
            (None, Some(function)) if object.is_none() => ("callback", function),
            (None, _) => ("callback", callback_name(object)?),
        },
        (Subject::Source, Some(function)) => ("protocol method", function),
        (Subject::Source, None) => ("transport", text(&object.get_type().qualname()?.into_any())?),
    };
    Ok(Name { kind, name })
}

/// The task that `callback` is a step or wake-up of, or `callback` itself if it is a task.
fn task<'py>(callback: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let owner = match callback.getattr("__self__") {
        Ok(owner) => owner,
        Err(_) => callback.clone(),
    };
    let has = |name: &str| owner.hasattr(name).unwrap_or(false);
    let is_task = has("get_coro") && has("get_name");
    is_task.then_some(owner)
}

/// The function's qualified name, as in asyncio's log records. For an object without one, the name of its class.
fn callback_name(callback: &Bound<'_, PyAny>) -> PyResult<String> {
    let mut function = callback.clone();
    for _ in 0..MAX_PARTIALS {
        match function.getattr("__qualname__") {
            Ok(name) if name.is_instance_of::<PyString>() => return text(&name),
            Ok(_) | Err(_) => {}
        }
        // `functools.partial` and objects that look like it.
        match function.getattr("func") {
            Ok(inner) => function = inner,
            Err(_) => break,
        }
    }
    text(&callback.get_type().qualname()?.into_any())
}

fn text(object: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(object.str()?.to_string_lossy().into_owned())
}

/// The code object of a Python function. Called with the function that runs the loop: `places` stops at the frame that
/// runs this code.
pub(super) fn code_of(function: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    Ok(function
        .getattr("__code__")?
        .cast_into::<PyCode>()?
        .into_any()
        .unbind())
}
