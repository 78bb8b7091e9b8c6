//! Allocates the stacks of a thread. They lie in arenas, each of which is one mapping for many stacks.
//!
//! ```text
//!   Arena, up to 128 stacks                                                   higher addresses -->
//!   +--------- stride, 10 MiB ----------------------------------------+---------------------------------
//!   | guard, | stack 0: 8 MiB and its colour      <- grows      | gap | guard, | stack 1         | not
//!   | 1 MiB  | base                                         top |     | 1 MiB  |                 | opened ...
//!   +--------+--------------------------------------------------+-----+--------+-----------------+------
//!            a multiple of 2 MiB                          |<- one page table ->|
//!                                                                 2 MiB
//! ```
//!
//! - **Guards.** An access to a guard faults, so a stack that overflows does not overwrite the stack below it. Since
//!   Linux 6.13 a guard is a mark in the page tables (`pages::install_guard`). With marks, the kernel counts an arena
//!   as one mapping, or as two until all of its stacks have been opened (made accessible). On other systems a guard is
//!   memory without access, which takes two mappings for each stack.
//! - **Colours.** Suspended stacks use the memory just below their tops. If all tops had the same offset in a page, all
//!   suspended stacks would compete for the same few sets of the processor's caches. So each stack has its own
//!   *colour*: an extra length that moves its top.
//! - **Page tables.** The used end of a stack and the guard above it are in the same page table, so the two together
//!   take only one.
//! - **Reuse.** A limited number of free stacks keep the memory of their uppermost pages. So the next coro that takes
//!   one of them causes no system call and no page fault. Stacks are taken from the first arena that has a free one, so
//!   that later arenas become empty. An empty arena is unmapped if enough free stacks are left in the others
//!   (`KEPT_STACKS`).
//! - **Limits.** A caller can reserve a stack with `promise`; `take_promised` then cannot fail. Near a limit of the
//!   system, new stacks must be refused while the rest of the process can still allocate. So `mappings` leaves a
//!   reserve of mappings, and an arena is made only if the address space has more room than the arena needs. Stacks
//!   are opened in groups for the same reason: the system refuses such a large request while there is still memory for
//!   the small requests of the rest of the process.
//!
//! An `Arenas` belongs to one thread.

use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use super::mappings::{self, Budget};
use crate::sys::faults::{Describe, Guards, MAX_STACKS, WatchedGuards};
use crate::sys::pages::{self, MappingUsage};

const MIB: usize = 1024 * 1024;
/// The length of the guard below a stack.
pub(super) const GUARD_LEN: usize = MIB;
/// How much address space one page table maps, on most processors.
const TABLE_LEN: usize = 2 * MIB;
/// Tops have this many different offsets in a page, one cache line apart.
const LINE_COLOURS: usize = 64;
const LINE_LEN: usize = 64;
/// The tops also lie in this many different pages, `PAGE_STEP` apart. So the page table entries of these pages are at
/// least 64 bytes apart, in different cache lines.
const PAGE_COLOURS: usize = 8;
const PAGE_STEP: usize = 32 * 1024;
/// The most that colours add to the length of a stack.
const COLOURS_LEN: usize = PAGE_COLOURS * PAGE_STEP;
/// The number of stacks in the first arena. Each later arena doubles the total, but has at most `MAX_STACKS`.
const FIRST_CAPACITY: usize = 4;
/// The number of stacks that are opened at a time.
const GROUP: usize = 4;
/// How many bytes of memory a free stack keeps below its top, if it keeps any.
const WARM_LEN: usize = 16 * 1024;
/// How many free stacks may keep memory. An arena whose stacks are all free is unmapped only if this many free stacks
/// remain in other arenas.
const KEPT_STACKS: usize = 1024;
/// If the system refuses memory when at most this many mappings are left, the limit of mappings is reported as the
/// reason.
const NEAR_LIMIT: usize = 16;
/// An arena is made only if the address space has this much room in addition to it.
const RESERVED_LEN: usize = 32 * MIB;

/// Why a stack could not be allocated.
#[derive(Debug)]
pub enum StackError {
    /// The process is near the kernel's limit of mappings. `None` if this request did not count the mappings, because
    /// an earlier one has just counted them and found that too few are left.
    Mappings(Option<MappingUsage>),
    /// The system refused memory or addresses.
    Memory(io::Error),
}

impl fmt::Display for StackError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mappings(Some(MappingUsage { count, limit })) => write!(
                formatter,
                "the process has {count} memory mappings, and the kernel's limit vm.max_map_count is {limit}"
            ),
            Self::Mappings(None) => formatter
                .write_str("the process is near the kernel's limit of memory mappings, vm.max_map_count"),
            Self::Memory(error) => write!(
                formatter,
                "the system refused it ({error}); check the limits of address space (RLIMIT_AS), of memory \
                 (vm.overcommit_memory) and of mappings (vm.max_map_count)"
            ),
        }
    }
}

/// The stacks of a thread.
pub struct Arenas {
    inner: Rc<Inner>,
}

/// The state that an `Arenas` shares with its leases. It lives until the `Arenas` and all leases are dropped.
struct Inner {
    stack_len: usize,
    /// The distance from one stack to the next.
    stride: usize,
    page_len: usize,
    describe: Describe,
    /// Whether guards are marks in the page tables instead of mappings.
    has_marks: bool,
    budget: &'static Budget,
    state: RefCell<State>,
}

struct State {
    /// `None` in the places of arenas that were unmapped.
    arenas: Vec<Option<Arena>>,
    /// One bit for each arena, set if it has a free stack.
    with_free: Vec<u64>,
    /// How many open stacks are free. This is never less than `promised`.
    free: usize,
    /// How many stacks were promised and not taken yet.
    promised: usize,
    /// How many free stacks keep memory.
    warm: usize,
    /// How many stacks all arenas have, whether they are open or not.
    capacity: usize,
}

struct Arena {
    /// The first address, which is the start of the first guard.
    start: usize,
    capacity: usize,
    /// How many stacks are open, from the first one on. An open stack is in use or free.
    opened: usize,
    /// The indexes of free stacks that keep memory.
    warm: Vec<usize>,
    /// The indexes of free stacks that keep no memory.
    cold: Vec<usize>,
    /// How many mappings of the budget the arena takes.
    mappings: usize,
    guards: WatchedGuards,
}

impl Arenas {
    /// Arenas for stacks of `len_bytes` (rounded up to whole pages). The fault handler calls `describe` for a fault in
    /// the guard of a stack, if the stack has an owner set.
    pub fn new(len_bytes: usize, describe: Describe) -> Self {
        // The variable is for tests, and for kernels in which marks turn out not to work.
        let is_disabled = std::env::var("GRAPESHOT_CORO_GUARDS").is_ok_and(|text| text == "mappings");
        let has_marks = !is_disabled && pages::has_guards();
        Self::with(len_bytes, describe, has_marks, &mappings::PROCESS)
    }

    fn with(len_bytes: usize, describe: Describe, has_marks: bool, budget: &'static Budget) -> Self {
        let page_len = pages::page_len();
        let stack_len = len_bytes.next_multiple_of(page_len);
        let inner = Inner {
            stack_len,
            page_len,
            stride: (stack_len + COLOURS_LEN + GUARD_LEN).next_multiple_of(TABLE_LEN),
            describe,
            has_marks,
            budget,
            state: RefCell::new(State {
                arenas: Vec::new(),
                with_free: Vec::new(),
                free: 0,
                promised: 0,
                warm: 0,
                capacity: 0,
            }),
        };
        Self {
            inner: Rc::new(inner),
        }
    }

    /// Takes a free stack.
    pub fn take(&self) -> Result<Lease, StackError> {
        self.promise()?;
        self.take_promised()
    }

    /// Reserves a stack, so that a later `take_promised` cannot fail.
    #[inline]
    pub fn promise(&self) -> Result<(), StackError> {
        let mut state = self.inner.state.borrow_mut();
        if state.free <= state.promised {
            self.inner.grow(&mut state)?;
        }
        state.promised += 1;
        Ok(())
    }

    /// Gives up a promise that is not needed.
    #[inline]
    pub fn forgo(&self) {
        let mut state = self.inner.state.borrow_mut();
        state.promised = state.promised.saturating_sub(1);
    }

    /// Takes a stack that was promised. Fails only if no stack was promised.
    #[inline]
    pub fn take_promised(&self) -> Result<Lease, StackError> {
        let mut state = self.inner.state.borrow_mut();
        state.promised = state.promised.saturating_sub(1);
        let (arena, index) = state
            .pop()
            .ok_or_else(|| StackError::Memory(io::ErrorKind::OutOfMemory.into()))?;
        let (base, top) = state.bounds(arena, index, &self.inner);
        Ok(Lease {
            base,
            top,
            arena,
            index,
            inner: Rc::clone(&self.inner),
        })
    }
}

/// A stack that is in use. Dropping this gives the stack back, so nothing may use its memory afterwards.
pub struct Lease {
    base: usize,
    top: usize,
    arena: usize,
    index: usize,
    inner: Rc<Inner>,
}

impl Lease {
    /// The address after the highest usable one, aligned to 16 bytes. The first push writes just below it.
    #[inline]
    pub fn top(&self) -> usize {
        self.top
    }

    /// The lowest usable address.
    #[inline]
    pub fn base(&self) -> usize {
        self.base
    }

    /// Sets the object that the fault handler describes if the stack overflows. A null pointer removes it. The object
    /// must stay at its address until the stack is given back.
    #[inline]
    pub fn set_owner(&self, owner: *const c_void) {
        let state = self.inner.state.borrow();
        if let Some(Some(arena)) = state.arenas.get(self.arena) {
            arena.guards.set_owner(self.index, owner);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.inner.give(self.arena, self.index);
    }
}

impl Inner {
    /// Opens the next group of stacks. Makes a new arena for them if all stacks of the existing arenas are open.
    #[cold]
    fn grow(&self, state: &mut State) -> Result<(), StackError> {
        let has_unopened = |arena: &Arena| arena.opened < arena.capacity;
        let arena = match state
            .arenas
            .iter()
            .position(|arena| arena.as_ref().is_some_and(has_unopened))
        {
            Some(arena) => arena,
            None => self.add_arena(state)?,
        };
        let opened = match state.arenas[arena].as_mut() {
            Some(made) => made.open(self).map_err(|error| self.explain(error))?,
            None => 0,
        };
        state.free += opened;
        state.mark(arena);
        Ok(())
    }

    /// Adds an arena and returns its index. If the system refuses the usual size, smaller sizes are tried.
    fn add_arena(&self, state: &mut State) -> Result<usize, StackError> {
        let mut capacity = state.capacity.clamp(FIRST_CAPACITY, MAX_STACKS);
        self.budget.take(2).map_err(StackError::Mappings)?;
        let made = loop {
            match Arena::map(self, capacity) {
                Ok(made) => break made,
                Err(_) if capacity > 1 => capacity /= 2,
                Err(error) => {
                    self.budget.give_back(2);
                    return Err(self.explain(error));
                }
            }
        };
        state.capacity += capacity;
        if let Some(place) = state.arenas.iter().position(Option::is_none) {
            state.arenas[place] = Some(made);
            return Ok(place);
        }
        state.arenas.push(Some(made));
        if state.with_free.len() * 64 < state.arenas.len() {
            state.with_free.push(0);
        }
        Ok(state.arenas.len() - 1)
    }

    /// Finds out whether the system refused memory because of the number of mappings. The system reports the same error
    /// for a lack of memory, of addresses and of mappings.
    #[cold]
    fn explain(&self, error: StackError) -> StackError {
        if matches!(error, StackError::Memory(_))
            && let Some(usage) = self.budget.usage()
            && usage.count + NEAR_LIMIT >= usage.limit
        {
            return StackError::Mappings(Some(usage));
        }
        error
    }

    /// Takes a stack back.
    fn give(&self, arena: usize, index: usize) {
        let mut state = self.state.borrow_mut();
        let (base, top) = state.bounds(arena, index, self);
        let is_warm = state.warm < KEPT_STACKS;
        let Some(Some(home)) = state.arenas.get_mut(arena) else {
            return;
        };
        home.guards.set_owner(index, std::ptr::null());
        let end = if is_warm {
            top - WARM_LEN.min(top - base)
        } else {
            top
        };
        let end = end.next_multiple_of(self.page_len);
        // SAFETY: the stack is free, and no other stack uses the rest of the page in which its top lies.
        unsafe { pages::discard(base, end - base) };
        if is_warm {
            home.warm.push(index);
        } else {
            home.cold.push(index);
        }
        let (free_here, opened) = (home.warm.len() + home.cold.len(), home.opened);
        state.warm += usize::from(is_warm);
        state.free += 1;
        state.mark(arena);
        if free_here == opened && state.free - opened >= KEPT_STACKS + state.promised {
            state.remove(arena, self);
        }
    }
}

impl State {
    /// Records that an arena has a free stack.
    fn mark(&mut self, arena: usize) {
        self.with_free[arena / 64] |= 1 << (arena % 64);
    }

    /// Takes a free stack out of the first arena that has one. Returns the index of the arena and of the stack in it.
    #[inline]
    fn pop(&mut self) -> Option<(usize, usize)> {
        let word = self.with_free.iter().position(|word| *word != 0)?;
        let arena = word * 64 + self.with_free[word].trailing_zeros() as usize;
        let home = self.arenas[arena].as_mut()?;
        let index = if let Some(index) = home.warm.pop() {
            self.warm -= 1;
            index
        } else {
            home.cold.pop()?
        };
        if home.warm.is_empty() && home.cold.is_empty() {
            self.with_free[word] &= !(1 << (arena % 64));
        }
        self.free -= 1;
        Some((arena, index))
    }

    /// The lowest address of a stack, and the address after its highest one.
    #[inline]
    fn bounds(&self, arena: usize, index: usize, inner: &Inner) -> (usize, usize) {
        let start = self.arenas[arena].as_ref().map_or(0, |arena| arena.start);
        let base = start + index * inner.stride + GUARD_LEN;
        let number = arena * MAX_STACKS + index;
        let pages = number % PAGE_COLOURS + 1;
        let lines = number % LINE_COLOURS;
        (
            base,
            base + inner.stack_len + pages * PAGE_STEP - lines * LINE_LEN,
        )
    }

    /// Unmaps an arena whose stacks are all free.
    #[cold]
    fn remove(&mut self, arena: usize, inner: &Inner) {
        if let Some(home) = self.arenas[arena].take() {
            self.free -= home.opened;
            self.warm -= home.warm.len();
            self.capacity -= home.capacity;
            self.with_free[arena / 64] &= !(1 << (arena % 64));
            home.unmap(inner);
        }
    }
}

impl Arena {
    fn map(inner: &Inner, capacity: usize) -> Result<Self, StackError> {
        // The start is chosen so that the first stack, which is above the first guard, begins at a multiple of
        // TABLE_LEN.
        let len_bytes = capacity * inner.stride;
        let reserved_len = len_bytes + TABLE_LEN + RESERVED_LEN;
        let reserved = pages::reserve(reserved_len).map_err(StackError::Memory)?;
        let start = (reserved + GUARD_LEN).next_multiple_of(TABLE_LEN) - GUARD_LEN;
        let end = start + len_bytes;
        // SAFETY: these are both ends of the mapping made above, and nothing uses them.
        unsafe {
            pages::release(reserved, start - reserved);
            pages::release(end, reserved + reserved_len - end);
        }
        // SAFETY: this is the part of the mapping that is left.
        unsafe { pages::refuse_huge_pages(start, len_bytes) };
        let guards = Guards {
            start,
            stride: inner.stride,
            len_bytes: GUARD_LEN,
            count: capacity,
        };
        Ok(Self {
            start,
            capacity,
            opened: 0,
            warm: Vec::with_capacity(capacity),
            cold: Vec::with_capacity(capacity),
            mappings: 2,
            guards: WatchedGuards::new(guards, inner.describe),
        })
    }

    /// Opens the next group of stacks. Returns how many stacks were opened.
    fn open(&mut self, inner: &Inner) -> Result<usize, StackError> {
        let group = self.opened..self.capacity.min(self.opened + GROUP);
        if !(inner.has_marks && self.open_with_marks(group.clone(), inner)?) {
            let count = 2 * group.len();
            inner.budget.take(count).map_err(StackError::Mappings)?;
            if let Err(error) = self.open_with_mappings(group.clone(), inner) {
                inner.budget.give_back(count);
                return Err(error);
            }
            self.mappings += count;
        }
        // `State::pop` takes the last element, so the reversed order makes it take the lowest stack first.
        self.cold.extend(group.clone().rev());
        self.opened = group.end;
        Ok(group.len())
    }

    /// Opens a group whose guards are marks, which do not split the mapping. Returns false if the system cannot make
    /// marks here.
    fn open_with_marks(&self, group: Range<usize>, inner: &Inner) -> Result<bool, StackError> {
        let start = self.start + group.start * inner.stride;
        // SAFETY: the range is inside the mapping, and nothing uses these stacks yet.
        unsafe {
            pages::open(start, group.len() * inner.stride).map_err(StackError::Memory)?;
            for index in group {
                let guard = self.start + index * inner.stride;
                if !pages::install_guard(guard, GUARD_LEN).map_err(StackError::Memory)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Opens a group whose guards are mappings without access. After an error the whole group is without access.
    fn open_with_mappings(&self, group: Range<usize>, inner: &Inner) -> Result<(), StackError> {
        let start = self.start + group.start * inner.stride;
        let len_bytes = group.len() * inner.stride;
        // SAFETY: the range is inside the mapping, and nothing uses these stacks yet.
        unsafe {
            pages::close(start, len_bytes).map_err(StackError::Memory)?;
            for index in group {
                let base = self.start + index * inner.stride + GUARD_LEN;
                if let Err(error) = pages::open(base, inner.stride - GUARD_LEN) {
                    // This joins mappings and does not need a new one, so it succeeds at the limit of mappings too.
                    let _ = pages::close(start, len_bytes);
                    return Err(StackError::Memory(error));
                }
            }
        }
        Ok(())
    }

    fn unmap(self, inner: &Inner) {
        inner.budget.give_back(self.mappings);
        // The fault handler must not describe faults in these addresses once they can belong to another mapping.
        drop(self.guards);
        // SAFETY: the mapping belongs to this arena, and no stack of it is in use.
        unsafe { pages::release(self.start, self.capacity * inner.stride) };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Each stack in use holds a reference to this value. It is being dropped, so no stack is in use.
        for arena in std::mem::take(&mut self.state.get_mut().arenas)
            .into_iter()
            .flatten()
        {
            arena.unmap(self);
        }
    }
}

#[cfg(test)]
#[path = "arena_tests.rs"]
mod tests;
