//! Warns of coros that run long without a yield, on asyncio's logger, as asyncio warns of slow callbacks.
//!
//! ```text
//!   loop's thread   begin(coro) ..... computes ........................ end: "ran for 0.731 s, at 0.200 it was at ..."
//!   watchdog               sleeps until begin + limit, `report`: "has run for 0.200 s, and is at ...", its stack
//! ```
//!
//! The clock that times a run is cheap and ticks every few milliseconds. Still, every reported run has taken longer
//! than the limit. The `Pulse` of a thread holds the time since which a coro runs there. That thread writes it, with at
//! most four stores per run, and the watchdog reads it. The watchdog finds out which coro it is, and where, only with
//! the GIL, because then the run cannot end.

use std::mem;
use std::sync::atomic::Ordering;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coroutine::Coro;
use super::fiber;
use super::pulse::{Found, HAS_ENDED, Pulse, late_after};
use super::runtime::{Runtime, current, with_runtime};
use super::{hooks, watchdog};
use crate::binding::log;
use grapeshot_core::sys::clock;

/// A run begins, in a thread whose limit is set.
#[inline]
pub(super) fn begin(runtime: &Runtime, coro: Coro<'_>) {
    let pulse: &Pulse = &runtime.pulse;
    pulse.coro.store(coro.as_ptr(), Ordering::Relaxed);
    // SAFETY: attached.
    let thread = unsafe { ffi::PyThreadState_Get() };
    pulse.thread.store(thread, Ordering::Relaxed);
    pulse
        .since_ns
        .store(clock::coarse_ns() & !HAS_ENDED, Ordering::Relaxed);
    if pulse.is_unwatched.load(Ordering::Relaxed) {
        watchdog::watch(&runtime.pulse, report);
    }
}

/// Sets the limit of this thread and returns the one before. The limit holds for the current run, too.
pub(super) fn set_limit(py: Python<'_>, limit_ns: u64) -> u64 {
    let coro = current(py);
    with_runtime(|runtime| {
        let late_ns = late_after(limit_ns);
        runtime.options.late_ns.set(late_ns);
        let pulse = &runtime.pulse;
        pulse.late_ns.store(late_ns, Ordering::Relaxed);
        drop(pulse.found().take());
        if late_ns == 0 {
            pulse.since_ns.fetch_or(HAS_ENDED, Ordering::Relaxed);
            watchdog::unwatch(pulse);
        } else {
            if let (None, Some(coro)) = (pulse.running_since(), coro) {
                begin(runtime, coro);
            }
            if coro.is_some() || !pulse.is_unwatched.load(Ordering::Relaxed) {
                watchdog::watch(pulse, report);
            }
        }
        runtime.options.latency_ns.replace(limit_ns)
    })
}

/// Reports where the coro is that has run since `since_ns`, if it still runs. The watchdog calls this.
fn report(py: Python<'_>, pulse: &Pulse, since_ns: u64) -> PyResult<()> {
    let is_current = || pulse.running_since() == Some(since_ns);
    if !is_current() {
        return Ok(());
    }
    let after_ns = clock::coarse_ns().saturating_sub(since_ns);
    // SAFETY: attached, so the run cannot end before other code runs: its coro is alive.
    let coro = unsafe { Bound::from_borrowed_ptr(py, pulse.coro.load(Ordering::Relaxed)) };
    let name = coro.getattr("name")?;
    // Only the coro's own thread may drop the last reference to it.
    drop(coro);
    // SAFETY: the thread is in that run (see above), its state belongs to this interpreter, and its frames change only
    // with the GIL.
    let places = unsafe { places(py, pulse.thread.load(Ordering::Relaxed))? };
    let place = match places.first() {
        Some((code, line)) => Some(Found {
            since_ns,
            after_ns,
            file: text(code, "co_filename")?,
            line: *line,
            function: text(code, "co_qualname")?,
        }),
        None => None,
    };
    if !is_current() {
        // A finalizer has let the thread run meanwhile (to 3.11 the collector runs where objects are made), so the coro
        // is somewhere else.
        return Ok(());
    }
    let seconds = after_ns as f64 / 1e9;
    *pulse.found() = place;
    hooks::report_late(py, (name, seconds, PyList::new(py, places)?))
}

/// Code and line of the functions that a thread is in, the innermost first; nothing if it is in none.
///
/// `sys._current_frames` cannot be used: it also makes frame objects of other interpreters' threads, which have GILs of
/// their own.
///
/// # Safety
/// `thread` is the state of a live thread of this interpreter.
unsafe fn places(py: Python<'_>, thread: *mut ffi::PyThreadState) -> PyResult<Vec<(Bound<'_, PyAny>, u32)>> {
    // SAFETY: by the contract; a new reference, or null without an exception.
    let mut frame = unsafe { Bound::from_owned_ptr_or_opt(py, ffi::PyThreadState_GetFrame(thread).cast()) };
    let mut places = Vec::new();
    while let Some(inner) = frame.filter(|frame| !frame.is_none()) {
        // None while a function is between two lines.
        let line = inner.getattr("f_lineno")?.extract::<Option<u32>>()?;
        places.push((inner.getattr("f_code")?, line.unwrap_or(0)));
        frame = Some(inner.getattr("f_back")?);
    }
    Ok(places)
}

fn text(code: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    Ok(code.getattr(name)?.str()?.to_string_lossy().into_owned())
}

/// Warns of a coro that ran for `took_ns` before it yielded or ended. Returns Err only for an exception that must leave
/// the loop.
#[cold]
pub(super) fn warn(runtime: &Runtime, coro: Coro<'_>, took_ns: u64) -> PyResult<()> {
    let py = coro.py();
    let pulse = &runtime.pulse;
    let found =
        mem::take(&mut *pulse.found()).filter(|found| found.since_ns | HAS_ENDED == pulse.last_change());
    match try_warn(coro, took_ns, found) {
        Ok(outcome) => outcome,
        Err(error) => {
            error.write_unraisable(py, Some(&coro.to_bound()));
            Ok(())
        }
    }
}

/// Ok holds what logging has raised.
fn try_warn(coro: Coro<'_>, took_ns: u64, found: Option<Found>) -> PyResult<PyResult<()>> {
    let py = coro.py();
    let seconds = |duration_ns| (duration_ns as f64 / 1e9).into_pyobject(py).map(Bound::into_any);
    let mut values = vec![coro.to_bound().getattr("name")?, seconds(took_ns)?];
    let format = if let Some(found) = found {
        values.push(seconds(found.after_ns)?);
        values.push(found.file.into_pyobject(py)?.into_any());
        values.push(found.line.into_pyobject(py)?.into_any());
        values.push(found.function.into_pyobject(py)?.into_any());
        "coro %r ran for %.3f seconds without a yield; after %.3f it was at %s:%s in %s"
    } else if let Some(place) = place(coro)? {
        // The watchdog has not seen this run: C code kept the GIL, or there was no watchdog thread.
        values.extend(place);
        "coro %r ran for %.3f seconds without a yield, until %s:%s in %s"
    } else {
        "coro %r ran for %.3f seconds without a yield, until it ended"
    };
    Ok(log::warning(py, format, &values))
}

/// File, line and function where the coro is suspended; None if it has ended.
fn place(coro: Coro<'_>) -> PyResult<Option<[Bound<'_, PyAny>; 3]>> {
    let Some(frame) = fiber::frame(coro)? else {
        return Ok(None);
    };
    let code = frame.getattr("f_code")?;
    Ok(Some([
        code.getattr("co_filename")?,
        frame.getattr("f_lineno")?,
        code.getattr("co_qualname")?,
    ]))
}
