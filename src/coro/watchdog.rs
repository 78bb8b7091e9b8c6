//! The watchdog: a thread that finds late runs while they are still going on. It reads the *pulse* of each watched
//! thread (`Pulse`), which says what runs in that thread and since when.
//!
//! ```text
//!   a run begins in a thread       a check finds that no        the next check finds
//!   that is not watched:      -->  pulse has changed: the  -->  no change either: sleep
//!   check, sleep, check ...        next run must wake us        until a run wakes us
//!        ^                                                                |
//!        '----------------------------------------------------------------'
//!   Between two checks the watchdog sleeps until the earliest time at which a run can be late.
//! ```
//!
//! There is one watchdog for all threads. It starts when the first run begins in a thread that has a limit. Each
//! resumption of a coro is a run. In a loop that is observed (`latency::observe_running_loop`), each task step, each
//! callback and each call of a protocol method is a run, too. The watchdog sleeps while nothing runs. It ends when no
//! thread is left to watch: the limits are off, the loops are closed, the threads have ended, or the process forks or
//! exits.
//!
//! The watchdog is a Rust thread that does not appear in `threading.enumerate()`. It reads the pulses without the GIL
//! and attaches only when a run is late. It starts a short-lived `threading` thread to make the log record, since log
//! handlers may block, and since logging in a thread that `threading` has not started would leave a `Thread` object
//! behind. Up to Python 3.13, if a thread asks for the GIL of an exiting interpreter, CPython ends the thread inside
//! that call; `sys/unwinding` handles this for the watchdog, too.
//!
//! Free-threaded builds have no watchdog: it could neither keep the object of a run alive nor read the frames of a
//! thread that runs. There, late runs are reported when they end.
//!
//! Callers of `watch`, `unwatch` and `stop` hold the GIL. While the watchdog uses Python (`is_reporting`), no thread
//! that holds the GIL waits for it, and the watchdog holds no lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use super::pulse::Pulse;
use crate::binding::HAS_GIL;
use grapeshot_core::sys::clock;
use grapeshot_core::sys::thread::{self, HelperThread};

/// Python code runs on this stack, so it has the usual length.
const STACK_LEN: usize = 8 * 1024 * 1024;
/// The shortest and the longest sleep. A shorter sleep would be of no use, because the clock ticks in milliseconds. The
/// longest one can be added to any time without an overflow.
const SLEEP_NS: std::ops::RangeInclusive<u64> = 1_000_000..=3_600_000_000_000;
/// How long an exit or a fork waits for a report that the watchdog has begun.
const GRACE: Duration = Duration::from_secs(1);

/// Reports the run that began at the given time, unless the run has ended. Called with the GIL.
pub(super) type Report = fn(Python<'_>, &Pulse, u64) -> PyResult<()>;

struct Watchdog {
    state: Mutex<State>,
    report: Report,
    /// Notified when a run begins in a thread that was not watched, when a limit changes, when no thread is left, and
    /// when the watchdog has finished using Python.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    /// The watchdog's thread exists and has not yet decided to end.
    is_alive: bool,
    /// The watchdog is using Python, or waiting for the GIL.
    is_reporting: bool,
    thread: Option<HelperThread>,
}

struct Watched {
    pulse: Arc<Pulse>,
    /// `Pulse::last_change` at the last check.
    seen: u64,
    /// The run that was reported, identified by the time from which it may have held something up
    /// (`Pulse::holding_up_since`).
    reported_ns: Option<u64>,
}

/// The result of a check of all pulses.
enum Finding {
    Late(Arc<Pulse>, u64),
    /// No run can be late before this time has passed. `is_busy`: something has run since the last check, or is running
    /// and was not reported.
    Sleep {
        duration: Duration,
        is_busy: bool,
    },
}

/// Created once and never freed. A forked child starts without one, because the parent's thread does not exist there.
static WATCHDOG: AtomicPtr<Watchdog> = AtomicPtr::new(ptr::null_mut());

fn existing() -> Option<&'static Watchdog> {
    // SAFETY: null, or leaked by `get_or_make`.
    unsafe { WATCHDOG.load(Ordering::Acquire).as_ref() }
}

fn get_or_make(report: Report) -> &'static Watchdog {
    existing().unwrap_or_else(|| {
        let watchdog = Box::leak(Box::new(Watchdog {
            state: Mutex::default(),
            report,
            changed: Condvar::new(),
        }));
        // No other thread can have made one in the meantime, because the caller holds the GIL.
        WATCHDOG.store(watchdog, Ordering::Release);
        watchdog
    })
}

/// Watches a thread. Called when a run has begun in a thread that is not watched, or when the limit has changed.
#[cold]
pub(super) fn watch(pulse: &Arc<Pulse>, report: Report) {
    pulse.set_unwatched(false);
    if !HAS_GIL {
        return; // without a GIL, the run could end while the watchdog looks at it
    }
    let watchdog = get_or_make(report);
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
        // The process cannot start another thread. So late runs are reported only when they end. All pulses stay
        // marked as watched, so later runs do not try to start the watchdog again.
        Err(_) => state.watched.clear(),
    }
}

/// Stops watching the thread of this pulse, until its next run.
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

/// Stops watching all threads, until their next run. Called when the process is about to fork or to exit.
pub(super) fn stop(py: Python<'_>) {
    let Some(watchdog) = existing() else {
        return;
    };
    let mut state = watchdog.lock();
    state.forget_all();
    if state.is_reporting {
        drop(state);
        // Wait for the watchdog to finish: it must not ask for the GIL of an interpreter that no longer exists, and
        // CPython warns about a fork in a process with several threads.
        py.detach(|| {
            let state = watchdog.lock();
            drop(
                watchdog
                    .changed
                    .wait_timeout_while(state, GRACE, |state| state.is_reporting),
            );
        });
        state = watchdog.lock();
        state.forget_all(); // other threads may have added themselves during the wait
    }
    watchdog.end_if_unused(state);
}

/// Called in a forked child, before the loop continues.
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

    fn check_pulses(&mut self) -> Finding {
        let now_ns = clock::coarse_ns();
        let mut is_busy = false;
        let mut sleep_ns = *SLEEP_NS.end();
        for watched in &mut self.watched {
            let pulse = &watched.pulse;
            is_busy |= std::mem::replace(&mut watched.seen, pulse.last_change()) != watched.seen;
            let (since_ns, late_ns) = (pulse.running_since(), pulse.late_ns());
            // Normally the next check is due after `late_ns`: a run that begins now cannot be late before that, and a
            // run that was already reported need not be checked before that. Only a run that was not reported may need
            // an earlier check.
            let mut left_ns = late_ns;
            if let Some(since_ns) = since_ns {
                let (from_ns, limit_ns) = pulse.holding_up_since(since_ns, late_ns);
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
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The main function of the thread.
    fn run(&self) {
        let mut quiet_checks = 0;
        let mut state = self.lock();
        loop {
            state.watched.retain(|watched| !watched.pulse.is_gone());
            if state.watched.is_empty() {
                state.is_alive = false;
                return;
            }
            match state.check_pulses() {
                Finding::Late(pulse, since_ns) => {
                    // Below, the first quiet check marks all pulses as unwatched. If the late run began after that, it
                    // has marked its own pulse as watched again. So the count of quiet checks restarts, and all pulses
                    // are marked as unwatched again before the watchdog sleeps without a time limit.
                    quiet_checks = 0;
                    state.is_reporting = true;
                    drop(state);
                    self.report_run(&pulse, since_ns);
                    state = self.lock();
                    state.is_reporting = false;
                    self.changed.notify_all();
                }
                Finding::Sleep { duration, is_busy } => {
                    quiet_checks = if is_busy { 0 } else { quiet_checks + 1 };
                    if quiet_checks == 1 {
                        for watched in &state.watched {
                            watched.pulse.set_unwatched(true);
                        }
                    }
                    // If a thread began a run just before it could see the flag, the second check notices the changed
                    // pulse.
                    state = if quiet_checks < 2 {
                        let waited = self.changed.wait_timeout(state, duration);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    } else {
                        quiet_checks = 0;
                        let waited = self.changed.wait(state);
                        waited.unwrap_or_else(PoisonError::into_inner)
                    };
                }
            }
        }
    }

    /// If nothing is watched and the watchdog is not using Python, tells the watchdog's thread to end and waits until
    /// it has ended. (The thread needs no GIL to end.) If the watchdog is using Python, it finds out afterwards that
    /// nothing is watched, and ends then.
    fn end_if_unused(&self, mut state: MutexGuard<'_, State>) {
        if !state.watched.is_empty() || state.is_reporting {
            return;
        }
        // The thread may have decided to end already.
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_all();
        if let Some(thread) = thread {
            thread.join();
        }
    }

    /// Reports the run, unless it ends before the watchdog has the GIL.
    fn report_run(&self, pulse: &Pulse, since_ns: u64) {
        // `try_attach` returns None if the interpreter has begun to exit.
        let _ = Python::try_attach(|py| {
            if let Err(error) = (self.report)(py, pulse, since_ns) {
                error.write_unraisable(py, None);
            }
        });
    }
}
