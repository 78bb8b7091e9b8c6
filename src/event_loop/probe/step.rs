//! Runs the loop's steps while the probe's mode has a bit of `Mode::STEPS`. Debug mode logs slow steps, with the same
//! text as asyncio and on the same logger. The latency warning of coros (`observer`) is told when a step begins and ends.
//! Measuring records how long steps take and wait. The program's step observer gets the wall and CPU time of each step.
//!
//! A bit may be set or cleared during a step. The end of a step does the work for the bits that were set when the step
//! began.

use grapeshot_core::sys::clock;
use pyo3::prelude::*;

use super::Mode;
use super::observer::{self, Kind};
use crate::binding::{errors, log};
use crate::event_loop::handle::Handle;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Reactor;
use crate::event_loop::source::DeferredCall;

/// Runs a handle that was just taken out of the ready queue.
#[cold]
pub(crate) fn run_handle(event_loop: &LoopObject, handle: Handle<'_>) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let probe = &reactor.probe;
    let ready_ns = note_taken(reactor);
    if handle.is_cancelled() {
        return Ok(());
    }
    let run = || {
        if probe.is_debug() {
            run_and_log(event_loop, handle, probe.slow_callback_s())
        } else {
            handle.run()
        }
    };
    let is_watched = probe.has(Mode::STEPS - Mode::DEBUG);
    let callback = if is_watched { handle.callback() } else { None };
    match callback {
        None => run(),
        Some(callback) => watch(event_loop, &callback, Some(Kind::Callback), ready_ns, run),
    }
}

/// Runs a deferred function that was just taken out of the ready queue.
#[cold]
pub(crate) fn run_deferred(py: Python<'_>, event_loop: &LoopObject, call: DeferredCall) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let ready_ns = note_taken(reactor);
    let is_own = observer::is_own_entry(call.function());
    if is_own && !reactor.probe.has(Mode::STEPS - Mode::OBSERVED) {
        return call.call(py);
    }
    let source = call.to_bound(py);
    let kind = (!is_own).then_some(Kind::Source);
    watch_source(event_loop, &source, kind, ready_ns, || {
        let result = call.call(py);
        drop(call);
        result
    })
}

/// Runs `run`, in which `source` handles an event.
#[cold]
pub(crate) fn run_source(
    event_loop: &LoopObject,
    source: &Bound<'_, PyAny>,
    run: impl FnOnce() -> PyResult<()>,
) -> PyResult<()> {
    watch_source(event_loop, source, Some(Kind::Source), None, run)
}

/// Called after an entry was taken out of the ready queue. Returns the time at which that entry became ready; None
/// while measuring is off.
fn note_taken(reactor: &Reactor) -> Option<u64> {
    let measuring = reactor.probe.measuring()?;
    Some(measuring.take(reactor.ready.len()))
}

/// Runs a step of `what`, and reports it to the observer, to `Measuring` and to the step observer. `kind` is None for
/// the observer's `own_entry`, which is not reported to the observer here. `ready_ns` is the time at which the step
/// became ready; None stands for the time when the last poll returned. Returns the result of the step, or an exception
/// that must leave the loop.
fn watch(
    event_loop: &LoopObject,
    what: &Bound<'_, PyAny>,
    kind: Option<Kind>,
    ready_ns: Option<u64>,
    run: impl FnOnce() -> PyResult<()>,
) -> PyResult<()> {
    let py = what.py();
    let reactor = event_loop.reactor();
    let probe = &reactor.probe;
    let observed = kind
        .filter(|_| probe.has(Mode::OBSERVED))
        .and_then(|kind| Some((observer::get()?, kind)));
    if let Some((observer, kind)) = observed {
        (observer.begin)(what, kind);
    }
    let measured = probe
        .measuring()
        .map(|measuring| (measuring, measuring.begin(ready_ns)));
    let clocks = probe
        .has(Mode::TIMED)
        .then(|| (clock::now_ns(), clock::thread_cpu_ns()));

    let mut result = run();

    // All of the following is done, even if the step has failed or a call below fails.
    if let Some((wall_ns, cpu_ns)) = clocks {
        let cpu_ns = clock::thread_cpu_ns().saturating_sub(cpu_ns);
        let wall_ns = clock::now_ns().saturating_sub(wall_ns);
        if let Some(observer) = probe.step_observer.get(py) {
            let called = observer.call1((what, wall_ns, cpu_ns));
            result = result.and(only_exits(called, &observer));
        }
    }
    let slow = measured.and_then(|(measuring, started_ns)| {
        let took_ns = measuring.end(started_ns, reactor.ready.len())?;
        Some((started_ns, took_ns))
    });
    if let Some((observer, kind)) = observed {
        let ended = (observer.end)(what, kind);
        result = result.and(ended);
    }
    if let Some((started_ns, took_ns)) = slow {
        let own_loop = event_loop.to_bound(py);
        let reported = own_loop.call_method1("_on_slow", (what, started_ns, took_ns));
        result = result.and(only_exits(reported, what));
    }
    result
}

/// `watch` for a source that handles an event or a queued step. In debug mode, also logs the step if it was slow.
fn watch_source(
    event_loop: &LoopObject,
    source: &Bound<'_, PyAny>,
    kind: Option<Kind>,
    ready_ns: Option<u64>,
    run: impl FnOnce() -> PyResult<()>,
) -> PyResult<()> {
    let probe = &event_loop.reactor().probe;
    let mut started_ns = None;
    let result = watch(event_loop, source, kind, ready_ns, || {
        started_ns = probe.is_debug().then(clock::now_ns);
        run()
    });
    if let Some(started_ns) = started_ns
        && result.is_ok()
    {
        let took_s = elapsed_s(started_ns);
        if took_s >= probe.slow_callback_s()
            && let Err(error) = source.repr().and_then(|text| warn(text.as_any(), took_s))
        {
            error.write_unraisable(source.py(), Some(source));
        }
    }
    result
}

/// Passes an exception to `sys.unraisablehook`, with `context`, unless it must leave the loop.
fn only_exits(result: PyResult<Bound<'_, PyAny>>, context: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = context.py();
    match result {
        Ok(_) => Ok(()),
        Err(error) if errors::leaves_loop(py, &error) => Err(error),
        Err(error) => {
            error.write_unraisable(py, Some(context));
            Ok(())
        }
    }
}

/// Runs `handle` and logs it if it took at least `limit_s` seconds.
fn run_and_log(event_loop: &LoopObject, handle: Handle<'_>, limit_s: f64) -> PyResult<()> {
    let py = handle.py();
    // The default exception handler reads this attribute to show where the running handle was created.
    let own_loop = event_loop.to_bound(py);
    own_loop.setattr("_current_handle", handle.to_bound())?;
    let started_ns = clock::now_ns();
    let result = handle.run_and_keep();
    own_loop.setattr("_current_handle", py.None().into_bound(py))?;
    let took_s = elapsed_s(started_ns);
    if took_s >= limit_s && result.is_ok() {
        let own = handle.to_bound();
        let logged = py
            .import("grapeshot._loop.origins")
            .and_then(|origins| origins.call_method1("describe_handle", (&own,)))
            .and_then(|text| warn(&text, took_s));
        if let Err(error) = logged {
            error.write_unraisable(py, Some(&own_loop));
        }
    }
    handle.forget_call_unless_kept();
    result
}

fn elapsed_s(started_ns: u64) -> f64 {
    clock::now_ns().saturating_sub(started_ns) as f64 / 1e9
}

fn warn(what: &Bound<'_, PyAny>, took_s: f64) -> PyResult<()> {
    let py = what.py();
    log::warning(
        py,
        "Executing %s took %.3f seconds",
        &[what.clone(), took_s.into_pyobject(py)?.into_any()],
    )
}
