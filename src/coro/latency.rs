//! Warns about code that blocks a loop. The warnings go to asyncio's logger, like asyncio's own about slow callbacks.
//! They are about coros that run long without a yield and, in a thread that has coros or has set a limit, also about
//! tasks, callbacks and protocol methods.
//!
//! Each resumption of a coro is a *run*, and so is each task step, callback or protocol method that a loop calls. A run
//! counts as blocking only while other work waits for its turn (`Reactor::has_backlog`). If nothing else waits when the
//! run has reached the limit, the run's time counts anew from that moment on. A program can ask for reports of all long
//! runs instead (`report_always`).
//!
//! ```text
//!   loop's thread   begin ............ computes ........ end: "ran for 0.731 seconds; after 0.200 it was at ..."
//!   watchdog               sleeps until begin + limit, `report`: "has run for 0.200 seconds, and is at ..."
//! ```
//!
//! Free-threaded builds have no watchdog: there, a run is reported when it ends.
//!
//! Runs are timed with a cheap clock that ticks every few milliseconds. Still, every reported run has taken longer than
//! the limit. The `Pulse` of each thread holds the time at which the current run began. The thread writes it, with at
//! most four stores per run, and the watchdog reads it. To find out which object runs and where it is, the watchdog
//! takes the GIL, because the run cannot end while the watchdog holds it. `scheduler` records the runs of coros, and
//! the loop (`event_loop/probe/observer`) records the others.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coroutine::{Coro, CoroObject};
use super::fiber;
use super::pulse::{Found, HAS_ENDED, Name, Place, Pulse, Subject, late_after, set_default_limit_ns};
use super::report::{name, place, places};
use super::runtime::{Runtime, current, with_runtime};
use super::{hooks, tasks, watchdog};
use crate::binding::log;
use crate::binding::native_type::This;
use crate::binding::object_result::none;
use crate::event_loop::probe::Mode;
use crate::event_loop::probe::observer::{self, Kind, Observer};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::source::Deferred;
use grapeshot_core::sys::clock;

/// The end of each log record.
pub(super) const HINT: &str = " (coro.set_latency_warning(s) or GRAPESHOT_LATENCY_WARNING=s sets the limit to s seconds, and 0 switches the warning off; GRAPESHOT_LATENCY_WARNING=s,stack adds the stack)";

/// Whether to report long runs even if no other work waits for their end.
static REPORTS_ALWAYS: AtomicBool = AtomicBool::new(false);

/// Called when a coro begins to run, in a thread whose limit is set.
#[inline]
pub(super) fn begin(runtime: &Runtime, coro: Coro<'_>) {
    start(runtime, coro.as_ptr(), Subject::Coro);
}

/// Called when the running coro yields and continues at once: one run ends at `now_ns`, and the next one begins.
/// Returns false, with nothing changed, if the run was too long or the watchdog must be notified; the coro then has to
/// leave its stack.
#[inline]
pub(super) fn renew(runtime: &Runtime, now_ns: u64) -> bool {
    let late_ns = runtime.options.late_ns.get();
    let pulse: &Pulse = &runtime.pulse;
    late_ns == 0 || (!pulse.is_unwatched.load(Ordering::Relaxed) && pulse.renew(late_ns, now_ns))
}

/// Begins a run. The caller keeps the object alive until the run has ended.
#[inline]
fn start(runtime: &Runtime, object: *mut ffi::PyObject, subject: Subject) {
    let pulse: &Pulse = &runtime.pulse;
    pulse.set_subject(object, subject);
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

// ---- what the loop runs ------------------------------------------------------------------------------------------

/// Makes the loops report what they run, except for queued entries with the function `own_entry`: these are coros,
/// which report their own runs.
pub(super) fn install(own_entry: Deferred) {
    observer::install(Observer {
        enter: |event_loop| {
            with_runtime(|runtime| {
                runtime
                    .pulse
                    .event_loop
                    .store(event_loop.as_ptr(), Ordering::Relaxed);
                is_observed(runtime)
            })
        },
        begin: |object, kind| {
            with_runtime(|runtime| {
                if is_observed(runtime) {
                    start(runtime, object.as_ptr(), subject_of(kind));
                }
            });
        },
        end: |object, kind| with_runtime(|runtime| end(runtime, object, subject_of(kind))),
        leave: || {
            with_runtime(|runtime| {
                runtime.pulse.event_loop.store(ptr::null_mut(), Ordering::Relaxed);
                runtime.pulse.since_ns.fetch_or(HAS_ENDED, Ordering::Relaxed);
            });
        },
        own_entry,
    });
}

fn is_observed(runtime: &Runtime) -> bool {
    runtime.options.late_ns.get() != 0 && runtime.is_watched.get()
}

fn subject_of(kind: Kind) -> Subject {
    match kind {
        Kind::Callback => Subject::Callback,
        Kind::Source => Subject::Source,
    }
}

/// Ends the run of an object that the loop has called.
fn end(runtime: &Runtime, object: &Bound<'_, PyAny>, subject: Subject) -> PyResult<()> {
    let late_ns = runtime.options.late_ns.get();
    let pulse = &runtime.pulse;
    // There may be no run any more: the limit was switched off during the run, or a coro's run replaced it.
    if late_ns == 0 || pulse.running_since().is_none() {
        return Ok(());
    }
    match pulse.end(late_ns) {
        None => Ok(()),
        Some(took_ns) => warn(runtime, object, subject, took_ns),
    }
}

/// Does nothing unless a grapeshot loop runs in this thread. If the thread has a limit and is watched, the loop reports
/// from now on what it runs; if not, it stops reporting.
pub(super) fn observe_running_loop(py: Python<'_>, runtime: &Runtime) {
    if let Ok(event_loop) = tasks::running_loop(py)
        && LoopObject::is_loop(&event_loop)
    {
        runtime
            .pulse
            .event_loop
            .store(event_loop.as_ptr(), Ordering::Relaxed);
        LoopObject::of(&event_loop)
            .reactor()
            .probe
            .switch(Mode::OBSERVED, is_observed(runtime));
    }
}

/// Begins a run for the task or callback that the loop is running now. The task or callback began while the loop was
/// not observed, so the loop will not report its end. Therefore an empty entry is queued: when the loop comes to it,
/// the run of that entry replaces this one.
fn observe_current(py: Python<'_>, runtime: &Runtime) -> PyResult<()> {
    let event_loop = tasks::running_loop(py)?;
    if !LoopObject::is_loop(&event_loop) {
        return Ok(());
    }
    let task = tasks::current(py).unwrap_or_else(|_| none(py));
    start(runtime, task.as_ptr(), Subject::Callback);
    // The entry keeps the task alive, and the task is also the object of the entry's run.
    LoopObject::of(&event_loop)
        .reactor()
        .ready
        .defer(task, |_, _| Ok(()));
    Ok(())
}

// ---- the limit ---------------------------------------------------------------------------------------------------

/// Sets the limit of this thread and returns the previous one. The new limit also applies to the current run.
pub(super) fn set_limit(py: Python<'_>, limit_ns: u64) -> PyResult<u64> {
    with_runtime(|runtime| {
        if !runtime.is_watched.replace(true) {
            hooks::watch_thread(py);
        }
        let late_ns = late_after(limit_ns);
        runtime.options.late_ns.set(late_ns);
        let before = runtime.options.latency_ns.replace(limit_ns);
        let pulse = &runtime.pulse;
        pulse.late_ns.store(late_ns, Ordering::Relaxed);
        drop(pulse.found().take());
        observe_running_loop(py, runtime);
        if late_ns == 0 {
            pulse.since_ns.fetch_or(HAS_ENDED, Ordering::Relaxed);
            watchdog::unwatch(pulse);
            return Ok(before);
        }
        match (pulse.running_since(), current(py)) {
            (None, Some(coro)) => begin(runtime, coro),
            (None, None) => observe_current(py, runtime)?,
            (Some(_), _) => {}
        }
        if pulse.running_since().is_some() || !pulse.is_unwatched.load(Ordering::Relaxed) {
            watchdog::watch(pulse, report);
        }
        Ok(before)
    })
}

/// Sets the limit of this thread and of threads that start later.
pub(super) fn set_default_limit(runtime: &Runtime, limit_ns: u64) {
    set_default_limit_ns(limit_ns);
    let late_ns = late_after(limit_ns);
    runtime.options.latency_ns.set(limit_ns);
    runtime.options.late_ns.set(late_ns);
    runtime.pulse.late_ns.store(late_ns, Ordering::Relaxed);
}

/// Sets whether to report long runs even if no other work waits for their end.
pub(super) fn report_always(is_on: bool) {
    REPORTS_ALWAYS.store(is_on, Ordering::Relaxed);
}

// ---- what a run holds up -----------------------------------------------------------------------------------------

/// Whether other work waits for the end of the run. If nothing waits, the run's time counts from now on.
fn holds_up_work(py: Python<'_>, pulse: &Pulse, object: *mut ffi::PyObject, subject: Subject) -> bool {
    if REPORTS_ALWAYS.load(Ordering::Relaxed) {
        return true;
    }
    let event_loop = match subject {
        // SAFETY: attached, and the caller guarantees that the object, a coro, is alive.
        Subject::Coro => unsafe { This::<CoroObject>::new(py, object) }.event_loop.as_ptr(),
        Subject::Callback | Subject::Source => pulse.event_loop.load(Ordering::Relaxed),
    };
    // SAFETY: attached; null, or a loop that is kept alive, by its coro or by the thread that runs it, at least until
    // this code lets other threads run.
    let Some(event_loop) = (unsafe { Bound::from_borrowed_ptr_or_opt(py, event_loop) }) else {
        return true;
    };
    let event_loop = LoopObject::of(&event_loop);
    let has_backlog = event_loop.reactor().has_backlog(py, event_loop);
    if !has_backlog {
        pulse.note_harmless();
    }
    has_backlog
}

// ---- the records -------------------------------------------------------------------------------------------------

/// Reports where the run that began at `since_ns` is now, if it has not ended and holds up other work. Called by the
/// watchdog.
fn report(py: Python<'_>, pulse: &Pulse, since_ns: u64) -> PyResult<()> {
    let is_current = || pulse.running_since() == Some(since_ns);
    if !is_current() {
        return Ok(());
    }
    let after_ns = clock::coarse_ns().saturating_sub(since_ns);
    let (object, subject) = pulse.subject();
    if !holds_up_work(py, pulse, object, subject) {
        return Ok(());
    }
    // SAFETY: attached, so the run cannot end before this code lets other code run, and its object is alive.
    let object = unsafe { Bound::from_borrowed_ptr(py, object) };
    // SAFETY: the thread is in that run (see above), so its state belongs to this interpreter, and its frames change
    // only while it has the GIL.
    let places = unsafe { places(py, pulse.thread.load(Ordering::Relaxed))? };
    let innermost = places.first().map(place).transpose()?;
    let outermost = places.last().map(place).transpose()?;
    let name = name(&object, subject, outermost.as_ref())?;
    // If the object is a coro, only its own thread may drop the last reference to it. So drop this reference now,
    // while the run still holds another one.
    drop(object);
    if !is_current() {
        // The code above has run a finalizer (up to 3.11 the collector runs when objects are created) or a task's own
        // `get_name`. Meanwhile the thread went on, and is somewhere else now.
        return Ok(());
    }
    let seconds = after_ns as f64 / 1e9;
    *pulse.found() = Some(Found {
        since_ns,
        after_ns,
        name: name.clone(),
        place: innermost,
    });
    hooks::report_late(py, (name.kind, name.name, seconds, PyList::new(py, places)?))
}

/// Logs a warning about a run that took `took_ns`, if the run held up other work. Returns Err only for an exception
/// that must leave the loop.
#[cold]
pub(super) fn warn(
    runtime: &Runtime,
    object: &Bound<'_, PyAny>,
    subject: Subject,
    took_ns: u64,
) -> PyResult<()> {
    let py = object.py();
    let pulse = &runtime.pulse;
    let found =
        mem::take(&mut *pulse.found()).filter(|found| found.since_ns | HAS_ENDED == pulse.last_change());
    if found.is_none() && !held_up_work(runtime, object, subject) {
        return Ok(());
    }
    match try_warn(object, subject, took_ns, found) {
        Ok(outcome) => outcome,
        Err(error) => {
            error.write_unraisable(py, Some(object));
            Ok(())
        }
    }
}

/// Whether a run that has just ended held up work: it was late by the rule of `Pulse::holding_up_since`, and other work
/// waits now.
fn held_up_work(runtime: &Runtime, object: &Bound<'_, PyAny>, subject: Subject) -> bool {
    let pulse = &runtime.pulse;
    let began_ns = pulse.last_change() & !HAS_ENDED;
    let (since_ns, limit_ns) = pulse.holding_up_since(began_ns, runtime.options.late_ns.get());
    clock::coarse_ns().saturating_sub(since_ns) >= limit_ns
        && holds_up_work(object.py(), pulse, object.as_ptr(), subject)
}

/// Logs the warning. The outer result is Err if the warning could not be prepared. The inner one is Err if logging it
/// raised an exception that must leave the loop.
fn try_warn(
    object: &Bound<'_, PyAny>,
    subject: Subject,
    took_ns: u64,
    found: Option<Found>,
) -> PyResult<PyResult<()>> {
    let py = object.py();
    let (name, seen) = match found {
        Some(found) => (found.name, Some((found.after_ns, found.place))),
        None => (name(object, subject, None)?, None),
    };
    let mut format = format!("{} %r ran for %.3f seconds{}", name.kind, without_a_yield(&name));
    let mut values = vec![name.name.into_pyobject(py)?.into_any(), seconds(py, took_ns)?];
    let place = match seen {
        Some((after_ns, place)) => {
            values.push(seconds(py, after_ns)?);
            format += if place.is_some() {
                "; after %.3f it was at %s:%s in %s"
            } else {
                "; after %.3f it was not in a Python function"
            };
            place
        }
        // The watchdog did not see this run: C code held the GIL, or there was no watchdog thread.
        None if subject == Subject::Coro => {
            let place = suspended_at(object)?;
            format += if place.is_some() {
                ", until %s:%s in %s"
            } else {
                ", until it ended"
            };
            place
        }
        None => None,
    };
    if let Some(place) = place {
        values.push(place.file.into_pyobject(py)?.into_any());
        values.push(place.line.into_pyobject(py)?.into_any());
        values.push(place.function.into_pyobject(py)?.into_any());
    }
    format += HINT;
    Ok(log::warning(py, &format, &values))
}

fn seconds(py: Python<'_>, duration_ns: u64) -> PyResult<Bound<'_, PyAny>> {
    Ok((duration_ns as f64 / 1e9).into_pyobject(py)?.into_any())
}

/// The addition to the message for coros and tasks, which could have yielded.
fn without_a_yield(name: &Name) -> &'static str {
    match name.kind {
        "coro" | "task" => " without a yield",
        _ => "",
    }
}

/// The place in the code where the coro is suspended; None if it has ended.
fn suspended_at(coro: &Bound<'_, PyAny>) -> PyResult<Option<Place>> {
    // SAFETY: only coros are run as `Subject::Coro` (`begin`).
    let coro: Coro<'_> = unsafe { This::new(coro.py(), coro.as_ptr()) };
    let Some(frame) = fiber::frame(coro)? else {
        return Ok(None);
    };
    let line = frame.getattr("f_lineno")?.extract::<Option<u32>>()?;
    place(&(frame.getattr("f_code")?, line.unwrap_or(0))).map(Some)
}
