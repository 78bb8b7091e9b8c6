//! The tables of live coros, one for each thread. `asyncio.all_tasks()` reads the tables of all threads. So no
//! process-wide set has to be updated when a coro starts and when it ends.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coroutine::{Coro, CoroObject};
use crate::binding::object_result::ObjectResult;

/// The coros of a thread that have started and not ended: owned references. A coro knows its index (`place`).
#[derive(Default)]
struct Table(Vec<*mut ffi::PyObject>);

// SAFETY: the pointers are references that the table owns, which are used only by attached threads.
unsafe impl Send for Table {}

/// The tables of all threads that have started a coro.
static TABLES: Mutex<Vec<Weak<Mutex<Table>>>> = Mutex::new(Vec::new());

/// Locks a table or the list of tables. No code that holds such a lock calls Python, or detaches from the interpreter.
/// So a thread waits only briefly for a lock. And no thread holds a lock while another one forks, because a fork waits
/// until all other threads are detached.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table of this thread.
#[derive(Default)]
pub(super) struct LiveCoros {
    table: Arc<Mutex<Table>>,
    /// Whether the table is in `TABLES`.
    is_published: Cell<bool>,
}

impl LiveCoros {
    #[cold]
    fn publish(&self) {
        let mut tables = lock(&TABLES);
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(&self.table));
    }

    /// Adds a coro of this thread.
    #[inline]
    pub(super) fn add(&self, coro: Coro<'_>) {
        if !self.is_published.replace(true) {
            self.publish();
        }
        let object = coro.to_bound().into_ptr();
        let mut table = lock(&self.table);
        coro.place.set(table.0.len());
        table.0.push(object);
    }

    /// Removes a coro, which must be in the table. Returns the table's reference, and whether no other coro is left.
    #[inline]
    pub(super) fn remove<'py>(&self, coro: Coro<'py>) -> (Bound<'py, PyAny>, bool) {
        let place = coro.place.get();
        let mut table = lock(&self.table);
        let object = table.0.swap_remove(place);
        if let Some(moved) = table.0.get(place) {
            // SAFETY: the table holds a reference to the coro, and only this thread uses the places of its coros.
            unsafe { &*moved.cast::<CoroObject>() }.place.set(place);
        }
        let is_empty = table.0.is_empty();
        drop(table);
        // SAFETY: the table has held this reference since `add`.
        (unsafe { Bound::from_owned_ptr(coro.py(), object) }, is_empty)
    }

    /// Removes all coros but `kept`, a borrowed pointer or null. Returns the table's references.
    pub(super) fn remove_others<'py>(
        &self,
        py: Python<'py>,
        kept: *mut ffi::PyObject,
    ) -> Vec<Bound<'py, PyAny>> {
        let mut table = lock(&self.table);
        let others = table.0.extract_if(.., |object| *object != kept);
        let removed = others
            // SAFETY: the table has held these references since `add`.
            .map(|object| unsafe { Bound::from_owned_ptr(py, object) })
            .collect();
        if let Some(kept) = table.0.first() {
            // SAFETY: as in `remove`.
            unsafe { &*kept.cast::<CoroObject>() }.place.set(0);
        }
        removed
    }

    /// New references to all coros of this thread.
    pub(super) fn all<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        lock(&self.table).references(py).collect()
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.table).0.len()
    }

    /// The number of coros of one loop.
    pub(super) fn count_of(&self, event_loop: *mut ffi::PyObject) -> usize {
        let table = lock(&self.table);
        let of_loop = table.0.iter().filter(|object| {
            // SAFETY: the table holds a reference to each coro in it. Only the pointer to the coro's loop is read.
            unsafe { &*object.cast::<CoroObject>() }.event_loop.as_ptr() == event_loop
        });
        of_loop.count()
    }
}

impl Drop for LiveCoros {
    /// The thread is ending. If it has coros that did not end, the references to them are never dropped, and
    /// `asyncio.all_tasks()` still finds them.
    fn drop(&mut self) {
        if self.count() > 0 {
            std::mem::forget(Arc::clone(&self.table));
        }
    }
}

impl Table {
    fn references<'py>(&self, py: Python<'py>) -> impl Iterator<Item = Bound<'py, PyAny>> {
        // SAFETY: the table holds a reference to each.
        let new = move |object: &*mut ffi::PyObject| unsafe { Bound::from_borrowed_ptr(py, *object) };
        self.0.iter().map(new)
    }
}

/// A list of the live coros of all threads, without daemons and without coros that a program has unregistered from
/// asyncio's tasks (`is_listed`).
pub(super) fn tasks_of_all_threads(py: Python<'_>) -> ObjectResult<'_> {
    let tables: Vec<_> = lock(&TABLES).iter().filter_map(Weak::upgrade).collect();
    let mut coros = Vec::new();
    for table in tables {
        coros.extend(lock(&table).references(py));
    }
    // SAFETY: all are coros, and `coros` has a reference to each.
    coros.retain(|coro| unsafe { &*coro.as_ptr().cast::<CoroObject>() }.is_listed());
    Ok(PyList::new(py, coros)?.into_any())
}
