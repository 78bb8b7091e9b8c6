//! The methods of the loop for its limits, and the listeners that stop accepting while a limit is reached.

use std::mem;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::limits::{Reached, UNLIMITED};
use super::pyloop::LoopObject;
use crate::binding::args::Args;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getter, row, threadsafe_getter};
use crate::binding::{errors, log};

/// Seconds until paused listeners try again. The limit of descriptors needs these attempts, because the loop is not
/// told when a descriptor that is not a connection is closed.
const RETRY_DELAY_S: f64 = 1.0;

impl LoopObject {
    /// Remembers `listener`, which the caller has taken out of the poller because of the limit `reached`. The loop
    /// calls `listener._resume()` when a connection ends, when the limits change, or at the latest after
    /// `RETRY_DELAY_S`.
    #[cold]
    pub(crate) fn pause_listener(&self, listener: &Bound<'_, PyAny>, reached: Reached) -> PyResult<()> {
        let py = listener.py();
        let waiting = match self.paused.get(py) {
            Some(waiting) => waiting.cast_into::<PyList>()?,
            None => PyList::empty(py),
        };
        waiting.append(listener)?;
        self.paused.set(waiting.into_any());
        let limits = &self.reactor().limits;
        if limits.begin_retry() {
            let event_loop = self.to_bound(py);
            let again = event_loop.getattr("_resume_listeners")?;
            event_loop.call_method1("call_later", (RETRY_DELAY_S, again))?;
        }
        if !limits.begin_pause() {
            return Ok(());
        }
        let (_, text) = reached.describe();
        let text = text.into_pyobject(py)?.into_any();
        log::warning(py, "%r has paused accepting: %s", &[listener.clone(), text])
    }

    /// Lets the paused listeners try again. Called when a connection has ended, when the limits have changed, and
    /// by the retry timer.
    #[inline]
    pub(crate) fn resume_listeners(&self, py: Python<'_>) -> PyResult<()> {
        if self.paused.is_set() {
            return self.resume_each(py);
        }
        Ok(())
    }

    #[cold]
    fn resume_each(&self, py: Python<'_>) -> PyResult<()> {
        let Some(waiting) = self.paused.take(py) else {
            return Ok(());
        };
        let mut result = Ok(());
        for listener in waiting.cast_into::<PyList>()?.iter() {
            if let Err(error) = listener.call_method0("_resume") {
                let message = "A server failed to resume accepting after a pause";
                let reported = errors::report(&self.to_bound(py), message, error, &[]);
                result = result.and(reported);
            }
        }
        result
    }

    /// Called in the child of a fork: the paused listeners belong to the parent. Like the work that the parent's loop
    /// has scheduled, they are leaked, because dropping them could run code (see `Reactor::forget_parent`).
    pub(super) fn forget_paused(&self, py: Python<'_>) {
        mem::forget(self.paused.take(py));
    }
}

/// Converts an argument of `set_limits()`: None, or a positive number.
fn limit(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<usize> {
    let Some(value) = value.filter(|value| !value.is_none()) else {
        return Ok(UNLIMITED);
    };
    match value.extract::<i64>()? {
        number if number < 1 => Err(PyValueError::new_err(format!(
            "{name} must be at least 1, or None for no limit, got {number}"
        ))),
        number => Ok(usize::try_from(number).unwrap_or(UNLIMITED)),
    }
}

/// The limit as Python sees it: a number, or None.
fn shown(py: Python<'_>, limit: usize) -> ObjectResult<'_> {
    match limit {
        UNLIMITED => Ok(none(py)),
        limit => Ok(limit.into_pyobject(py)?.into_any()),
    }
}

/// `_set_limits(connections, descriptors, coros)`: each limit is a number or None.
fn set_limits<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [connections, descriptors, coros] = args.bind()?;
    let connections = limit(connections.as_ref(), "connections")?;
    let descriptors = limit(descriptors.as_ref(), "descriptors")?;
    let coros = limit(coros.as_ref(), "coros")?;
    this.reactor().limits.set(connections, descriptors, coros);
    this.resume_listeners(this.py())?;
    Ok(none(this.py()))
}

/// `_resume_listeners()`, which the timer of `pause_listener` calls.
fn resume_listeners<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.reactor().limits.end_retry();
    this.resume_listeners(this.py())?;
    Ok(none(this.py()))
}

/// `_limits`: `(connections, descriptors, coros)`.
fn get_limits(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    let py = this.py();
    let limits = &this.reactor().limits;
    let values = (
        shown(py, limits.max_connections())?,
        shown(py, limits.max_descriptors())?,
        shown(py, limits.max_coros())?,
    );
    Ok(values.into_pyobject(py)?.into_any())
}

/// `_check_limits(is_connection)`: raises `LimitError` if `is_connection` is true and the limits allow no further
/// connection, or if it is false and they allow no further descriptor.
fn check_limits<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [is_connection] = args.bind()?;
    let is_connection = is_connection.map_or(Ok(false), |value| value.is_truthy())?;
    let reactor = this.reactor();
    let reached = if is_connection {
        reactor.connection_limit_reached()
    } else {
        reactor.descriptor_limit_reached()
    };
    match reached {
        Some(reached) => Err(reached.error(this.py())),
        None => Ok(none(this.py())),
    }
}

fn open_connections(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    let count = this.reactor().limits.connections();
    Ok(count.into_pyobject(this.py())?.into_any())
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            set_limits,
            Loop._set_limits,
            "Set each limit to a number, or to None for no limit."
        ),
        row!(
            method,
            resume_listeners,
            Loop._resume_listeners,
            "Let the listeners that a limit has paused accept again."
        ),
        row!(
            method,
            check_limits,
            Loop._check_limits,
            "Raise LimitError if the limits allow no further descriptor, or no further connection."
        ),
    ]
}

pub(super) fn getters() -> [ffi::PyGetSetDef; 2] {
    [
        getter(
            c"_limits",
            get_limits,
            c"The limits of connections, descriptors and coros; None means no limit.",
        ),
        threadsafe_getter(
            c"_open_connections",
            open_connections,
            c"The number of connections that the loop's stream transports have.",
        ),
    ]
}
