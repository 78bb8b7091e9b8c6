//! The Python object that owns a transport's descriptor. Any code that has a reference to this object may close it, and
//! the descriptor's number may then belong to another file. `Owner` finds out whether the object still has the
//! descriptor.
//!
//! Each use of the descriptor first gets the number from the object. For sockets and raw files that is a single load,
//! because their C structures begin with the number, right after the object header. This layout is checked once per
//! type when the module is loaded, and once per object when a transport takes it over.

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::size_of;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::binding::names::names;
use crate::binding::object_cell::ObjectCell;

/// The type `_socket.socket`; null if its objects do not have the expected layout.
static SOCKET_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// The type `_io.FileIO`; null if its objects do not have the expected layout.
static FILE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// An `Owner` whose bytes are all zero is valid: it is the same as `Owner::none()`.
pub(super) struct Owner {
    /// Empty if the transport itself owns the descriptor. In that case, no other code can close the descriptor.
    object: ObjectCell,
    /// Whether the object's C structure begins with the number of the descriptor.
    has_field: Cell<bool>,
}

impl Owner {
    pub(super) const fn none() -> Self {
        Self {
            object: ObjectCell::empty(),
            has_field: Cell::new(false),
        }
    }

    /// Makes `object` the owner of the descriptor `fd`.
    pub(super) fn set(&self, object: &Bound<'_, PyAny>, fd: RawFd) {
        let inner = raw_file(object);
        let object = if field(&inner) == Some(fd) {
            inner
        } else {
            object.clone()
        };
        self.has_field.set(field(&object) == Some(fd));
        self.object.set(object);
    }

    /// Whether the owner's descriptor is still `fd`. True if there is no owner.
    #[inline]
    pub(super) fn has(&self, py: Python<'_>, fd: RawFd) -> bool {
        if !self.object.is_set() {
            return true;
        }
        if self.has_field.get() {
            // SAFETY: `set` has checked that this object has the field, and the cell keeps the object alive.
            return unsafe { load(self.object.as_ptr()) } == fd;
        }
        self.ask_fileno(py) == Some(fd)
    }

    /// The number according to the object's `fileno()`, which may run any code.
    #[cold]
    fn ask_fileno(&self, py: Python<'_>) -> Option<RawFd> {
        let object = self.object.get(py)?;
        let name = names(py).fileno.bind(py).cast_into::<PyString>().ok()?;
        match object.call_method0(name).and_then(|number| number.extract()) {
            Ok(fd) => Some(fd),
            Err(error) => {
                if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                    // SAFETY: callable at any time. Ctrl-C is meant for the user's code, not for this code: the
                    // interrupt is set again here, so that it is raised later in the user's code.
                    unsafe { ffi::PyErr_SetInterrupt() };
                }
                None
            }
        }
    }

    /// The cell, for the collector.
    pub(super) fn cell(&self) -> &ObjectCell {
        &self.object
    }
}

/// The raw file below a buffered file or a text file. A reference to the raw file stays valid even if it is detached
/// from the outer file. An object that has neither `buffer` nor `raw` is returned unchanged.
fn raw_file<'py>(object: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
    let mut inner = object.clone();
    for name in ["buffer", "raw"] {
        if field(&inner).is_some() {
            break;
        }
        if let Ok(Some(next)) = inner.getattr_opt(name) {
            inner = next;
        }
    }
    inner
}

/// The number at the start of an object's C structure. None if the object's type is not known to have one there.
fn field(object: &Bound<'_, PyAny>) -> Option<RawFd> {
    let is_one_of = |kind: &AtomicPtr<ffi::PyTypeObject>| {
        let kind = kind.load(Ordering::Relaxed);
        // SAFETY: attached, with a type that is never freed.
        !kind.is_null() && unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), kind) } != 0
    };
    // SAFETY: `register` has checked that objects of these types have the field, and objects of their subclasses begin
    // in the same way.
    (is_one_of(&SOCKET_TYPE) || is_one_of(&FILE_TYPE)).then(|| unsafe { load(object.as_ptr()) })
}

/// # Safety
/// `object` must be alive, and larger than a bare object header by at least an int.
#[inline]
unsafe fn load(object: *mut ffi::PyObject) -> RawFd {
    // SAFETY: the caller guarantees that there is an int behind the header. The load is atomic, because without a GIL
    // another thread may write to the field at the same time.
    unsafe { AtomicI32::from_ptr(object.add(1).cast::<c_int>()).load(Ordering::Relaxed) }
}

/// Remembers the type in `place` if its objects have the expected layout: in an object that was never opened, the int
/// after the object header must be -1, which stands for no descriptor.
fn learn(kind: &Bound<'_, PyAny>, place: &AtomicPtr<ffi::PyTypeObject>) -> PyResult<()> {
    let size: usize = kind.getattr("__basicsize__")?.extract()?;
    if size < size_of::<ffi::PyObject>() + size_of::<c_int>() {
        return Ok(());
    }
    let unopened = kind.call_method1("__new__", (kind,))?;
    // SAFETY: the check above has found the object large enough.
    if unsafe { load(unopened.as_ptr()) } == -1 {
        place.store(kind.clone().into_ptr().cast(), Ordering::Relaxed);
    }
    Ok(())
}

pub(super) fn register(py: Python<'_>) -> PyResult<()> {
    learn(&py.import("_socket")?.getattr("socket")?, &SOCKET_TYPE)?;
    learn(&py.import("_io")?.getattr("FileIO")?, &FILE_TYPE)
}
