//! The methods and attributes of the loop that control the probe and return its results.

use std::ffi::{c_int, c_void};

use grapeshot_core::queue::histogram::Histogram;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat};

use super::Mode;
use super::measuring::Measuring;
use crate::binding::args::Args;
use crate::binding::attributes::set_value;
use crate::binding::native_type::This;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{row, threadsafe_getter};
use crate::event_loop::pyloop::LoopObject;

fn get_debug<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(this.py(), this.reactor().probe.is_debug()))
}

fn set_debug<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [enabled] = args.bind()?;
    let is_debug = is_true(enabled)?;
    this.reactor().probe.switch(Mode::DEBUG, is_debug);
    Ok(none(this.py()))
}

/// Whether an argument is true; false if it is missing.
fn is_true(value: Option<Bound<'_, PyAny>>) -> PyResult<bool> {
    value.map_or(Ok(false), |value| value.is_truthy())
}

fn slow_callback_duration(this: This<'_, LoopObject>) -> ObjectResult<'_> {
    Ok(PyFloat::new(this.py(), this.reactor().probe.slow_callback_s()).into_any())
}

unsafe extern "C" fn set_slow_callback_duration(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    _: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls this setter with an object of the loop's type.
    unsafe {
        set_value(
            slf,
            value,
            "cannot delete slow_callback_duration",
            |this: This<'_, LoopObject>, value| {
                this.reactor().probe.set_slow_callback_s(value.extract()?);
                Ok(())
            },
        )
    }
}

/// `_statistics()`: the loop's counters, and the other values that `grapeshot.insight._statistics` needs. Any thread
/// may call it.
fn statistics<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let dict = PyDict::new(this.py());
    let reactor = this.reactor();
    let counters = &reactor.probe.counters;
    for (name, value) in counters.all() {
        dict.set_item(name, value)?;
    }
    let [running_ns, polling_ns] = counters.clock.durations_ns();
    dict.set_item("running_s", running_ns as f64 / 1e9)?;
    dict.set_item("polling_s", polling_ns as f64 / 1e9)?;
    // The current lengths of the queues replace the lengths that the last iteration has stored. In a free-threaded
    // build, the current lengths cannot be read while another thread runs the loop.
    let lens = LoopObject::with_loop_access(&this, this.py(), || Ok(reactor.queue_lens()));
    if let Ok((ready, timers)) = lens {
        dict.set_item("noted_ready", ready)?;
        dict.set_item("noted_timers", timers)?;
    }
    if let Some(measuring) = reactor.probe.measured() {
        dict.set_item("callback_durations", histogram(&measuring.durations))?;
        dict.set_item("scheduling_delays", histogram(&measuring.delays))?;
    }
    Ok(dict.into_any())
}

/// The sum, the maximum and the buckets of durations in nanoseconds.
fn histogram(histogram: &Histogram) -> (u64, u64, Vec<(u64, u64)>) {
    (histogram.sum(), histogram.max(), histogram.buckets().collect())
}

/// `_set_measured(is_on, slow_ns)`: switches measuring on or off. Steps that take at least `slow_ns` are reported; with
/// None, no steps are reported.
fn set_measured<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [is_on, slow_ns] = args.bind()?;
    let is_on = is_true(is_on)?;
    let slow_ns: Option<u64> = slow_ns.map_or(Ok(None), |slow_ns| slow_ns.extract())?;
    this.reactor()
        .probe
        .set_measured(is_on, slow_ns.unwrap_or(u64::MAX));
    Ok(none(this.py()))
}

/// `_running_since_ns()`: when the running step began; None if no step runs or the loop is not measured. Any thread may
/// call it.
fn running_since<'py>(this: This<'py, LoopObject>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let measuring = this.reactor().probe.measured();
    let since_ns = measuring.and_then(Measuring::running_since_ns);
    Ok(since_ns.into_pyobject(this.py())?.into_any())
}

/// `_set_step_observer(function or None)`: the loop calls `function(what, wall_ns, cpu_ns)` after each step.
fn set_step_observer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [observer] = args.bind()?;
    let observer = observer.filter(|observer| !observer.is_none());
    this.reactor().probe.set_step_observer(this.py(), observer);
    Ok(none(this.py()))
}

/// `_set_task_observer(function or None)`: the function is called with each task that `create_task` returns, and with
/// each coro that is started.
fn set_task_observer<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [observer] = args.bind()?;
    let observer = observer.filter(|observer| !observer.is_none());
    this.reactor().probe.set_task_observer(this.py(), observer);
    Ok(none(this.py()))
}

/// `_log_events(io, tls)`: sets which events are logged.
fn log_events<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [io, tls] = args.bind()?;
    let (io, tls) = (is_true(io)?, is_true(tls)?);
    let probe = &this.reactor().probe;
    probe.switch(Mode::LOG_IO, io);
    probe.switch(Mode::LOG_TLS, tls);
    Ok(none(this.py()))
}

pub(crate) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            threadsafe_method,
            get_debug,
            Loop.get_debug,
            "True in debug mode."
        ),
        row!(
            threadsafe_method,
            set_debug,
            Loop.set_debug,
            "Turn debug mode on or off."
        ),
        row!(
            threadsafe_method,
            statistics,
            Loop._statistics,
            "The counters from which loop.statistics() is made."
        ),
        row!(
            method,
            set_measured,
            Loop._set_measured,
            "Start or stop measuring how long steps take, and how long they wait."
        ),
        row!(
            threadsafe_method,
            running_since,
            Loop._running_since_ns,
            "When the running step began; None if no step runs or measuring is off."
        ),
        row!(
            method,
            set_step_observer,
            Loop._set_step_observer,
            "Call observer(what, wall_ns, cpu_ns) after each step; None ends that."
        ),
        row!(
            method,
            set_task_observer,
            Loop._set_task_observer,
            "Call observer(task) for each new task and each new coro; None ends that."
        ),
        row!(
            method,
            log_events,
            Loop._log_events,
            "Log connection events, TLS events, both or neither."
        ),
    ]
}

pub(crate) fn getters() -> [ffi::PyGetSetDef; 1] {
    [ffi::PyGetSetDef {
        set: Some(set_slow_callback_duration),
        ..threadsafe_getter(
            c"slow_callback_duration",
            slow_callback_duration,
            c"Seconds after which debug mode logs a callback as slow.",
        )
    }]
}
