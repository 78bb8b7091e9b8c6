//! The limits of `loop.set_limits()`: how many connections, descriptors and coros a loop may have.
//!
//! The rooms above ask here before they open a connection or a descriptor, or start a coro. Without limits, that costs
//! one comparison. The limits belong to the loop's thread, except for the count of connections: whichever thread frees
//! a connection lowers it.

use std::cell::Cell;
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::pyloop::LoopObject;
use super::reactor::Reactor;
use crate::binding::native_type::{Args, This, getter, method, none, threadsafe_getter};
use crate::binding::{errors, log};

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// Seconds until paused listeners try again. Needed for the limit of descriptors: the loop is not told when a
/// descriptor that is not a connection is closed.
const RETRY_DELAY_S: f64 = 1.0;
/// The value of a limit that is not set.
const UNLIMITED: usize = usize::MAX;

pub(crate) struct Limits {
    max_connections: Cell<usize>,
    /// The loop opens no descriptor with this number or a higher one. A new descriptor gets the lowest free number, so
    /// if that is at least the limit, at least that many descriptors are open.
    max_descriptors: Cell<usize>,
    max_coros: Cell<usize>,
    /// The number of connections that this loop's stream transports have.
    connections: AtomicUsize,
    /// Whether the log has said that accepting is paused, since the limits were set.
    is_pause_logged: Cell<bool>,
    /// Whether a timer is set that resumes the paused listeners.
    is_retry_set: Cell<bool>,
}

/// The limit that has been reached, with the number for its message.
#[derive(Clone, Copy)]
pub(crate) enum Reached {
    Connections(usize),
    Descriptors(usize),
    Coros(usize),
}

impl Reached {
    /// `(errno, text)`.
    fn describe(self) -> (i32, String) {
        let (errno, text) = match self {
            Self::Connections(count) => (libc::EMFILE, format!("{count} connections of this loop are open")),
            Self::Descriptors(count) => (libc::EMFILE, format!("all descriptors below {count} are open")),
            Self::Coros(count) => (libc::EAGAIN, format!("{count} coros of this loop are alive")),
        };
        (errno, format!("{text}, and set_limits() allows no more"))
    }

    /// `grapeshot.LimitError`.
    #[cold]
    pub(crate) fn error(self, py: Python<'_>) -> PyErr {
        let (errno, text) = self.describe();
        let made = py
            .import("grapeshot._loop.limits")
            .and_then(|module| module.getattr("LimitError"))
            .and_then(|class| class.call1((errno, text)));
        match made {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    }
}

impl Limits {
    pub(crate) const fn none() -> Self {
        Self {
            max_connections: Cell::new(UNLIMITED),
            max_descriptors: Cell::new(UNLIMITED),
            max_coros: Cell::new(UNLIMITED),
            connections: AtomicUsize::new(0),
            is_pause_logged: Cell::new(false),
            is_retry_set: Cell::new(false),
        }
    }

    pub(crate) fn connection_opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn connection_closed(&self) {
        let less_one = |count: usize| Some(count.saturating_sub(1));
        let _ = self
            .connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less_one);
    }

    /// Called in the child of a fork: the counted connections and the timer belong to the parent.
    pub(crate) fn forget_parent(&self) {
        self.connections.store(0, Ordering::Relaxed);
        self.is_retry_set.set(false);
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// The limit of connections, if one more connection would exceed it.
    #[inline]
    pub(crate) fn connections_reached(&self) -> Option<Reached> {
        let count = self.connections();
        (count >= self.max_connections.get()).then_some(Reached::Connections(count))
    }

    /// The limit of coros, if one more coro would exceed it. `count` returns how many there are.
    #[inline]
    pub(crate) fn coros_reached(&self, count: impl FnOnce() -> usize) -> Option<Reached> {
        let limit = self.max_coros.get();
        if limit == UNLIMITED {
            return None;
        }
        let count = count();
        (count >= limit).then_some(Reached::Coros(count))
    }
}

impl Reactor {
    /// The limit of descriptors, if one more descriptor would exceed it.
    #[inline]
    fn descriptors_reached(&self) -> Option<Reached> {
        let limit = self.limits.max_descriptors.get();
        if limit == UNLIMITED {
            return None;
        }
        // If the process has no free number, the system call that opens the descriptor fails by itself.
        let number = usize::try_from(self.lowest_free_fd()?).ok()?;
        (number >= limit).then_some(Reached::Descriptors(limit))
    }

    /// The limit that one more connection would exceed: that of connections, or that of descriptors.
    #[inline]
    pub(crate) fn connection_limit_reached(&self) -> Option<Reached> {
        self.limits
            .connections_reached()
            .or_else(|| self.descriptors_reached())
    }
}

impl LoopObject {
    /// Remembers `listener`, which has stopped accepting because of the limit `reached`: the caller has taken it out of
    /// the poller. When a connection ends, when the limits change, or after `RETRY_DELAY_S`, `listener._resume()` is
    /// called.
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
        if !limits.is_retry_set.replace(true) {
            let event_loop = self.to_bound(py);
            let again = event_loop.getattr("_resume_paused")?;
            event_loop.call_method1("call_later", (RETRY_DELAY_S, again))?;
        }
        if limits.is_pause_logged.replace(true) {
            return Ok(());
        }
        let (_, text) = reached.describe();
        let text = text.into_pyobject(py)?.into_any();
        log::warning(py, "%r has paused accepting: %s", &[listener.clone(), text])
    }

    /// Lets the paused listeners try again. Called when a connection has ended and when the limits have changed.
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

    /// Called in the child of a fork: the paused listeners belong to the parent. Like everything that the child
    /// inherits from the parent's loop, they are leaked, because dropping them could run code (see
    /// `Reactor::forget_parent`).
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
fn shown(py: Python<'_>, limit: usize) -> Object<'_> {
    match limit {
        UNLIMITED => Ok(none(py)),
        limit => Ok(limit.into_pyobject(py)?.into_any()),
    }
}

/// `_set_limits(connections, descriptors, coros)`: a number or None each.
fn set_limits<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    let [connections, descriptors, coros] = args.bind()?;
    let connections = limit(connections.as_ref(), "connections")?;
    let descriptors = limit(descriptors.as_ref(), "descriptors")?;
    let coros = limit(coros.as_ref(), "coros")?;
    let limits = &this.reactor().limits;
    limits.max_connections.set(connections);
    limits.max_descriptors.set(descriptors);
    limits.max_coros.set(coros);
    limits.is_pause_logged.set(false);
    this.resume_listeners(this.py())?;
    Ok(none(this.py()))
}

/// `_resume_paused()`, which the timer calls.
fn resume_paused<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor().limits.is_retry_set.set(false);
    this.resume_listeners(this.py())?;
    Ok(none(this.py()))
}

/// `_limits`: `(connections, descriptors, coros)`.
fn get_limits(this: This<'_, LoopObject>) -> Object<'_> {
    let py = this.py();
    let limits = &this.reactor().limits;
    let values = (
        shown(py, limits.max_connections.get())?,
        shown(py, limits.max_descriptors.get())?,
        shown(py, limits.max_coros.get())?,
    );
    Ok(values.into_pyobject(py)?.into_any())
}

/// `_check_place(is_connection)`: raises `LimitError` if the limits allow no further connection, or no further
/// descriptor if `is_connection` is false.
fn check_place<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    let [is_connection] = args.bind()?;
    let is_connection = is_connection.map_or(Ok(false), |value| value.is_truthy())?;
    let reactor = this.reactor();
    let reached = if is_connection {
        reactor.connection_limit_reached()
    } else {
        reactor.descriptors_reached()
    };
    match reached {
        Some(reached) => Err(reached.error(this.py())),
        None => Ok(none(this.py())),
    }
}

fn open_connections(this: This<'_, LoopObject>) -> Object<'_> {
    let count = this.reactor().limits.connections();
    Ok(count.into_pyobject(this.py())?.into_any())
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        method!(
            LoopObject,
            set_limits,
            "_set_limits(connections, descriptors, coros)",
            "Set each limit to a number, or to None for no limit."
        ),
        method!(
            LoopObject,
            resume_paused,
            "_resume_paused()",
            "Let the listeners that a limit has paused accept again."
        ),
        method!(
            LoopObject,
            check_place,
            "_check_place(is_connection)",
            "Raise LimitError if the limits allow no further descriptor, or no further connection."
        ),
    ]
}

pub(super) fn getters() -> [ffi::PyGetSetDef; 2] {
    [
        getter!(
            LoopObject,
            c"_limits",
            get_limits,
            c"The limits of connections, descriptors and coros; None means no limit."
        ),
        threadsafe_getter!(
            LoopObject,
            c"_open_connections",
            open_connections,
            c"The number of connections that the loop's stream transports have."
        ),
    ]
}
