//! The attributes that asyncio's handles have as `__slots__`. Programs can read, set and delete all of them.
//!
//! The handle itself stores what the loop needs: callback, arguments, context, the cancelled flag, the deadline. All
//! other values that a program sets, and the mark of a deleted attribute, go to a dict. The dict takes the place of the
//! source traceback (`flag::HAS_EXTRAS`), so handles without this dict are neither larger nor slower.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PySequence, PyString, PyTuple};

use super::methods::get_when;
use super::{HANDLE_TYPE, HandleObject, flag};
use crate::binding::errors;
use crate::binding::native_type::{This, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{bool_object, none};
use crate::event_loop::pyloop::LoopObject;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    Callback,
    Args,
    Context,
    Loop,
    Cancelled,
    SourceTraceback,
    Repr,
    When,
    Scheduled,
}

/// The name and the docstring of each attribute, in the order of `Slot`.
const SLOTS: [(Slot, &CStr, &CStr); 9] = [
    (
        Slot::Callback,
        c"_callback",
        c"The callable; None after cancel(), and usually after the run.",
    ),
    (
        Slot::Args,
        c"_args",
        c"The arguments as a tuple; None once cancelled.",
    ),
    (Slot::Context, c"_context", c"The context it runs in."),
    (Slot::Loop, c"_loop", c"The loop."),
    (Slot::Cancelled, c"_cancelled", c"True if cancelled."),
    (
        Slot::SourceTraceback,
        c"_source_traceback",
        c"Where it was scheduled (debug mode).",
    ),
    (
        Slot::Repr,
        c"_repr",
        c"The text that repr() shows; None if repr() describes the handle.",
    ),
    (Slot::When, c"_when", c"The deadline in seconds of loop.time()."),
    (
        Slot::Scheduled,
        c"_scheduled",
        c"True while it waits in the timer heap.",
    ),
];

/// The rows of `Handle`, and the additional rows of `TimerHandle`.
pub(super) fn rows() -> (Vec<ffi::PyGetSetDef>, Vec<ffi::PyGetSetDef>) {
    let mut rows: Vec<_> = SLOTS
        .iter()
        .enumerate()
        .map(|(index, (_, name, doc))| ffi::PyGetSetDef {
            name: name.as_ptr(),
            get: Some(get),
            set: Some(set),
            doc: doc.as_ptr(),
            closure: ptr::without_provenance_mut(index),
        })
        .collect();
    let timer_rows = rows.split_off(Slot::When as usize);
    (rows, timer_rows)
}

unsafe extern "C" fn get(slf: *mut ffi::PyObject, closure: *mut c_void) -> *mut ffi::PyObject {
    // SAFETY: CPython calls getters, attached, with an object of the type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::<HandleObject>::new(py, slf);
            let (slot, name, _) = SLOTS[closure.addr()];
            with_critical_section(this, || read(this, slot))?
                .map(Bound::into_ptr)
                .ok_or_else(|| missing(this, name))
        })
    }
}

unsafe extern "C" fn set(slf: *mut ffi::PyObject, value: *mut ffi::PyObject, closure: *mut c_void) -> c_int {
    // SAFETY: CPython calls setters, attached, with an object of the type; value is null on deletion.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let this = This::<HandleObject>::new(py, slf);
            let (slot, name, _) = SLOTS[closure.addr()];
            match Bound::from_borrowed_ptr_or_opt(py, value) {
                Some(value) => {
                    let value = converted(slot, value)?;
                    with_critical_section(this, || write(this, slot, value))?;
                }
                None => with_critical_section(this, || delete(this, slot, name))?,
            }
            if slot == Slot::When {
                reorder(this)?;
            }
            Ok(0)
        })
    }
}

#[cold]
fn missing(this: This<'_, HandleObject>, name: &CStr) -> PyErr {
    let kind = if this.has(flag::TIMER) {
        "TimerHandle"
    } else {
        "Handle"
    };
    PyAttributeError::new_err(format!(
        "'{kind}' object has no attribute '{}'",
        name.to_string_lossy()
    ))
}

// ---- the dict ----------------------------------------------------------------------------------------------------

fn key(py: Python<'_>, slot: Slot) -> Bound<'_, PyString> {
    PyString::intern(py, &SLOTS[slot as usize].1.to_string_lossy())
}

/// The mark of a deleted attribute: the type object of handles, which no attribute has as its value by accident.
fn deleted(py: Python<'_>) -> Bound<'_, PyAny> {
    // SAFETY: attached; the type is stored before any handle exists, and stays.
    unsafe { Bound::from_borrowed_ptr(py, HANDLE_TYPE.load(Ordering::Relaxed).cast()) }
}

/// The dict with the values that have no place in the handle; None if there is no dict.
fn extras(this: This<'_, HandleObject>) -> PyResult<Option<Bound<'_, PyDict>>> {
    if !this.has(flag::HAS_EXTRAS) {
        return Ok(None);
    }
    let dict = this.source_traceback.get(this.py());
    Ok(dict.map(Bound::cast_into::<PyDict>).transpose()?)
}

/// The dict, which is created if there is none.
fn extras_made(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyDict>> {
    let py = this.py();
    if let Some(dict) = extras(this)? {
        return Ok(dict);
    }
    let dict = PyDict::new(py);
    if let Some(traceback) = this.source_traceback.get(py) {
        dict.set_item(key(py, Slot::SourceTraceback), traceback)?;
    }
    this.source_traceback.set(dict.clone().into_any());
    this.raise_flag(flag::HAS_EXTRAS);
    Ok(dict)
}

/// The dict's entry for the attribute: no entry, the mark of a deleted attribute, or a value.
fn extra(this: This<'_, HandleObject>, slot: Slot) -> PyResult<Option<Bound<'_, PyAny>>> {
    match extras(this)? {
        Some(dict) => dict.get_item(key(this.py(), slot)),
        None => Ok(None),
    }
}

fn forget_extra(this: This<'_, HandleObject>, slot: Slot) -> PyResult<()> {
    let name = key(this.py(), slot);
    if let Some(dict) = extras(this)?
        && dict.contains(&name)?
    {
        dict.del_item(name)?;
    }
    Ok(())
}

// ---- reading -------------------------------------------------------------------------------------------------------

fn or_none<'py>(py: Python<'py>, cell: &ObjectCell) -> Bound<'py, PyAny> {
    cell.get(py).unwrap_or_else(|| none(py))
}

/// The value of an attribute; None if it is deleted.
fn read(this: This<'_, HandleObject>, slot: Slot) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = this.py();
    if let Some(found) = extra(this, slot)? {
        return Ok(Some(found).filter(|found| !found.is(deleted(py))));
    }
    Ok(Some(match slot {
        Slot::Callback => callback_or_none(this),
        Slot::Args if this.has(flag::CANCELLED) && !has_call(this) => none(py),
        Slot::Args => this.args_tuple(py)?.into_any(),
        Slot::Context => context(this)?,
        Slot::Loop => or_none(py, &this.event_loop),
        Slot::Cancelled => bool_object(py, this.has(flag::CANCELLED)),
        // The cell holds the dict, in which `extra` has found no traceback.
        Slot::SourceTraceback if this.has(flag::HAS_EXTRAS) => none(py),
        Slot::SourceTraceback => or_none(py, &this.source_traceback),
        Slot::Repr if this.has(flag::HAS_TEXT) => or_none(py, &this.callback),
        Slot::Repr => none(py),
        Slot::When => get_when(this)?,
        Slot::Scheduled => bool_object(py, this.has(flag::SCHEDULED)),
    }))
}

/// True unless the callback was dropped, for example by `cancel()`.
fn has_call(this: This<'_, HandleObject>) -> bool {
    this.callback.is_set() && !this.has(flag::HAS_TEXT)
}

/// True if the handle still has everything that a run needs. After `cancel()` it does not: the reference to its loop is
/// gone, and a program that sets `_loop` does not restore it.
fn can_run(this: This<'_, HandleObject>) -> bool {
    has_call(this) && this.context.is_set() && this.event_loop.is_set()
}

pub(super) fn context(this: This<'_, HandleObject>) -> PyResult<Bound<'_, PyAny>> {
    this.own_context(this.py())?;
    Ok(or_none(this.py(), &this.context))
}

/// The callback or None. The cell of a cancelled handle may hold its text for `repr` instead.
pub(super) fn callback_or_none(this: This<'_, HandleObject>) -> Bound<'_, PyAny> {
    if this.has(flag::HAS_TEXT) {
        return none(this.py());
    }
    or_none(this.py(), &this.callback)
}

/// The source traceback; None outside of debug mode.
pub(super) fn source_traceback(this: This<'_, HandleObject>) -> PyResult<Option<Bound<'_, PyAny>>> {
    Ok(read(this, Slot::SourceTraceback)?.filter(|found| !found.is_none()))
}

/// The text that `repr` shows instead of describing the handle: the `_repr` that the program has set, or the text of a
/// handle that was cancelled in debug mode. None if there is no such text.
pub(super) fn fixed_text(this: This<'_, HandleObject>) -> PyResult<Option<Bound<'_, PyAny>>> {
    Ok(read(this, Slot::Repr)?.filter(|found| !found.is_none()))
}

// ---- setting and deleting ------------------------------------------------------------------------------------------

/// Converts the value for storage. Raises TypeError for values that the loop could not work with.
fn converted(slot: Slot, value: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let py = value.py();
    Ok(match slot {
        Slot::Cancelled => PyBool::new(py, value.is_truthy()?).to_owned().into_any(),
        Slot::When if value.is_exact_instance_of::<PyInt>() => value,
        Slot::When => PyFloat::new(py, value.extract()?).into_any(),
        Slot::Args if value.is_none() || value.is_exact_instance_of::<PyTuple>() => value,
        Slot::Args => match value.cast::<PySequence>() {
            Ok(sequence) => sequence.to_tuple()?.into_any(),
            Err(_) => PyTuple::new(py, value.try_iter()?.collect::<PyResult<Vec<_>>>()?)?.into_any(),
        },
        // SAFETY: a live object, and only its type is read.
        Slot::Context if unsafe { ffi::PyContext_CheckExact(value.as_ptr()) } == 0 => {
            return Err(PyTypeError::new_err(format!(
                "a contextvars.Context was expected, got {}",
                value.repr()?
            )));
        }
        _ => value,
    })
}

fn write<'py>(this: This<'py, HandleObject>, slot: Slot, value: Bound<'py, PyAny>) -> PyResult<()> {
    let py = this.py();
    // Other code uses the handle, so the collector must track it from now on.
    this.track();
    match slot {
        Slot::Callback => {
            keep_text(this)?;
            forget_extra(this, slot)?;
            this.callback.set(value);
        }
        Slot::Args => {
            this.drop_args();
            if value.is_none() {
                return extras_made(this)?.set_item(key(py, slot), value);
            }
            forget_extra(this, slot)?;
            this.more_args.set(value);
        }
        Slot::Context => {
            forget_extra(this, slot)?;
            this.lower_flag(flag::SHARES_CONTEXT);
            this.context.set(value);
        }
        Slot::Cancelled => {
            forget_extra(this, slot)?;
            if value.is_truthy()? {
                this.raise_flag(flag::CANCELLED);
            } else if can_run(this) {
                this.lower_flag(flag::CANCELLED);
            } else {
                extras_made(this)?.set_item(key(py, slot), value)?;
            }
        }
        Slot::When => {
            let bits = value.extract::<f64>()?.to_bits();
            forget_extra(this, slot)?;
            this.when_or_runner.store(bits, Ordering::Relaxed);
            // No slack: the program has asked for this exact time.
            this.lower_flag(flag::HAS_SLACK);
            if value.is_exact_instance_of::<PyInt>() {
                this.raise_flag(flag::WHEN_IS_INT);
            } else {
                this.lower_flag(flag::WHEN_IS_INT);
            }
        }
        Slot::SourceTraceback | Slot::Repr | Slot::Loop | Slot::Scheduled => {
            extras_made(this)?.set_item(key(py, slot), value)?;
        }
    }
    Ok(())
}

/// Moves the text for `repr` to the dict, before the cell of the callback changes.
fn keep_text(this: This<'_, HandleObject>) -> PyResult<()> {
    let py = this.py();
    if !this.has(flag::HAS_TEXT) {
        return Ok(());
    }
    let dict = extras_made(this)?;
    this.lower_flag(flag::HAS_TEXT);
    match this.callback.take(py) {
        Some(text) if !dict.contains(key(py, Slot::Repr))? => dict.set_item(key(py, Slot::Repr), text),
        _ => Ok(()),
    }
}

/// Deletes an attribute. A deleted callback or context becomes None, so running the handle fails, and the failure is
/// reported.
fn delete(this: This<'_, HandleObject>, slot: Slot, name: &CStr) -> PyResult<()> {
    let py = this.py();
    if read(this, slot)?.is_none() {
        return Err(missing(this, name));
    }
    this.track();
    let dict = extras_made(this)?;
    match slot {
        Slot::Callback => {
            keep_text(this)?;
            this.callback.set(none(py));
        }
        Slot::Args => this.drop_args(),
        Slot::Context => {
            this.lower_flag(flag::SHARES_CONTEXT);
            this.context.set(none(py));
        }
        _ => {}
    }
    dict.set_item(key(py, slot), deleted(py))
}

/// Moves a scheduled timer that has a new deadline to its new place in the heap.
fn reorder(this: This<'_, HandleObject>) -> PyResult<()> {
    match this.event_loop() {
        Some(event_loop) if this.has(flag::SCHEDULED) => {
            let event_loop = LoopObject::of(&event_loop);
            event_loop.with_loop_access(this.py(), || {
                event_loop.reactor().timer_moved(this);
                Ok(())
            })
        }
        _ => Ok(()),
    }
}
