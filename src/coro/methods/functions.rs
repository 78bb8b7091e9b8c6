//! The functions of the native module that the package `coro` is built on, except for those that make coros.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyType};

use super::{Object, making};
use crate::coro::coroutine::Status;
use crate::coro::errors::{self as coro_errors, Kind};
use crate::coro::runtime::{current as running, with_runtime};
use crate::coro::{arch, pystate, scheduler, tasks};
use crate::event_loop::native_type::{Args, This, none};

pub(super) fn current<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("current", 0)?;
    match running(py) {
        Some(coro) => Ok(coro.to_bound()),
        None => Err(coro_errors::new(
            py,
            Kind::YieldFromMain,
            "no coro is running: this is the thread's own stack",
        )),
    }
}

pub(super) fn current_or_none<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_current_or_none", 0)?;
    Ok(running(py).map_or_else(|| none(py), This::to_bound))
}

pub(super) fn yield_slice<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("yield_slice", 0)?;
    scheduler::yield_slice(scheduler::suspendable(py)?)
}

pub(super) fn wait<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_wait", 0)?;
    scheduler::wait(scheduler::suspendable(py)?)
}

/// As `_coro_wait`, but an interruption is returned rather than raised: what is raised here is that nothing can wait.
pub(super) fn wait_for_wake<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_wait_for_wake", 0)?;
    let coro = scheduler::suspendable(py)?;
    Ok(match scheduler::wait(coro) {
        Ok(_) => none(py),
        Err(interruption) => interruption.into_value(py).into_bound(py).into_any(),
    })
}

pub(super) fn sleep_until<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("sleep_absolute", 1)?;
    let when_s = args.get(0).map_or(Ok(0.0), |when| when.extract::<f64>())?;
    scheduler::sleep_until(scheduler::suspendable(py)?, when_s)
}

pub(super) fn sleep_for<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("sleep_relative", 1)?;
    let delay_s = args.get(0).map_or(Ok(0.0), |delay| delay.extract::<f64>())?;
    let coro = scheduler::suspendable(py)?;
    scheduler::sleep_until(coro, crate::event_loop::reactor::time_s() + delay_s)
}

/// What a timer of `sleep_until` calls.
pub(super) fn end_sleep<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_end_sleep", 1)?;
    if let Some(object) = args.get(0) {
        let coro = scheduler::coro_of(&object);
        if coro.status.get() == Status::Waiting {
            scheduler::make_ready(coro);
        }
    }
    Ok(none(py))
}

pub(super) fn live<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_live", 0)?;
    Ok(PyList::new(py, with_runtime(|runtime| runtime.live(py)))?.into_any())
}

pub(super) fn statistics<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_statistics", 0)?;
    let dict = PyDict::new(py);
    with_runtime(|runtime| -> PyResult<()> {
        let stats = &runtime.stats;
        dict.set_item("switches", stats.switches.get())?;
        dict.set_item("evacuations", stats.evacuations.get())?;
        dict.set_item("bytes_copied", stats.copied_len.get())?;
        dict.set_item("bytes_saved", stats.saved_len.get())?;
        dict.set_item("started", stats.started.get())?;
        dict.set_item("slots", runtime.options.slots.get())?;
        dict.set_item("evicts_always", runtime.options.evicts_always.get())
    })?;
    Ok(dict.into_any())
}

pub(super) fn set_slots<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("set_stack_slots", 1)?;
    let count: usize = args.get(0).map_or(Ok(1), |count| count.extract())?;
    if count == 0 || count > 4096 {
        return Err(PyValueError::new_err("between 1 and 4096 slots"));
    }
    with_runtime(|runtime| runtime.options.slots.set(count));
    Ok(none(py))
}

pub(super) fn evict_always<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_evict_always", 1)?;
    let is_on = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    with_runtime(|runtime| runtime.options.evicts_always.set(is_on));
    Ok(none(py))
}

pub(super) fn fail_evacuations<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_fail_evacuations", 1)?;
    let count: u32 = args.get(0).map_or(Ok(0), |count| count.extract())?;
    with_runtime(|runtime| runtime.options.failing_evacuations.set(count));
    Ok(none(py))
}

/// `_coro_setup(errors, kind)`: the package hands its exception classes and its Coro over. None, or why there are no
/// coros here.
pub(super) fn set_up<'py>(py: Python<'py>, args: Args<'_, 'py>) -> Object<'py> {
    args.exactly("_coro_setup", 2)?;
    if !arch::IS_SUPPORTED {
        return Ok(PyString::new(py, "coros know x86-64 and AArch64 only").into_any());
    }
    if let Some(reason) = pystate::self_check(py)? {
        return Ok(PyString::new(py, reason).into_any());
    }
    if let (Some(module), Some(kind)) = (args.get(0), args.get(1)) {
        coro_errors::set_classes(&module)?;
        tasks::set_up(py)?;
        let kind = kind.cast_into::<PyType>()?;
        making::set_type(kind);
    }
    Ok(none(py))
}
