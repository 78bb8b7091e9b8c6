//! Descriptors and socket addresses as Python objects. A stream transport creates its `socket.socket` object and its
//! address tuples only when a program asks for them.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::str::FromStr;

use grapeshot_core::sys::socket::{self, Address, AddressView};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyString, PyTuple, PyType};

use crate::binding::object_result::none;
use crate::binding::{base_socket, errors, new_bytes, new_objects};

/// A nonblocking `socket.socket` that takes over `fd`. Family, type and protocol are read from the descriptor. After an
/// error, the caller still owns the descriptor.
pub(crate) fn adopt(py: Python<'_>, fd: RawFd) -> PyResult<Bound<'_, PyAny>> {
    let raw = raw_type(py)?;
    let found = py.import("socket")?.getattr("socket")?.cast_into::<PyType>();
    // The program may have replaced `socket.socket` with something that is not a socket class. In that case, the
    // program gets a `_socket.socket`.
    let kind = match found {
        Ok(kind) if kind.is_subclass(&raw)? => kind,
        _ => raw,
    };
    let arguments = PyDict::new(py);
    arguments.set_item("fileno", fd)?;
    take_over(&kind, &PyTuple::empty(py), Some(&arguments), None)
}

fn raw_type(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    Ok(new_objects::attribute(&new_objects::module(py, "_socket")?, "socket")?.cast_into::<PyType>()?)
}

/// `kind(*args, **kwargs)` for a subclass of `_socket.socket`, with arguments that include a descriptor. The socket is
/// then set to nonblocking, and owns the descriptor.
///
/// After an error, `owner` is dropped, which closes the descriptor; without `owner`, the caller still owns the
/// descriptor. The failed object may already have the descriptor and live on in a traceback (after Ctrl-C in the Python
/// part of the constructor, for example), so the descriptor is detached from it.
pub(crate) fn take_over<'py>(
    kind: &Bound<'py, PyType>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
    owner: Option<OwnedFd>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = kind.py();
    let raw = raw_type(py)?;
    let detach = new_objects::attribute(&raw, "detach")?;
    let set_blocking = new_objects::string(py, "setblocking")?;
    let kwargs = kwargs.map_or(ptr::null_mut(), Bound::as_ptr);
    // SAFETY: attached. The type's own slot returns a new reference, or null with an exception set.
    let socket = unsafe {
        match (*kind.as_type_ptr()).tp_new {
            Some(new) => Bound::from_owned_ptr_or_err(py, new(kind.as_type_ptr(), args.as_ptr(), kwargs))?,
            None => return Err(PyTypeError::new_err("socket.socket cannot be instantiated")),
        }
    };
    if !socket.is_instance(&raw)? {
        return Err(PyTypeError::new_err(format!(
            "socket.socket() returned a {}, which is not a socket",
            socket.get_type().name()?
        )));
    }
    // A panic here must not drop both `owner` and the object, because both may have the descriptor and would close it.
    let made = errors::caught(|| {
        initialize(&socket, args, kwargs)?;
        // The constructor applies the default timeout, which would make the descriptor blocking.
        socket.call_method1(&set_blocking, (false,))
    });
    match made {
        Ok(_) => {
            let _ = owner.map(IntoRawFd::into_raw_fd);
            Ok(socket)
        }
        Err(error) => {
            let taken_back = errors::caught(|| {
                let was_opened = base_socket::is_known() && base_socket::family(&socket)? != 0;
                // `detach` is a C function, so no Python code runs between the check above and the detaching.
                let detached: RawFd = detach.call1((&socket,))?.extract()?;
                Ok(detached >= 0 || !was_opened)
            });
            if !matches!(taken_back, Ok(true)) {
                // Perhaps the constructor of a subclass has closed the descriptor, whose number may belong to another
                // file by now. Or there was no memory to find that out, and the object keeps the descriptor. In both
                // cases, `owner` must not close it.
                let _ = owner.map(IntoRawFd::into_raw_fd);
            }
            Err(error)
        }
    }
}

/// Detaches the descriptor from a socket object made by `adopt`, because something else owns the descriptor.
pub(crate) fn disown(socket: Bound<'_, PyAny>) -> PyResult<()> {
    raw_type(socket.py())?.getattr("detach")?.call1((socket,))?;
    Ok(())
}

/// `type(object).__init__(object, *args, **kwargs)`.
fn initialize(
    object: &Bound<'_, PyAny>,
    args: &Bound<'_, PyTuple>,
    kwargs: *mut ffi::PyObject,
) -> PyResult<()> {
    // SAFETY: attached. The slot of the object's own type returns -1 with an exception set on failure.
    unsafe {
        match (*object.get_type_ptr()).tp_init {
            Some(init) if init(object.as_ptr(), args.as_ptr(), kwargs) < 0 => Err(PyErr::fetch(object.py())),
            _ => Ok(()),
        }
    }
}

/// The repr of a socket object for `fd`. The caller still owns the descriptor.
pub(crate) fn describe(py: Python<'_>, fd: RawFd) -> PyResult<Bound<'_, PyString>> {
    let detach = raw_type(py)?.getattr("detach")?;
    let socket = adopt(py, fd)?;
    let text = socket.repr();
    detach.call1((socket,))?;
    text
}

/// The result of `get_extra_info("socket")`: asyncio's wrapper, which has only methods that do not read, write or close
/// the socket.
pub(crate) fn guarded<'py>(socket: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let module = new_objects::module(socket.py(), "asyncio.trsock")?;
    new_objects::attribute(&module, "TransportSocket")?.call1((socket,))
}

/// The address as `socket.getsockname` returns it: (host, port), (host, port, flowinfo, `scope_id`), a path (empty for
/// a Unix socket that is not bound), or bytes for an abstract name. None if there is no address or its family is not
/// known.
pub(crate) fn address_object<'py>(py: Python<'py>, address: &Address) -> PyResult<Bound<'py, PyAny>> {
    match address.view() {
        AddressView::V4 { ip, port } => {
            let host = new_objects::string(py, Ipv4Text::new(ip).as_str())?;
            let parts = [host.into_any(), new_objects::int(py, port.into())?];
            Ok(new_objects::tuple(py, parts.into_iter())?.into_any())
        }
        AddressView::V6 {
            ip,
            port,
            flowinfo,
            scope_id,
        } => Ok((socket::ipv6_text(ip), port, flowinfo, scope_id)
            .into_pyobject(py)?
            .into_any()),
        AddressView::Unix(path) if path.first() == Some(&0) => new_bytes::copied(py, path),
        AddressView::Unix(path) => {
            let decode = new_objects::attribute(&new_objects::module(py, "os")?, "fsdecode")?;
            decode.call1((new_bytes::copied(py, path)?,))
        }
        AddressView::Unnamed if address.family() == libc::AF_UNSPEC => Ok(none(py)),
        AddressView::Unnamed => Ok(new_objects::string(py, "")?.into_any()),
        AddressView::Other => Ok(none(py)),
    }
}

/// Whether `address_object` can convert addresses of this family.
pub(crate) fn is_known_family(family: i32) -> bool {
    matches!(family, libc::AF_INET | libc::AF_INET6 | libc::AF_UNIX)
}

/// An IPv4 address in dotted decimals. It is built without an allocation, because such a text is made for every
/// datagram from a new sender.
struct Ipv4Text {
    bytes: [u8; 15],
    len: usize,
}

impl Ipv4Text {
    fn new(ip: [u8; 4]) -> Self {
        let mut text = Self {
            bytes: [0; 15],
            len: 0,
        };
        for (index, part) in ip.into_iter().enumerate() {
            if index > 0 {
                text.push(b'.');
            }
            if part >= 100 {
                text.push(b'0' + part / 100);
            }
            if part >= 10 {
                text.push(b'0' + part / 10 % 10);
            }
            text.push(b'0' + part % 10);
        }
        text
    }

    fn push(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    fn as_str(&self) -> &str {
        // Digits and dots are ASCII, so the default is never used.
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

/// Converts a Python object to an address for a socket of this family, if it has one of the usual forms: a tuple of a
/// numeric host and a port (and flow label and scope), a path as str or bytes, or an abstract name. None for everything
/// else (host names, `"<broadcast>"`, zones, wrong types, other families), which the socket module must handle.
pub(crate) fn native_address(family: i32, object: &Bound<'_, PyAny>) -> Option<Address> {
    match family {
        libc::AF_INET => {
            let tuple = object.cast::<PyTuple>().ok()?;
            if tuple.len() != 2 {
                return None;
            }
            let ip: Ipv4Addr = host(tuple)?;
            Some(Address::v4(ip.octets(), number(tuple, 1)?))
        }
        libc::AF_INET6 => {
            let tuple = object.cast::<PyTuple>().ok()?;
            let ip: Ipv6Addr = host(tuple)?;
            let (flowinfo, scope_id) = match tuple.len() {
                2 => (0, 0),
                3 => (number(tuple, 2)?, 0),
                4 => (number(tuple, 2)?, number(tuple, 3)?),
                _ => return None,
            };
            let port = number(tuple, 1)?;
            (flowinfo <= MAX_FLOWINFO).then(|| Address::v6(ip.octets(), port, flowinfo, scope_id))
        }
        libc::AF_UNIX => {
            if let Ok(name) = object.cast_exact::<PyBytes>() {
                return Address::unix(name.as_bytes());
            }
            // A path that is not ASCII needs the file system's encoding, which the socket module applies.
            let path = object.cast_exact::<PyString>().ok()?.to_str().ok()?;
            path.is_ascii().then(|| Address::unix(path.as_bytes())).flatten()
        }
        _ => None,
    }
}

/// The largest `flowinfo` that the socket module accepts: 20 bits.
const MAX_FLOWINFO: u32 = 0xf_ffff;

fn host<T: FromStr>(address: &Bound<'_, PyTuple>) -> Option<T> {
    let host = address.get_borrowed_item(0).ok()?;
    host.cast_exact::<PyString>().ok()?.to_str().ok()?.parse().ok()
}

fn number<'a, 'py, T: FromPyObject<'a, 'py>>(address: &'a Bound<'py, PyTuple>, index: usize) -> Option<T> {
    let number = address.get_borrowed_item(index).ok()?;
    number.cast_exact::<PyInt>().ok()?;
    number.extract().ok()
}
