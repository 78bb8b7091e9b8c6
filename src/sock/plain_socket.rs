//! Which socket objects native code may read and write by their descriptor: exact `socket.socket` objects whose class
//! nobody has patched. Everything else is used through its methods, as asyncio does.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

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
/// The functions behind the two methods that are called for each operation.
static FILENO: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
static GETTIMEOUT: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
/// The descriptors of `_socket.socket` for what a socket was made with.
static FAMILY: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
static KIND: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
static PROTOCOL: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

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
    let raw = socket.py().import("_socket")?.getattr("socket")?;
    for name in METHODS {
        if !kind.getattr(name)?.is(&raw.getattr(name)?) {
            return Ok(false);
        }
    }
    if kind.getattr("accept")?.as_ptr() != ACCEPT.load(Ordering::Relaxed) {
        return Ok(false);
    }
    // SAFETY: as in `is_plain`; the lookups above have given the type a version, if it can have one.
    VERSION.store(unsafe { (*kind.as_type_ptr()).tp_version_tag }, Ordering::Relaxed);
    Ok(true)
}

/// Calls a C function without arguments on a plain socket.
#[inline]
fn call<'py>(socket: &Bound<'py, PyAny>, function: &AtomicPtr<()>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: `register` has stored the function of a METH_NOARGS method of `_socket.socket`, of which a plain socket
    // is an instance.
    unsafe {
        let function: ffi::PyCFunction = std::mem::transmute(function.load(Ordering::Relaxed));
        Bound::from_owned_ptr_or_err(socket.py(), function(socket.as_ptr(), ptr::null_mut()))
    }
}

/// The descriptor of a plain socket, -1 once it is closed.
#[inline]
pub(super) fn descriptor(socket: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    call(socket, &FILENO)?.extract()
}

/// Whether a plain socket has the timeout 0.
pub(super) fn is_nonblocking(socket: &Bound<'_, PyAny>) -> PyResult<bool> {
    let timeout_s: Option<f64> = call(socket, &GETTIMEOUT)?.extract()?;
    Ok(timeout_s == Some(0.0))
}

/// What a plain socket was made with.
pub(super) fn family(socket: &Bound<'_, PyAny>) -> PyResult<c_int> {
    member(socket, &FAMILY)?.extract()
}

/// The value that `family`, `type` and `proto` have in C, without the enums of the Python class.
pub(super) fn shape<'py>(socket: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 3]> {
    Ok([
        member(socket, &FAMILY)?,
        member(socket, &KIND)?,
        member(socket, &PROTOCOL)?,
    ])
}

fn member<'py>(
    socket: &Bound<'py, PyAny>,
    descriptor: &AtomicPtr<ffi::PyObject>,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: `register` has stored descriptors of `_socket.socket`, which are never freed.
    let descriptor = unsafe { Bound::from_borrowed_ptr(socket.py(), descriptor.load(Ordering::Relaxed)) };
    descriptor.call_method1("__get__", (socket,))
}

/// The C function of a method without arguments, taken from a socket object that was never opened; null if the method
/// is of another kind.
fn function_of(unopened: &Bound<'_, PyAny>, name: &str) -> PyResult<*mut ()> {
    let method = unopened.getattr(name)?;
    // SAFETY: attached; the calls check the type of the object, and leave an exception if it is another one.
    let (function, flags) = unsafe {
        let function = ffi::PyCFunction_GetFunction(method.as_ptr());
        if function.is_none() {
            drop(PyErr::fetch(unopened.py()));
            return Ok(ptr::null_mut());
        }
        (function, ffi::PyCFunction_GetFlags(method.as_ptr()))
    };
    Ok(match function {
        Some(function) if flags == ffi::METH_NOARGS => function as *mut (),
        _ => ptr::null_mut(),
    })
}

pub(super) fn register(py: Python<'_>) -> PyResult<()> {
    let kind = py.import("socket")?.getattr("socket")?;
    let raw = py.import("_socket")?.getattr("socket")?;
    let unopened = raw.call_method1("__new__", (&raw,))?;
    let (fileno, gettimeout) = (
        function_of(&unopened, "fileno")?,
        function_of(&unopened, "gettimeout")?,
    );
    if fileno.is_null() || gettimeout.is_null() {
        // No socket counts as plain then.
        return Ok(());
    }
    FILENO.store(fileno, Ordering::Relaxed);
    GETTIMEOUT.store(gettimeout, Ordering::Relaxed);
    for (place, name) in [(&FAMILY, "family"), (&KIND, "type"), (&PROTOCOL, "proto")] {
        place.store(raw.getattr(name)?.into_ptr(), Ordering::Relaxed);
    }
    ACCEPT.store(kind.getattr("accept")?.into_ptr(), Ordering::Relaxed);
    SOCKET_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
