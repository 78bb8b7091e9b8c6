//! The contexts of callbacks that are scheduled without a `context` argument.
//!
//! asyncio copies the current context for each such callback. Here, all callbacks that are scheduled while the context
//! variables have the same values share one copy, the template. Nothing ever runs in the template, and the program
//! cannot get hold of it. Each callback runs in a copy of the template. If nothing has changed, this copy becomes the
//! spare, which the next callback reuses:
//!
//! ```text
//!   scheduling:      does the current context have the template's values?
//!                       | yes: the handle refers to the template
//!                       '-- no: the current context is copied, and the copy is the new template
//!   running:         does the spare have the values of the handle's template?
//!                       | yes: the callback runs in the spare
//!                       '-- no: the callback runs in a new copy of the template
//!   after the run:   does the callback's context still have the template's values, and does nothing else refer to it?
//!                       | yes: it becomes the spare
//!                       '-- no: it is dropped
//! ```
//! So a burst of callbacks needs two contexts. If the program asks a handle for its context, the handle gets a copy of
//! its own (`HandleObject::own_context`).
//!
//! The values of a context are an immutable mapping. If two contexts have the same mapping object, their values are the
//! same. The C API has no function that returns the mapping or the current context. So this module reads two fields
//! directly: the mapping in a context, and the current context in the thread state. `find_fields` finds their offsets:
//! it enters a context, sets a variable and leaves the context, and observes which words of both structures change. If
//! it does not find both fields, and in free-threaded builds, each handle has a context of its own, as in asyncio.
//!
//! Before the loop sleeps, it drops the template and the spare if either of them has values, so that they do not keep
//! the values alive. Any thread that schedules something touches the two contexts, while it holds the GIL.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::HAS_GIL;
use crate::binding::object_cell::ObjectCell;

/// The offset of the current context in the thread state, in pointers; 0 if it is not known.
static CURRENT: AtomicUsize = AtomicUsize::new(0);
/// The offset of the mapping in a context, in pointers.
static VALUES: AtomicUsize = AtomicUsize::new(0);
/// The mapping of a context without values, which lives forever.
static NO_VALUES: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

/// The number of words of a thread state that are searched. The structure is larger than this in every version of
/// CPython.
const THREAD_WORDS: usize = 32;

/// The pointer at offset `place` (in pointers) of the structure at `start`.
///
/// # Safety
/// The structure is larger than `place` pointers, and no other thread changes it during the call.
#[inline]
unsafe fn word(start: *mut c_void, place: usize) -> *mut ffi::PyObject {
    // SAFETY: by the contract.
    unsafe { *start.cast::<*mut ffi::PyObject>().add(place) }
}

/// The mapping of a context, borrowed from it.
///
/// # Safety
/// Attached, with a context; `find_fields` has found the fields.
#[inline]
unsafe fn values_of(context: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: by the contract; the field lies inside of a context.
    unsafe { word(context.cast(), VALUES.load(Ordering::Relaxed)) }
}

/// A new copy of the current context.
fn copy_current(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: attached.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent()) }
}

/// A new copy of a context.
pub(super) fn copy<'py>(context: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: attached; the call itself checks that the argument is a context.
    unsafe { Bound::from_owned_ptr_or_err(context.py(), ffi::PyContext_Copy(context.as_ptr())) }
}

/// The contexts that the handles of one loop share.
pub(crate) struct Contexts {
    template: ObjectCell,
    /// A copy of a template, for the next callback that runs.
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

    /// The context for a new handle, as a new reference, and whether it is the template.
    #[inline]
    pub(super) fn for_handle(&self, py: Python<'_>) -> PyResult<(*mut ffi::PyObject, bool)> {
        let template = self.template.as_ptr();
        // SAFETY: attached. The current context is null or an object that the thread state holds. The cell holds a
        // context only if the fields are known; otherwise it is empty.
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
            // Dropping the previous template may run code, but this function does not use `self` afterwards.
            self.template.set(made.clone());
        }
        Ok((made.into_ptr(), is_shared))
    }

    /// The context in which a handle with this template runs, as a new reference. On failure, returns null and sets an
    /// exception.
    ///
    /// # Safety
    /// Attached, and the caller holds the template.
    #[inline]
    pub(super) unsafe fn begin_run(&self, template: *mut ffi::PyObject) -> *mut ffi::PyObject {
        let spare = self.spare.take_ptr();
        // SAFETY: `take_ptr` has moved the cell's reference to this function; a template exists only if the fields are
        // known.
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

    /// Takes back the context that `begin_run` has returned. The callback has run, and the context is not entered any
    /// more.
    ///
    /// # Safety
    /// As for `begin_run`; `context` is a reference of the caller, which this function takes over.
    #[inline]
    pub(super) unsafe fn end_run(&self, template: *mut ffi::PyObject, context: *mut ffi::PyObject) {
        // SAFETY: the caller holds a reference to each. The template keeps its mapping alive, so no other mapping can
        // have the same address.
        unsafe {
            let is_unused = ffi::Py_REFCNT(context) == 1 && values_of(context) == values_of(template);
            if is_unused && !self.spare.is_set() {
                self.spare.put_new(context);
            } else {
                ffi::Py_DECREF(context);
            }
        }
    }

    /// Called before the loop sleeps, and when its run ends: makes sure that these contexts keep no values alive.
    #[inline]
    pub(super) fn forget_values(&self, py: Python<'_>) {
        if self.has_values.get() || self.has_spare_values() {
            self.forget(py);
        }
    }

    /// Whether the spare has values. The field `has_values` is about the current template, but the spare may be a copy
    /// of an older one.
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
    /// `visit` and `arg` are the arguments that the collector passed to `tp_traverse`.
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
    // SAFETY: attached. Only words inside of the structures are read, and none of them is followed as a pointer.
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
