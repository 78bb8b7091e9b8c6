//! The memory that coros run on, and the copies of evicted stacks.
//!
//! ```text
//!   StackSlot (8 MiB of address space)                     the slot's coro      another coro of the slot
//!   +------------+ top                                 runs or is           evicted:
//!   |  used      |                                     suspended in place
//!   |            |  <- sp --------------------------------------------+    +------------+ Saved: exactly
//!   |            |     below it nothing is kept                       +--> |  sp .. top |  as long as the
//!   |            |                                                         +------------+  used part
//!   +------------+ base
//!   |   guard    |  1 MiB without access, as below the stack of a process: a large frame does not step over it
//!   +------------+
//! ```
//!
//! A coro belongs to one slot for life, so that pointers into its stack are right whenever it runs. While it is
//! suspended, its bytes stay in the slot until another coro needs the slot. Then the stack is evicted: its bytes are
//! copied to a `Saved`.
//!
//! Belongs to one thread. It must not know Python or who runs when.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr;

use crate::sys::pages;

/// Saved stacks are rounded up to this, so that buffers of one size serve many.
const SAVED_UNIT: usize = 16;
/// Buffers up to this many units are kept for the next eviction.
const POOLED_UNITS: usize = 512;
/// The most bytes that are kept in all buffers. Switches take as many buffers as they give back, so few are enough.
const MAX_KEPT_LEN: usize = 1024 * 1024;
/// A trim gives back the memory of a stack below this depth.
const RESIDENT_LEN: usize = 256 * 1024;
/// How many evictions there are between two trims.
const EVICTIONS_PER_TRIM: u32 = 1024;
/// The debug mode that evicts always overwrites the slot with this byte.
const POISON: u8 = 0xDD;

/// The length of the guard below a stack, which nobody can access.
const GUARD_LEN: usize = 1024 * 1024;

/// One mapping with a guard below.
pub struct StackSlot {
    mapping: *mut libc::c_void,
    mapping_len: usize,
    base: usize,
    top: usize,
    evictions: Cell<u32>,
}

fn page_len() -> usize {
    // SAFETY: no memory is involved.
    let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(len).unwrap_or(4096)
}

impl StackSlot {
    /// Maps `len_bytes` (rounded up to pages) of stack. The system provides memory when a page is first used.
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        let page = page_len();
        let usable = len_bytes.next_multiple_of(page);
        let mapping_len = usable + GUARD_LEN;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | pages::NO_RESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapping = unsafe { libc::mmap(ptr::null_mut(), mapping_len, libc::PROT_NONE, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = mapping as usize + GUARD_LEN;
        let slot = Self {
            mapping,
            mapping_len,
            base,
            top: base + usable,
            evictions: Cell::new(0),
        };
        // SAFETY: inside the mapping made above; on failure the slot is dropped and unmapped.
        let is_usable = unsafe {
            libc::mprotect(
                base as *mut libc::c_void,
                usable,
                libc::PROT_READ | libc::PROT_WRITE,
            ) == 0
        };
        if !is_usable {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: inside the mapping made above.
        unsafe { pages::refuse_huge_pages(base, usable) };
        Ok(slot)
    }

    /// The highest address, 16 bytes aligned; stacks begin below it.
    #[inline]
    pub fn top(&self) -> usize {
        self.top
    }

    /// The lowest usable address.
    #[inline]
    pub fn base(&self) -> usize {
        self.base
    }

    /// The length of the stack.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.top - self.base
    }

    /// The addresses that nobody may touch, below the stack.
    pub fn guard(&self) -> Range<usize> {
        self.mapping as usize..self.base
    }

    /// Whether an address lies on the stack (the guard does not belong to it).
    #[inline]
    pub fn contains(&self, address: usize) -> bool {
        self.base <= address && address < self.top
    }

    /// Copies the used part of the stack at `sp` into `saved`, which must have its length.
    ///
    /// # Safety
    /// The stack at `sp` is suspended, in this slot.
    #[inline]
    pub unsafe fn evict(&self, sp: usize, saved: &Saved) {
        debug_assert!(self.contains(sp) && saved.len_bytes == self.top - sp);
        // SAFETY: `sp..top` is mapped and not running (contract); the buffer has that length and is elsewhere.
        unsafe { ptr::copy_nonoverlapping(sp as *const u8, saved.data, saved.len_bytes) };
        let count = self.evictions.get() + 1;
        self.evictions.set(count);
        if count.is_multiple_of(EVICTIONS_PER_TRIM) {
            self.trim(sp);
        }
    }

    /// Copies a saved stack back to where it was.
    ///
    /// # Safety
    /// No stack is running or suspended in place in this slot; `saved` was evicted from it.
    #[inline]
    pub unsafe fn restore(&self, saved: &Saved) {
        // SAFETY: the slot is free (contract), and has at least the length that was taken out of it.
        unsafe {
            ptr::copy_nonoverlapping(
                saved.data,
                (self.top - saved.len_bytes) as *mut u8,
                saved.len_bytes,
            );
        }
    }

    /// Overwrites everything from `sp` up, so that the use of a pointer into an evicted stack fails early.
    ///
    /// # Safety
    /// No stack is running or suspended in place in this slot.
    pub unsafe fn poison(&self, sp: usize) {
        // SAFETY: mapped, and free (contract).
        unsafe { ptr::write_bytes(sp as *mut u8, POISON, self.top - sp) };
    }

    /// Gives memory back to the system: the pages more than `RESIDENT_LEN` below the top that the stack at `sp` does
    /// not use. Returns whether there were any.
    pub fn trim(&self, sp: usize) -> bool {
        let page = page_len();
        let end = (sp.min(self.top) - page).min(self.top - RESIDENT_LEN.min(self.len_bytes())) & !(page - 1);
        if end <= self.base {
            return false;
        }
        let mut residency = 0_u8;
        // SAFETY: one page inside the mapping, and one byte for it (mincore(2)).
        let known = unsafe {
            libc::mincore(
                (end - page) as *mut libc::c_void,
                page,
                (&raw mut residency).cast(),
            ) == 0
        };
        if !known || residency & 1 == 0 {
            return false;
        }
        // SAFETY: the pages lie below every stack pointer in use, so nothing in them is needed.
        unsafe {
            libc::madvise(
                self.base as *mut libc::c_void,
                end - self.base,
                libc::MADV_DONTNEED,
            )
        };
        true
    }
}

impl Drop for StackSlot {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever drops the slot has ended all coros on it.
        unsafe { libc::munmap(self.mapping, self.mapping_len) };
    }
}

/// The bytes of an evicted stack.
pub struct Saved {
    data: *mut u8,
    len_bytes: usize,
}

impl Saved {
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

    fn fill(slot: &StackSlot, sp: usize, value: u8) {
        // SAFETY: mapped and unused by others.
        unsafe { ptr::write_bytes(sp as *mut u8, value, slot.top() - sp) };
    }

    fn content(slot: &StackSlot, sp: usize) -> Vec<u8> {
        // SAFETY: mapped, initialized by `fill` or zero.
        unsafe { std::slice::from_raw_parts(sp as *const u8, slot.top() - sp).to_vec() }
    }

    #[test]
    fn stacks_come_back_as_they_were() {
        let slot = StackSlot::new(1 << 20).unwrap();
        let mut pool = Pool::new();
        let lens = [64, 65, 1000, 4096, 100_000];
        let saved: Vec<Saved> = lens
            .iter()
            .zip(1_u8..)
            .map(|(len, value)| {
                let sp = slot.top() - len;
                fill(&slot, sp, value);
                let saved = pool.take(*len).unwrap();
                // SAFETY: nothing runs on the slot.
                unsafe {
                    slot.evict(sp, &saved);
                    slot.poison(sp);
                }
                saved
            })
            .collect();
        for ((saved, len), value) in saved.into_iter().zip(lens).zip(1_u8..) {
            assert_eq!(saved.len_bytes(), len);
            // SAFETY: nothing runs on the slot.
            unsafe { slot.restore(&saved) };
            assert!(content(&slot, slot.top() - len).iter().all(|byte| *byte == value));
            pool.give(saved);
        }
    }

    #[test]
    fn a_deep_excursion_gives_its_memory_back() {
        let slot = StackSlot::new(4 << 20).unwrap();
        assert!(!slot.trim(slot.top() - 1000));
        fill(&slot, slot.base(), 7);
        let sp = slot.top() - 1000;
        assert!(slot.trim(sp));
        assert!(!slot.trim(sp));
        assert!(content(&slot, sp).iter().all(|byte| *byte == 7));
        assert_eq!(content(&slot, slot.base())[0], 0);
    }

    #[test]
    fn addresses_are_told_apart() {
        let slot = StackSlot::new(1).unwrap();
        assert_eq!(slot.len_bytes(), page_len());
        assert!(slot.contains(slot.base()) && slot.contains(slot.top() - 1) && !slot.contains(slot.top()));
        assert_eq!(slot.top() % 16, 0);
    }

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
