//! Where the stacks of a thread lie: arenas, each a mapping for many stacks.
//!
//! ```text
//!   Arena, up to 128 stacks                                                   higher addresses -->
//!   +--------- stride, 10 MiB ----------------------------------------+---------------------------------
//!   | guard, | stack 0: 8 MiB and its colour      <- grows      | gap | guard, | stack 1         | not
//!   | 1 MiB  | base                                         top |     | 1 MiB  |                 | opened ...
//!   +--------+--------------------------------------------------+-----+--------+-----------------+------
//!            a multiple of 2 MiB                                |<-- 2 MiB --->|
//!                                                               of one page table
//! ```
//!
//! - **Guards.** Since Linux 6.13 a guard is a mark in the page tables (`pages::install_guard`), and an arena is one
//!   mapping, or two while some of its stacks were never used. Elsewhere a guard has another protection than the
//!   stack, which takes two mappings for each stack.
//! - **Colours.** Suspended stacks use the memory just below their tops. If all tops lay at the same place of a page,
//!   they would share a few sets of the processor's caches, and evict each other from there.
//! - **Page tables.** The used end of a stack and the guard above it are in one page table.
//! - **Reuse.** A stack that is given back keeps its uppermost pages, up to a number of stacks. So the next coro neither
//!   calls the system nor faults. Stacks come from the first arena with a free one, so that others become empty: those
//!   are unmapped.
//! - **Limits.** A stack can be promised: then there will be one, without a call that can fail. `mappings` keeps a
//!   reserve of mappings, a new arena needs more addresses than it takes, and stacks are opened several at a time, so
//!   that where the system refuses them, there is some memory left for everybody else.
//!
//! Belongs to one thread. It must not know what runs on the stacks.

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
/// The length of the guard below a stack, which nobody can access.
pub(super) const GUARD_LEN: usize = MIB;
/// The addresses that one page table maps, on most processors.
const TABLE_LEN: usize = 2 * MIB;
/// Tops lie at this many places of a page, a cache line apart.
const LINE_COLOURS: usize = 64;
const LINE_LEN: usize = 64;
/// They lie in pages whose entries of the page tables are this many cache lines apart.
const PAGE_COLOURS: usize = 8;
const PAGE_STEP: usize = 32 * 1024;
/// The most that colours add to a stack.
const COLOURS_LEN: usize = PAGE_COLOURS * PAGE_STEP;
/// The first arena has so many stacks; a later one as many as there are, up to `MAX_STACKS`.
const FIRST_CAPACITY: usize = 4;
/// Stacks are opened in groups.
const GROUP: usize = 4;
/// A stack that is given back keeps so many bytes of memory below its top.
const WARM_LEN: usize = 16 * 1024;
/// So many free stacks keep memory. An arena of free stacks is unmapped if as many free ones are left.
const KEPT_STACKS: usize = 1024;
/// Where the system refuses something, and so few mappings are left, their number is the reason.
const NEAR: usize = 16;
/// A new arena is made only where so many addresses are left after it.
const RESERVED_LEN: usize = 32 * MIB;

/// Why there is no stack.
#[derive(Debug)]
pub enum StackError {
    /// The process is near the kernel's limit of mappings; None if that was found just before.
    Mappings(Option<MappingUsage>),
    /// The system refuses memory or addresses.
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
                "the system has refused it ({error}); it has limits of addresses (RLIMIT_AS), of memory \
                 (vm.overcommit_memory) and of mappings (vm.max_map_count)"
            ),
        }
    }
}

/// The stacks of a thread.
pub struct Arenas {
    inner: Rc<Inner>,
}

/// What the stacks that are in use refer to.
struct Inner {
    stack_len: usize,
    stride: usize,
    page_len: usize,
    describe: Describe,
    /// Whether guards are marks in the page tables.
    has_marks: bool,
    budget: &'static Budget,
    state: RefCell<State>,
}

struct State {
    /// None where one was unmapped.
    arenas: Vec<Option<Arena>>,
    /// A bit for each arena with a free stack.
    with_free: Vec<u64>,
    /// Free stacks that are open. At least as many as are promised.
    free: usize,
    promised: usize,
    /// Free stacks that keep memory.
    warm: usize,
    /// All stacks of all arenas.
    capacity: usize,
}

struct Arena {
    /// The first address: that of the first guard.
    start: usize,
    capacity: usize,
    /// The stacks up to this one are open: in use, or free.
    opened: usize,
    /// The indexes of free stacks.
    warm: Vec<usize>,
    cold: Vec<usize>,
    /// The mappings that it takes of the budget.
    mappings: usize,
    guards: WatchedGuards,
}

impl Arenas {
    /// For stacks of `len_bytes` (rounded up to pages). `describe` is called for a fault in the guard of a stack whose
    /// owner is set.
    pub fn new(len_bytes: usize, describe: Describe) -> Self {
        // For tests, and for kernels whose guards turn out to be wrong.
        let is_refused = std::env::var("GRAPESHOT_CORO_GUARDS").is_ok_and(|text| text == "mappings");
        let has_marks = !is_refused && pages::has_guards();
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

    /// A stack.
    pub fn take(&self) -> Result<Lease, StackError> {
        self.promise()?;
        self.take_promised()
    }

    /// Makes sure that `take_promised` will have a stack.
    #[inline]
    pub fn promise(&self) -> Result<(), StackError> {
        let mut state = self.inner.state.borrow_mut();
        if state.free <= state.promised {
            self.inner.grow(&mut state)?;
        }
        state.promised += 1;
        Ok(())
    }

    /// Takes a promise back.
    #[inline]
    pub fn forgo(&self) {
        let mut state = self.inner.state.borrow_mut();
        state.promised = state.promised.saturating_sub(1);
    }

    /// The stack that was promised. An error only if none was.
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

/// A stack that is in use. It is given back when this is dropped; then nobody uses its memory any more.
pub struct Lease {
    base: usize,
    top: usize,
    arena: usize,
    index: usize,
    inner: Rc<Inner>,
}

impl Lease {
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

    /// Sets what the fault handler describes if the stack is used up; null for nothing. It must stay at its address
    /// until the stack is given back.
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
    /// Opens some stacks.
    #[cold]
    fn grow(&self, state: &mut State) -> Result<(), StackError> {
        let is_open = |arena: &Arena| arena.opened < arena.capacity;
        let arena = match state
            .arenas
            .iter()
            .position(|arena| arena.as_ref().is_some_and(is_open))
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

    /// Maps an arena, as large as the system allows. Returns its index.
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

    /// What the system has refused. It has one error for a lack of memory, of addresses and of mappings.
    #[cold]
    fn explain(&self, error: StackError) -> StackError {
        if matches!(error, StackError::Memory(_))
            && let Some(usage) = self.budget.usage()
            && usage.count + NEAR >= usage.limit
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
        // SAFETY: the stack is free. The rest of the page of its top belongs to no other stack.
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
    fn mark(&mut self, arena: usize) {
        self.with_free[arena / 64] |= 1 << (arena % 64);
    }

    /// Takes a free stack out of the first arena that has one.
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

    /// The lowest address of a stack, and the one behind its highest.
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
        // The first stack begins at a multiple of TABLE_LEN.
        let len_bytes = capacity * inner.stride;
        let reserved_len = len_bytes + TABLE_LEN + RESERVED_LEN;
        let reserved = pages::reserve(reserved_len).map_err(StackError::Memory)?;
        let start = (reserved + GUARD_LEN).next_multiple_of(TABLE_LEN) - GUARD_LEN;
        let end = start + len_bytes;
        // SAFETY: both ends of the mapping made above, which nobody uses.
        unsafe {
            pages::release(reserved, start - reserved);
            pages::release(end, reserved + reserved_len - end);
        }
        // SAFETY: what is left of it.
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

    /// Opens the next group of stacks. Returns how many there are now that were not there before.
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
        // The lower ones are used first.
        self.cold.extend(group.clone().rev());
        self.opened = group.end;
        Ok(group.len())
    }

    /// With guards that split no mapping. Returns false if the system does not have them here.
    fn open_with_marks(&self, group: Range<usize>, inner: &Inner) -> Result<bool, StackError> {
        let start = self.start + group.start * inner.stride;
        // SAFETY: inside the mapping; nobody uses these stacks yet.
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

    /// With guards that are mappings without access. After an error the group is closed.
    fn open_with_mappings(&self, group: Range<usize>, inner: &Inner) -> Result<(), StackError> {
        let start = self.start + group.start * inner.stride;
        let len_bytes = group.len() * inner.stride;
        // SAFETY: inside the mapping; nobody uses these stacks yet.
        unsafe {
            pages::close(start, len_bytes).map_err(StackError::Memory)?;
            for index in group {
                let base = self.start + index * inner.stride + GUARD_LEN;
                if let Err(error) = pages::open(base, inner.stride - GUARD_LEN) {
                    // What was split is one mapping again, so this needs none.
                    let _ = pages::close(start, len_bytes);
                    return Err(StackError::Memory(error));
                }
            }
        }
        Ok(())
    }

    fn unmap(self, inner: &Inner) {
        inner.budget.give_back(self.mappings);
        // No fault in it is described any more.
        drop(self.guards);
        // SAFETY: the mapping is ours, and none of its stacks is in use.
        unsafe { pages::release(self.start, self.capacity * inner.stride) };
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Each stack in use keeps this alive, so none is.
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
