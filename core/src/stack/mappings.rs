//! How many mappings stacks may take of those that the kernel allows a process (`vm.max_map_count`).
//!
//! At the limit every allocation of some size fails, not only that of a stack, and a program does not survive that. So
//! stacks leave a reserve. Counting takes time in proportion to the number of mappings (`pages::mapping_usage`). So it
//! is done again only when stacks have taken an eighth of that number since the last count, or half of what was free:
//! the other half is for the rest of the process, which may take mappings meanwhile.
//!
//! Owner: any thread, since the limit is the process's.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::sys::clock;
use crate::sys::pages::{self, MappingUsage};

/// The part of the limit that stacks leave to others: a 32nd, 2,047 of the usual 65,530.
const RESERVED_PART: usize = 32;
/// Mappings are counted again when this part of their number was taken.
const COUNTED_PART: usize = 8;
/// Mappings are not counted again so soon after stacks were refused one.
const RECOUNT_NS: u64 = 100_000_000;

/// What stacks have taken, and may take.
pub(super) struct Budget {
    usage: fn() -> Option<MappingUsage>,
    taken: AtomicUsize,
    /// Up to here nobody needs to count.
    granted: AtomicUsize,
    /// Until when nobody counts again.
    refused_until_ns: AtomicU64,
}

/// The budget of this process.
pub(super) static PROCESS: Budget = Budget::new(pages::mapping_usage);

impl Budget {
    /// Nothing is taken yet. `usage` counts the mappings, None if there is no limit.
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
    /// The reserve would be touched.
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
            self.granted.store(usize::MAX, Ordering::Relaxed);
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

    /// Gives `count` mappings back. The rest of the process may take them, so they are not granted any more.
    pub(super) fn give_back(&self, count: usize) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
        let less = |granted: usize| Some(granted.saturating_sub(count));
        // It always changes the value, so there is no error.
        let _ = self
            .granted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// What the budget knows of the limit, for an error.
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
        // 1 and 49: an eighth of 400.
        assert_eq!((budget.take(49), counts()), (Ok(()), 1));
        IN_USE.store(900, Ordering::Relaxed);
        assert_eq!((budget.take(1), counts()), (Ok(()), 2));
        // 1024 less 900 in use and 32 in reserve: 92 are free, and half of them is granted.
        assert_eq!((budget.take(45), counts()), (Ok(()), 2));
        assert_eq!((budget.take(1), counts()), (Ok(()), 3));
        budget.give_back(97);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn what_was_given_back_is_counted_before_it_is_taken_again() {
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
        // Somebody else has them now.
        IN_USE.store(990, Ordering::Relaxed);
        assert!(budget.take(100).is_err());
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn the_reserve_is_left() {
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
        // Counted again after a while.
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
