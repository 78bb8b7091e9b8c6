//! The result type of native functions that CPython calls: an object, or the error that is raised as an exception.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyNone};

/// An owned reference to the object that the Python caller gets, or the error that is raised there as an exception.
pub(crate) type ObjectResult<'py> = PyResult<Bound<'py, PyAny>>;

/// None, as a method's result.
#[inline]
pub(crate) fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    PyNone::get(py).to_owned().into_any()
}

/// True or False, as a method's result.
pub(crate) fn bool_object(py: Python<'_>, value: bool) -> Bound<'_, PyAny> {
    PyBool::new(py, value).to_owned().into_any()
}
