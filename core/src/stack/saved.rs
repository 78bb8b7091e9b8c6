//! The copies of evicted stacks, and the buffers that they are in.
//!
//! Belongs to one thread. It must not know where the stacks lie.

/// Saved stacks are rounded up to this, so that buffers of one size serve many.
const SAVED_UNIT: usize = 16;
/// Buffers up to this many units are kept for the next eviction.
const POOLED_UNITS: usize = 512;
/// The most bytes that are kept in all buffers. Switches take as many buffers as they give back, so few are enough.
const MAX_KEPT_LEN: usize = 1024 * 1024;

/// The bytes of an evicted stack.
pub struct Saved {
    pub(super) data: *mut u8,
    pub(super) len_bytes: usize,
}

impl Saved {
    /// Where the bytes are.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// The length of the part that was used.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Buffers for saved stacks, kept by size.
pub struct Pool {
    kept: Vec<Vec<*mut u8>>,
    /// The bytes in all of them.
    kept_len: usize,
}

fn units(len_bytes: usize) -> usize {
    len_bytes.div_ceil(SAVED_UNIT)
}

impl Pool {
    /// No buffers yet.
    pub fn new() -> Self {
        Self {
            kept: (0..=POOLED_UNITS).map(|_| Vec::new()).collect(),
            kept_len: 0,
        }
    }

    /// A buffer of `len_bytes`, or None if there is no memory.
    #[inline]
    pub fn take(&mut self, len_bytes: usize) -> Option<Saved> {
        let size = units(len_bytes);
        let data = match self.kept.get_mut(size).and_then(Vec::pop) {
            Some(data) => {
                self.kept_len -= size * SAVED_UNIT;
                data
            }
            // SAFETY: plain allocation; null is checked below.
            None => unsafe { libc::malloc(size * SAVED_UNIT) }.cast::<u8>(),
        };
        if data.is_null() {
            return None;
        }
        Some(Saved { data, len_bytes })
    }

    /// Takes a buffer back.
    #[inline]
    #[allow(clippy::needless_pass_by_value)] // the buffer is given up
    pub fn give(&mut self, saved: Saved) {
        let size = units(saved.len_bytes);
        let len_bytes = size * SAVED_UNIT;
        match self.kept.get_mut(size) {
            Some(kept) if self.kept_len + len_bytes <= MAX_KEPT_LEN => {
                kept.push(saved.data);
                self.kept_len += len_bytes;
            }
            // SAFETY: allocated by `take`, given up by the caller.
            _ => unsafe { libc::free(saved.data.cast()) },
        }
    }

    /// True if no buffer is kept.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.kept_len == 0
    }

    /// Gives all buffers back to the system.
    #[cold]
    pub fn clear(&mut self) {
        self.kept_len = 0;
        for kept in &mut self.kept {
            for data in std::mem::take(kept) {
                // SAFETY: allocated by `take` and owned by the pool, which has just given it up.
                unsafe { libc::free(data.cast()) };
            }
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again() {
        let mut pool = Pool::new();
        let first = pool.take(1001).unwrap();
        let data = first.data;
        pool.give(first);
        let again = pool.take(1008).unwrap();
        assert_eq!(again.data, data);
        pool.give(again);
    }

    #[test]
    fn few_buffers_are_kept() {
        let mut pool = Pool::new();
        let lens = (1..=POOLED_UNITS).map(|size| size * SAVED_UNIT);
        let all: Vec<Saved> = lens
            .flat_map(|len| [len; 64])
            .map(|len| pool.take(len).unwrap())
            .collect();
        assert!(pool.is_empty());
        for saved in all {
            pool.give(saved);
        }
        let kept_len: usize = pool
            .kept
            .iter()
            .enumerate()
            .map(|(size, kept)| size * SAVED_UNIT * kept.len())
            .sum();
        assert_eq!(kept_len, pool.kept_len);
        assert!(kept_len > MAX_KEPT_LEN / 2 && kept_len <= MAX_KEPT_LEN);
        pool.clear();
        assert!(pool.is_empty() && pool.kept.iter().all(|kept| kept.capacity() == 0));
    }
}
