//! Remembers how much the last reads of a socket returned, and decides from that where the next read puts its data.
//!
//! A small or irregular read goes into a scratch buffer, and is then copied into an object of exactly its size. Reads
//! of 8 to 256 KiB that always have about the same size go directly into an object of that size, which saves the copy.
//! Such direct reads begin only after several reads in a row for which the same size of object is suitable. If a single
//! unusual read could choose the size, the next message could get an object that is too small, and arrive in pieces. If
//! the caller chooses the size of the object, only the last read is considered ([`ReadSize::suits`]).
//!
//! A [`ReadSize`] belongs to the loop's thread.

use std::cell::Cell;

/// After a read that returned less than this, the next read goes through the scratch buffer.
const MIN_DIRECT_LEN: usize = 8 * 1024;
/// The largest object that a read goes into directly.
const MAX_DIRECT_LEN: usize = 256 * 1024;
/// The size of an object that a read goes into directly is a multiple of this.
const UNIT: usize = 4 * 1024;
/// When this many reads in a row have each needed the same size of object as the previous read, the next read goes
/// directly into an object of that size.
const STEADY_READS: u8 = 4;

/// The history of one socket. It takes only two bytes, because every open connection has one.
#[derive(Debug)]
pub struct ReadSize {
    /// The size of the object that would have suited the last read, in multiples of `UNIT`; 0 if the read was small or
    /// very large, or filled its buffer.
    units: Cell<u8>,
    /// How many reads in a row have repeated that size (saturating).
    steady: Cell<u8>,
}

impl ReadSize {
    /// The history of a socket from which nothing has been read yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            units: Cell::new(0),
            steady: Cell::new(0),
        }
    }

    /// The length in bytes of an object for the next read, or 0 if the read should go through the scratch buffer.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        if self.steady.get() < STEADY_READS {
            0
        } else {
            usize::from(self.units.get()) * UNIT
        }
    }

    /// Whether a read of at most `len_bytes` may go directly into an object of that length. It may if that length is at
    /// most `MAX_DIRECT_LEN`, and the last read was neither small nor very large, did not fill its buffer, and would
    /// have filled at least about half of the object.
    #[inline]
    #[must_use]
    pub fn suits(&self, len_bytes: usize) -> bool {
        len_bytes <= MAX_DIRECT_LEN
            && usize::from(self.units.get()) * UNIT * 2 >= len_bytes.max(MIN_DIRECT_LEN)
    }

    /// Records that a read into `capacity` bytes has returned `len_bytes`. If it filled the buffer, there may be more
    /// to read, so the next read goes through the scratch buffer.
    #[inline]
    pub fn note(&self, len_bytes: usize, capacity: usize) {
        let suitable = if len_bytes == capacity {
            0
        } else {
            suitable_units(len_bytes)
        };
        let is_steady = self.units.replace(suitable) == suitable;
        self.steady.set(if is_steady {
            self.steady.get().saturating_add(1)
        } else {
            0
        });
    }

    /// Forgets all reads.
    pub fn reset(&self) {
        self.units.set(0);
        self.steady.set(0);
    }
}

impl Default for ReadSize {
    fn default() -> Self {
        Self::new()
    }
}

/// The size of an object for a read that returns `len_bytes`, in multiples of `UNIT`, or 0 if such reads go through the
/// scratch buffer. The object has space for at least one byte more. So a read of the same size does not fill it, which
/// tells the reader that the socket has no more data.
#[inline]
fn suitable_units(len_bytes: usize) -> u8 {
    let units = len_bytes / UNIT + 1;
    if len_bytes < MIN_DIRECT_LEN || units > MAX_DIRECT_LEN / UNIT {
        0
    } else {
        units as u8
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MAX_DIRECT_LEN, MIN_DIRECT_LEN, ReadSize, STEADY_READS, UNIT};

    /// The history after `count` reads of `len_bytes` each through the scratch buffer.
    fn after(len_bytes: usize, count: u8) -> ReadSize {
        let size = ReadSize::new();
        for _ in 0..count {
            size.note(len_bytes, 1 << 20);
        }
        size
    }

    #[test]
    fn steady_reads_get_an_object_that_holds_them_with_a_byte_to_spare() {
        for len_bytes in [MIN_DIRECT_LEN, 100_000, 102_400, MAX_DIRECT_LEN - 1] {
            assert_eq!(after(len_bytes, STEADY_READS).capacity(), 0, "{len_bytes}");
            let capacity = after(len_bytes, STEADY_READS + 1).capacity();
            assert!(
                (len_bytes + 1..=len_bytes + UNIT).contains(&capacity),
                "{len_bytes}: {capacity}"
            );
        }
    }

    #[test]
    fn small_and_very_large_reads_use_the_scratch_buffer() {
        for len_bytes in [1, MIN_DIRECT_LEN - 1, MAX_DIRECT_LEN, 1 << 19] {
            assert_eq!(after(len_bytes, 100).capacity(), 0, "{len_bytes}");
        }
    }

    #[test]
    fn an_unusual_read_and_a_full_object_end_direct_reads() {
        let size = after(100_000, 10);
        size.note(20_000, 1 << 20);
        assert_eq!(size.capacity(), 0);
        let size = after(100_000, 10);
        let capacity = size.capacity();
        size.note(capacity, capacity);
        assert_eq!(size.capacity(), 0);
        let size = after(100_000, 255);
        size.note(100_000, 1 << 20);
        assert_ne!(size.capacity(), 0, "the count does not wrap");
        size.reset();
        assert_eq!(size.capacity(), 0);
    }

    #[test]
    fn a_read_that_would_fill_half_of_the_object_goes_directly() {
        for (last, asked_for, suits) in [
            (65_536, 65_536, true),
            (36_864, 65_536, true),
            (20_000, 65_536, false),
            (MIN_DIRECT_LEN - 1, 4096, false),
            (MIN_DIRECT_LEN, 4096, true),
            (200_000, MAX_DIRECT_LEN, true),
            (200_000, MAX_DIRECT_LEN + 1, false),
        ] {
            assert_eq!(after(last, 1).suits(asked_for), suits, "{last}, {asked_for}");
        }
        assert!(!ReadSize::new().suits(1));
    }

    proptest! {
        #[test]
        fn capacity_is_limited_and_a_multiple_of_the_unit(lens in prop::collection::vec(0_usize..600_000, 1..60)) {
            let size = ReadSize::default();
            for len_bytes in lens {
                let capacity = size.capacity();
                prop_assert!(capacity <= MAX_DIRECT_LEN && capacity % UNIT == 0);
                let limit = if capacity == 0 { MAX_DIRECT_LEN } else { capacity };
                size.note(len_bytes.min(limit), limit);
            }
        }
    }
}
