//! The memory that coros run on, and the copies of evicted stacks.
//!
//! ```text
//!   StackSlot (8 MiB of address space)                 the slot's coro      another coro of the slot
//!   +------------+ top                                 runs or is           is evicted:
//!   |  used      |                                     suspended in place
//!   |            |  <- sp --------------------------------------------+    +------------+ Saved: exactly
//!   |            |     nothing below it is kept                       +--> |  sp .. top |  as long as the
//!   |            |                                                         +------------+  used part
//!   +------------+ base
//!   |   guard    |  1 MiB without access, so that a large frame cannot reach past it
//!   +------------+
//! ```
//!
//! A coro belongs to the same slot for its whole life, so that pointers into its stack are valid whenever it runs.
//! While the coro is suspended, its stack stays in the slot until another coro needs the slot. Then the stack is
//! *evicted*: its used part is copied to a `Saved`.
//!
//! | module | contents |
//! |---|---|
//! | `arena` | the memory of the slots: guards, limits, reuse |
//! | `mappings` | the reserve of mappings that is left to the rest of the process |
//! | `saved` | the copies, and a pool of buffers for them |
//!
//! All of these types belong to one thread, except the budget in `mappings`, which all threads share.

mod arena;
mod mappings;
mod saved;

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

pub use arena::{Arenas, Lease, StackError};
pub use saved::{Pool, Saved};

use crate::sys::pages;

/// A trim keeps this much memory below the top of a stack, and gives back the memory further down.
const RESIDENT_LEN: usize = 256 * 1024;
/// [`StackSlot::evict`] trims the stack once in this many evictions.
const EVICTIONS_PER_TRIM: u32 = 1024;
/// The byte with which [`StackSlot::poison`] overwrites a stack.
const POISON: u8 = 0xDD;

/// A stack of an arena, whose content can be evicted and restored.
pub struct StackSlot {
    lease: Lease,
    evictions: Cell<u32>,
}

impl StackSlot {
    /// A slot on which nothing has run yet.
    pub fn new(lease: Lease) -> Self {
        Self {
            lease,
            evictions: Cell::new(0),
        }
    }

    /// Sets the object that the fault handler describes if the stack overflows. A null pointer removes it. The object
    /// must stay at its address until the slot is dropped.
    #[inline]
    pub fn set_owner(&self, owner: *const c_void) {
        self.lease.set_owner(owner);
    }

    /// The address after the highest usable one, aligned to 16 bytes. The first push writes just below it.
    #[inline]
    pub fn top(&self) -> usize {
        self.lease.top()
    }

    /// The lowest usable address.
    #[inline]
    pub fn base(&self) -> usize {
        self.lease.base()
    }

    /// The length of the stack.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.top() - self.base()
    }

    /// Whether an address lies on the stack. The guard is not part of the stack.
    #[inline]
    pub fn contains(&self, address: usize) -> bool {
        self.base() <= address && address < self.top()
    }

    /// Copies the used part of the stack, from `sp` to the top, into `saved`, which must have exactly that length.
    ///
    /// # Safety
    /// A stack with the stack pointer `sp` is suspended in this slot.
    #[inline]
    pub unsafe fn evict(&self, sp: usize, saved: &Saved) {
        debug_assert!(self.contains(sp) && saved.len_bytes == self.top() - sp);
        // SAFETY: `sp..top` is mapped, and its stack is suspended (contract). The buffer has the length of this range
        // and does not overlap it.
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
    /// No stack is running or suspended in this slot, and `saved` was evicted from it.
    #[inline]
    pub unsafe fn restore(&self, saved: &Saved) {
        // SAFETY: the slot is free (contract), and it is at least as long as the stack that was evicted from it.
        unsafe {
            ptr::copy_nonoverlapping(
                saved.data,
                (self.top() - saved.len_bytes) as *mut u8,
                saved.len_bytes,
            );
        }
    }

    /// Overwrites everything from `sp` up, so that a use of a pointer into the evicted stack fails early. The debug
    /// mode that evicts at every switch calls this.
    ///
    /// # Safety
    /// No stack is running or suspended in this slot.
    pub unsafe fn poison(&self, sp: usize) {
        // SAFETY: the range is mapped, and the slot is free (contract).
        unsafe { ptr::write_bytes(sp as *mut u8, POISON, self.top() - sp) };
    }

    /// Gives memory back to the system: all pages that are more than `RESIDENT_LEN` below the top and that the stack at
    /// `sp` does not use. Does nothing, and returns false, if there are no such pages or the uppermost of them has no
    /// memory.
    pub fn trim(&self, sp: usize) -> bool {
        let page = pages::page_len();
        let end =
            (sp.min(self.top()) - page).min(self.top() - RESIDENT_LEN.min(self.len_bytes())) & !(page - 1);
        if end <= self.base() {
            return false;
        }
        let mut residency = 0_u8;
        // SAFETY: the call gets one page inside the mapping, and one byte for the result (mincore(2)).
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
        // SAFETY: the pages lie below the stack pointer, so nothing in them is needed.
        unsafe { pages::discard(self.base(), end - self.base()) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::faults::FaultMessage;

    unsafe fn say_nothing(_: *const c_void, _: &mut FaultMessage) {}

    fn slot(len_bytes: usize) -> StackSlot {
        StackSlot::new(Arenas::new(len_bytes, say_nothing).take().unwrap())
    }

    fn fill(slot: &StackSlot, sp: usize, value: u8) {
        // SAFETY: the range is mapped, and nothing else uses it.
        unsafe { ptr::write_bytes(sp as *mut u8, value, slot.top() - sp) };
    }

    fn content(slot: &StackSlot, sp: usize) -> Vec<u8> {
        // SAFETY: the range is mapped, and initialized by `fill` or zero.
        unsafe { std::slice::from_raw_parts(sp as *const u8, slot.top() - sp).to_vec() }
    }

    #[test]
    fn stacks_come_back_as_they_were() {
        let slot = slot(1 << 20);
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
    fn memory_of_a_deep_call_is_given_back() {
        let slot = slot(4 << 20);
        assert!(!slot.trim(slot.top() - 1000));
        fill(&slot, slot.base(), 7);
        let sp = slot.top() - 1000;
        assert!(slot.trim(sp));
        assert!(!slot.trim(sp));
        assert!(content(&slot, sp).iter().all(|byte| *byte == 7));
        #[cfg(target_os = "linux")]
        assert_eq!(content(&slot, slot.base())[0], 0);
    }

    #[test]
    fn contains_checks_both_ends() {
        let slot = slot(1);
        assert!(slot.len_bytes() >= pages::page_len());
        assert!(slot.contains(slot.base()) && slot.contains(slot.top() - 1) && !slot.contains(slot.top()));
        assert_eq!(slot.top() % 16, 0);
    }
}
