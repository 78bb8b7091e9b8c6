//! Measures how long the loop's steps take, and how long they wait before they run. Reading the clock for each step has
//! a cost, so the loop measures only when a program asks for it.
//!
//! A step is one call that the loop makes (see `reactor::flush_policy`). Its waiting time begins when it becomes ready:
//!
//! ```text
//!   a step that was scheduled                           became ready
//!   by another step                                     when that step ended
//!   by an event or another thread                       when the last poll returned or the last step ended,
//!                                                       whichever was later
//!   as a timer                                          at its deadline
//!   as a timer whose slack let the loop sleep longer    when that sleep ended
//!
//!   a step in which a native object handles an event,
//!   without the ready queue                             when the last poll returned
//! ```
//! The entries of the ready queue have no time stamps. The queue is first in, first out, so a list of marks is enough.
//! Each mark stands for one time and says up to which entry of the queue it applies.
//!
//! Only the loop's thread measures. Other threads may read the histograms and `running_since_ns`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use grapeshot_core::queue::histogram::Histogram;
use grapeshot_core::sys::clock;

/// The entries of the ready queue between the previous mark's `end` and this mark's `end` have been ready since
/// `since_ns`. Entries are numbered from the last `forget_marks`.
struct Mark {
    end: u64,
    since_ns: u64,
}

pub(crate) struct Measuring {
    pub(super) durations: Histogram,
    pub(super) delays: Histogram,
    marks: RefCell<VecDeque<Mark>>,
    /// The number of entries that were taken out of the ready queue since the last `forget_marks`.
    taken: Cell<u64>,
    /// When the last poll returned.
    polled_ns: Cell<u64>,
    /// When the last step ended.
    ended_ns: Cell<u64>,
    /// When the running step began; 0 while no step runs.
    running_since_ns: AtomicU64,
    /// A step is slow if it takes at least this long.
    slow_ns: AtomicU64,
}

impl Measuring {
    pub(super) fn new() -> Self {
        Self {
            durations: Histogram::new(),
            delays: Histogram::new(),
            marks: RefCell::new(VecDeque::new()),
            taken: Cell::new(0),
            polled_ns: Cell::new(0),
            ended_ns: Cell::new(0),
            running_since_ns: AtomicU64::new(0),
            slow_ns: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn set_slow_ns(&self, slow_ns: u64) {
        self.slow_ns.store(slow_ns, Ordering::Relaxed);
    }

    /// Called when measuring starts, or starts again.
    pub(super) fn restart(&self) {
        self.forget_marks();
        self.polled_ns.set(clock::now_ns());
    }

    /// Called when all entries of the ready queue are removed without being run, and when measuring starts.
    pub(super) fn forget_marks(&self) {
        self.marks.borrow_mut().clear();
        self.taken.set(0);
    }

    /// When the running step began, on the monotonic clock; None if no step runs. Any thread may call this.
    pub(super) fn running_since_ns(&self) -> Option<u64> {
        Some(self.running_since_ns.load(Ordering::Relaxed)).filter(|since_ns| *since_ns != 0)
    }

    /// Marks the entries that have no mark yet as ready since `since_ns`. The queue has `ready_len` entries now.
    fn mark(&self, ready_len: usize, since_ns: u64) {
        let end = self.taken.get() + ready_len as u64;
        let mut marks = self.marks.borrow_mut();
        let marked = marks.back().map_or(self.taken.get(), |last| last.end);
        if end > marked {
            marks.push_back(Mark { end, since_ns });
        }
    }

    /// Counts an entry that was taken out of the queue, which now has `ready_len` entries. Returns the time at which
    /// the entry became ready.
    pub(super) fn take(&self, ready_len: usize) -> u64 {
        // Each step marks the entries that it has scheduled. So entries without a mark were scheduled by an event or by
        // another thread.
        self.mark(ready_len + 1, self.polled_ns.get().max(self.ended_ns.get()));
        let taken = self.taken.get() + 1;
        self.taken.set(taken);
        let mut marks = self.marks.borrow_mut();
        let Some(first) = marks.front() else { return 0 };
        let since_ns = first.since_ns;
        if first.end <= taken {
            marks.pop_front();
        }
        since_ns
    }

    /// Begins to measure a step that became ready at `ready_ns`; None stands for the time when the last poll returned.
    /// Returns when the step began.
    pub(super) fn begin(&self, ready_ns: Option<u64>) -> u64 {
        let started_ns = clock::now_ns();
        let ready_ns = ready_ns.unwrap_or_else(|| self.polled_ns.get());
        self.delays.add(started_ns.saturating_sub(ready_ns));
        self.running_since_ns.store(started_ns, Ordering::Relaxed);
        started_ns
    }

    /// Called when the step that began at `started_ns` has ended. The queue has `ready_len` entries now. Returns how
    /// long the step took, or None if it was not slow.
    pub(super) fn end(&self, started_ns: u64, ready_len: usize) -> Option<u64> {
        let now_ns = clock::now_ns();
        let took_ns = now_ns.saturating_sub(started_ns);
        self.durations.add(took_ns);
        self.running_since_ns.store(0, Ordering::Relaxed);
        self.ended_ns.set(now_ns);
        self.mark(ready_len, now_ns);
        (took_ns >= self.slow_ns.load(Ordering::Relaxed)).then_some(took_ns)
    }

    /// Called after a poll has returned.
    #[cold]
    pub(crate) fn note_polled(&self) {
        self.polled_ns.set(clock::now_ns());
    }

    /// Called before a timer goes into the ready queue, which has `ready_len` entries. The timer was due `late_ns` ago,
    /// and the loop may have slept up to `slack_ns` beyond the timer's deadline.
    #[cold]
    pub(crate) fn note_due(&self, ready_len: usize, late_ns: u64, slack_ns: u64) {
        let (polled_ns, ended_ns) = (self.polled_ns.get(), self.ended_ns.get());
        self.mark(ready_len, polled_ns.max(ended_ns));
        let due_ns = clock::now_ns().saturating_sub(late_ns);
        let since_ns = if ended_ns < due_ns {
            due_ns.max(polled_ns.min(due_ns + slack_ns))
        } else {
            due_ns
        };
        self.mark(ready_len + 1, since_ns);
    }
}
