//! The native socket type for coros, which derives from Python's `socket.socket`.
//!
//! `coro.sock`, the patched `socket.socket` and TLS sockets are Python classes that derive from the native type. The
//! type is made when the package first calls `_coro_socket_type`, with the base class as the argument. Its objects are
//! `socket.socket` objects: options, `makefile`, `dup`, context managers and the refusal to be pickled come from the
//! standard library.
//!
//! The base's timeout is always 0, which makes the descriptor non-blocking. The timeout that the program sets is in
//! `Extra`.

use std::ffi::{c_int, c_void};
use std::mem::{align_of, size_of};
use std::ptr;
use std::sync::atomic::Ordering;

use pyo3::exceptions::{PyOSError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt, PyTuple, PyType};

use super::accepting::{self, resolved};
use super::by_base::{Method, base_method, learn_methods};
use super::socket::{Extra, SOCKET_TYPE, Socket, set_type};
use super::{readiness, receiving, sending};
use crate::binding::args::Args;
use crate::binding::native_type::slot;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::binding::rows::{self, leak_table, row};
use crate::binding::{base_socket, errors, new_objects};

/// Calls `function`, which implements a method that never waits for the descriptor.
///
/// # Safety
/// CPython has called a method of `object`, an object of the native socket type, with these arguments.
#[inline(always)]
unsafe fn call_plain(
    object: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    function: for<'a, 'py> fn(&Socket<'py>, Args<'a, 'py>) -> ObjectResult<'py>,
) -> *mut ffi::PyObject {
    errors::at_boundary(args.py(), ptr::null_mut(), || {
        // SAFETY: by the contract.
        let socket = unsafe { Socket::new(args.py(), object) };
        args.pass_to(&socket, function).map(Bound::into_ptr)
    })
}

fn methods() -> Vec<ffi::PyMethodDef> {
    let mut methods = receiving::methods();
    methods.extend(accepting::methods());
    methods.extend(sending::methods());
    methods.extend([
        readiness::wait_method(),
        row!(
            method(call_plain),
            set_timeout,
            "settimeout(timeout, /)",
            "Let calls wait for at most timeout seconds. With None there is no limit; with 0, calls do not wait."
        ),
        row!(
            method(call_plain),
            get_timeout,
            "gettimeout()",
            "Return the timeout in seconds, or None."
        ),
        row!(
            method(call_plain),
            set_blocking,
            "setblocking(flag, /)",
            "Call settimeout(None) if flag is true, else settimeout(0)."
        ),
        row!(
            method(call_plain),
            get_blocking,
            "getblocking()",
            "Return False if the timeout is 0."
        ),
        row!(
            method(call_plain),
            bind,
            "bind(address, /)",
            "Bind the socket to an address, whose host may be a name."
        ),
        row!(
            method(call_plain),
            detach,
            "detach()",
            "Take the descriptor from the object and return it. Waiting coros get ClosedError."
        ),
        row!(
            method(call_plain),
            real_close,
            "_real_close()",
            "Close the descriptor. Waiting coros get ClosedError."
        ),
        row!(
            method(call_plain),
            note_unread,
            "_note_unread(flag, /)",
            "Record whether the object holds data that was received but not returned."
        ),
    ]);
    methods
}

// ---- the methods that do not wait for the descriptor ---------------------------------------------------------------

/// Reads a timeout argument. The base raises the error for an invalid one.
fn timeout_of(socket: &Socket<'_>, value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    if value.is_none() {
        return Ok(None);
    }
    let is_number = value.is_exact_instance_of::<PyFloat>() || value.is_exact_instance_of::<PyInt>();
    if is_number
        && let Ok(timeout_s) = value.extract::<f64>()
        && (0.0..1e9).contains(&timeout_s)
    {
        return Ok(Some(timeout_s));
    }
    // Pass the value to the base's method on a socket that was never opened. The method checks the value and stores it
    // in the socket. Then it finds that there is no descriptor, and raises OSError.
    let py = socket.py();
    let raw = py.import("_socket")?.getattr("socket")?;
    let unopened = raw.call_method1("__new__", (&raw,))?;
    match base_method(py, Method::SetTimeout)?.call1((&unopened, value)) {
        Err(error) if !error.is_instance_of::<PyOSError>(py) => Err(error),
        _ => base_socket::timeout_s(&unopened),
    }
}

fn set_timeout<'py>(socket: &Socket<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = socket.py();
    let timeout_s = match args.get(0) {
        Some(value) => timeout_of(socket, &value)?,
        None => None,
    };
    let is_closed = socket.descriptor()? < 0;
    socket.extra().set_timeout_s(timeout_s);
    if is_closed {
        return Err(errors::os_error(&std::io::Error::from_raw_os_error(libc::EBADF)));
    }
    Ok(none(py))
}

fn get_timeout<'py>(socket: &Socket<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    shown_timeout(socket)
}

fn shown_timeout<'py>(socket: &Socket<'py>) -> ObjectResult<'py> {
    let py = socket.py();
    Ok(match socket.extra().timeout_s() {
        Some(timeout_s) => timeout_s.into_pyobject(py)?.into_any(),
        None => none(py),
    })
}

fn set_blocking<'py>(socket: &Socket<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let is_blocking = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    let is_closed = socket.descriptor()? < 0;
    socket
        .extra()
        .set_timeout_s(if is_blocking { None } else { Some(0.0) });
    if is_closed {
        return Err(errors::os_error(&std::io::Error::from_raw_os_error(libc::EBADF)));
    }
    Ok(none(socket.py()))
}

fn get_blocking<'py>(socket: &Socket<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(bool_object(socket.py(), !socket.extra().is_at_once()))
}

fn bind<'py>(socket: &Socket<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let method = base_method(socket.py(), Method::Bind)?;
    match args.get(0) {
        Some(address) => method.call1((socket.object(), resolved(socket, address)?)),
        None => method.call1((socket.object(),)),
    }
}

fn detach<'py>(socket: &Socket<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    socket.end_waits()?;
    base_method(socket.py(), Method::Detach)?.call1((socket.object(),))
}

fn real_close<'py>(socket: &Socket<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let ended = socket.end_waits();
    base_method(socket.py(), Method::RealClose)?.call1((socket.object(),))?;
    ended.map(|()| none(socket.py()))
}

fn note_unread<'py>(socket: &Socket<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let has_unread = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    socket.extra().has_unread.set(has_unread);
    Ok(none(socket.py()))
}

/// The attribute `timeout`.
unsafe extern "C" fn timeout(slf: *mut ffi::PyObject, _: *mut c_void) -> *mut ffi::PyObject {
    // SAFETY: CPython calls getters, attached, with an object of the type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            shown_timeout(&Socket::new(py, slf)).map(Bound::into_ptr)
        })
    }
}

// ---- the type ------------------------------------------------------------------------------------------------------

/// `__init__`: calls the `__init__` of `socket.socket`, makes the descriptor non-blocking, and moves the timeout to
/// `Extra`.
unsafe extern "C" fn init(
    slf: *mut ffi::PyObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> c_int {
    // SAFETY: CPython calls tp_init, attached, with an object of the type, a tuple, and a dict or null.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let socket = Socket::new(py, slf);
            let args = Bound::from_borrowed_ptr(py, args).cast_into_unchecked::<PyTuple>();
            let kwargs = Bound::from_borrowed_ptr_or_opt(py, kwargs)
                .map(|kwargs| kwargs.cast_into_unchecked::<PyDict>());
            let mut values = vec![socket.object().clone()];
            values.extend(args.iter());
            let values = new_objects::tuple(py, values.into_iter())?;
            base_method(py, Method::Init)?.call(values, kwargs.as_ref())?;
            let timeout_s = base_socket::timeout_s(socket.object())?;
            if timeout_s != Some(0.0) {
                let zero = new_objects::float(py, 0.0)?;
                base_method(py, Method::SetTimeout)?.call1((socket.object(), zero))?;
            }
            socket.extra().begin(timeout_s);
            Ok(0)
        })
    }
}

/// `_coro_socket_type(base)`: returns the native type that derives from `base`, which is `socket.socket`. The type is
/// made only once.
fn make_type<'py>(base: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyType>> {
    let py = base.py();
    let known = SOCKET_TYPE.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: a type that is never freed.
        return unsafe { Ok(Bound::from_borrowed_ptr(py, known.cast()).cast_into_unchecked()) };
    }
    let raw = py.import("_socket")?.getattr("socket")?.cast_into::<PyType>()?;
    if !base.is_subclass(&raw)? || !base_socket::is_known() {
        return Err(PyTypeError::new_err(
            "this socket.socket is not supported: its base or its layout is unknown",
        ));
    }
    learn_methods(base, &raw)?;
    base_socket::learn_layout(py)?;
    // SAFETY: a live type.
    let base_len = unsafe { (*base.as_type_ptr()).tp_basicsize } as usize;
    let offset = base_len.next_multiple_of(align_of::<Extra>());
    let getters = vec![ffi::PyGetSetDef {
        name: c"timeout".as_ptr(),
        get: Some(timeout),
        set: None,
        doc: c"The timeout in seconds, or None.".as_ptr(),
        closure: ptr::null_mut(),
    }];
    let mut slots = [
        slot(
            ffi::Py_tp_doc,
            c"_Socket(family=-1, type=-1, proto=-1, fileno=None)\n--\n\nA socket whose calls let other coros run while they wait."
                .as_ptr()
                .cast_mut()
                .cast(),
        ),
        slot(ffi::Py_tp_init, init as *mut c_void),
        slot(
            ffi::Py_tp_methods,
            leak_table(methods(), ffi::PyMethodDef::zeroed()),
        ),
        slot(
            ffi::Py_tp_getset,
            leak_table(getters, ffi::PyGetSetDef::default()),
        ),
        slot(0, ptr::null_mut()),
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"grapeshot._core._Socket".as_ptr(),
        basicsize: (offset + size_of::<Extra>()) as c_int,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_BASETYPE | u64::from(ffi::Py_TPFLAGS_DEFAULT as u32)) as u32,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [base])?;
    // SAFETY: the spec and its slots outlive the call, and the tables are leaked. Dealloc, traverse and clear are the
    // functions that CPython gives to every class that derives from a Python class. They handle the fields of the base,
    // and nothing has to be done for `Extra`.
    let kind = unsafe {
        let made = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyType>()
    };
    kind.setattr("_accepted_class", py.None())?;
    set_type(kind.clone().into_ptr().cast(), offset);
    Ok(kind)
}

/// `_coro_bind_socket_methods(kind)`: puts the native methods into the subclass `kind` itself, so that the
/// interpreter can specialize calls of them.
pub(in crate::coro) fn bind_methods<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let base = SOCKET_TYPE.load(Ordering::Acquire);
    let kind = args.get(0).map(Bound::cast_into::<PyType>).transpose()?;
    let is_native = |kind: &Bound<'_, PyType>| {
        // SAFETY: attached; `base` is not null here and never freed, and `kind` is a live type.
        !base.is_null() && unsafe { ffi::PyType_IsSubtype(kind.as_type_ptr(), base) } != 0
    };
    let Some(kind) = kind.filter(is_native) else {
        return Err(PyTypeError::new_err(
            "a subclass of the native socket type is required",
        ));
    };
    // SAFETY: as above.
    let base = unsafe { Bound::from_borrowed_ptr(py, base.cast()) };
    rows::bind_methods(&kind, &base, methods())?;
    Ok(none(py))
}

/// `_coro_socket_type(base)`: see `make_type`.
pub(in crate::coro) fn socket_type<'py>(_: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let Some(base) = args.get(0) else {
        return Err(PyTypeError::new_err("_coro_socket_type() takes socket.socket"));
    };
    Ok(make_type(&base.cast_into::<PyType>()?)?.into_any())
}
