//! New objects of Python's built-in types, with `MemoryError` if there is no memory for them.
//!
//! pyo3's own constructors report the error to `sys.unraisablehook` and then panic, and `errors` turns the panic into a
//! `MemoryError`. The functions here return the error instead. They are for code that has to clean up in that case, and
//! for code that programs call often.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

/// A `str`.
pub(crate) fn string<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyString>> {
    // SAFETY: attached; the call copies `len` readable bytes, which are UTF-8, or returns null with an exception set.
    unsafe {
        let made = ffi::PyUnicode_FromStringAndSize(text.as_ptr().cast(), text.len() as ffi::Py_ssize_t);
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked())
    }
}

/// `getattr(object, name)`, for a name that is not in the table of `names`.
pub(crate) fn attribute<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    object.getattr(string(object.py(), name)?)
}

/// `import name`.
pub(crate) fn module<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    Ok(py.import(string(py, name)?)?.into_any())
}

/// An empty `dict`.
pub(crate) fn dict(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    // SAFETY: attached; a new dict, or null with an exception set.
    unsafe { Ok(Bound::from_owned_ptr_or_err(py, ffi::PyDict_New())?.cast_into_unchecked()) }
}

/// An empty `list`.
pub(crate) fn list(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    // SAFETY: attached; a new list, or null with an exception set.
    unsafe { Ok(Bound::from_owned_ptr_or_err(py, ffi::PyList_New(0))?.cast_into_unchecked()) }
}

/// An `int`.
pub(crate) fn int(py: Python<'_>, number: i64) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: attached; a new int, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyLong_FromLongLong(number)) }
}

/// A `float`.
pub(crate) fn float(py: Python<'_>, number: f64) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: attached; a new float, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyFloat_FromDouble(number)) }
}

/// A `tuple` of the items.
pub(crate) fn tuple<'py>(
    py: Python<'py>,
    items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyTuple>> {
    // SAFETY: attached; a new tuple of that length, or null with an exception set. Each place is filled once, with a
    // reference that the tuple takes over. An iterator that is shorter than its `len` would leave nulls in the tuple.
    // No caller passes one; debug builds check that.
    unsafe {
        let len = items.len();
        let made = Bound::from_owned_ptr_or_err(py, ffi::PyTuple_New(len as ffi::Py_ssize_t))?;
        let mut filled = 0;
        for item in items.take(len) {
            ffi::PyTuple_SET_ITEM(made.as_ptr(), filled, item.into_ptr());
            filled += 1;
        }
        debug_assert_eq!(filled as usize, len);
        Ok(made.cast_into_unchecked())
    }
}
