//! The tables of live coros, one for each thread. `asyncio.all_tasks()` reads the tables of all threads, so that a coro
//! need not be added to a set of the whole process at its start and removed at its end.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::coroutine::{Coro, CoroObject};
use crate::binding::object_result::ObjectResult;

/// The coros of a thread that have started and not ended.
#[derive(Default)]
struct Table {
    /// Owned references. A free entry is null.
    coros: Vec<*mut ffi::PyObject>,
    /// The indexes of the free entries.
    free: Vec<usize>,
}

// SAFETY: the table owns a reference through each pointer, and only attached threads use the pointers.
unsafe impl Send for Table {}

/// The tables of all threads that have started a coro.
static TABLES: Mutex<Vec<Weak<Mutex<Table>>>> = Mutex::new(Vec::new());

/// No code that holds this lock calls Python or lets other threads run Python, so a thread that waits for it waits only
/// briefly, and no thread holds it while another one forks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table of this thread.
#[derive(Default)]
pub(super) struct LiveCoros(Arc<Mutex<Table>>);

impl LiveCoros {
    /// Called when the first coro is added: lets all threads see the table.
    #[cold]
    fn publish(&self) {
        let mut tables = lock(&TABLES);
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(&self.0));
    }

    /// Adds a coro, and returns its place.
    #[inline]
    pub(super) fn add(&self, coro: Coro<'_>) -> usize {
        let object = coro.to_bound().into_ptr();
        let mut table = lock(&self.0);
        if let Some(place) = table.free.pop() {
            table.coros[place] = object;
            return place;
        }
        if table.coros.is_empty() {
            self.publish();
        }
        table.coros.push(object);
        table.coros.len() - 1
    }

    /// Removes the coro at `place`. Returns the table's reference, and whether no other coro is left.
    #[inline]
    pub(super) fn remove<'py>(&self, py: Python<'py>, place: usize) -> (Bound<'py, PyAny>, bool) {
        let mut table = lock(&self.0);
        let object = std::mem::replace(&mut table.coros[place], ptr::null_mut());
        table.free.push(place);
        let is_empty = table.len() == 0;
        drop(table);
        // SAFETY: the table has held this reference since `add`.
        (unsafe { Bound::from_owned_ptr(py, object) }, is_empty)
    }

    /// Removes all coros but `kept`, a borrowed pointer or null. Returns the table's references.
    pub(super) fn remove_others<'py>(
        &self,
        py: Python<'py>,
        kept: *mut ffi::PyObject,
    ) -> Vec<Bound<'py, PyAny>> {
        let mut table = lock(&self.0);
        let Table { coros, free } = &mut *table;
        let mut removed = Vec::new();
        for (place, object) in coros.iter_mut().enumerate() {
            if !object.is_null() && *object != kept {
                free.push(place);
                let object = std::mem::replace(object, ptr::null_mut());
                // SAFETY: the table has held this reference since `add`.
                removed.push(unsafe { Bound::from_owned_ptr(py, object) });
            }
        }
        removed
    }

    /// New references to all coros of this thread.
    pub(super) fn all<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        lock(&self.0).references(py).collect()
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.0).len()
    }

    /// The number of coros of one loop.
    pub(super) fn count_of(&self, event_loop: *mut ffi::PyObject) -> usize {
        let table = lock(&self.0);
        let of_loop = table.coros.iter().filter(|object| {
            // SAFETY: the table holds a reference to each coro in it. Only the pointer to the coro's loop is read.
            !object.is_null() && unsafe { &*object.cast::<CoroObject>() }.event_loop.as_ptr() == event_loop
        });
        of_loop.count()
    }
}

impl Table {
    fn len(&self) -> usize {
        self.coros.len() - self.free.len()
    }

    fn references<'py>(&self, py: Python<'py>) -> impl Iterator<Item = Bound<'py, PyAny>> {
        let objects = self.coros.iter().filter(|object| !object.is_null());
        // SAFETY: the table holds a reference to each.
        objects.map(move |object| unsafe { Bound::from_borrowed_ptr(py, *object) })
    }
}

/// A list of the coros of all threads, except those that stand for daemon threads: code that cancels all tasks and
/// waits for them must not wait for a daemon.
pub(super) fn tasks_of_all_threads(py: Python<'_>) -> ObjectResult<'_> {
    let tables: Vec<_> = lock(&TABLES).iter().filter_map(Weak::upgrade).collect();
    let mut coros = Vec::new();
    for table in tables {
        coros.extend(lock(&table).references(py));
    }
    // SAFETY: all are coros, and `coros` has a reference to each.
    coros.retain(|coro| !unsafe { &*coro.as_ptr().cast::<CoroObject>() }.is_daemon());
    Ok(PyList::new(py, coros)?.into_any())
}
