//! How many connections, descriptors and coros a loop may have: `loop.set_limits()`.
//!
//! The rooms above ask before they open something. Without limits they pay one comparison per connection or coro.
//! Belongs to the loop's thread; only the count of connections is also lowered where garbage is collected.

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

/// Seconds until paused listeners try again, in case the descriptors that were closed are no connections.
const RETRY_DELAY_S: f64 = 1.0;
/// No limit.
const UNLIMITED: usize = usize::MAX;

pub(crate) struct Limits {
    max_connections: Cell<usize>,
    /// Descriptors of the loop have lower numbers. The kernel gives the lowest free number, so there are that many.
    max_descriptors: Cell<usize>,
    max_coros: Cell<usize>,
    /// The connections of this loop's stream transports.
    connections: AtomicUsize,
    /// The log was told that accepting pauses, since the limits were set.
    is_pause_logged: Cell<bool>,
    /// A timer will try again.
    is_retry_set: Cell<bool>,
}

/// What a loop has as many of as it may.
#[derive(Clone, Copy)]
pub(crate) enum Reached {
    Connections(usize),
    Descriptors(usize),
    Coros(usize),
}

impl Reached {
    /// `(errno, text)`.
    fn describe(self) -> (i32, String) {
        match self {
            Self::Connections(count) => (libc::EMFILE, format!("{count} connections of this loop are open")),
            Self::Descriptors(count) => (libc::EMFILE, format!("all descriptors below {count} are open")),
            Self::Coros(count) => (libc::EAGAIN, format!("{count} coros of this loop are alive")),
        }
    }

    /// `grapeshot.LimitError`.
    #[cold]
    pub(crate) fn error(self, py: Python<'_>) -> PyErr {
        let (errno, text) = self.describe();
        let text = format!("{text}, and set_limits() allows no more");
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

    /// In the child of a fork, where the connections and the timer are the parent's.
    pub(crate) fn forget_parent(&self) {
        self.connections.store(0, Ordering::Relaxed);
        self.is_retry_set.set(false);
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Whether one more connection would be one too many.
    #[inline]
    pub(crate) fn connections_reached(&self) -> Option<Reached> {
        let count = self.connections();
        (count >= self.max_connections.get()).then_some(Reached::Connections(count))
    }

    /// Whether one more coro would be one too many; `count` tells how many there are.
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
    /// Whether one more descriptor would be one too many.
    #[inline]
    fn descriptors_reached(&self) -> Option<Reached> {
        let limit = self.limits.max_descriptors.get();
        if limit == UNLIMITED {
            return None;
        }
        // Without a number the system has none left, and says so itself.
        let number = usize::try_from(self.lowest_free_fd()?).ok()?;
        (number >= limit).then_some(Reached::Descriptors(limit))
    }

    /// Whether one more connection, with its descriptor, would be one too many.
    #[inline]
    pub(crate) fn places_reached(&self) -> Option<Reached> {
        self.limits
            .connections_reached()
            .or_else(|| self.descriptors_reached())
    }
}

impl LoopObject {
    /// Nothing is accepted on `listener`, which the caller has taken out of the poller, until a connection ends, the
    /// limits change or some time has passed. Then `listener._resume()` is called.
    #[cold]
    pub(crate) fn wait_for_place(&self, listener: &Bound<'_, PyAny>, reached: Reached) -> PyResult<()> {
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
        log::warning(
            py,
            "%r accepts nothing until a place is free: %s",
            &[listener.clone(), text],
        )
    }

    /// A connection has ended, or the limits are others: what waits tries again.
    #[inline]
    pub(crate) fn place_is_free(&self, py: Python<'_>) -> PyResult<()> {
        if self.paused.is_set() {
            return self.resume_paused(py);
        }
        Ok(())
    }

    #[cold]
    fn resume_paused(&self, py: Python<'_>) -> PyResult<()> {
        let Some(waiting) = self.paused.take(py) else {
            return Ok(());
        };
        let mut result = Ok(());
        for listener in waiting.cast_into::<PyList>()?.iter() {
            if let Err(error) = listener.call_method0("_resume") {
                let message = "A server cannot accept again after a pause";
                let reported = errors::report(&self.to_bound(py), message, error, &[]);
                result = result.and(reported);
            }
        }
        result
    }

    /// In the child of a fork: what waits is the parent's. As all of that, it stays for good.
    pub(super) fn forget_paused(&self, py: Python<'_>) {
        mem::forget(self.paused.take(py));
    }
}

/// A limit as Python gives it: None, or a positive number.
fn limit(value: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<usize> {
    let Some(value) = value.filter(|value| !value.is_none()) else {
        return Ok(UNLIMITED);
    };
    match value.extract::<i64>()? {
        number if number < 1 => Err(PyValueError::new_err(format!(
            "{name} must be at least 1, or None for no limit"
        ))),
        number => Ok(usize::try_from(number).unwrap_or(UNLIMITED)),
    }
}

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
    this.place_is_free(this.py())?;
    Ok(none(this.py()))
}

/// `_resume_paused()`: the timer.
fn resume_paused<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> Object<'py> {
    this.reactor().limits.is_retry_set.set(false);
    this.place_is_free(this.py())?;
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

/// `_check_place(is_connection)`: `LimitError` if there may not be one more descriptor, or connection.
fn check_place<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> Object<'py> {
    let [is_connection] = args.bind()?;
    let is_connection = is_connection.is_some_and(|value| value.is_truthy().unwrap_or(false));
    let reactor = this.reactor();
    let reached = if is_connection {
        reactor.places_reached()
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
            "Limit each to a number, or None."
        ),
        method!(
            LoopObject,
            resume_paused,
            "_resume_paused()",
            "Try again to accept where a limit was reached."
        ),
        method!(
            LoopObject,
            check_place,
            "_check_place(is_connection)",
            "LimitError if there may not be one more descriptor, or connection."
        ),
    ]
}

pub(super) fn getters() -> [ffi::PyGetSetDef; 2] {
    [
        getter!(
            LoopObject,
            c"_limits",
            get_limits,
            c"The limits of connections, descriptors and coros, None where there is none."
        ),
        threadsafe_getter!(
            LoopObject,
            c"_open_connections",
            open_connections,
            c"How many connections the stream transports of the loop have."
        ),
    ]
}
