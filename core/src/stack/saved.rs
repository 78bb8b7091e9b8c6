//! The copies of evicted stacks, and a pool of buffers for them. A pool belongs to one thread.

/// The lengths of buffers are multiples of this, so that a buffer can be used again for stacks of similar lengths.
const SAVED_UNIT: usize = 16;
/// Buffers of up to this many units are kept for the next eviction.
const POOLED_UNITS: usize = 512;
/// The most bytes that the pool keeps. Over time, switches give back as many buffers as they take, so few are enough.
const MAX_KEPT_LEN: usize = 1024 * 1024;

/// The bytes of an evicted stack.
pub struct Saved {
    pub(super) data: *mut u8,
    pub(super) len_bytes: usize,
}

impl Saved {
    /// The address of the copied bytes.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// The length of the copy, which is the used part of the stack.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Buffers for saved stacks.
pub struct Pool {
    /// The buffers that are kept. The index is their length in units.
    kept: Vec<Vec<*mut u8>>,
    /// The total length of the kept buffers.
    kept_len: usize,
}

fn units(len_bytes: usize) -> usize {
    len_bytes.div_ceil(SAVED_UNIT)
}

impl Pool {
    /// An empty pool.
    pub fn new() -> Self {
        Self {
            kept: (0..=POOLED_UNITS).map(|_| Vec::new()).collect(),
            kept_len: 0,
        }
    }

    /// Takes a buffer of `len_bytes`. Returns `None` if there is no memory.
    #[inline]
    pub fn take(&mut self, len_bytes: usize) -> Option<Saved> {
        let size = units(len_bytes);
        let data = match self.kept.get_mut(size).and_then(Vec::pop) {
            Some(data) => {
                self.kept_len -= size * SAVED_UNIT;
                data
            }
            // SAFETY: malloc has no preconditions, and null is handled below.
            None => unsafe { libc::malloc(size * SAVED_UNIT) }.cast::<u8>(),
        };
        if data.is_null() {
            return None;
        }
        Some(Saved { data, len_bytes })
    }

    /// Takes a buffer back.
    #[inline]
    #[allow(clippy::needless_pass_by_value)] // the caller must not keep the buffer
    pub fn give(&mut self, saved: Saved) {
        let size = units(saved.len_bytes);
        let len_bytes = size * SAVED_UNIT;
        match self.kept.get_mut(size) {
            Some(kept) if self.kept_len + len_bytes <= MAX_KEPT_LEN => {
                kept.push(saved.data);
                self.kept_len += len_bytes;
            }
            // SAFETY: the buffer was allocated by `take`, and the caller has given it up.
            _ => unsafe { libc::free(saved.data.cast()) },
        }
    }

    /// Whether the pool keeps no buffer.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.kept_len == 0
    }

    /// Frees all buffers that the pool keeps.
    #[cold]
    pub fn clear(&mut self) {
        self.kept_len = 0;
        for kept in &mut self.kept {
            for data in std::mem::take(kept) {
                // SAFETY: the buffer was allocated by `take`, and the pool has just removed it.
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
    fn the_kept_buffers_are_limited() {
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
