//! `Pulse`: what runs in a thread, and since when: a coro, or what the thread's loop runs.
//!
//! The thread that owns a pulse writes it, with at most four stores per run; the watchdog reads it. It must
//! not know what follows from a run that is late.

use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use grapeshot_core::sys::clock;
use pyo3::ffi;

/// The limit of a new thread, until it is changed.
static DEFAULT_LIMIT_NS: AtomicU64 = AtomicU64::new(200_000_000);
/// Set in `since_ns` when nothing runs.
pub(super) const HAS_ENDED: u64 = 1;
/// The shortest time between two looks at a run that holds up nothing.
const LOOK_AGAIN_NS: u64 = 100_000_000;
/// `since_ns` of a thread that has ended.
const GONE: u64 = u64::MAX;

/// The current run in a thread.
pub(super) struct Pulse {
    /// When the current run began. After the run: the same time with `HAS_ENDED` set.
    pub(super) since_ns: AtomicU64,
    /// What runs: an object and its `Subject`. Whoever runs it keeps the object during the run.
    subject: AtomicPtr<ffi::PyObject>,
    /// When somebody has last seen that the run holds up nothing. Only a time since the run began counts.
    alone_ns: AtomicU64,
    /// The loop that runs in the thread; null if none does. The thread keeps it until it runs no more.
    pub(super) event_loop: AtomicPtr<ffi::PyObject>,
    /// A run that takes this long is late; 0 for never.
    pub(super) late_ns: AtomicU64,
    /// The watchdog has to be told of the next run.
    pub(super) is_unwatched: AtomicBool,
    /// The thread's state during that run.
    pub(super) thread: AtomicPtr<ffi::PyThreadState>,
    /// Where the watchdog has found the run.
    found: Mutex<Option<Found>>,
}

/// What kind of object runs. Kept in the lowest bits of the object's address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    Coro = 0,
    /// The callback of a handle, a task, or None.
    Callback = 1,
    /// A native transport or listener.
    Source = 2,
}

/// What the watchdog has seen of a run.
pub(super) struct Found {
    pub(super) since_ns: u64,
    pub(super) after_ns: u64,
    /// The name of what runs, and the place where it was. None: in no Python function.
    pub(super) name: Name,
    pub(super) place: Option<Place>,
}

/// The kind of what runs as users know it, and its name.
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

/// The pulse as its thread holds it; the watchdog may keep it longer.
pub(super) struct OwnPulse(Arc<Pulse>);

impl OwnPulse {
    pub(super) fn new() -> Self {
        Self(Arc::new(Pulse {
            since_ns: AtomicU64::new(HAS_ENDED),
            subject: AtomicPtr::new(ptr::null_mut()),
            alone_ns: AtomicU64::new(0),
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

/// A run that is this long by the coarse clock is longer than the limit; 0 for never.
pub(super) fn late_after(limit_ns: u64) -> u64 {
    match limit_ns {
        0 | u64::MAX => 0,
        limit_ns => limit_ns.saturating_add(clock::coarse_resolution_ns()),
    }
}

impl Pulse {
    /// What runs from now on. `begin` follows.
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

    /// When the current run began; None if there is none.
    pub(super) fn running_since(&self) -> Option<u64> {
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        (since_ns & HAS_ENDED == 0).then_some(since_ns)
    }

    /// The run that goes on holds up nothing.
    pub(super) fn note_alone(&self) {
        self.alone_ns.store(clock::coarse_ns(), Ordering::Relaxed);
    }

    /// Since when a run that began at `since_ns` may hold up something, and for how long it may do so. A run that was seen
    /// to hold up nothing is not looked at again with each tick.
    pub(super) fn in_the_way_since(&self, since_ns: u64, late_ns: u64) -> (u64, u64) {
        match self.alone_ns.load(Ordering::Relaxed) {
            alone_ns if alone_ns > since_ns => (alone_ns, late_ns.max(LOOK_AGAIN_NS)),
            _ => (since_ns, late_ns),
        }
    }

    /// A number that changes with each run, as far as the clock's resolution shows it.
    pub(super) fn last_change(&self) -> u64 {
        self.since_ns.load(Ordering::Relaxed)
    }

    pub(super) fn late_ns(&self) -> u64 {
        self.late_ns.load(Ordering::Relaxed)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.last_change() == GONE
    }

    /// Whether the next run tells the watchdog.
    pub(super) fn set_unwatched(&self, is_unwatched: bool) {
        self.is_unwatched.store(is_unwatched, Ordering::Relaxed);
    }

    /// Ends the run. Returns how long it took, if that was too long.
    #[inline]
    pub(super) fn end(&self, late_ns: u64) -> Option<u64> {
        let since_ns = self.since_ns.load(Ordering::Relaxed);
        self.since_ns.store(since_ns | HAS_ENDED, Ordering::Relaxed);
        let took_ns = clock::coarse_ns().saturating_sub(since_ns);
        (took_ns >= late_ns).then_some(took_ns)
    }

    /// The run ends at `now_ns`, and another one of the same object begins. Returns false, and changes nothing, if the run
    /// was too long.
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
