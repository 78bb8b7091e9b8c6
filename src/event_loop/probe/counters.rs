//! The loop's counters, which are always on. `loop.statistics()` reads them.
//!
//! Most counters are increased only by the thread that has access to the loop's cells, so an addition is a plain load
//! and store. Comments mark the few that any thread may increase. Any thread may read all counters at any time: each
//! value is exact, but two values that are read one after the other may belong to different moments.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use grapeshot_core::sys::{clock, socket};

use crate::binding::HAS_GIL;

/// A number that any thread may read. `add` and `add_anywhere` say which threads may change it.
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

    /// Adds to a counter that only the thread with access to the loop increases.
    #[inline(always)]
    pub(crate) fn add(&self, count: u64) {
        self.set(self.get().wrapping_add(count));
    }

    /// Adds to a counter that any attached thread may increase.
    #[inline(always)]
    pub(crate) fn add_anywhere(&self, count: u64) {
        if HAS_GIL {
            self.add(count);
        } else {
            self.0.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// Declares the counters, and a function that returns all of them with their names.
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

            /// All counters, with their names.
            pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    iterations,
    /// How often the loop asked the poller for events. (For a long wait, the poller makes several system calls.)
    polls,
    /// Events that the polls returned: ready descriptors, and the loop's own wake-ups and signals.
    events,
    /// Handles that were taken from the ready queue. Timers are included, and so are handles that were cancelled while
    /// they were in the queue.
    callbacks,
    /// The largest number of ready entries that one iteration had to run.
    most_ready,
    timers_set,
    /// Timers that were due and not cancelled.
    timers_run,
    /// Calls of `call_soon_threadsafe`. Any thread may increase this counter.
    threadsafe_calls,
    /// How often another thread woke the loop out of a poll. Any thread may increase this counter.
    wakeups,
    /// System calls that sent data.
    writes,
    bytes_written,
    /// Calls of `write` and `writelines` whose data a stream transport has collected, to send it together with other
    /// data.
    corked_writes,
    connections_accepted,
    /// Calls of `accept` that failed. A call that found no connection, or only an aborted one, is not counted.
    accept_errors,
    coros_started,
    coros_ended,
    /// Coros that were started with a stack of their own.
    pinned_coros_started,
    pinned_coros_ended,
    /// How often a coro was resumed.
    coro_switches,
    /// How often a coro's stack was copied away to make room for another coro's.
    coro_evictions,
    coro_bytes_copied,
    /// How many entries were ready when the last iteration began. Only free-threaded builds set this counter and the
    /// next one: there, no other thread may read the queues while the loop runs.
    noted_ready,
    /// How many timers were set and not cancelled when the last iteration began.
    noted_timers,
}

impl Counters {
    /// Called after a system call has sent `len_bytes` bytes.
    #[inline(always)]
    pub(crate) fn note_write(&self, len_bytes: usize) {
        self.writes.add(1);
        self.bytes_written.add(len_bytes as u64);
    }

    /// Called after `accept` has returned.
    #[inline]
    pub(crate) fn note_accept<T>(&self, result: &io::Result<T>) {
        match result {
            Ok(_) => self.connections_accepted.add(1),
            Err(error) if socket::is_no_connection(error) => {}
            Err(_) => self.accept_errors.add(1),
        }
    }

    /// Called before `len` entries of the ready queue run.
    #[inline(always)]
    pub(crate) fn note_ready(&self, len: usize) {
        if len as u64 > self.most_ready.get() {
            self.most_ready.set(len as u64);
        }
    }

    /// Stores the number of ready entries, and the number of timers that are not cancelled.
    pub(crate) fn note_queues(&self, (ready, timers): (usize, usize)) {
        self.noted_ready.set(ready as u64);
        self.noted_timers.set(timers as u64);
    }
}

/// Measures how long the loop has run, and how much of that time it was blocked in polls. Reading the clock around each
/// poll would cost too much, so the processor's tick counter is read before and after a poll instead. The clock is read
/// only at the start and the end of a run and in `durations_ns`. These readings show how long a tick is.
///
/// ```text
///   run begins:            poll blocks:        poll returns:            run ends:
///   read ticks and clock   subtract ticks      add ticks       ...      read ticks and clock
/// ```
pub(crate) struct RunClock {
    run_ns: Counter,
    run_ticks: Counter,
    /// The ticks spent in polls. Negative as an `i64` while the loop is blocked, because the tick count at the start of
    /// the poll was subtracted, and the count at its end is not added yet.
    polling_ticks: Counter,
    /// When the current run began; 0 outside of a run.
    since_ns: Counter,
    since_ticks: Counter,
    /// Twice the number of changes to the fields that `runs` reads; odd during a change.
    changes: AtomicU64,
    /// The largest durations that `durations_ns` has returned. Each call computes the length of a tick again, so
    /// without these maxima a result could be smaller than an earlier one.
    reported_ns: [AtomicU64; 2],
}

/// The maximum number of times that `RunClock::runs` reads the fields.
const MAX_TRIES: usize = 1000;

impl RunClock {
    const fn new() -> Self {
        Self {
            run_ns: Counter::new(),
            run_ticks: Counter::new(),
            polling_ticks: Counter::new(),
            since_ns: Counter::new(),
            since_ticks: Counter::new(),
            changes: AtomicU64::new(0),
            reported_ns: [const { AtomicU64::new(0) }; 2],
        }
    }

    pub(crate) fn begin_run(&self) {
        self.change(|| {
            self.since_ticks.set(clock::ticks());
            self.since_ns.set(clock::now_ns());
        });
    }

    pub(crate) fn end_run(&self) {
        let (ticks, now_ns) = (clock::ticks(), clock::now_ns());
        self.change(|| {
            self.run_ticks.add(ticks.saturating_sub(self.since_ticks.get()));
            self.run_ns.add(now_ns.saturating_sub(self.since_ns.get()));
            self.since_ns.set(0);
        });
    }

    /// Changes the fields that `runs` reads. A thread that reads them meanwhile reads them again (a sequence lock).
    fn change(&self, body: impl FnOnce()) {
        let changes = self.changes.load(Ordering::Relaxed);
        self.changes.store(changes + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        body();
        self.changes.store(changes + 2, Ordering::Release);
    }

    /// Returns how long the finished runs took, in nanoseconds and in ticks, and when the current run began, in the
    /// same units.
    fn runs(&self) -> [u64; 4] {
        let mut tries = 0;
        loop {
            let changes = self.changes.load(Ordering::Acquire);
            let found = [&self.run_ns, &self.run_ticks, &self.since_ns, &self.since_ticks].map(Counter::get);
            fence(Ordering::Acquire);
            tries += 1;
            // In the child of a fork, the thread that was changing the fields may not exist any more.
            if (changes.is_multiple_of(2) && self.changes.load(Ordering::Relaxed) == changes)
                || tries == MAX_TRIES
            {
                return found;
            }
            std::thread::yield_now();
        }
    }

    #[inline(always)]
    pub(crate) fn begin_poll(&self) {
        self.polling_ticks.add(clock::ticks().wrapping_neg());
    }

    #[inline(always)]
    pub(crate) fn end_poll(&self) {
        self.polling_ticks.add(clock::ticks());
    }

    /// The nanoseconds that the loop has run outside of polls, and the nanoseconds in polls. Neither ever decreases.
    /// Any thread may call this.
    pub(crate) fn durations_ns(&self) -> [u64; 2] {
        let [mut run_ns, mut run_ticks, since_ns, since_ticks] = self.runs();
        let (now, now_ns) = (clock::ticks(), clock::now_ns());
        if since_ns != 0 {
            run_ns += now_ns.saturating_sub(since_ns);
            run_ticks += now.saturating_sub(since_ticks);
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
