//! Closed file objects that still have registered callbacks.
//!
//! A program may close a socket and call `remove_reader(socket)` only afterwards, when the socket has no descriptor
//! number any more. `selectors` then finds the registration by the identity of the object, and so does this module.
//!
//! This module also recognizes a case that asyncio cannot: the kernel may have given the closed object's number to
//! another file, which the program then registers. That registration ends the callbacks of the closed object. If the
//! program later calls `remove_reader` with the closed object, the call returns False instead of raising an error.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::RawFd;

use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use super::watcher::Direction;
use super::{Descriptors, FdUse};
use crate::event_loop::fileno::number_of;

/// The maximum number of references in `Displaced`.
const MAX_DISPLACED: usize = 64;

/// Weak references to closed file objects whose number now belongs to another object.
pub(super) struct Displaced(RefCell<VecDeque<Py<PyWeakrefReference>>>);

impl Displaced {
    pub(super) const fn new() -> Self {
        Self(RefCell::new(VecDeque::new()))
    }

    fn add(&self, target: &Bound<'_, PyAny>) {
        let Ok(reference) = PyWeakrefReference::new(target) else {
            return;
        };
        let oldest = {
            let mut displaced = self.0.borrow_mut();
            displaced.push_back(reference.unbind());
            if displaced.len() > MAX_DISPLACED {
                displaced.pop_front()
            } else {
                None
            }
        };
        drop(oldest.map(|oldest| oldest.into_bound(target.py())));
    }

    fn has(&self, target: &Bound<'_, PyAny>) -> bool {
        let py = target.py();
        // The upgraded references are dropped after the borrow has ended. Without a GIL, another thread may have
        // dropped its reference to an object in the meantime. Then the reference here is the last one, and dropping it
        // runs a finalizer, which may use the loop.
        let known: Vec<_> = {
            let displaced = self.0.borrow();
            displaced
                .iter()
                .filter_map(|reference| reference.bind(py).upgrade())
                .collect()
        };
        known.iter().any(|known| known.is(target))
    }

    pub(super) fn forget(&self, py: Python<'_>) {
        for reference in self.0.take() {
            drop(reference.into_bound(py));
        }
    }
}

impl Descriptors {
    /// The descriptor under which callbacks of exactly this object are registered.
    pub(crate) fn fd_of(&self, target: &Bound<'_, PyAny>) -> Option<RawFd> {
        let is_registered_for = |fd_use: &FdUse| match fd_use {
            FdUse::Watch(watch) => watch
                .get()
                .targets(target.py())
                .iter()
                .flatten()
                .any(|known| known.is(target)),
            FdUse::Source(_) => false,
        };
        let table = self.table.borrow();
        table
            .iter()
            .find(|(_, fd_use)| is_registered_for(fd_use))
            .map(|(fd, _)| fd)
    }

    /// Ends the callbacks of `fd` that belong to an object other than `target`, if that object no longer has the number
    /// `fd`.
    pub(crate) fn end_displaced(&self, fd: RawFd, target: &Bound<'_, PyAny>) {
        let py = target.py();
        for direction in Direction::BOTH {
            let known = || self.target(py, fd, direction);
            let Some(other) = known().filter(|other| !other.is(target)) else {
                continue;
            };
            let is_displaced = !number_of(&other).is_ok_and(|number| number == i64::from(fd));
            // `number_of` may have called a `fileno()` of the program, which may have changed the registration. So the
            // registration is looked up again.
            if is_displaced
                && known().is_some_and(|now| now.is(&other))
                && let Ok(Some(ended)) = self.set_watcher(py, fd, direction, None)
            {
                self.displaced.add(&other);
                ended.end(py);
            }
        }
    }

    /// Called when a source takes over a descriptor number whose entry in the fd table was `fd_use`. If that entry is a
    /// watch, this records its file objects as displaced, because most likely they have been closed.
    pub(super) fn note_all_displaced(&self, py: Python<'_>, fd_use: &FdUse) {
        if let FdUse::Watch(watch) = fd_use {
            for target in watch.get().targets(py).into_iter().flatten() {
                self.displaced.add(&target);
            }
        }
    }

    /// Whether the callbacks of this object have ended because another object got its number.
    pub(crate) fn was_displaced(&self, target: &Bound<'_, PyAny>) -> bool {
        self.displaced.has(target)
    }
}
