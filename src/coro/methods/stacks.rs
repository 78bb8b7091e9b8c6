//! `stack_info()` for a thread and for one coro, the number of shared stacks, and the switch stamps.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::coro::check_thread;
use crate::binding::args::Args;
use crate::binding::object_result::{ObjectResult, none};
use crate::coro::coroutine::{Coro, Status};
use crate::coro::runtime::with_runtime;
use crate::coro::stamps;

pub(super) fn statistics<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let dict = PyDict::new(py);
    with_runtime(|runtime| -> PyResult<()> {
        let stats = &runtime.stats;
        dict.set_item("switches", stats.switches.get())?;
        dict.set_item("evictions", stats.evictions.get())?;
        dict.set_item("bytes_copied", stats.copied_len.get())?;
        dict.set_item("bytes_saved", stats.saved_len.get())?;
        dict.set_item("live", runtime.live.count())?;
        dict.set_item("started", stats.started.get())?;
        dict.set_item("slots", runtime.slots.count())?;
        dict.set_item("evicts_always", runtime.options.evicts_always.get())
    })?;
    Ok(dict.into_any())
}

/// `_coro_set_switch_stamps(on)`: switches the stamps on or off, in all threads.
pub(super) fn set_stamps<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    stamps::set_on(args.get(0).map_or(Ok(false), |on| on.is_truthy())?);
    Ok(none(py))
}

/// `_coro_switch_stamps()`: when a coro of this thread was last entered and left, each as wall and CPU nanoseconds.
pub(super) fn switch_stamps<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let (entered, left) = with_runtime(|runtime| (runtime.stamps.entered.get(), runtime.stamps.left.get()));
    let moments = (entered.wall_ns, entered.cpu_ns, left.wall_ns, left.cpu_ns);
    Ok(moments.into_pyobject(py)?.into_any())
}

/// `Coro.stack_info()`. For a running coro, `bytes_used` is what it uses of its stack at this moment.
pub(super) fn coro_info<'py>(this: Coro<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    check_thread(this)?;
    let py = this.py();
    let dict = PyDict::new(py);
    dict.set_item("kind", if this.has_own_stack.get() { "own" } else { "shared" })?;
    let is_running = this.status.get() == Status::Running;
    let report = with_runtime(|runtime| runtime.stack_report(this, is_running));
    let (place, slot, used_len, frames_len) = match report {
        Some(report) => (report.place, report.slot, report.used_len, report.frames_len),
        None => ("none", None, 0, 0),
    };
    dict.set_item("where", place)?;
    dict.set_item("slot", slot)?;
    dict.set_item("bytes_used", used_len)?;
    dict.set_item("frame_bytes", frames_len)?;
    Ok(dict.into_any())
}

pub(super) fn set_slots<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let count: Option<usize> = args.get(0).map_or(Ok(None), |count| count.extract())?;
    if count.is_some_and(|count| count == 0 || count > 4096) {
        return Err(PyValueError::new_err(
            "the number of slots must be between 1 and 4096, or None",
        ));
    }
    with_runtime(|runtime| runtime.slots.set_count(count));
    Ok(none(py))
}
