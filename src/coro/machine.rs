//! `Machine`: the stack and the interpreter state of one coro, from its first run to its end.
//!
//! Belongs to the coro's thread. It must not know the scheduler.

use std::rc::Rc;

use super::pystate::{Base, PyState, Relinked};
use super::stack::{Saved, Slot};

pub(super) struct Machine {
    pub(super) slot: Rc<SharedSlot>,
    /// The stack pointer while it is suspended.
    pub(super) sp: usize,
    /// Its bytes while they are not in the slot.
    pub(super) saved: Option<Saved>,
    pub(super) relinked: Relinked,
    /// The innermost frame of an evacuated stack.
    pub(super) innermost: *mut u8,
    pub(super) state: PyState,
    /// What the interpreter state points to: this box does not move.
    pub(super) base: Base,
}

/// A slot and whose stack lies in it.
pub(super) struct SharedSlot {
    pub(super) slot: Slot,
    /// The machine whose stack is in place, null if none.
    pub(super) occupant: std::cell::Cell<*mut Machine>,
}

impl Machine {
    /// The bytes in use of a suspended stack.
    pub(super) fn used_len(&self) -> usize {
        self.slot.slot.top() - self.sp
    }
}
