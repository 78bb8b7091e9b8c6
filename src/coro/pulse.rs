//! `Pulse`: what is running in a thread and since when. Each resumption of a coro is one run, and so is each task step,
//! callback or protocol method that a loop calls.
//!
//! The thread that owns a pulse records its runs there, with at most four stores per run, and the watchdog reads them.
//! The watchdog writes only `is_unwatched`, `harmless_ns` and `found`. `latency` decides what to do about a run that is
//! late.

use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use grapeshot_core::sys::clock;
use pyo3::ffi;

/// The limit that a new thread starts with.
static DEFAULT_LIMIT_NS: AtomicU64 = AtomicU64::new(200_000_000);
/// A bit that is set in `since_ns` while nothing runs.
pub(super) const HAS_ENDED: u64 = 1;
/// The shortest time between two checks of a run that holds up nothing.
const RECHECK_NS: u64 = 100_000_000;
/// `since_ns` of a thread that has ended.
const GONE: u64 = u64::MAX;

/// The current run in a thread.
pub(super) struct Pulse {
    /// When the current run began. After the run: the same time with `HAS_ENDED` set.
    pub(super) since_ns: AtomicU64,
    /// The object that runs, with its `Subject` in the lowest bits of the address. The code that runs it keeps it alive
    /// during the run.
    subject: AtomicPtr<ffi::PyObject>,
    /// When a check last found that a run was holding up nothing. A time before the start of the current run belongs to
    /// an earlier run.
    harmless_ns: AtomicU64,
    /// The loop that runs in the thread; null if there is none. The thread keeps the loop alive while the loop runs.
    pub(super) event_loop: AtomicPtr<ffi::PyObject>,
    /// A run that takes this long is late; 0 for never.
    pub(super) late_ns: AtomicU64,
    /// The next run must notify the watchdog (`watchdog::watch`).
    pub(super) is_unwatched: AtomicBool,
    /// The thread state (`PyThreadState`) during the current run.
    pub(super) thread: AtomicPtr<ffi::PyThreadState>,
    /// The watchdog's findings when it reported the run.
    found: Mutex<Option<Found>>,
}

/// The kind of the object that runs. Kept in the lowest bits of the object's address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    Coro = 0,
    /// A handle's callback, a task, or None.
    Callback = 1,
    /// A native object that handles an event or a queued step, such as a transport or a listener.
    Source = 2,
}

/// The watchdog's findings when it reported a run.
pub(super) struct Found {
    pub(super) since_ns: u64,
    pub(super) after_ns: u64,
    pub(super) name: Name,
    /// Where the object was in the code; None if it was not in a Python function.
    pub(super) place: Option<Place>,
}

/// The name of the object that runs, and its kind in the users' terms.
#[derive(Clone)]
pub(super) struct Name {
    pub(super) kind: &'static str,
    pub(super) name: String,
}

#[derive(Clone)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) line: u32,
    pub(super) function: String,
}

/// The owning thread's handle to its pulse. Dropping the handle marks the pulse as gone. The watchdog may keep the
/// pulse longer than that.
pub(super) struct OwnPulse(Arc<Pulse>);

impl OwnPulse {
    pub(super) fn new() -> Self {
        Self(Arc::new(Pulse {
            since_ns: AtomicU64::new(HAS_ENDED),
            subject: AtomicPtr::new(ptr::null_mut()),
            harmless_ns: AtomicU64::new(0),
            event_loop: AtomicPtr::new(ptr::null_mut()),
            late_ns: AtomicU64::new(late_after(default_limit_ns())),
            is_unwatched: AtomicBool::new(true),
            thread: AtomicPtr::new(ptr::null_mut()),
            found: Mutex::new(None),
        }))
    }
}

impl Deref for OwnPulse {
    type Target = Arc<Pulse>;

    fn deref(&self) -> &Arc<Pulse> {
        &self.0
    }
}

impl Drop for OwnPulse {
    fn drop(&mut self) {
        self.0.since_ns.store(GONE, Ordering::Relaxed);
    }
}

/// The limit of a new thread.
pub(super) fn default_limit_ns() -> u64 {
    DEFAULT_LIMIT_NS.load(Ordering::Relaxed)
}

pub(super) fn set_default_limit_ns(limit_ns: u64) {
    DEFAULT_LIMIT_NS.store(limit_ns, Ordering::Relaxed);
}

/// The limit adjusted for the coarse clock: a run that takes this long by the coarse clock has certainly exceeded the
/// limit. 0 for never.
pub(super) fn late_after(limit_ns: u64) -> u64 {
    match limit_ns {
        0 | u64::MAX => 0,
        limit_ns => limit_ns.saturating_add(clock::coarse_resolution_ns()),
    }
}

impl Pulse {
    /// Sets the object of the run that is about to begin.
    #[inline]
    pub(super) fn set_subject(&self, object: *mut ffi::PyObject, subject: Subject) {
        let tagged = object.map_addr(|address| address | subject as usize);
        self.subject.store(tagged, Ordering::Relaxed);
    }

    /// The object of the current run, borrowed.
    pub(super) fn subject(&self) -> (*mut ffi::PyObject, Subject) {
        let tagged = self.subject.load(Ordering::Relaxed);
        let subject = match tagged.addr() & 3 {
            0 => Subject::Coro,
            1 => Subject::Callback,
            _ => Subject::Source,
        };
        (tagged.map_addr(|address| address & !3), subject)
    }

    /// When the current run began; None if nothing runs.
    pub(super) fn running_since(&self) -> Option<u64> {
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        (since_ns & HAS_ENDED == 0).then_some(since_ns)
    }

    /// Records that the current run holds up nothing at this moment.
    pub(super) fn note_harmless(&self) {
        self.harmless_ns.store(clock::coarse_ns(), Ordering::Relaxed);
    }

    /// Two values for a run that began at `since_ns`: the time from which the run may have held something up, and how
    /// long after this time it becomes late. If a check has found that no other work waits, the first value is the time
    /// of the check, and the second is at least `RECHECK_NS`, so that the run is not checked again at each tick.
    pub(super) fn holding_up_since(&self, since_ns: u64, late_ns: u64) -> (u64, u64) {
        match self.harmless_ns.load(Ordering::Relaxed) {
            harmless_ns if harmless_ns > since_ns => (harmless_ns, late_ns.max(RECHECK_NS)),
            _ => (since_ns, late_ns),
        }
    }

    /// The start of the current or last run, with `HAS_ENDED` set if that run has ended. `GONE` if the thread has
    /// ended. Two runs have the same start only if they begin in the same tick of the clock.
    pub(super) fn last_change(&self) -> u64 {
        self.since_ns.load(Ordering::Relaxed)
    }

    pub(super) fn late_ns(&self) -> u64 {
        self.late_ns.load(Ordering::Relaxed)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.last_change() == GONE
    }

    /// Sets whether the next run must notify the watchdog.
    pub(super) fn set_unwatched(&self, is_unwatched: bool) {
        self.is_unwatched.store(is_unwatched, Ordering::Relaxed);
    }

    /// Ends the run. Returns how long it took, if that was `late_ns` or more.
    #[inline]
    pub(super) fn end(&self, late_ns: u64) -> Option<u64> {
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        self.since_ns.store(since_ns | HAS_ENDED, Ordering::Relaxed);
        let took_ns = clock::coarse_ns().saturating_sub(since_ns);
        (took_ns >= late_ns).then_some(took_ns)
    }

    /// Ends the run at `now_ns` and begins the next run of the same object. Returns false, and changes nothing, if the
    /// run was too long or if nothing runs.
    #[inline]
    pub(super) fn renew(&self, late_ns: u64, now_ns: u64) -> bool {
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        let is_in_time = since_ns & HAS_ENDED == 0 && now_ns.saturating_sub(since_ns) < late_ns;
        if is_in_time {
            self.since_ns.store(now_ns & !HAS_ENDED, Ordering::Relaxed);
        }
        is_in_time
    }

    pub(super) fn found(&self) -> MutexGuard<'_, Option<Found>> {
        // A panic cannot leave the value half written.
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
