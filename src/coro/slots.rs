//! `Slots`: assigns a slot to each new coro of a thread.
//!
//! ```text
//!   at the start                                     after set_stack_slots(3)
//!   single  single ... single      shared            shared     shared     shared
//!   coro A  coro B     coro H      coros I, J, K ..  A, D, G .. B, E, H .. C, F, I ..
//! ```
//!
//! A slot is the memory in which a coro's stack lies while the coro runs. Stacks that share a slot are copied out and
//! in when their coros take turns. A few coros that hand data to each other switch all the time and would copy at every
//! switch, so up to `MAX_SINGLES` coros have a slot to themselves. Among a thousand coros, a few more such slots would
//! save almost no copies, and each slot keeps as much memory as its deepest stack has needed.
//!
//! Each thread has its own `Slots`; `take` and `give` are called on the thread's own stack.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::fiber::SharedSlot;

/// How many coros at a time can have a slot to themselves.
const MAX_SINGLES: usize = 8;
/// Each time this many coros have ended in single slots, the free single slots give back memory that deep stacks have
/// used.
const ENDS_PER_TRIM: u32 = 64;

/// The slots of a thread. They do not include the slots of coros with a stack of their own.
pub(super) struct Slots {
    shared: RefCell<Vec<Rc<SharedSlot>>>,
    /// The index, modulo `count`, of the shared slot that the next coro gets if it gets no single slot.
    next: Cell<usize>,
    /// The number of shared slots over which new coros are distributed.
    count: Cell<usize>,
    /// The single slots that are free.
    free_singles: RefCell<Vec<Rc<SharedSlot>>>,
    /// The number of single slots that exist.
    singles: Cell<usize>,
    /// The number of single slots that may exist.
    max_singles: Cell<usize>,
    /// The number of coros that have ended in single slots.
    ends: Cell<u32>,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self {
            shared: RefCell::new(Vec::new()),
            next: Cell::new(0),
            count: Cell::new(1),
            free_singles: RefCell::new(Vec::new()),
            singles: Cell::new(0),
            max_singles: Cell::new(MAX_SINGLES),
            ends: Cell::new(0),
        }
    }

    /// The number of shared slots over which new coros are distributed.
    pub(super) fn count(&self) -> usize {
        self.count.get()
    }

    /// Distributes coros over `count` shared slots. This applies to all coros that have not run yet, because a coro
    /// gets its slot when it first runs. None restores the initial layout: single slots, and one shared slot.
    pub(super) fn set_count(&self, count: Option<usize>) {
        self.count.set(count.unwrap_or(1));
        self.max_singles
            .set(if count.is_none() { MAX_SINGLES } else { 0 });
        if count.is_some() {
            let unwanted = self.free_singles.take();
            self.singles.set(self.singles.get() - unwanted.len());
        }
    }

    /// The index of a shared slot; None for a slot that one coro has to itself.
    pub(super) fn index_of(&self, slot: &Rc<SharedSlot>) -> Option<usize> {
        let shared = self.shared.borrow();
        shared.iter().position(|shared| Rc::ptr_eq(shared, slot))
    }

    /// The slot of a new coro: a single one if possible, else the next shared one. `make` makes a slot, and must not
    /// call Python.
    ///
    /// # Errors
    /// The error of `make`, if the shared slot that is next does not exist yet and cannot be made.
    pub(super) fn take<F, E>(&self, make: F) -> Result<Rc<SharedSlot>, E>
    where
        F: Fn() -> Result<Rc<SharedSlot>, E>,
    {
        let mut shared = self.shared.borrow_mut();
        let index = self.next.get() % self.count.get();
        // Make the shared slot first, even if this coro then gets a single slot. Once all single slots are taken, new
        // coros need the shared one, and by then there may be no memory for it.
        while shared.len() <= index {
            shared.push(make()?);
        }
        if let Some(single) = self.take_single(make) {
            return Ok(single);
        }
        self.next.set(index + 1);
        Ok(Rc::clone(&shared[index]))
    }

    /// A slot for one coro alone. None if no such slot is free, and either the maximum is reached or `make` fails.
    fn take_single<F, E>(&self, make: F) -> Option<Rc<SharedSlot>>
    where
        F: FnOnce() -> Result<Rc<SharedSlot>, E>,
    {
        let free = self.free_singles.borrow_mut().pop();
        if free.is_some() || self.singles.get() >= self.max_singles.get() {
            return free;
        }
        let single = make().ok()?;
        single.is_single.set(true);
        self.singles.set(self.singles.get() + 1);
        Some(single)
    }

    /// Takes back the slot of a coro that has ended or could not start. The slot is empty, or it is shared and holds
    /// another coro's stack.
    pub(super) fn give(&self, slot: &Rc<SharedSlot>) {
        if !slot.is_single.get() {
            return;
        }
        if self.singles.get() > self.max_singles.get() {
            self.singles.set(self.singles.get() - 1);
            return;
        }
        let mut free = self.free_singles.borrow_mut();
        free.push(Rc::clone(slot));
        let ends = self.ends.get().wrapping_add(1);
        self.ends.set(ends);
        if ends.is_multiple_of(ENDS_PER_TRIM) {
            for single in free.iter() {
                single.stack.trim(single.stack.top());
            }
        }
    }
}
