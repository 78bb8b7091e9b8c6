//! Gives each coro its own record of the containers whose `repr` is in progress. CPython has one record per thread.
//!
//! `Py_ReprEnter` keeps these containers in a list, the entry `Py_Repr` of the thread state's dict, so that the `repr`
//! of a container that contains itself shows `...` instead of recursing forever. The `__repr__` of an item may wait,
//! and another coro may print the same container during the wait. So the contents of that list are exchanged at each
//! switch. `Fiber::reprs` holds the contents for the stack that is not running: the coro's contents while the coro is
//! suspended, and the thread's own while the coro runs. The list object itself stays the same.
//!
//! While no `repr` is in progress, each switch costs three comparisons. The exchange swaps the fields of the list
//! object. It allocates only a box, and runs no Python code. Source: `Py_ReprEnter` in CPython's `Objects/object.c`.

use std::cell::Cell;
use std::mem;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::binding::HAS_GIL;

/// How far the items of a list are from the start of their memory: free-threaded builds store the list's capacity in
/// front of the items (`_PyListArray`, `Objects/listobject.c`).
const ITEMS_OFFSET: usize = if HAS_GIL { 0 } else { size_of::<ffi::Py_ssize_t>() };

/// The contents of a list object, as in its fields: owned references, in memory that Python allocated. They need no
/// `Drop`: each `repr` removes its container from the list when it ends, so nothing is left when a fiber is freed.
pub(super) struct Contents {
    items: *mut *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    allocated: ffi::Py_ssize_t,
}

/// The list of one thread; null before the thread's first coro and after `forget`.
pub(super) struct ReprList(Cell<*mut ffi::PyListObject>);

impl ReprList {
    pub(super) const fn new() -> Self {
        Self(Cell::new(ptr::null_mut()))
    }

    /// Finds or makes the list, before a coro starts. If there is no memory for it, the coros share the thread's
    /// record.
    pub(super) fn set_up(&self, py: Python<'_>) {
        if self.0.get().is_null()
            && let Ok(list) = list_of_thread(py)
        {
            self.0.set(list.into_ptr().cast());
        }
    }

    /// Called when the thread ends. Afterwards, coros are resumed only to end, and share the thread's record.
    pub(super) fn forget(&self, py: Python<'_>) {
        let list = self.0.replace(ptr::null_mut());
        // SAFETY: attached; null, or the reference of `set_up`.
        drop(unsafe { Bound::from_owned_ptr_or_opt(py, list.cast()) });
    }

    /// Exchanges the contents of the thread's list with `place`, unless both are empty.
    ///
    /// # Safety
    /// Attached, in the thread of this list. The call is a part of a switch to or from the stack that `place` belongs
    /// to.
    #[inline(always)]
    pub(super) unsafe fn exchange(&self, place: &mut Option<Box<Contents>>) {
        let list = self.0.get();
        // SAFETY: null, or a list that is kept until `forget`.
        if !list.is_null() && (place.is_some() || unsafe { (*list).ob_base.ob_size } != 0) {
            // SAFETY: as above.
            unsafe { exchange_contents(list, place) };
        }
    }
}

/// # Safety
/// Attached; a live list, which no other code is reading or changing.
#[cold]
#[inline(never)]
unsafe fn exchange_contents(list: *mut ffi::PyListObject, place: &mut Option<Box<Contents>>) {
    // SAFETY: by the contract; each reference stays in exactly one place, and an empty list needs no memory for items.
    unsafe {
        let next = match place.take() {
            Some(contents) => *contents,
            None => Contents {
                items: ptr::null_mut(),
                len: 0,
                allocated: 0,
            },
        };
        let before = Contents {
            items: mem::replace(&mut (*list).ob_item, next.items),
            len: mem::replace(&mut (*list).ob_base.ob_size, next.len),
            allocated: mem::replace(&mut (*list).allocated, next.allocated),
        };
        if before.len != 0 {
            *place = Some(Box::new(before));
        } else if !before.items.is_null() {
            // The old list was empty, but may have memory.
            ffi::PyMem_Free(before.items.cast::<u8>().sub(ITEMS_OFFSET).cast());
        }
    }
}

/// The list that `Py_ReprEnter` uses in this thread.
fn list_of_thread(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    // SAFETY: attached; a borrowed reference, or null without an exception.
    let dict = unsafe { Bound::from_borrowed_ptr_or_err(py, ffi::PyThreadState_GetDict())? };
    let dict = dict.cast_into::<PyDict>()?;
    if let Some(list) = dict.get_item("Py_Repr")? {
        return Ok(list.cast_into::<PyList>()?);
    }
    let list = PyList::empty(py);
    dict.set_item("Py_Repr", &list)?;
    Ok(list)
}
