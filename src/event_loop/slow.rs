//! The slow path of running a step, for loops whose steps are timed for any reason. Debug mode logs slow steps, with
//! the same text as asyncio and on the same logger. The observer learns when a step begins and ends. Measuring records
//! how long steps take and wait. The step observer gets the wall and CPU time of each step.
//!
//! Runs on the loop's thread, and only while at least one of these is on.

use grapeshot_core::sys::clock;
use pyo3::prelude::*;

use super::handle::Handle;
use super::observer::{self, Kind, Run};
use super::pyloop::LoopObject;
use super::reactor::Reactor;
use super::reactor::measuring::Step;
use super::source::DeferredCall;
use crate::binding::{errors, log};

/// Runs `handle`. In debug mode, logs it if it took at least `slow_callback_duration`.
#[cold]
pub(crate) fn run_handle(event_loop: &LoopObject, handle: Handle<'_>) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let ready_ns = reactor.note_taken();
    if handle.is_cancelled() {
        return Ok(());
    }
    let is_monitored = reactor.is_observed() || reactor.is_measured() || reactor.is_timed();
    let callback = if is_monitored { handle.callback() } else { None };
    let monitor =
        callback.map(|callback| StepMonitor::begin(reactor, callback, Some(Kind::Callback), ready_ns));
    let result = if reactor.is_debug() {
        run_timed(event_loop, handle, reactor.slow_callback_s())
    } else {
        handle.run()
    };
    match monitor {
        None => result,
        Some(monitor) => monitor.end(event_loop, result),
    }
}

/// The records of a running step: for the observer, for measuring, and for the step observer.
struct StepMonitor<'py, 'a> {
    what: Bound<'py, PyAny>,
    run: Option<Run<'py>>,
    step: Option<Step<'a>>,
    clocks: Option<Clocks>,
}

impl<'py, 'a> StepMonitor<'py, 'a> {
    /// Called before the step of `what`. `kind` is None if the step tells the observer itself. `ready_ns` is the time
    /// at which the step became ready; None means at the last poll.
    fn begin(
        reactor: &'a Reactor,
        what: Bound<'py, PyAny>,
        kind: Option<Kind>,
        ready_ns: Option<u64>,
    ) -> Self {
        Self {
            run: kind
                .filter(|_| reactor.is_observed())
                .and_then(|kind| Run::begin(what.clone(), kind)),
            step: reactor.begin_step(ready_ns),
            clocks: Clocks::read(reactor),
            what,
        }
    }

    /// Called after the step, with its result. Returns `result`, or an exception that must leave the loop.
    fn end(self, event_loop: &LoopObject, result: PyResult<()>) -> PyResult<()> {
        let result = match self.clocks {
            None => result,
            Some(clocks) => result.and(clocks.charge(event_loop, &self.what)),
        };
        let slow = self.step.and_then(|step| step.end(event_loop.reactor()));
        let result = match self.run {
            None => result,
            Some(run) => {
                // Called even if the result is an error.
                let ended = run.end();
                result.and(ended)
            }
        };
        match slow {
            None => result,
            Some(slow) => {
                let reported = report_slow(event_loop, &self.what, slow);
                result.and(reported)
            }
        }
    }
}

/// The readings of the clocks before a step, for the loop's step observer.
struct Clocks {
    wall_ns: u64,
    cpu_ns: u64,
}

impl Clocks {
    /// Reads the clocks; None if the loop has no step observer.
    fn read(reactor: &Reactor) -> Option<Self> {
        reactor.is_timed().then(|| Self {
            wall_ns: clock::now_ns(),
            cpu_ns: clock::thread_cpu_ns(),
        })
    }

    /// Tells the step observer how much time the step of `what` took. Err is only for exceptions that must leave the
    /// loop.
    fn charge(self, event_loop: &LoopObject, what: &Bound<'_, PyAny>) -> PyResult<()> {
        let cpu_ns = clock::thread_cpu_ns().saturating_sub(self.cpu_ns);
        let wall_ns = clock::now_ns().saturating_sub(self.wall_ns);
        let py = what.py();
        let Some(observer) = event_loop.step_observer.get(py) else {
            return Ok(());
        };
        match observer.call1((what, wall_ns, cpu_ns)) {
            Err(error) if errors::leaves_loop(py, &error) => return Err(error),
            Err(error) => error.write_unraisable(py, Some(&observer)),
            Ok(_) => {}
        }
        Ok(())
    }
}

/// Reports a slow step to the loop's Python part (`_on_slow`): its object, when it began and how long it took, both in
/// nanoseconds. Err is only for exceptions that must leave the loop.
#[cold]
fn report_slow(
    event_loop: &LoopObject,
    object: &Bound<'_, PyAny>,
    (started_ns, took_ns): (u64, u64),
) -> PyResult<()> {
    let py = object.py();
    let reported = event_loop
        .to_bound(py)
        .call_method1("_on_slow", (object, started_ns, took_ns));
    match reported {
        Err(error) if errors::leaves_loop(py, &error) => return Err(error),
        Err(error) => error.write_unraisable(py, Some(object)),
        Ok(_) => {}
    }
    Ok(())
}

/// Runs `handle` and logs it if it took at least `limit_s` seconds.
fn run_timed(event_loop: &LoopObject, handle: Handle<'_>, limit_s: f64) -> PyResult<()> {
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
            .and_then(|text| warn(py, &text, took_s));
        if let Err(error) = logged {
            error.write_unraisable(py, Some(&own_loop));
        }
    }
    handle.forget_call_unless_kept();
    result
}

/// Runs an entry of the ready queue that is not a handle.
#[cold]
pub(crate) fn run_deferred(py: Python<'_>, event_loop: &LoopObject, call: DeferredCall) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let ready_ns = reactor.note_taken();
    let is_own = observer::is_own_entry(call.function());
    if is_own && ready_ns.is_none() && !reactor.is_debug() && !reactor.is_timed() {
        return call.call(py);
    }
    let monitor = SourceMonitor::begin_unless(is_own, reactor, call.to_bound(py), ready_ns);
    let result = call.call(py);
    drop(call);
    monitor.end(event_loop, result)
}

/// `StepMonitor` for a source that handles an event or a queued step; also writes debug mode's log of slow steps.
pub(crate) struct SourceMonitor<'py, 'a> {
    monitor: StepMonitor<'py, 'a>,
    /// When the step began; 0 if the loop is not in debug mode.
    started_ns: u64,
}

impl<'py, 'a> SourceMonitor<'py, 'a> {
    #[cold]
    pub(crate) fn begin(reactor: &'a Reactor, source: Bound<'py, PyAny>) -> Self {
        Self::begin_unless(false, reactor, source, None)
    }

    fn begin_unless(
        is_own: bool,
        reactor: &'a Reactor,
        source: Bound<'py, PyAny>,
        ready_ns: Option<u64>,
    ) -> Self {
        let kind = (!is_own).then_some(Kind::Source);
        Self {
            monitor: StepMonitor::begin(reactor, source, kind, ready_ns),
            started_ns: if reactor.is_debug() { clock::now_ns() } else { 0 },
        }
    }

    /// Called after the step, with its result. Returns `result`, or an exception that must leave the loop.
    #[cold]
    pub(crate) fn end(self, event_loop: &LoopObject, result: PyResult<()>) -> PyResult<()> {
        let source = self.monitor.what.clone();
        let result = self.monitor.end(event_loop, result);
        if self.started_ns != 0 && result.is_ok() {
            check_source(&source, self.started_ns, event_loop.reactor().slow_callback_s());
        }
        result
    }
}

/// Logs a transport whose event or queued step took at least `limit_s` seconds since `started_ns`.
fn check_source(source: &Bound<'_, PyAny>, started_ns: u64, limit_s: f64) {
    let took_s = elapsed_s(started_ns);
    if took_s < limit_s {
        return;
    }
    let py = source.py();
    if let Err(error) = source.repr().and_then(|text| warn(py, text.as_any(), took_s)) {
        error.write_unraisable(py, Some(source));
    }
}

fn elapsed_s(started_ns: u64) -> f64 {
    clock::now_ns().saturating_sub(started_ns) as f64 / 1e9
}

fn warn(py: Python<'_>, what: &Bound<'_, PyAny>, took_s: f64) -> PyResult<()> {
    log::warning(
        py,
        "Executing %s took %.3f seconds",
        &[what.clone(), took_s.into_pyobject(py)?.into_any()],
    )
}
