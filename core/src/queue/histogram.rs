//! A histogram of durations: counts in buckets whose width grows with the value, as in an HDR histogram.
//!
//! ```text
//!   0 1 2 ... 7 | 8 9 ... 15 | 16 18 ... 30 | 32 36 ... 60 | ...     lower bounds: 8 buckets for each power of two
//! ```
//! The first 8 buckets have a width of 1. The width of every other bucket is at most an eighth of its lower bound.
//! One thread adds values, and any thread may read them.

use std::sync::atomic::{AtomicU64, Ordering};

/// The base-2 logarithm of the number of buckets for each power of two.
const FINE_BITS: u32 = 3;
const FINE: u64 = 1 << FINE_BITS;
/// All values of `1 << MAX_BITS` or more are in the last bucket. In nanoseconds, that limit is 18 minutes.
const MAX_BITS: u32 = 40;
const BUCKETS: usize = ((MAX_BITS - FINE_BITS + 1) << FINE_BITS) as usize;

/// The histogram. Its size is 2.4 KB.
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum: AtomicU64,
    max: AtomicU64,
}

/// The index of the bucket of a value.
fn bucket_of(value: u64) -> usize {
    if value < FINE {
        return value as usize;
    }
    let shift = value.ilog2() - FINE_BITS;
    let index = u64::from(shift) * FINE + (value >> shift);
    (index as usize).min(BUCKETS - 1)
}

/// The smallest value that is too large for the bucket `index`.
fn end_of(index: usize) -> u64 {
    let next = index as u64 + 1;
    if next < FINE {
        return next;
    }
    let shift = next / FINE - 1;
    (next - shift * FINE) << shift
}

fn add(number: &AtomicU64, value: u64) {
    number.store(
        number.load(Ordering::Relaxed).wrapping_add(value),
        Ordering::Relaxed,
    );
}

impl Histogram {
    /// An empty histogram.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }

    /// Counts a value. Only one thread at a time may call this.
    pub fn add(&self, value: u64) {
        add(&self.counts[bucket_of(value)], 1);
        add(&self.sum, value);
        if value > self.max.load(Ordering::Relaxed) {
            self.max.store(value, Ordering::Relaxed);
        }
    }

    /// The sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// The largest value, or 0 if the histogram is empty.
    pub fn max(&self) -> u64 {
        self.max.load(Ordering::Relaxed)
    }

    /// The buckets that are not empty, in ascending order: the exclusive upper bound of each, and its number of values.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.counts.iter().enumerate();
        counts
            .map(|(index, count)| (end_of(index), count.load(Ordering::Relaxed)))
            .filter(|(_, count)| *count > 0)
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Histogram, MAX_BITS, bucket_of, end_of};

    #[test]
    fn buckets_follow_each_other() {
        let mut start = 0;
        for index in 0..BUCKETS {
            let end = end_of(index);
            assert!(start < end, "bucket {index} is empty");
            assert_eq!(bucket_of(start), index);
            assert_eq!(bucket_of(end - 1), index);
            assert!((end - start) * 8 <= start.max(8), "bucket {index} is too wide");
            start = end;
        }
        assert_eq!(start, 1 << MAX_BITS);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn counts_added_values() {
        let histogram = Histogram::new();
        assert_eq!(
            (histogram.sum(), histogram.max(), histogram.buckets().count()),
            (0, 0, 0)
        );
        for value in [0, 1000, 1001, 5, 1 << 50] {
            histogram.add(value);
        }
        assert_eq!(histogram.sum(), 2006 + (1 << 50));
        assert_eq!(histogram.max(), 1 << 50);
        let buckets: Vec<_> = histogram.buckets().collect();
        assert_eq!(buckets, [(1, 1), (6, 1), (1024, 2), (1 << MAX_BITS, 1)]);
    }
}
