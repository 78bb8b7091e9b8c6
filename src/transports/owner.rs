//! The Python object that owns a transport's descriptor, and whether it still does: any code that holds the object may
//! close it, and the number then belongs to another file.
//!
//! The object's own number is asked at each use. For sockets and raw files that is one load, since their C structures
//! begin with it; the transport looks whether that is so each time that it takes an object over.

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

/// `_socket.socket` and `_io.FileIO`; null where their objects look otherwise than we know.
static SOCKET_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
static FILE_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// All zeroes is nobody.
pub(super) struct Owner {
    /// Empty: the descriptor is the transport's, and nobody else can close it.
    object: ObjectCell,
    /// The object's structure begins with its number.
    has_field: Cell<bool>,
}

impl Owner {
    pub(super) const fn nobody() -> Self {
        Self {
            object: ObjectCell::empty(),
            has_field: Cell::new(false),
        }
    }

    /// From now on `object` owns the descriptor `fd`.
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

    /// Whether the descriptor is still `fd`.
    #[inline]
    pub(super) fn has(&self, py: Python<'_>, fd: RawFd) -> bool {
        if !self.object.is_set() {
            return true;
        }
        if self.has_field.get() {
            // SAFETY: `set` has found the field in this object, which the cell keeps alive.
            return unsafe { load(self.object.as_ptr()) } == fd;
        }
        self.asked(py) == Some(fd)
    }

    /// By `fileno()`. It may run any code.
    #[cold]
    fn asked(&self, py: Python<'_>) -> Option<RawFd> {
        let object = self.object.get(py)?;
        let name = names(py).fileno.bind(py).cast_into::<PyString>().ok()?;
        match object.call_method0(name).and_then(|number| number.extract()) {
            Ok(fd) => Some(fd),
            Err(error) => {
                if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                    // SAFETY: callable at any time. Ctrl-C is not meant for this code: the interrupt is raised again
                    // later, in the user's code.
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

/// What a buffered or a text file reads and writes; it lives on when it is taken out of that. Anything else is itself.
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

/// The number at the head of an object's C structure, if it is known to have one.
fn field(object: &Bound<'_, PyAny>) -> Option<RawFd> {
    let is_one_of = |kind: &AtomicPtr<ffi::PyTypeObject>| {
        let kind = kind.load(Ordering::Relaxed);
        // SAFETY: attached, with a type that is never freed.
        !kind.is_null() && unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), kind) } != 0
    };
    // SAFETY: `register` has found the field in objects of these types, with which those of subclasses begin.
    (is_one_of(&SOCKET_TYPE) || is_one_of(&FILE_TYPE)).then(|| unsafe { load(object.as_ptr()) })
}

/// # Safety
/// `object` is alive, and its type is at least an int larger than the head of every object.
#[inline]
unsafe fn load(object: *mut ffi::PyObject) -> RawFd {
    // SAFETY: the caller vouches for the place behind the head. Another thread may write to it meanwhile where there is
    // no GIL.
    unsafe { AtomicI32::from_ptr(object.add(1).cast::<c_int>()).load(Ordering::Relaxed) }
}

/// Remembers the type if an object of it that was never opened begins with -1, as `fileno` has it then.
fn learn(kind: &Bound<'_, PyAny>, place: &AtomicPtr<ffi::PyTypeObject>) -> PyResult<()> {
    let size: usize = kind.getattr("__basicsize__")?.extract()?;
    if size < size_of::<ffi::PyObject>() + size_of::<c_int>() {
        return Ok(());
    }
    let unopened = kind.call_method1("__new__", (kind,))?;
    // SAFETY: large enough, by the check above.
    if unsafe { load(unopened.as_ptr()) } == -1 {
        place.store(kind.clone().into_ptr().cast(), Ordering::Relaxed);
    }
    Ok(())
}

pub(super) fn register(py: Python<'_>) -> PyResult<()> {
    learn(&py.import("_socket")?.getattr("socket")?, &SOCKET_TYPE)?;
    learn(&py.import("_io")?.getattr("FileIO")?, &FILE_TYPE)
}
