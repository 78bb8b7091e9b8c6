//! `Slots`: which slot a new coro of a thread gets.
//!
//! ```text
//!   at the start                                     after set_stack_slots(3)
//!   single  single ... single      shared            shared     shared     shared
//!   coro A  coro B     coro H      coros I, J, K ..  A, D, G .. B, E, H .. C, F, I ..
//! ```
//!
//! Stacks that share a slot are copied when their coros take turns. A few coros that hand things to each other do
//! nothing else, so each of them has a slot that it shares with nobody. Between a thousand coros a few more slots save
//! nothing, and each slot keeps as much memory as its deepest use.
//!
//! Belongs to its thread; `take` and `give` are called on the thread's own stack. It must not know how slots are made,
//! nor what lies in them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::fiber::SharedSlot;

/// So many coros that live at the same time have a slot each.
const MAX_SINGLES: usize = 8;
/// After so many coros have ended in single slots, the free ones give back what deep ones have used.
const ENDS_PER_TRIM: u32 = 64;

/// The slots of a thread. Those of coros with a stack of their own do not belong to them.
pub(super) struct Slots {
    shared: RefCell<Vec<Rc<SharedSlot>>>,
    /// The index of the shared slot that the next coro gets.
    next: Cell<usize>,
    /// How many shared slots coros are distributed over.
    count: Cell<usize>,
    /// The single slots that no coro has.
    free_singles: RefCell<Vec<Rc<SharedSlot>>>,
    /// How many single slots there are in all, and how many there may be.
    singles: Cell<usize>,
    max_singles: Cell<usize>,
    /// How many coros have ended in single slots.
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

    /// How many shared slots later coros are distributed over.
    pub(super) fn count(&self) -> usize {
        self.count.get()
    }

    /// Distributes later coros over `count` shared slots; None, as at the start: single slots, and one shared one.
    pub(super) fn set_count(&self, count: Option<usize>) {
        self.count.set(count.unwrap_or(1));
        self.max_singles
            .set(if count.is_none() { MAX_SINGLES } else { 0 });
        if count.is_some() {
            let unwanted = self.free_singles.take();
            self.singles.set(self.singles.get() - unwanted.len());
        }
    }

    /// The index of a shared slot.
    pub(super) fn index_of(&self, slot: &Rc<SharedSlot>) -> Option<usize> {
        let shared = self.shared.borrow();
        shared.iter().position(|shared| Rc::ptr_eq(shared, slot))
    }

    /// The slot of a new coro: a single one, else the next shared one. `make` makes a slot, and does not call Python.
    ///
    /// # Errors
    /// Those of `make`, if there is no slot to share.
    pub(super) fn take<F, E>(&self, make: F) -> Result<Rc<SharedSlot>, E>
    where
        F: Fn() -> Result<Rc<SharedSlot>, E>,
    {
        let mut shared = self.shared.borrow_mut();
        let index = self.next.get() % self.count.get();
        // This comes before the single slots, which can be done without: later there may be no memory for it.
        while shared.len() <= index {
            shared.push(make()?);
        }
        if let Some(single) = self.take_single(make) {
            return Ok(single);
        }
        self.next.set(index + 1);
        Ok(Rc::clone(&shared[index]))
    }

    /// A slot that no other coro has. None if there are as many as there may be, or if `make` makes none.
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

    /// Takes back the slot of a coro that has ended, or could not begin: nothing lies in it, or another coro's stack if it
    /// is shared.
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
