//! Loops that are looked at closely: debug mode's slow-callback log, with the same sentence as asyncio on the same
//! logger, what the observer is told, what is measured, and the clocks of each step for its charge.
//!
//! Runs on the loop's thread, and only in debug mode, with an observer, or while the loop is measured.

use grapeshot_core::sys::clock;
use pyo3::ffi;
use pyo3::prelude::*;

use super::handle::HandleRef;
use super::observer::{self, Kind, Run};
use super::pyloop::LoopObject;
use super::reactor::Reactor;
use super::reactor::measuring::Step;
use super::source::Deferred;
use crate::binding::{errors, log};

/// Runs `handle`. In debug mode, logs it if it took at least as long as asyncio's limit.
#[cold]
pub(crate) fn run_handle(py: Python<'_>, event_loop: &LoopObject, handle: HandleRef) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let ready_ns = reactor.note_taken();
    if handle.is_cancelled(py) {
        return Ok(());
    }
    let is_looked_at = reactor.is_observed() || reactor.is_measured() || reactor.is_timed();
    let callback = if is_looked_at { handle.callback(py) } else { None };
    let look = callback.map(|callback| Look::begin(reactor, callback, Some(Kind::Callback), ready_ns));
    let result = if reactor.is_debug() {
        run_timed(py, event_loop, handle, reactor.slow_callback_s())
    } else {
        handle.run(py)
    };
    match look {
        None => result,
        Some(look) => look.end(event_loop, result),
    }
}

/// What is noted of a step while it runs, for whoever wants to know: the observer, the histograms, the step observer.
struct Look<'py, 'a> {
    what: Bound<'py, PyAny>,
    run: Option<Run<'py>>,
    step: Option<Step<'a>>,
    clocks: Option<Clocks>,
}

impl<'py, 'a> Look<'py, 'a> {
    /// `kind`: None if the observer knows of the step anyway. `ready_ns`: since when it waits, by default since the last
    /// poll.
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

    /// Returns `result`, or an exception that must leave the loop.
    fn end(self, event_loop: &LoopObject, result: PyResult<()>) -> PyResult<()> {
        let result = match self.clocks {
            None => result,
            Some(clocks) => result.and(clocks.charge(event_loop, &self.what)),
        };
        let slow = self.step.and_then(|step| step.end(event_loop.reactor()));
        let result = match self.run {
            None => result,
            Some(run) => {
                // Whatever the result is.
                let ended = run.end();
                result.and(ended)
            }
        };
        match slow {
            None => result,
            Some(slow) => {
                let told = tell_slow(event_loop, &self.what, slow);
                result.and(told)
            }
        }
    }
}

/// The clocks before a step: for the loop's step observer.
struct Clocks {
    wall_ns: u64,
    cpu_ns: u64,
}

impl Clocks {
    /// None if nobody wants to know.
    fn read(reactor: &Reactor) -> Option<Self> {
        reactor.is_timed().then(|| Self {
            wall_ns: clock::now_ns(),
            cpu_ns: clock::thread_cpu_ns(),
        })
    }

    /// Tells the step observer what the step of `what` took. Err is only for what must leave the loop.
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

/// Tells the loop's Python part of a slow step: its object, when it began and how long it took, in nanoseconds.
/// Err is only for what must leave the loop.
#[cold]
fn tell_slow(
    event_loop: &LoopObject,
    object: &Bound<'_, PyAny>,
    (started_ns, took_ns): (u64, u64),
) -> PyResult<()> {
    let py = object.py();
    let told = event_loop
        .to_bound(py)
        .call_method1("_on_slow", (object, started_ns, took_ns));
    match told {
        Err(error) if errors::leaves_loop(py, &error) => return Err(error),
        Err(error) => error.write_unraisable(py, Some(object)),
        Ok(_) => {}
    }
    Ok(())
}

/// Runs `handle` and logs it if it took at least `limit_s` seconds.
fn run_timed(py: Python<'_>, event_loop: &LoopObject, handle: HandleRef, limit_s: f64) -> PyResult<()> {
    // `default_exception_handler` shows where the running handle was created.
    let own_loop = event_loop.to_bound(py);
    own_loop.setattr("_current_handle", handle.this(py).to_bound())?;
    let started_ns = clock::now_ns();
    let result = handle.run_and_keep(py);
    own_loop.setattr("_current_handle", py.None().into_bound(py))?;
    let took_s = elapsed_s(started_ns);
    if took_s >= limit_s && result.is_ok() {
        let own = handle.this(py).to_bound();
        let logged = py
            .import("grapeshot._loop.origins")
            .and_then(|origins| origins.call_method1("describe_handle", (&own,)))
            .and_then(|text| warn(py, &text, took_s));
        if let Err(error) = logged {
            error.write_unraisable(py, Some(&own_loop));
        }
    }
    handle.forget_call_unless_kept(py);
    result
}

/// Runs an entry of the ready queue that is no handle.
///
/// # Safety
/// `object` is alive during the call and belongs to `run`.
#[cold]
pub(crate) unsafe fn run_deferred(
    py: Python<'_>,
    event_loop: &LoopObject,
    object: *mut ffi::PyObject,
    run: Deferred,
) -> PyResult<()> {
    let reactor = event_loop.reactor();
    let ready_ns = reactor.note_taken();
    let is_own = observer::is_own_entry(run);
    if is_own && ready_ns.is_none() && !reactor.is_debug() && !reactor.is_timed() {
        // SAFETY: by the contract.
        return unsafe { run(py, object) };
    }
    // SAFETY: by the contract; from_borrowed adds a reference.
    let source = unsafe { Bound::from_borrowed_ptr(py, object) };
    let look = CloseLook::begin_unless(is_own, reactor, source, ready_ns);
    // SAFETY: by the contract.
    let result = unsafe { run(py, object) };
    look.end(event_loop, result)
}

/// A source that handles an event, or does a queued step.
pub(crate) struct CloseLook<'py, 'a> {
    look: Look<'py, 'a>,
    /// 0: not in debug mode.
    started_ns: u64,
}

impl<'py, 'a> CloseLook<'py, 'a> {
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
            look: Look::begin(reactor, source, kind, ready_ns),
            started_ns: if reactor.is_debug() { clock::now_ns() } else { 0 },
        }
    }

    /// Returns `result`, or an exception that must leave the loop.
    #[cold]
    pub(crate) fn end(self, event_loop: &LoopObject, result: PyResult<()>) -> PyResult<()> {
        let source = self.look.what.clone();
        let result = self.look.end(event_loop, result);
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
