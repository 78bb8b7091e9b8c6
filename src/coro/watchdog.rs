//! The watchdog: a thread that finds runs that are late while they last.
//!
//! ```text
//!   a run in a thread          no pulse has changed      the same again: pulses      again: sleep until
//!   that is not watched  -->   since the last look  -->  are told to wake us   -->   somebody wakes us
//!        ^  sleep until the earliest run can be late                                      |
//!        '--------------------------------------------------------------------------------'
//! ```
//!
//! There is one watchdog for all threads. It starts with the first run where a limit is set: of a coro, or of what an
//! observed loop runs. It sleeps while nothing runs. It ends when there is no thread left to watch: the limit is off, the
//! loop is closed, or the process forks or exits.
//!
//! The watchdog is a Rust thread. It reads the pulses without the GIL, attaches only when a run is late, and is not in
//! `threading.enumerate()`. A short-lived thread of `threading` makes the log record: for a thread that it does not
//! know, logging leaves an entry in `threading`, and handlers may block. To Python 3.13 a thread that asks for the GIL
//! of an exiting interpreter is ended inside that call; `sys/unwinding` handles that here, too.
//!
//! Callers of `watch`, `unwatch` and `stop` have the GIL. While the watchdog uses Python (`is_looking`), nobody waits
//! for it with the GIL, and it holds no lock. It must not know what is logged.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::prelude::*;

use super::pulse::Pulse;
use grapeshot_core::sys::{clock, thread};

/// The usual length: Python code runs on this stack.
const STACK_LEN: usize = 8 * 1024 * 1024;
/// The shortest and the longest sleep: the clock ticks in milliseconds, and sums must not overflow.
const SLEEP_NS: std::ops::RangeInclusive<u64> = 1_000_000..=3_600_000_000_000;
/// How long an exit or a fork waits for a report that the watchdog has begun.
const GRACE: Duration = Duration::from_secs(1);

/// Reports the run of that pulse which began at that time, unless it has ended. Called with the GIL.
pub(super) type Report = fn(Python<'_>, &Pulse, u64) -> PyResult<()>;

struct Watchdog {
    state: Mutex<State>,
    report: Report,
    /// Notified when the watched threads change, and when the watchdog has finished using Python.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    /// The thread exists and has not yet decided to end.
    is_alive: bool,
    /// The thread uses Python, or waits for the GIL.
    is_looking: bool,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    pulse: Arc<Pulse>,
    /// The pulse at the last look.
    seen: u64,
    /// The run that was reported, by the time from which it counts: later than its beginning if it held up nothing.
    reported_ns: Option<u64>,
}

/// The result of a check of all pulses.
enum Finding {
    Late(Arc<Pulse>, u64),
    /// No run can be late before that time is over. `is_busy`: something has run since the last check.
    Sleep {
        duration: Duration,
        is_busy: bool,
    },
}

/// Made once and never freed. A forked child starts without one: the parent's thread does not exist there.
static WATCHDOG: AtomicPtr<Watchdog> = AtomicPtr::new(ptr::null_mut());

fn existing() -> Option<&'static Watchdog> {
    // SAFETY: null, or leaked by `made`.
    unsafe { WATCHDOG.load(Ordering::Acquire).as_ref() }
}

fn made(report: Report) -> &'static Watchdog {
    existing().unwrap_or_else(|| {
        let watchdog = Box::leak(Box::new(Watchdog {
            state: Mutex::default(),
            report,
            changed: Condvar::new(),
        }));
        // Nobody else has made one: the caller has the GIL.
        WATCHDOG.store(watchdog, Ordering::Release);
        watchdog
    })
}

/// A run has begun in a thread that is not watched, or its limit has changed.
#[cold]
pub(super) fn watch(pulse: &Arc<Pulse>, report: Report) {
    pulse.set_unwatched(false);
    let watchdog = made(report);
    let mut state = watchdog.lock();
    if !state.has(pulse) {
        state.watched.push(Watched {
            pulse: Arc::clone(pulse),
            seen: 0,
            reported_ns: None,
        });
    }
    if state.is_alive {
        watchdog.changed.notify_all();
        return;
    }
    match thread::spawn("coro-watchdog".to_owned(), STACK_LEN, || watchdog.run()) {
        Ok(handle) => {
            state.is_alive = true;
            state.thread = Some(handle);
        }
        // The process cannot start another thread. Then late runs are reported when they end, and not each run tries
        // again.
        Err(_) => state.watched.clear(),
    }
}

/// Stops watching the thread of that pulse, until its next run.
pub(super) fn unwatch(pulse: &Arc<Pulse>) {
    pulse.set_unwatched(true);
    if let Some(watchdog) = existing() {
        let mut state = watchdog.lock();
        state
            .watched
            .retain(|watched| !Arc::ptr_eq(&watched.pulse, pulse));
        watchdog.end_if_unused(state);
    }
}

/// Stops watching all threads, until their next run: the process is about to fork or to exit.
pub(super) fn stop(py: Python<'_>) {
    let Some(watchdog) = existing() else {
        return;
    };
    let mut state = watchdog.lock();
    state.forget_all();
    if state.is_looking {
        drop(state);
        // The watchdog must not ask for the GIL of an interpreter that does not exist any more, and CPython warns of
        // a fork with several threads.
        py.detach(|| {
            let state = watchdog.lock();
            drop(
                watchdog
                    .changed
                    .wait_timeout_while(state, GRACE, |state| state.is_looking),
            );
        });
        state = watchdog.lock();
        state.forget_all(); // coros of other threads have run meanwhile
    }
    watchdog.end_if_unused(state);
}

/// In a forked child, before anything can run.
pub(super) fn after_fork(pulse: &Pulse) {
    WATCHDOG.store(ptr::null_mut(), Ordering::Release);
    pulse.set_unwatched(true);
}

impl State {
    fn has(&self, pulse: &Arc<Pulse>) -> bool {
        self.watched
            .iter()
            .any(|watched| Arc::ptr_eq(&watched.pulse, pulse))
    }

    fn forget_all(&mut self) {
        for watched in self.watched.drain(..) {
            watched.pulse.set_unwatched(true);
        }
    }

    fn look_around(&mut self) -> Finding {
        let now_ns = clock::coarse_ns();
        let mut is_busy = false;
        let mut sleep_ns = *SLEEP_NS.end();
        for watched in &mut self.watched {
            let pulse = &watched.pulse;
            is_busy |= std::mem::replace(&mut watched.seen, pulse.last_change()) != watched.seen;
            let (since_ns, late_ns) = (pulse.running_since(), pulse.late_ns());
            // A run that begins now, and a run that was reported and goes on, are checked again after the limit.
            let mut left_ns = late_ns;
            if let Some(since_ns) = since_ns {
                let (from_ns, limit_ns) = pulse.in_the_way_since(since_ns, late_ns);
                if watched.reported_ns != Some(from_ns) {
                    is_busy = true;
                    left_ns = limit_ns.saturating_sub(now_ns.saturating_sub(from_ns));
                    if left_ns == 0 && late_ns != 0 {
                        watched.reported_ns = Some(from_ns);
                        return Finding::Late(Arc::clone(pulse), since_ns);
                    }
                }
            }
            sleep_ns = sleep_ns.min(left_ns);
        }
        Finding::Sleep {
            duration: Duration::from_nanos(sleep_ns.max(*SLEEP_NS.start())),
            is_busy,
        }
    }
}

impl Watchdog {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The main function of the thread.
    fn run(&self) {
        let mut quiet_looks = 0;
        let mut state = self.lock();
        loop {
            state.watched.retain(|watched| !watched.pulse.is_gone());
            if state.watched.is_empty() {
                state.is_alive = false;
                return;
            }
            match state.look_around() {
                Finding::Late(pulse, since_ns) => {
                    // The run may have begun after the pulses were told to wake us, and has taken that back.
                    quiet_looks = 0;
                    state.is_looking = true;
                    drop(state);
                    self.look(&pulse, since_ns);
                    state = self.lock();
                    state.is_looking = false;
                    self.changed.notify_all();
                }
                Finding::Sleep { duration, is_busy } => {
                    quiet_looks = if is_busy { 0 } else { quiet_looks + 1 };
                    if quiet_looks == 1 {
                        for watched in &state.watched {
                            watched.pulse.set_unwatched(true);
                        }
                    }
                    // A thread that did not see the flag in time has shown by the second check that it runs.
                    state = if quiet_looks < 2 {
                        let waited = self.changed.wait_timeout(state, duration);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    } else {
                        quiet_looks = 0;
                        let waited = self.changed.wait(state);
                        waited.unwrap_or_else(PoisonError::into_inner)
                    };
                }
            }
        }
    }

    /// If nothing is watched and the thread does not use Python, tells it to end and waits for that: it needs no GIL to
    /// end. Otherwise it ends by itself.
    fn end_if_unused(&self, mut state: MutexGuard<'_, State>) {
        if !state.watched.is_empty() || state.is_looking {
            return;
        }
        // It may have decided to end already, and be about to.
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_all();
        if let Some(thread) = thread {
            // Err is a panic, which was written to stderr.
            drop(thread.join());
        }
    }

    /// Reports the run, unless it ends before the watchdog has the GIL.
    fn look(&self, pulse: &Pulse, since_ns: u64) {
        // None when the interpreter has begun to exit.
        let _ = Python::try_attach(|py| {
            if let Err(error) = (self.report)(py, pulse, since_ns) {
                error.write_unraisable(py, None);
            }
        });
    }
}
