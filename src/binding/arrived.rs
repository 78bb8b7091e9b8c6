//! The results of name lookups and of calls on files, on their way from native code to Python code. Python code gets
//! them in a list, each with the ticket that was returned when the lookup or the call was begun.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::errors;
use super::object_result::ObjectResult;

/// A ticket, and the result or the exception to raise. None if there was memory for neither a result nor an exception:
/// `append` then makes a MemoryError.
type Ticket = (u64, Option<Py<PyAny>>);

/// The results that Python code has not received yet. After a call of `append` there are none, unless that call ran out
/// of memory. (The collector need not see the results, because they do not refer to the object that contains them.)
#[derive(Default)]
pub(crate) struct Arrived(Mutex<VecDeque<Ticket>>);

impl Arrived {
    /// Appends `(ticket, result)` to the list for each result. If the conversion of a result fails, the exception is
    /// appended in its place. Err if a pair could not be appended; the next call appends that pair and all later ones.
    pub(crate) fn append<'py, T>(
        &self,
        list: &Bound<'py, PyList>,
        new: Vec<(u64, T)>,
        convert: impl Fn(T) -> ObjectResult<'py>,
    ) -> PyResult<()> {
        let py = list.py();
        let value_of = |error: PyErr| error.into_value(py).into_any();
        for (ticket, answer) in new {
            let converted = errors::caught(|| Ok(convert(answer).map_or_else(value_of, Bound::unbind)));
            self.lock().push_back((ticket, converted.ok()));
        }
        loop {
            let Some((ticket, answer)) = self.lock().pop_front() else {
                return Ok(());
            };
            let appended = errors::caught(|| {
                let answer = answer.as_ref().map(|answer| answer.clone_ref(py));
                list.append((
                    ticket,
                    answer.unwrap_or_else(|| value_of(PyMemoryError::new_err(()))),
                ))
            });
            if let Err(error) = appended {
                self.lock().push_front((ticket, answer));
                return Err(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Ticket>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
