//! The times at which a coro of this thread was last entered and left, for the profiler. The time between `left` and
//! the next `entered` is spent in the loop.
//!
//! ```text
//!   coro A ... | left    switch, loop, poll, switch    entered | ... coro B
//! ```
//!
//! Each thread has its own stamps, but they are switched on for all threads at once. While they are off, their only
//! cost is two tests of a flag in each run of a coro.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use grapeshot_core::sys::clock;

static IS_ON: AtomicBool = AtomicBool::new(false);

pub(super) fn set_on(is_on: bool) {
    IS_ON.store(is_on, Ordering::Relaxed);
}

/// A moment on the monotonic clock, and the CPU time of the thread until then.
#[derive(Clone, Copy, Default)]
pub(super) struct Moment {
    pub(super) wall_ns: u64,
    pub(super) cpu_ns: u64,
}

#[derive(Default)]
pub(super) struct Stamps {
    pub(super) entered: Cell<Moment>,
    pub(super) left: Cell<Moment>,
}

/// Stores the current moment, if stamps are switched on.
#[inline(always)]
pub(super) fn note(stamp: &Cell<Moment>) {
    if IS_ON.load(Ordering::Relaxed) {
        stamp.set(now());
    }
}

#[cold]
#[inline(never)]
fn now() -> Moment {
    Moment {
        wall_ns: clock::now_ns(),
        cpu_ns: clock::thread_cpu_ns(),
    }
}
