//! Counts the steps that a dict of `CPython` takes to insert integers.
//!
//! The hash of an integer is not secret, and neither is the order in which a dict probes its slots. A peer can
//! therefore choose integers whose probes hit one taken slot after another, and a dict of 90,000 such keys takes
//! seconds instead of milliseconds. Which keys collide depends on the size of the table and on the keys before them.
//! So this module fills a model of the dict's table. The model contains only the hashes.
//!
//! Source: `Objects/dictobject.c` (`perturb`, `GROWTH_RATE`) and `Python/pyhash.c` (`_PyHASH_MODULUS`) of `CPython`
//! 3.11 to 3.15.

/// The hash of an integer is the integer modulo this prime.
const MODULUS: u64 = (1 << 61) - 1;
const SHIFT: u32 = 5;
const MIN_SLOTS: usize = 8;
/// Marks an empty slot. It cannot be a hash, because every hash is less than `MODULUS` away from zero.
const EMPTY: u64 = 1 << 62;

/// The slots of a dict, and the hashes in the order in which they were inserted.
#[derive(Debug)]
pub struct Probing {
    slots: Vec<u64>,
    hashes: Vec<u64>,
}

impl Default for Probing {
    fn default() -> Self {
        Self {
            slots: vec![EMPTY; MIN_SLOTS],
            hashes: Vec::new(),
        }
    }
}

impl Probing {
    /// How many different hashes were inserted.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Inserts an integer. Returns how many taken slots the dict passes before it finds the place, including the slots
    /// that it passes when the table has to grow and all earlier hashes are inserted into the larger one.
    ///
    /// Integers with the same hash are treated as the same integer. At most about a dozen 64-bit integers share a hash.
    pub fn insert(&mut self, is_negative: bool, magnitude: u64) -> u64 {
        let hash = hash_of(is_negative, magnitude);
        let (slot, mut steps) = find_slot(&self.slots, hash);
        if self.slots[slot] == hash {
            return steps;
        }
        let mut free = slot;
        if self.hashes.len() >= self.slots.len() * 2 / 3 {
            let size = (self.hashes.len() * 3).next_power_of_two().max(MIN_SLOTS);
            self.slots.clear();
            self.slots.resize(size, EMPTY);
            for &earlier in &self.hashes {
                let (slot, more) = find_slot(&self.slots, earlier);
                self.slots[slot] = earlier;
                steps += more;
            }
            let more;
            (free, more) = find_slot(&self.slots, hash);
            steps += more;
        }
        self.slots[free] = hash;
        self.hashes.push(hash);
        steps
    }
}

/// The value that `hash()` returns, with its bits reinterpreted as an unsigned number.
fn hash_of(is_negative: bool, magnitude: u64) -> u64 {
    let hash = magnitude % MODULUS;
    match (is_negative, hash) {
        (false, _) => hash,
        (true, 1) => 2_u64.wrapping_neg(),
        (true, _) => hash.wrapping_neg(),
    }
}

/// Finds the slot that has this hash, or the first empty slot if no slot has it. Returns the slot's index, and how many
/// other slots were probed before it. The search always ends: at least a third of the slots are empty, and the probes
/// reach every slot.
fn find_slot(slots: &[u64], hash: u64) -> (usize, u64) {
    let mask = slots.len() as u64 - 1;
    let (mut at, mut perturb, mut steps) = (hash & mask, hash, 0);
    loop {
        // The mask keeps the value below the length, which is a usize.
        #[allow(clippy::cast_possible_truncation)]
        let slot = at as usize;
        if slots[slot] == EMPTY || slots[slot] == hash {
            return (slot, steps);
        }
        steps += 1;
        perturb >>= SHIFT;
        at = at.wrapping_mul(5).wrapping_add(perturb).wrapping_add(1) & mask;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_equal_python_hashes() {
        assert_eq!(hash_of(false, 5), 5);
        assert_eq!(hash_of(false, MODULUS), 0);
        assert_eq!(hash_of(false, u64::MAX), 7);
        assert_eq!(hash_of(true, 1), (-2_i64).cast_unsigned());
        assert_eq!(hash_of(true, 2), (-2_i64).cast_unsigned());
        assert_eq!(hash_of(true, 1 << 63), (-4_i64).cast_unsigned());
    }

    #[test]
    fn consecutive_integers_take_no_steps() {
        let mut probing = Probing::default();
        assert_eq!((0..100_000).map(|key| probing.insert(false, key)).sum::<u64>(), 0);
        // The second time, each integer is found at once in its own slot.
        assert_eq!((0..100_000).map(|key| probing.insert(false, key)).sum::<u64>(), 0);
        assert_eq!(probing.hashes.len(), 100_000);
        assert_eq!(probing.slots.len(), 1 << 18);
    }

    #[test]
    fn integers_with_the_same_low_bits_take_some_steps() {
        let mut probing = Probing::default();
        let steps = (0..100_000)
            .map(|key| probing.insert(false, key << 22))
            .sum::<u64>();
        assert!((100_000..4_000_000).contains(&steps), "{steps}");
    }

    #[test]
    fn probes_of_taken_slots_are_counted() {
        // Once all bits of a hash are shifted out, the slot after `slot` is 5 * slot + 1. The first keys take half of
        // 4096 slots in that order. The later keys are chosen so that their own bits lead only to taken slots.
        let (size, taken) = (4096_u64, 2048);
        let mut probing = Probing::default();
        let mut slots = vec![EMPTY; 4096];
        let mut at = 1;
        for _ in 0..taken {
            probing.insert(false, at);
            slots[usize::try_from(at).unwrap()] = at;
            at = (at * 5 + 1) % size;
        }
        let bad = (1_u64 << 20..)
            .filter(|&key| find_slot(&slots, key).1 > 500)
            .take(500);
        let steps = bad.map(|key| probing.insert(false, key)).sum::<u64>();
        assert!(steps > 500 * 500, "{steps}");
    }
}
