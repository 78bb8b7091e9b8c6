//! How long ready work may keep the loop from polling.

use std::cell::Cell;

/// The number of iterations for which ready work may keep the loop from polling.
const MAX_UNPOLLED_ITERATIONS: u32 = 64;
const MAX_UNPOLLED_NS: u64 = 100_000;
/// If there are no timers, `Reactor::iterate` reads the clock only in three kinds of iterations: the first two after a
/// poll, then every fourth one, and one that must poll. Reading the clock takes a fifth of the time of a short
/// iteration, so most iterations do not read it. Few readings are enough: after two short iterations, the others are
/// probably short, too.
const CLOCK_CHECK_INTERVAL: u32 = 4;

pub(crate) struct Pacing {
    /// The number of iterations since the last poll. `MAX_UNPOLLED_ITERATIONS` if the next one must poll.
    unpolled_iterations: Cell<u32>,
    /// The clock's reading at the last poll. If the clock was not read then, this is 0 until the next reading.
    polled_ns: Cell<u64>,
}

impl Pacing {
    pub(super) const fn new() -> Self {
        Self {
            unpolled_iterations: Cell::new(MAX_UNPOLLED_ITERATIONS),
            polled_ns: Cell::new(0),
        }
    }

    /// Makes the next iteration poll, even if other work is ready.
    #[inline]
    pub(crate) fn poll_next(&self) {
        self.unpolled_iterations.set(MAX_UNPOLLED_ITERATIONS);
    }

    /// The number of the iteration that begins now, counted from the last poll, beginning with 1.
    #[inline]
    pub(crate) fn next_iteration(&self) -> u32 {
        self.unpolled_iterations.get() + 1
    }

    /// Whether an iteration without timers reads the clock.
    #[inline]
    pub(crate) fn reads_clock(iteration: u32) -> bool {
        iteration <= 2
            || iteration.is_multiple_of(CLOCK_CHECK_INTERVAL)
            || iteration > MAX_UNPOLLED_ITERATIONS
    }

    /// Whether an iteration with this number may skip the poll.
    #[inline]
    pub(crate) fn may_skip(iteration: u32) -> bool {
        iteration <= MAX_UNPOLLED_ITERATIONS
    }

    /// Called before each decision whether to poll. `now_ns` is the clock's reading, or 0 if the clock was not read. If
    /// the clock was not read at the last poll, the time without a poll counts from this reading.
    #[inline]
    pub(crate) fn note_clock(&self, now_ns: u64) {
        if self.polled_ns.get() == 0 {
            self.polled_ns.set(now_ns);
        }
    }

    /// Whether the last poll was so long ago that the iteration that begins now must poll.
    #[inline]
    pub(crate) fn is_overdue(&self, now_ns: u64) -> bool {
        now_ns - self.polled_ns.get() >= MAX_UNPOLLED_NS
    }

    /// Called when an iteration does not poll.
    #[inline]
    pub(crate) fn note_skipped(&self, iteration: u32) {
        self.unpolled_iterations.set(iteration);
    }

    /// Called after a poll.
    #[inline]
    pub(crate) fn note_polled(&self, now_ns: u64) {
        self.unpolled_iterations.set(0);
        self.polled_ns.set(now_ns);
    }
}
