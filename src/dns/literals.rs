//! `loop.getaddrinfo` for an address literal with a numeric port: answered without a resolver and without a thread.
//!
//! For an IPv4 or an IPv6 literal, only the address field of `socket.getaddrinfo`'s answer depends on the literal
//! itself. So the C library is called once for each IP version and each combination of family, type, protocol and
//! flags. The numbers in its answer are converted to enum members of the `socket` module. The result, without the
//! address, is the pattern of the answers to all requests with that IP version and that combination.
//!
//! Unusual requests (with a zone, a service name, or flags that could change the answer) are resolved like host names.
//! So are all requests in debug mode, and all requests while a program has replaced `socket.getaddrinfo` or
//! `_socket.getaddrinfo`.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use grapeshot_core::sys::resolver::{self, AddressInfo, AddressQuestion, Answer};
use grapeshot_core::sys::socket;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::binding::args::Args;
use crate::binding::audit;
use crate::binding::names::{Kept, names};
use crate::binding::native_type::This;
use crate::binding::object_result::ObjectResult;
use crate::binding::rows::{extend_type, row};
use crate::event_loop::pyloop::LoopObject;
use crate::sock;

/// Flags that do not change the answer for a literal with a numeric port.
const HARMLESS_FLAGS: c_int = libc::AI_PASSIVE | libc::AI_NUMERICHOST | libc::AI_NUMERICSERV;
/// The maximum number of patterns to remember; a program uses a handful.
const MAX_PATTERNS: usize = 64;

/// The parts of a request that determine the answer, apart from the address itself.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Question {
    is_v6: bool,
    family: c_int,
    kind: c_int,
    protocol: c_int,
    flags: c_int,
}

/// The answer to a question, as a tuple of (family, type, proto, canonname) tuples. It is never freed.
#[derive(Clone, Copy)]
struct Pattern(*mut ffi::PyObject);

// SAFETY: the tuple is never freed and never changed, and only attached threads read it.
unsafe impl Send for Pattern {}

static PATTERNS: Mutex<Vec<(Question, Pattern)>> = Mutex::new(Vec::new());

/// CPython's own `socket.getaddrinfo` and `_socket.getaddrinfo`. If a program replaced one of these functions before it
/// imported grapeshot, a plain `object()`, which is equal to no function, is stored instead of that function.
static ORIGINALS: PyOnceLock<[Kept; 2]> = PyOnceLock::new();

#[derive(Clone, Copy)]
enum Literal {
    V4(Ipv4Addr),
    V6(Ipv6Addr),
}

impl Literal {
    fn parse(text: &str) -> Option<Self> {
        if text.contains(':') {
            text.parse().ok().map(Self::V6)
        } else {
            text.parse().ok().map(Self::V4)
        }
    }

    /// The host part of the socket address. This is `given` itself for an IPv4 literal in a `str`, because an IPv4
    /// address has only one textual form.
    fn host<'py>(self, py: Python<'py>, given: &Bound<'py, PyAny>) -> Bound<'py, PyAny> {
        match self {
            Self::V4(_) if given.is_exact_instance_of::<PyString>() => given.clone(),
            Self::V4(ip) => PyString::new(py, &ip.to_string()).into_any(),
            Self::V6(ip) => PyString::new(py, &socket::ipv6_text(ip.octets())).into_any(),
        }
    }

    fn socket_address<'py>(self, given: &Bound<'py, PyAny>, port: u16) -> PyResult<Bound<'py, PyTuple>> {
        let py = given.py();
        let host = self.host(py, given);
        match self {
            Self::V4(_) => (host, port).into_pyobject(py),
            Self::V6(_) => (host, port, 0, 0).into_pyobject(py),
        }
    }
}

/// Parses a host argument, which must be an exact `str` or `bytes`, as a literal.
#[inline]
fn literal(host: &Bound<'_, PyAny>) -> Option<Literal> {
    if let Ok(text) = host.cast_exact::<PyString>() {
        return Literal::parse(text.to_str().ok()?);
    }
    let bytes = host.cast_exact::<PyBytes>().ok()?;
    Literal::parse(std::str::from_utf8(bytes.as_bytes()).ok()?)
}

/// The port number: the argument if it is an exact int in range, or 0 if it is Python's None. Rust's None for any other
/// argument.
#[inline]
fn port_number(port: &Bound<'_, PyAny>) -> Option<u16> {
    if port.is_none() {
        return Some(0);
    }
    // SAFETY: the argument is alive; only exact ints are converted.
    if unsafe { ffi::PyLong_CheckExact(port.as_ptr()) } == 0 {
        return None;
    }
    port.extract().ok()
}

/// Family, type, protocol and flags from the call's keywords; None if there is any other keyword, or if a value is
/// negative, does not fit into a C int or is not an int.
#[inline]
fn keywords(args: &Args<'_, '_>) -> Option<[c_int; 4]> {
    let known = names(args.py());
    let keys = [known.family, known.type_keyword, known.proto, known.flags];
    let mut values = [0; 4];
    for (name, value) in args.keywords() {
        let place = keys.iter().position(|key| key.as_ptr() == name.as_ptr())?;
        // SAFETY: keyword values are alive for the length of the call; instances of int and of its subclasses are valid
        // arguments.
        let number = unsafe {
            if ffi::PyLong_Check(value) == 0 {
                return None;
            }
            ffi::PyLong_AsLongAndOverflow(value, &mut 0)
        };
        values[place] = c_int::try_from(number).ok().filter(|number| *number >= 0)?;
    }
    Some(values)
}

/// The pattern for a question. The first time, this asks the C library for it. None if that fails: the caller then
/// resolves the request the ordinary way, which raises the error.
fn pattern(py: Python<'_>, question: Question) -> PyResult<Option<Bound<'_, PyTuple>>> {
    let known = {
        let patterns = PATTERNS.lock().unwrap_or_else(PoisonError::into_inner);
        patterns
            .iter()
            .find(|(known, _)| *known == question)
            .map(|(_, pattern)| pattern.0)
    };
    if let Some(known) = known {
        // SAFETY: patterns are never freed.
        let known = unsafe { Bound::from_borrowed_ptr(py, known) };
        return Ok(Some(known.cast_into()?));
    }
    learn(py, question)
}

/// Asks the C library directly, because a call of `socket.getaddrinfo` would also raise an audit event.
#[cold]
fn learn(py: Python<'_>, question: Question) -> PyResult<Option<Bound<'_, PyTuple>>> {
    let example = if question.is_v6 { c"::1" } else { c"127.0.0.1" };
    let asked = resolver::Question::Addresses(AddressQuestion {
        host: Some(example.to_owned()),
        service: Some(c"1".to_owned()),
        family: question.family,
        kind: question.kind,
        protocol: question.protocol,
        flags: question.flags,
    });
    let Ok(Answer::Addresses(infos)) = py.detach(|| resolver::look_up(&asked)) else {
        return Ok(None);
    };
    let kinds: Vec<_> = infos.iter().map(|info| kind(py, info)).collect::<PyResult<_>>()?;
    let learnt = PyTuple::new(py, kinds)?;
    let mut patterns = PATTERNS.lock().unwrap_or_else(PoisonError::into_inner);
    if patterns.len() < MAX_PATTERNS {
        patterns.push((question, Pattern(learnt.clone().into_ptr())));
    }
    Ok(Some(learnt))
}

/// One entry of a pattern: (family, type, proto, canonname).
fn kind<'py>(py: Python<'py>, info: &AddressInfo) -> PyResult<Bound<'py, PyTuple>> {
    let family = member(&names(py).address_family.bind(py), info.family)?;
    let kind = member(&names(py).socket_kind.bind(py), info.kind)?;
    (family, kind, info.protocol, "").into_pyobject(py)
}

/// The member of an enumeration of the `socket` module, or the number itself if the enumeration has no member for it.
fn member<'py>(enumeration: &Bound<'py, PyAny>, number: c_int) -> PyResult<Bound<'py, PyAny>> {
    let py = enumeration.py();
    match enumeration.call1((number,)) {
        Err(error) if error.is_instance_of::<PyValueError>(py) => Ok(number.into_pyobject(py)?.into_any()),
        found => found,
    }
}

/// Whether `socket.getaddrinfo` and `_socket.getaddrinfo` are both CPython's own. If a program or a test has replaced
/// one of them, the replacement must be called.
#[inline]
fn is_original(py: Python<'_>) -> PyResult<bool> {
    let Some(originals) = ORIGINALS.get(py) else {
        return Ok(false);
    };
    let names = names(py);
    for (module, original) in [names.socket_dict, names.native_socket_dict]
        .iter()
        .zip(originals)
    {
        let found = module
            .bind(py)
            .cast_into::<PyDict>()?
            .get_item(names.getaddrinfo.bind(py))?;
        if found.is_none_or(|found| found.as_ptr() != original.as_ptr()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// `_set_resolver(function, native)`: stores CPython's own `socket.getaddrinfo` and `_socket.getaddrinfo` in
/// `ORIGINALS`.
#[pyfunction(name = "_set_resolver")]
fn set_resolver(function: &Bound<'_, PyAny>, native: &Bound<'_, PyAny>) {
    ORIGINALS.get_or_init(function.py(), || [Kept::new(function), Kept::new(native)]);
}

/// A coroutine that returns the answer, or raises the exception of an audit hook. None if the request must be resolved
/// the ordinary way.
#[inline]
fn answer<'py>(this: This<'py, LoopObject>, args: &Args<'_, 'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = this.py();
    let (2, Some(host), Some(port)) = (args.positional().len(), args.get(0), args.get(1)) else {
        return Ok(None);
    };
    let (Some(literal), Some(number), Some([family, kind, protocol, flags])) =
        (literal(&host), port_number(&port), keywords(args))
    else {
        return Ok(None);
    };
    let (is_v6, own_family) = match literal {
        Literal::V4(_) => (false, libc::AF_INET),
        Literal::V6(_) => (true, libc::AF_INET6),
    };
    let fits = family == libc::AF_UNSPEC || family == own_family;
    // In debug mode each request must be logged, and only the ordinary way does that.
    if !fits || flags & !HARMLESS_FLAGS != 0 || this.reactor().probe.is_debug() || !is_original(py)? {
        return Ok(None);
    }
    let question = Question {
        is_v6,
        family,
        kind,
        protocol,
        flags,
    };
    let Some(pattern) = pattern(py, question)? else {
        return Ok(None);
    };
    // SAFETY: the format has one letter for each value; the objects are borrowed for the call.
    let audited = unsafe {
        audit::PySys_Audit(
            c"socket.getaddrinfo".as_ptr(),
            c"OOiii".as_ptr(),
            host.as_ptr(),
            port.as_ptr(),
            family,
            kind,
            protocol,
        )
    };
    if let Err(error) = audit::check(py, audited) {
        // As in asyncio, the hook's exception is raised by the first step of the coroutine, not by the call.
        return sock::refused(this, error).map(Some);
    }
    let address = literal.socket_address(&host, number)?;
    let infos = pattern.iter_borrowed().map(|kinds| info(&kinds, &address));
    let infos = PyList::new(py, infos.collect::<PyResult<Vec<_>>>()?)?;
    sock::answered(this, infos.into_any()).map(Some)
}

/// Builds one entry of the answer: (family, type, proto, canonname, sockaddr).
fn info<'py>(kinds: &Bound<'py, PyAny>, address: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyTuple>> {
    let kinds = kinds.cast::<PyTuple>()?;
    let part = |index: usize| kinds.get_borrowed_item(index);
    PyTuple::new(
        address.py(),
        [
            part(0)?.to_owned(),
            part(1)?.to_owned(),
            part(2)?.to_owned(),
            part(3)?.to_owned(),
            address.clone().into_any(),
        ],
    )
}

/// `loop.getaddrinfo(host, port, *, family=0, type=0, proto=0, flags=0)`: returns a coroutine, whether or not the
/// answer is known already.
fn getaddrinfo<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(answer) = answer(this, &args)? {
        return Ok(answer);
    }
    let mut call = vec![ptr::null_mut(), this.as_ptr()];
    call.extend_from_slice(args.values());
    // SAFETY: the values are the arguments of the running call, placed behind `self`; call[0] is the free slot that the
    // offset flag requires.
    unsafe {
        let result = ffi::PyObject_VectorcallMethod(
            names(this.py())._resolve.as_ptr(),
            call[1..].as_ptr(),
            (1 + args.positional().len()) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            args.kwnames(),
        );
        Bound::from_owned_ptr_or_err(this.py(), result)
    }
}

/// The methods that this module adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![row!(
        method,
        getaddrinfo,
        Loop.getaddrinfo,
        "Return what socket.getaddrinfo() returns, without blocking the loop."
    )]
}

/// Adds `getaddrinfo` to `grapeshot._core.Loop`, and `_set_resolver` to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(set_resolver, module)?)?;
    extend_type(&module.getattr("Loop")?, loop_methods())
}
