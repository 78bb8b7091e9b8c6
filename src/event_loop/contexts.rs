//! The contexts in which callbacks run that are scheduled without one.
//!
//! asyncio copies the current context for each of them. Here all that are scheduled in the same state share one copy, the
//! template, in which nothing ever runs, and which no other code can get:
//!
//! ```text
//!   scheduling: does the current context have the template's values? -- no --> the template is a new copy
//!                     | yes: the handle takes a reference
//!   running:    the spare, a copy of the handle's template --> the callback
//!   afterwards: does it still have these values, and does nobody else refer to it? -- no --> it was the callback's own
//!                     | yes: it is the spare again
//! ```
//! So a burst of callbacks needs one context. Whoever asks a handle for its context gets a copy (`HandleObject::own_context`).
//!
//! The values of a context are an immutable mapping: where two contexts have the same mapping, their values are the same.
//! The C API has no function for the mapping, nor for the current context. `find_fields` finds the places of both fields by
//! looking at what changes. Where it does not find them, and in free-threaded builds, each handle has a copy, as in asyncio.
//!
//! The loop forgets both contexts before it sleeps if they have values, which must not live longer because of them.
//! They are touched with the GIL, by any thread that schedules something.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::HAS_GIL;
use crate::binding::object_cell::ObjectCell;

/// The place of the current context in the thread state, counted in pointers; 0 if it is not known.
static CURRENT: AtomicUsize = AtomicUsize::new(0);
/// The place of the mapping in a context.
static VALUES: AtomicUsize = AtomicUsize::new(0);
/// The mapping of a context without values, which lives forever.
static NO_VALUES: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// So much of a thread state is searched: every version has more.
const THREAD_WORDS: usize = 32;

/// Pointer `place` of the structure at `start`.
///
/// # Safety
/// The structure has so many pointers, and nothing changes it meanwhile.
#[inline]
unsafe fn word(start: *mut c_void, place: usize) -> *mut ffi::PyObject {
    // SAFETY: by the contract.
    unsafe { *start.cast::<*mut ffi::PyObject>().add(place) }
}

/// The mapping of a context. Borrowed from it.
///
/// # Safety
/// Attached; `find_fields` has found the fields.
#[inline]
unsafe fn values_of(context: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: by the contract, and the field lies inside of a context.
    unsafe { word(context.cast(), VALUES.load(Ordering::Relaxed)) }
}

/// A new copy of the current context.
fn copy_current(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: attached.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent()) }
}

/// A new copy of a context.
pub(super) fn copy<'py>(context: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: attached; the argument is checked to be a context.
    unsafe { Bound::from_owned_ptr_or_err(context.py(), ffi::PyContext_Copy(context.as_ptr())) }
}

/// What the handles of one loop share.
pub(crate) struct Contexts {
    template: ObjectCell,
    /// A context that a callback may run in.
    spare: ObjectCell,
    /// Whether the template has values.
    has_values: Cell<bool>,
}

impl Contexts {
    pub(super) const fn new() -> Self {
        Self {
            template: ObjectCell::empty(),
            spare: ObjectCell::empty(),
            has_values: Cell::new(false),
        }
    }

    /// A context for a handle that is made now, and whether it is the template. A new reference.
    #[inline]
    pub(super) fn for_handle(&self, py: Python<'_>) -> PyResult<(*mut ffi::PyObject, bool)> {
        let template = self.template.as_ptr();
        // SAFETY: attached. The current context is null or an object that the thread state holds, and the cell holds a
        // context, so far as the fields are known; otherwise the cell is empty.
        unsafe {
            if !template.is_null() {
                let current = word(ffi::PyThreadState_Get().cast(), CURRENT.load(Ordering::Relaxed));
                if !current.is_null() && values_of(current) == values_of(template) {
                    return Ok((ffi::Py_NewRef(template), true));
                }
            }
        }
        self.new_template(py)
    }

    #[inline(never)]
    fn new_template(&self, py: Python<'_>) -> PyResult<(*mut ffi::PyObject, bool)> {
        let made = copy_current(py)?;
        let is_shared = HAS_GIL && CURRENT.load(Ordering::Relaxed) != 0;
        if is_shared {
            // SAFETY: attached, with a context, and the fields are known.
            let values = unsafe { values_of(made.as_ptr()) };
            self.has_values.set(values != NO_VALUES.load(Ordering::Relaxed));
            // Dropping the last one may run code, but nothing here is looked at afterwards.
            self.template.set(made.clone());
        }
        Ok((made.into_ptr(), is_shared))
    }

    /// The context to run a handle in that has this template. A new reference, or null with an exception set.
    ///
    /// # Safety
    /// Attached, and the caller holds the template.
    #[inline]
    pub(super) unsafe fn begin_run(&self, template: *mut ffi::PyObject) -> *mut ffi::PyObject {
        let spare = self.spare.take_ptr();
        // SAFETY: the cell's own reference, now this function's; a template exists only if the fields are known.
        unsafe {
            if !spare.is_null() {
                if values_of(spare) == values_of(template) {
                    return spare;
                }
                ffi::Py_DECREF(spare);
            }
            ffi::PyContext_Copy(template)
        }
    }

    /// Takes back what `begin_run` has returned: a callback has run in it, and it was left.
    ///
    /// # Safety
    /// As for `begin_run`.
    #[inline]
    pub(super) unsafe fn end_run(&self, template: *mut ffi::PyObject, context: *mut ffi::PyObject) {
        // SAFETY: the caller's references. The template keeps its mapping, so no other can have that one's address.
        unsafe {
            let is_unused = ffi::Py_REFCNT(context) == 1 && values_of(context) == values_of(template);
            if is_unused && !self.spare.is_set() {
                self.spare.put_new(context);
            } else {
                ffi::Py_DECREF(context);
            }
        }
    }

    /// The loop is about to sleep, or its run ends: values live no longer because of these contexts.
    #[inline]
    pub(super) fn forget_values(&self, py: Python<'_>) {
        if self.has_values.get() || self.has_spare_values() {
            self.forget(py);
        }
    }

    /// Whether the spare has values. It may be of an older template.
    #[inline]
    fn has_spare_values(&self) -> bool {
        let spare = self.spare.as_ptr();
        // SAFETY: the callers are attached, and the cell holds a context; a spare exists only if the fields are known.
        !spare.is_null() && unsafe { values_of(spare) } != NO_VALUES.load(Ordering::Relaxed)
    }

    #[inline(never)]
    pub(super) fn forget(&self, py: Python<'_>) {
        self.has_values.set(false);
        let _both = (self.template.take(py), self.spare.take(py));
    }

    /// For `tp_traverse`.
    ///
    /// # Safety
    /// `visit` and `arg` are those that the collector passed to `tp_traverse`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: by the contract.
        unsafe {
            match self.template.traverse(visit, arg) {
                0 => self.spare.traverse(visit, arg),
                result => result,
            }
        }
    }
}

/// Finds the fields, once, when the module is imported.
pub(super) fn find_fields(py: Python<'_>) -> PyResult<()> {
    if !HAS_GIL {
        return Ok(());
    }
    // SAFETY: attached. Only words inside of the structures are read, and compared with known pointers.
    unsafe {
        let one = Bound::from_owned_ptr_or_err(py, ffi::PyContext_New())?;
        let other = copy(&one)?;
        let len = (*ffi::Py_TYPE(one.as_ptr())).tp_basicsize as usize / size_of::<usize>();
        let first = size_of::<ffi::PyObject>() / size_of::<usize>();
        let mut places: Vec<usize> = (first..len)
            .filter(|place| {
                let mapping = word(one.as_ptr().cast(), *place);
                !mapping.is_null() && mapping == word(other.as_ptr().cast(), *place)
            })
            .collect();
        let no_values = places.first().map(|place| word(one.as_ptr().cast(), *place));

        let thread: *mut c_void = ffi::PyThreadState_Get().cast();
        if ffi::PyContext_Enter(other.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        let mut threads: Vec<usize> = (1..THREAD_WORDS)
            .filter(|place| word(thread, *place) == other.as_ptr())
            .collect();
        let changed = set_variable(py);
        if ffi::PyContext_Exit(other.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        changed?;
        threads.retain(|place| word(thread, *place) != other.as_ptr());
        places.retain(|place| word(one.as_ptr().cast(), *place) != word(other.as_ptr().cast(), *place));

        if let ([current], [values], Some(no_values)) = (&*threads, &*places, no_values) {
            NO_VALUES.store(no_values, Ordering::Relaxed);
            VALUES.store(*values, Ordering::Relaxed);
            CURRENT.store(*current, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Sets a variable in the current context.
fn set_variable(py: Python<'_>) -> PyResult<()> {
    // SAFETY: attached; both results are new references.
    unsafe {
        let variable =
            Bound::from_owned_ptr_or_err(py, ffi::PyContextVar_New(c"grapeshot".as_ptr(), ptr::null_mut()))?;
        let token = ffi::PyContextVar_Set(variable.as_ptr(), ffi::Py_None());
        Bound::from_owned_ptr_or_err(py, token).map(drop)
    }
}
