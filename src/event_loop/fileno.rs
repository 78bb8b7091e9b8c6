//! The descriptor number of an object from Python code.

use pyo3::exceptions::{PyAttributeError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};

use crate::binding::names::names;

/// The descriptor number of `target`: `target` itself if it is an int, otherwise the result of its `fileno()`. Raises
/// ValueError if there is no such number, as `selectors` does.
pub(super) fn number_of(target: &Bound<'_, PyAny>) -> PyResult<i64> {
    let py = target.py();
    let number = if target.is_instance_of::<PyInt>() {
        target.extract()
    } else {
        target
            .call_method0(names(py).fileno.bind(py).cast::<PyString>()?)
            .and_then(|fd| {
                let is_int = fd.is_exact_instance_of::<PyInt>();
                let fd = if is_int {
                    fd
                } else {
                    py.get_type::<PyInt>().call1((fd,))?
                };
                fd.extract()
            })
    };
    number.or_else(|error| {
        let is_usual = error.is_instance_of::<PyAttributeError>(py)
            || error.is_instance_of::<PyTypeError>(py)
            || error.is_instance_of::<PyValueError>(py)
            || error.is_instance_of::<PyOverflowError>(py);
        if !is_usual {
            return Err(error);
        }
        Err(PyValueError::new_err(format!(
            "Invalid file object: {}",
            target.repr()?
        )))
    })
}
