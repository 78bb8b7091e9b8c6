//! The watchdog: a thread that looks for runs which are late while they still go on.
//!
//! ```text
//!   a coro runs in a thread    no pulse has changed      the same again: pulses      again: sleep until
//!   that is not watched  -->   since the last look  -->  are told to wake us   -->   somebody wakes us
//!        ^  sleep until the earliest run can be late                                      |
//!        '--------------------------------------------------------------------------------'
//! ```
//!
//! One thread for all threads with coros. It begins with the first run of a coro where a limit is set, sleeps while
//! nothing runs, and ends when no thread is to be watched any more: the limit is off, the loop is closed, the process
//! forks or exits.
//!
//! A thread of Rust's: it looks without the GIL, attaches only when a run is late, and is in nobody's
//! `threading.enumerate()`. The record itself is made by a short-lived thread of `threading`: logging leaves an entry
//! of `threading` behind for a thread that it does not know, and handlers may block. To Python 3.13 whoever asks for
//! the GIL of an interpreter that exits is ended inside of that call; `sys/unwinding` sees to that here as everywhere.
//!
//! `watch`, `unwatch` and `stop` are called with the GIL. While the watchdog looks at Python (`is_looking`) nobody
//! waits for it with the GIL, and it holds no lock. It must not know what is logged.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::prelude::*;

use super::pulse::Pulse;
use grapeshot_core::sys::{clock, thread};

/// As much as other threads have: Python code runs on it.
const STACK_LEN: usize = 8 * 1024 * 1024;
/// The shortest and the longest sleep: the clock ticks in milliseconds, and sums must not overflow.
const SLEEP_NS: std::ops::RangeInclusive<u64> = 1_000_000..=3_600_000_000_000;
/// At the exit, for what the watchdog is in the middle of.
const EXIT_GRACE: Duration = Duration::from_secs(1);

/// Reports the run of that pulse which began at that time, if it goes on. Called with the GIL.
pub(super) type Report = fn(Python<'_>, &Pulse, u64) -> PyResult<()>;

struct Watchdog {
    state: Mutex<State>,
    report: Report,
    /// Something is to be watched or is not any more; the watchdog does not look at Python any more.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    /// There is a thread, which has not yet decided to end.
    is_alive: bool,
    /// It looks at Python, or waits for the GIL to do so.
    is_looking: bool,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    pulse: Arc<Pulse>,
    /// The pulse at the last look.
    seen: u64,
    /// The run that was reported.
    reported_ns: Option<u64>,
}

/// What a look over the pulses has found.
enum Finding {
    Late(Arc<Pulse>, u64),
    /// Nothing can be late before that time is over; whether something has run since the last look.
    Sleep {
        duration: Duration,
        is_busy: bool,
    },
}

/// Made once and never freed. A forked child has none: whatever state the parent's was in, its thread is not there.
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
        // The process may have no further thread: runs that are late are reported when they end. Not tried at each run.
        Err(_) => state.watched.clear(),
    }
}

/// The thread of that pulse is not watched before its next run.
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

/// No thread is watched before its next run: the process is going to fork, or to exit.
pub(super) fn stop(py: Python<'_>, is_exiting: bool) {
    let Some(watchdog) = existing() else {
        return;
    };
    let mut state = watchdog.lock();
    for watched in state.watched.drain(..) {
        watched.pulse.set_unwatched(true);
    }
    let is_looking = state.is_looking;
    watchdog.end_if_unused(state);
    if is_exiting && is_looking {
        // It must not ask for the GIL of an interpreter that is gone.
        py.detach(|| {
            let state = watchdog.lock();
            drop(
                watchdog
                    .changed
                    .wait_timeout_while(state, EXIT_GRACE, |state| state.is_looking),
            );
        });
    }
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

    fn look_around(&mut self) -> Finding {
        let now_ns = clock::coarse_ns();
        let mut is_busy = false;
        let mut sleep_ns = *SLEEP_NS.end();
        for watched in &mut self.watched {
            let pulse = &watched.pulse;
            is_busy |= std::mem::replace(&mut watched.seen, pulse.last_change()) != watched.seen;
            let (since_ns, late_ns) = (pulse.running_since(), pulse.late_ns());
            // What begins to run now, or runs on after it was reported, is looked at again after its limit.
            let mut left_ns = late_ns;
            if let Some(since_ns) = since_ns
                && watched.reported_ns != since_ns.into()
            {
                is_busy = true;
                left_ns = late_ns.saturating_sub(now_ns.saturating_sub(since_ns));
                if left_ns == 0 && late_ns != 0 {
                    watched.reported_ns = Some(since_ns);
                    return Finding::Late(Arc::clone(pulse), since_ns);
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

    /// What the thread does.
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
                    // Between the two looks a thread that has not seen the flag has shown that it runs.
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

    /// Ends the thread, and waits for its end, if nothing is watched and it does not look at Python: then it needs no
    /// GIL for that. Otherwise it ends by itself.
    fn end_if_unused(&self, mut state: MutexGuard<'_, State>) {
        if !state.watched.is_empty() || !state.is_alive || state.is_looking {
            return;
        }
        let thread = state.thread.take();
        drop(state);
        self.changed.notify_all();
        if let Some(thread) = thread {
            // Err is a panic, of which stderr has heard.
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
