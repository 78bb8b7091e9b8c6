//! What the loop counts, always: `loop.statistics()` reads it.
//!
//! A number is counted by one thread at a time, the one that has access to the loop's cells, so an addition is a load
//! and a store; what any thread may count says so. Every thread may read at any time. Each number is then exact, but two
//! of them may be of different moments.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use grapeshot_core::sys::{clock, socket};

use crate::binding::HAS_GIL;

/// A number that goes up.
pub(crate) struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// For the thread that has access to the loop.
    #[inline(always)]
    pub(crate) fn add(&self, count: u64) {
        self.set(self.get().wrapping_add(count));
    }

    /// For a number that any attached thread counts.
    #[inline(always)]
    pub(crate) fn add_anywhere(&self, count: u64) {
        if HAS_GIL {
            self.add(count);
        } else {
            self.0.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// Declares the counters, with a function that names them all.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        pub(crate) struct Counters {
            $($(#[$doc])* pub(crate) $name: Counter,)*
            pub(crate) clock: RunClock,
        }

        impl Counters {
            pub(super) const fn new() -> Self {
                Self {
                    $($name: Counter::new(),)*
                    clock: RunClock::new(),
                }
            }

            /// The numbers with their names.
            pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    iterations,
    /// System calls that asked for events.
    polls,
    /// What these have returned: descriptors that are ready, and the loop's own (wake-ups, signals).
    events,
    /// Handles that were run, timers among them.
    callbacks,
    /// The most entries of the ready queue that one iteration had to run.
    most_ready,
    timers_set,
    /// Timers that were due and not cancelled.
    timers_run,
    /// `call_soon_threadsafe`. Counted anywhere.
    threadsafe_calls,
    /// How often another thread has woken the loop out of a poll. Counted anywhere.
    wakeups,
    /// System calls that have sent something.
    writes,
    bytes_written,
    /// Calls of `write` and `writelines` whose data was kept, to leave with that of others.
    corked_writes,
    connections_accepted,
    /// `accept` that has failed, unless there was no connection.
    accept_errors,
    coros_started,
    coros_ended,
    /// Of the coros that have a stack of their own.
    pinned_coros_started,
    pinned_coros_ended,
    /// How often a coro went on.
    coro_switches,
    /// How often a stack was copied out of the way of another coro's.
    coro_evictions,
    coro_bytes_copied,
    /// What the queues held when the last iteration began, in builds where the thread of a reader may not look.
    noted_ready,
    noted_timers,
}

impl Counters {
    /// A system call has sent so many bytes.
    #[inline(always)]
    pub(crate) fn note_write(&self, len_bytes: usize) {
        self.writes.add(1);
        self.bytes_written.add(len_bytes as u64);
    }

    /// `accept` has returned.
    #[inline]
    pub(crate) fn note_accept<T>(&self, result: &io::Result<T>) {
        match result {
            Ok(_) => self.connections_accepted.add(1),
            Err(error) if socket::is_no_connection(error) => {}
            Err(_) => self.accept_errors.add(1),
        }
    }

    /// So many entries of the ready queue are about to run.
    #[inline(always)]
    pub(super) fn note_ready(&self, len: usize) {
        if len as u64 > self.most_ready.get() {
            self.most_ready.set(len as u64);
        }
    }

    /// What the queues hold.
    pub(super) fn note_queues(&self, (ready, timers): (usize, usize)) {
        self.noted_ready.set(ready as u64);
        self.noted_timers.set(timers as u64);
    }
}

/// How long the loop has been run, and how much of that it was blocked in polls. A poll costs two readings of the
/// processor's ticks; what they mean in seconds follows from the clock, which is read twice per run.
///
/// ```text
///   run begins        poll blocks        poll returns                  run ends
///   ticks, clock ------ - ticks ------------ + ticks --- ... ---------- ticks, clock
/// ```
pub(crate) struct RunClock {
    run_ns: Counter,
    run_ticks: Counter,
    /// While the loop is blocked: less than 0, as the ticks of the return are still to come.
    polling_ticks: Counter,
    /// When the current run began; 0: there is none.
    since_ns: Counter,
    since_ticks: Counter,
    /// What `durations` has returned: the ratio of ticks to time is measured anew each time, but no duration shrinks.
    reported_ns: [AtomicU64; 2],
}

impl RunClock {
    const fn new() -> Self {
        Self {
            run_ns: Counter::new(),
            run_ticks: Counter::new(),
            polling_ticks: Counter::new(),
            since_ns: Counter::new(),
            since_ticks: Counter::new(),
            reported_ns: [const { AtomicU64::new(0) }; 2],
        }
    }

    pub(super) fn begin_run(&self) {
        self.since_ticks.set(clock::ticks());
        self.since_ns.set(clock::now_ns());
    }

    pub(super) fn end_run(&self) {
        let (ticks, now_ns) = (clock::ticks(), clock::now_ns());
        self.run_ticks.add(ticks.saturating_sub(self.since_ticks.get()));
        self.run_ns.add(now_ns.saturating_sub(self.since_ns.get()));
        self.since_ns.set(0);
    }

    #[inline(always)]
    pub(super) fn begin_poll(&self) {
        self.polling_ticks.add(clock::ticks().wrapping_neg());
    }

    #[inline(always)]
    pub(super) fn end_poll(&self) {
        self.polling_ticks.add(clock::ticks());
    }

    /// Nanoseconds in runs outside of polls, and in polls. From any thread. They never shrink.
    pub(crate) fn durations_ns(&self) -> [u64; 2] {
        let (now, now_ns, since_ns) = (clock::ticks(), clock::now_ns(), self.since_ns.get());
        let (mut run_ns, mut run_ticks) = (self.run_ns.get(), self.run_ticks.get());
        if since_ns != 0 {
            run_ns += now_ns.saturating_sub(since_ns);
            run_ticks += now.saturating_sub(self.since_ticks.get());
        }
        let mut polling_ticks = self.polling_ticks.get() as i64;
        if polling_ticks < 0 {
            polling_ticks = polling_ticks.wrapping_add(now as i64);
        }
        let share = polling_ticks.max(0) as f64 / run_ticks.max(1) as f64;
        let polling_ns = ((run_ns as f64 * share) as u64).min(run_ns);
        let found = [run_ns - polling_ns, polling_ns];
        std::array::from_fn(|index| {
            let reported_ns = self.reported_ns[index].fetch_max(found[index], Ordering::Relaxed);
            reported_ns.max(found[index])
        })
    }
}
