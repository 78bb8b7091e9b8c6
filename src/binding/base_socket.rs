//! Reads the descriptor, the timeout, the family, the type and the protocol of a socket object without a method call.
//! For that, this module calls the C functions of `_socket.socket`, from which all of Python's socket classes derive.
//! If it knows where the descriptor is in memory (`learn_layout`), it reads the descriptor there.
//!
//! The table of these functions is filled once, when the module is initialized. Any attached thread may read it.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The C functions of the methods `fileno` and `gettimeout`.
static FILENO: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
static GETTIMEOUT: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
/// The attribute descriptors `family`, `type` and `proto` of `_socket.socket`.
static FAMILY: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
static KIND: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
static PROTOCOL: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// Whether the first field of a socket object is known to be its file descriptor.
static FIRST_IS_DESCRIPTOR: AtomicBool = AtomicBool::new(false);

/// Whether `fill` has found the methods and attributes that it expected. If not, the functions here that read a socket
/// must not be called.
pub(crate) fn is_known() -> bool {
    !PROTOCOL.load(Ordering::Acquire).is_null()
}

/// Calls a C function without arguments on a socket.
#[inline]
fn call<'py>(socket: &Bound<'py, PyAny>, function: &AtomicPtr<()>) -> PyResult<Bound<'py, PyAny>> {
    debug_assert!(is_known());
    // SAFETY: `fill` has stored the function of a METH_NOARGS method of `_socket.socket`, and the object is an instance
    // of that type.
    unsafe {
        let function: ffi::PyCFunction = std::mem::transmute(function.load(Ordering::Relaxed));
        Bound::from_owned_ptr_or_err(socket.py(), function(socket.as_ptr(), ptr::null_mut()))
    }
}

/// The descriptor of a socket, -1 once it is closed.
#[inline]
pub(crate) fn descriptor(socket: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    if FIRST_IS_DESCRIPTOR.load(Ordering::Relaxed) {
        // SAFETY: an instance of `_socket.socket`, whose first field was checked by `learn_layout`.
        return Ok(unsafe { first_field(socket) });
    }
    call(socket, &FILENO)?.extract()
}

/// The int after the object header.
///
/// # Safety
/// The object is an instance of `_socket.socket`, which has at least one field.
#[inline]
unsafe fn first_field(socket: &Bound<'_, PyAny>) -> c_int {
    // SAFETY: by the contract. In a free-threaded build, another thread may write the field, but only as a whole.
    unsafe { (*socket.as_ptr().add(1).cast::<AtomicI32>()).load(Ordering::Relaxed) }
}

/// Finds out whether the first field of a socket object is its file descriptor, as in all known versions of CPython.
/// For that, it compares the field of a new socket with the result of `fileno()` before the socket is open, while it is
/// open, and after it is closed. If the socket cannot be opened because the process has no free descriptor, the
/// function `descriptor` keeps calling `fileno()`.
pub(crate) fn learn_layout(py: Python<'_>) -> PyResult<()> {
    let raw = py.import("_socket")?.getattr("socket")?.cast_into::<PyType>()?;
    // SAFETY: a live type.
    let basic_len = unsafe { (*raw.as_type_ptr()).tp_basicsize } as usize;
    if !is_known() || basic_len < size_of::<ffi::PyObject>() + size_of::<c_int>() {
        return Ok(());
    }
    let socket = raw.call_method1("__new__", (&raw,))?;
    let agrees = |socket: &Bound<'_, PyAny>| -> PyResult<bool> {
        // SAFETY: an instance, with space for the field.
        Ok(call(socket, &FILENO)?.extract::<c_int>()? == unsafe { first_field(socket) })
    };
    let mut is_first = agrees(&socket)?;
    if socket.call_method0("__init__").is_err() {
        return Ok(());
    }
    is_first &= agrees(&socket)?;
    socket.call_method0("close")?;
    is_first &= agrees(&socket)?;
    FIRST_IS_DESCRIPTOR.store(is_first, Ordering::Relaxed);
    Ok(())
}

/// The timeout that the C type stores, in seconds; None if the socket blocks without a timeout.
pub(crate) fn timeout_s(socket: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    call(socket, &GETTIMEOUT)?.extract()
}

/// Whether a socket has the timeout 0.
pub(crate) fn is_nonblocking(socket: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(timeout_s(socket)? == Some(0.0))
}

/// The address family with which the socket was created.
pub(crate) fn family(socket: &Bound<'_, PyAny>) -> PyResult<c_int> {
    member(socket, &FAMILY)?.extract()
}

/// Family, type and protocol as plain ints, not as the enums of the Python class.
pub(crate) fn shape<'py>(socket: &Bound<'py, PyAny>) -> PyResult<[Bound<'py, PyAny>; 3]> {
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
    // SAFETY: `fill` has stored descriptors of `_socket.socket`, which are never freed.
    let descriptor = unsafe { Bound::from_borrowed_ptr(socket.py(), descriptor.load(Ordering::Relaxed)) };
    // SAFETY: attached; a live descriptor; the object is a socket. The slot is null-checked.
    unsafe {
        let get = (*ffi::Py_TYPE(descriptor.as_ptr())).tp_descr_get;
        match get {
            Some(get) => Bound::from_owned_ptr_or_err(
                socket.py(),
                get(
                    descriptor.as_ptr(),
                    socket.as_ptr(),
                    ffi::Py_TYPE(socket.as_ptr()).cast(),
                ),
            ),
            None => descriptor.call_method1("__get__", (socket,)),
        }
    }
}

/// The C function of a method without arguments, taken from a socket object that was never opened; null if the method
/// is of another kind.
fn function_of(unopened: &Bound<'_, PyAny>, name: &str) -> PyResult<*mut ()> {
    let method = unopened.getattr(name)?;
    // SAFETY: attached. The calls check the type of the object, and set an exception if it is not a built-in method.
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

/// Fills the table of functions. The module's initialization calls it once. If the type is not as expected, the table
/// stays empty.
pub(crate) fn fill(py: Python<'_>) -> PyResult<()> {
    let raw = py.import("_socket")?.getattr("socket")?;
    let unopened = raw.call_method1("__new__", (&raw,))?;
    let (fileno, gettimeout) = (
        function_of(&unopened, "fileno")?,
        function_of(&unopened, "gettimeout")?,
    );
    if fileno.is_null() || gettimeout.is_null() {
        return Ok(());
    }
    FILENO.store(fileno, Ordering::Relaxed);
    GETTIMEOUT.store(gettimeout, Ordering::Relaxed);
    for (place, name) in [(&FAMILY, "family"), (&KIND, "type"), (&PROTOCOL, "proto")] {
        place.store(raw.getattr(name)?.into_ptr(), Ordering::Release);
    }
    Ok(())
}
