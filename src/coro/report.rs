//! What a late run is called and where it is: kind, name and stack. The watchdog asks this while the run goes on.
//!
//! Called attached, from any thread. It must not know what the answers are for.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCode, PyString};

use super::hooks;
use super::pulse::{Name, Place, Subject};

/// `functools.partial`s of `functools.partial`s are followed to this depth.
const MAX_PARTIALS: usize = 8;

/// What the names of the import system's files begin with.
const IMPORT_SYSTEM: &str = "<frozen importlib";

/// Code and line of a function that a thread is in.
pub(super) type Entry<'py> = (Bound<'py, PyAny>, u32);

/// Code and line of the functions that a thread is in, the innermost first; nothing if it is in none. What has called
/// the loop is left out, and so are the functions of the import system, as in tracebacks.
///
/// `sys._current_frames` cannot be used: it also makes frame objects of other interpreters' threads, which have GILs of
/// their own.
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
            // None while a function is between two lines.
            let line = inner.getattr("f_lineno")?.extract::<Option<u32>>()?;
            places.push((code, line.unwrap_or(0)));
        }
        frame = Some(inner.getattr("f_back")?);
    }
    Ok(places)
}

/// An entry in words.
pub(super) fn place(entry: &Entry<'_>) -> PyResult<Place> {
    let (code, line) = entry;
    Ok(Place {
        file: text(&code.getattr("co_filename")?)?,
        line: *line,
        function: text(&code.getattr("co_qualname")?)?,
    })
}

/// The name of `object`; `outermost` is the function that the loop has called, if it is a Python function.
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

/// The task whose step or wake-up `callback` is, or which it is itself.
fn task<'py>(callback: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let owner = match callback.getattr("__self__") {
        Ok(owner) => owner,
        Err(_) => callback.clone(),
    };
    let has = |name: &str| owner.hasattr(name).unwrap_or(false);
    let is_task = has("get_coro") && has("get_name");
    is_task.then_some(owner)
}

/// The function's qualified name, as asyncio's records have it; of an object without one, its class's.
fn callback_name(callback: &Bound<'_, PyAny>) -> PyResult<String> {
    let mut function = callback.clone();
    for _ in 0..MAX_PARTIALS {
        match function.getattr("__qualname__") {
            Ok(name) if name.is_instance_of::<PyString>() => return text(&name),
            Ok(_) | Err(_) => {}
        }
        // functools.partial and what looks like it.
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

/// The code of the function that runs the loop: where `places` stops.
pub(super) fn code_of(function: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    Ok(function
        .getattr("__code__")?
        .cast_into::<PyCode>()?
        .into_any()
        .unbind())
}
