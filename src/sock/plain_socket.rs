//! Which socket objects native code may read and write by their descriptor: exact `socket.socket` objects whose class
//! nobody has patched. Everything else is used through its methods, as asyncio does.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::{base_socket, new_objects};

/// The methods that native code stands in for, or relies on.
const METHODS: [&str; 7] = [
    "recv",
    "recv_into",
    "recvfrom",
    "recvfrom_into",
    "send",
    "fileno",
    "gettimeout",
];

static SOCKET_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// `socket.socket.accept` as it was when the module was imported.
static ACCEPT: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// The version of the type that `is_unpatched` has found in order. CPython gives a type a new one when the type or one
/// of its bases changes; 0 is none.
static VERSION: AtomicU32 = AtomicU32::new(0);
/// True if the methods of the socket may be left out.
#[inline]
pub(super) fn is_plain(socket: &Bound<'_, PyAny>) -> bool {
    let expected = SOCKET_TYPE.load(Ordering::Relaxed);
    // SAFETY: the object is alive; the version is a plain number, read at once.
    let (kind, version) = unsafe {
        let kind = ffi::Py_TYPE(socket.as_ptr());
        (kind, (*kind).tp_version_tag)
    };
    // Null before `register`, and where it has found an unknown kind of socket.
    kind == expected
        && ((version != 0 && version == VERSION.load(Ordering::Relaxed))
            || is_unpatched(socket).unwrap_or(false))
}

/// Looks at each method, and remembers the version of a type that is in order.
#[cold]
fn is_unpatched(socket: &Bound<'_, PyAny>) -> PyResult<bool> {
    let kind = socket.get_type();
    let raw = new_objects::attribute(&new_objects::module(socket.py(), "_socket")?, "socket")?;
    for name in METHODS {
        if !new_objects::attribute(&kind, name)?.is(&new_objects::attribute(&raw, name)?) {
            return Ok(false);
        }
    }
    if new_objects::attribute(&kind, "accept")?.as_ptr() != ACCEPT.load(Ordering::Relaxed) {
        return Ok(false);
    }
    // SAFETY: as in `is_plain`; the lookups above have given the type a version, if it can have one.
    VERSION.store(unsafe { (*kind.as_type_ptr()).tp_version_tag }, Ordering::Relaxed);
    Ok(true)
}

pub(super) fn register(py: Python<'_>) -> PyResult<()> {
    if !base_socket::is_known() {
        // No socket counts as plain then.
        return Ok(());
    }
    let kind = py.import("socket")?.getattr("socket")?;
    ACCEPT.store(kind.getattr("accept")?.into_ptr(), Ordering::Relaxed);
    SOCKET_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
