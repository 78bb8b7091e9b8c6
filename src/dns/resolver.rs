//! `grapeshot._core._Resolver`: lets the threads of `core/src/sys/resolver` look up names, and turns the outcomes into
//! the results and exceptions of CPython's `_socket`. Each loop that looks up names has one resolver.
//!
//! Source: CPython `Modules/socketmodule.c`.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::time::Duration;

use grapeshot_core::sys::resolver::{
    self, AddressInfo, AddressQuestion, Answer, Failure, HAS_HOST_LOOKUPS, NameQuestion, Outcome, Question,
};
use grapeshot_core::sys::socket;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::binding::args::Args;
use crate::binding::arrived::Arrived;
use crate::binding::errors;
use crate::binding::names::{Kept, names};
use crate::binding::native_type::{NativeType, This, alloc_without_arguments, new_type, slot};
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{methods_slot, row};

#[repr(C)]
struct ResolverObject {
    base: ffi::PyObject,
    resolver: resolver::Resolver,
    arrived: Arrived,
}

impl NativeType for ResolverObject {
    const NAME: &'static CStr = c"grapeshot._core._Resolver";
    const DOC: &'static CStr = c"_Resolver()\n--\n\nLooks up names in threads that do not use Python.";
    const FLAGS: u64 = 0;
    const IS_COLLECTED: bool = false;

    /// Any thread may use a resolver at any time.
    fn with_access<R>(_: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        body()
    }
}

type Resolver<'py> = This<'py, ResolverObject>;

/// A text for the C library. Raises ValueError if it contains a null byte, but `grapeshot._loop.dns` passes no such
/// text.
fn text(value: &Bound<'_, PyAny>) -> PyResult<CString> {
    CString::new(value.cast::<PyBytes>()?.as_bytes()).map_err(|_| PyValueError::new_err("embedded null byte"))
}

fn optional_text(value: &Bound<'_, PyAny>) -> PyResult<Option<CString>> {
    if value.is_none() {
        return Ok(None);
    }
    text(value).map(Some)
}

/// Asks `question`, and returns the ticket with which the answer will arrive. An earlier answer to the same question
/// may be used again if it is at most `max_age` seconds old.
fn ask<'py>(this: Resolver<'py>, question: Question, max_age: &Bound<'py, PyAny>) -> ObjectResult<'py> {
    let max_age = Duration::try_from_secs_f64(max_age.extract()?).unwrap_or(Duration::MAX);
    // If no thread can be started, this raises the same exception as Python's `threading`.
    let ticket = this
        .resolver
        .ask(question, max_age)
        .map_err(|_| PyRuntimeError::new_err("can't start new thread"))?;
    Ok(ticket.into_pyobject(this.py())?.into_any())
}

fn getaddrinfo<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [host, service, family, kind, protocol, flags, max_age] = args.exactly()?;
    let question = Question::Addresses(AddressQuestion {
        host: optional_text(&host)?,
        service: optional_text(&service)?,
        family: family.extract()?,
        kind: kind.extract()?,
        protocol: protocol.extract()?,
        flags: flags.extract()?,
    });
    ask(this, question, &max_age)
}

fn getnameinfo<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [host, port, flow_info, scope_id, flags, max_age] = args.exactly()?;
    let question = Question::Names(NameQuestion {
        host: text(&host)?,
        port: text(&port)?,
        flow_info: flow_info.extract()?,
        scope_id: scope_id.extract()?,
        flags: flags.extract()?,
    });
    ask(this, question, &max_age)
}

fn gethostbyname<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [host, max_age] = args.exactly()?;
    ask(this, Question::HostByName(text(&host)?), &max_age)
}

fn gethostbyaddr<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [host, max_age] = args.exactly()?;
    ask(this, Question::HostByAddress(text(&host)?), &max_age)
}

fn forget<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let [ticket] = args.exactly()?;
    this.resolver.forget(ticket.extract()?);
    Ok(none(this.py()))
}

fn take<'py>(this: Resolver<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (py, [list]) = (this.py(), args.exactly()?);
    let list = list.cast::<PyList>()?;
    let new = this.resolver.take();
    this.arrived.append(list, new, |outcome| value(py, &outcome))?;
    Ok(none(py))
}

fn wake<'py>(this: Resolver<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    this.resolver.wake();
    Ok(none(this.py()))
}

fn fileno<'py>(this: Resolver<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(this.resolver.fd().into_pyobject(this.py())?.into_any())
}

/// The answer as a Python object. Err is the exception to raise.
fn value<'py>(py: Python<'py>, outcome: &Outcome) -> ObjectResult<'py> {
    match outcome {
        Ok(Answer::Addresses(infos)) => {
            let infos: Vec<_> = infos
                .iter()
                .map(|info| entry(py, info))
                .collect::<PyResult<_>>()?;
            Ok(PyList::new(py, infos)?.into_any())
        }
        Ok(Answer::Names(host, service)) => Ok((decoded(py, host)?, decoded(py, service)?)
            .into_pyobject(py)?
            .into_any()),
        Ok(Answer::Host(host)) => {
            let name = decoded(py, &host.name)?;
            Ok((
                name,
                all_decoded(py, &host.aliases)?,
                all_decoded(py, &host.addresses)?,
            )
                .into_pyobject(py)?
                .into_any())
        }
        Err(failure) => Err(exception(py, failure)?),
    }
}

fn exception(py: Python<'_>, failure: &Failure) -> PyResult<PyErr> {
    let with_message = |kind: Kept, code: c_int, message: &CStr| {
        let kind = kind.bind(py);
        Ok(PyErr::from_value(kind.call1((code, decoded(py, message)?))?))
    };
    match *failure {
        Failure::Lookup(code) => with_message(names(py).lookup_error, code, &resolver::lookup_message(code)),
        Failure::Host(code) => with_message(names(py).host_error, code, &resolver::host_message(code)),
        Failure::System(errno) => Ok(errors::os_error(&std::io::Error::from_raw_os_error(errno))),
        Failure::Ambiguous => Ok(PyOSError::new_err("sockaddr resolved to multiple addresses")),
    }
}

/// One entry of `getaddrinfo`'s list: (family, type, proto, canonname, sockaddr), the first two as plain ints.
fn entry<'py>(py: Python<'py>, info: &AddressInfo) -> ObjectResult<'py> {
    let address = match info.address {
        std::net::SocketAddr::V4(address) => (address.ip().to_string(), address.port()).into_pyobject(py)?,
        std::net::SocketAddr::V6(address) => (
            socket::ipv6_text(address.ip().octets()),
            address.port(),
            address.flowinfo(),
            address.scope_id(),
        )
            .into_pyobject(py)?,
    };
    let name = decoded(py, info.canonical_name.as_deref().unwrap_or_default())?;
    Ok((info.family, info.kind, info.protocol, name, address)
        .into_pyobject(py)?
        .into_any())
}

/// Decodes a text of the C library as UTF-8, as CPython does, whatever the encoding of the file system is. Raises
/// `UnicodeDecodeError`.
fn decoded<'py>(py: Python<'py>, text: &CStr) -> ObjectResult<'py> {
    // SAFETY: attached; the text ends with a null byte. The call returns a new reference, or null with an exception
    // set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyUnicode_FromString(text.as_ptr())) }
}

fn all_decoded<'py>(py: Python<'py>, texts: &[CString]) -> PyResult<Bound<'py, PyList>> {
    let decoded: Vec<_> = texts
        .iter()
        .map(|text| decoded(py, text))
        .collect::<PyResult<_>>()?;
    PyList::new(py, decoded)
}

/// # Safety
/// Called by CPython with the type or a subclass of it, a tuple, and a dict or null.
unsafe extern "C" fn new(
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and the arguments are as described above. The allocation is large enough for the layout, and
    // its fields are written before anything else can see the object.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let resolver = resolver::Resolver::new().map_err(|error| errors::os_error(&error))?;
            let object = alloc_without_arguments(py, kind, args, kwargs)?;
            let made = object.as_ptr().cast::<ResolverObject>();
            (&raw mut (*made).resolver).write(resolver);
            (&raw mut (*made).arrived).write(Arrived::default());
            Ok(object.into_ptr())
        })
    }
}

/// `_resolver_before_fork()`: ends the idle threads, because CPython warns if a process with several threads forks.
#[pyfunction(name = "_resolver_before_fork")]
fn before_fork() {
    resolver::before_fork();
}

/// `_resolver_after_fork()`, in the child: the parent's threads do not exist here, so the child makes its own.
#[pyfunction(name = "_resolver_after_fork")]
fn after_fork() {
    resolver::after_fork();
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![
        row!(
            method,
            getaddrinfo,
            _Resolver.getaddrinfo,
            "Ask for addresses; return a ticket."
        ),
        row!(
            method,
            getnameinfo,
            _Resolver.getnameinfo,
            "Ask for a host and a service; return a ticket."
        ),
        row!(
            method,
            gethostbyname,
            _Resolver.gethostbyname,
            "Ask for a host's entry; return a ticket."
        ),
        row!(
            method,
            gethostbyaddr,
            _Resolver.gethostbyaddr,
            "Ask for an address's entry; return a ticket."
        ),
        row!(method, forget, _Resolver.forget, "Drop interest in an outcome."),
        row!(method, take, _Resolver.take, "Append the answers to a list."),
        row!(method, wake, _Resolver.wake, "Make the descriptor readable."),
        row!(
            method,
            fileno,
            _Resolver.fileno,
            "The descriptor that is readable when an answer may have arrived."
        ),
    ];
    let slots = [slot(ffi::Py_tp_new, new as *mut c_void), methods_slot(methods)];
    // SAFETY: the functions are for this layout, and the table lives forever.
    let kind = unsafe { new_type::<ResolverObject>(module, None, &slots)? };
    module.add("_Resolver", kind)?;
    module.add("_HAS_HOST_LOOKUPS", HAS_HOST_LOOKUPS)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)
}
