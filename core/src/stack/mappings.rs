//! Decides how many memory mappings may be used for stacks. The kernel limits the number of mappings of a process
//! (`vm.max_map_count`).
//!
//! At the limit every large allocation of the process fails, not only the allocation of a stack, and most programs do
//! not survive that. So stacks leave a reserve. Counting the mappings takes time in proportion to their number
//! (`pages::mapping_usage`), so not every request counts them. After each count, stacks may take some mappings without
//! a further count: an eighth of the counted number, but at most half of the mappings that are free beyond the reserve.
//! The other half is left to the rest of the process, which may take mappings before the next count.
//!
//! The limit applies to the whole process, so any thread may use a `Budget`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::sys::clock;
use crate::sys::pages::{self, MappingUsage};

/// The reserve for the rest of the process is the limit divided by this: 2,047 of the usual 65,530 mappings.
const RESERVED_PART: usize = 32;
/// After a count, stacks may take at most the counted number divided by this without a further count.
const COUNTED_PART: usize = 8;
/// For this long after a refusal, further requests are refused without counting again.
const RECOUNT_NS: u64 = 100_000_000;

/// How many mappings stacks have taken, and how many they may take.
pub(super) struct Budget {
    usage: fn() -> Option<MappingUsage>,
    taken: AtomicUsize,
    /// As long as `taken` does not exceed this, mappings need not be counted.
    granted: AtomicUsize,
    /// Until this time requests beyond `granted` are refused without counting.
    refused_until_ns: AtomicU64,
}

/// The budget of this process.
pub(super) static PROCESS: Budget = Budget::new(pages::mapping_usage);

impl Budget {
    /// A budget of which nothing is taken yet. `usage` counts the mappings, or returns `None` if it cannot, for
    /// example because there is no limit.
    pub(super) const fn new(usage: fn() -> Option<MappingUsage>) -> Self {
        Self {
            usage,
            taken: AtomicUsize::new(0),
            granted: AtomicUsize::new(0),
            refused_until_ns: AtomicU64::new(0),
        }
    }

    /// Takes `count` mappings.
    ///
    /// # Errors
    /// Fails if fewer mappings than the reserve would be left. The error has the numbers if this call counted the
    /// mappings.
    pub(super) fn take(&self, count: usize) -> Result<(), Option<MappingUsage>> {
        let taken = self.taken.fetch_add(count, Ordering::Relaxed) + count;
        if taken <= self.granted.load(Ordering::Relaxed) {
            return Ok(());
        }
        let outcome = self.count_again(taken, count);
        if outcome.is_err() {
            self.taken.fetch_sub(count, Ordering::Relaxed);
        }
        outcome
    }

    #[cold]
    fn count_again(&self, taken: usize, count: usize) -> Result<(), Option<MappingUsage>> {
        let now_ns = clock::coarse_ns();
        if now_ns < self.refused_until_ns.load(Ordering::Relaxed) {
            return Err(None);
        }
        let Some(usage) = (self.usage)() else {
            // A later count may succeed, for example when the process has a free descriptor again.
            self.granted.store(taken, Ordering::Relaxed);
            return Ok(());
        };
        let reserved = usage.limit / RESERVED_PART;
        let free = usage.limit.saturating_sub(usage.count + reserved);
        if free < count {
            self.refused_until_ns
                .store(now_ns + RECOUNT_NS, Ordering::Relaxed);
            return Err(Some(usage));
        }
        let more = (free / 2).min(usage.count / COUNTED_PART).max(count) - count;
        self.granted.store(taken + more, Ordering::Relaxed);
        Ok(())
    }

    /// Gives `count` mappings back. They are not granted any more, because the rest of the process may take them.
    pub(super) fn give_back(&self, count: usize) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
        let less = |granted: usize| Some(granted.saturating_sub(count));
        // `less` never returns `None`, so the update cannot fail.
        let _ = self
            .granted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Counts the mappings, for an error message.
    pub(super) fn usage(&self) -> Option<MappingUsage> {
        (self.usage)()
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_every_mapping_needs_a_count() {
        static IN_USE: AtomicUsize = AtomicUsize::new(400);
        static COUNTS: AtomicUsize = AtomicUsize::new(0);
        let budget = Budget::new(|| {
            COUNTS.fetch_add(1, Ordering::Relaxed);
            Some(MappingUsage {
                count: IN_USE.load(Ordering::Relaxed),
                limit: 1024,
            })
        });
        let counts = || COUNTS.load(Ordering::Relaxed);
        assert_eq!((budget.take(1), counts()), (Ok(()), 1));
        // 1 + 49 mappings are an eighth of the 400 that were counted, so taking the 49 causes no further count.
        assert_eq!((budget.take(49), counts()), (Ok(()), 1));
        IN_USE.store(900, Ordering::Relaxed);
        assert_eq!((budget.take(1), counts()), (Ok(()), 2));
        // Of 1024 mappings 900 are in use and 32 are the reserve. So 92 are free, and half of them are granted.
        assert_eq!((budget.take(45), counts()), (Ok(()), 2));
        assert_eq!((budget.take(1), counts()), (Ok(()), 3));
        budget.give_back(97);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn mappings_are_counted_before_returned_ones_are_taken_again() {
        static IN_USE: AtomicUsize = AtomicUsize::new(100);
        let budget = Budget::new(|| {
            Some(MappingUsage {
                count: IN_USE.load(Ordering::Relaxed),
                limit: 1024,
            })
        });
        for _ in 0..8 {
            assert_eq!(budget.take(100), Ok(()));
        }
        budget.give_back(800);
        // The rest of the process takes the returned mappings.
        IN_USE.store(990, Ordering::Relaxed);
        assert!(budget.take(100).is_err());
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn the_reserve_is_not_taken() {
        static IN_USE: AtomicUsize = AtomicUsize::new(122);
        static COUNTS: AtomicUsize = AtomicUsize::new(0);
        let budget = Budget::new(|| {
            COUNTS.fetch_add(1, Ordering::Relaxed);
            Some(MappingUsage {
                count: IN_USE.load(Ordering::Relaxed),
                limit: 128,
            })
        });
        let usage = MappingUsage {
            count: 122,
            limit: 128,
        };
        assert_eq!(budget.take(3), Err(Some(usage)));
        assert_eq!(budget.take(3), Err(None));
        assert_eq!((COUNTS.load(Ordering::Relaxed), budget.taken()), (1, 0));
        // After `RECOUNT_NS` the mappings are counted again.
        budget.refused_until_ns.store(0, Ordering::Relaxed);
        IN_USE.store(20, Ordering::Relaxed);
        assert_eq!(budget.take(3), Ok(()));
        assert_eq!(budget.taken(), 3);
    }

    #[test]
    fn without_a_limit_everything_is_granted() {
        let budget = Budget::new(|| None);
        for _ in 0..3 {
            assert_eq!(budget.take(1 << 40), Ok(()));
        }
    }
}
