//! Decides for which socket objects native code may make system calls on the descriptor: for exact `socket.socket`
//! objects, as long as no program has patched the class. For any other socket, native code calls the socket's methods,
//! as asyncio does.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::{base_socket, new_objects};

/// The methods whose system calls native code makes itself, and the methods on whose usual behaviour it relies.
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
/// `socket.socket.accept` as it was when `grapeshot._core` was imported.
static ACCEPT: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// The version of the type that `is_unpatched` has last approved; 0 for none. CPython gives a type a new version when
/// the type or one of its bases changes.
static VERSION: AtomicU32 = AtomicU32::new(0);

/// True if native code may make system calls on the descriptor instead of calling the socket's methods.
#[inline]
pub(super) fn is_plain(socket: &Bound<'_, PyAny>) -> bool {
    let expected = SOCKET_TYPE.load(Ordering::Relaxed);
    // SAFETY: the object is alive, and the version is a plain number, of which a copy is taken.
    let (kind, version) = unsafe {
        let kind = ffi::Py_TYPE(socket.as_ptr());
        (kind, (*kind).tp_version_tag)
    };
    // `expected` is null before `register`, and also after it if `base_socket` does not know the socket type.
    kind == expected
        && ((version != 0 && version == VERSION.load(Ordering::Relaxed))
            || is_unpatched(socket).unwrap_or(false))
}

/// Checks each method, and remembers the version of the type if all are the original ones.
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
        // `SOCKET_TYPE` stays null, so no socket counts as plain.
        return Ok(());
    }
    let kind = py.import("socket")?.getattr("socket")?;
    ACCEPT.store(kind.getattr("accept")?.into_ptr(), Ordering::Relaxed);
    SOCKET_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
