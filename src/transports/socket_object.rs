//! Between descriptors and Python: `socket.socket` objects and address tuples, made only when someone asks.

use std::net::Ipv4Addr;
use std::os::fd::RawFd;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::event_loop::native_type::none;
use crate::sys::socket::{self, Address, AddressView};

/// A `socket.socket` that takes over `fd`; family, type and protocol are read from the descriptor.
pub(super) fn adopt(py: Python<'_>, fd: RawFd) -> PyResult<Bound<'_, PyAny>> {
    let arguments = PyDict::new(py);
    arguments.set_item("fileno", fd)?;
    let socket = py
        .import("socket")?
        .getattr("socket")?
        .call((), Some(&arguments))?;
    // The constructor applies the default timeout, which would make the descriptor blocking.
    socket.call_method1("setblocking", (false,))?;
    Ok(socket)
}

/// The text of the socket object that `fd` would get; the descriptor stays the caller's.
pub(super) fn describe(py: Python<'_>, fd: RawFd) -> PyResult<Bound<'_, PyString>> {
    let socket = adopt(py, fd)?;
    let text = socket.repr();
    socket.call_method0("detach")?;
    text
}

/// What `get_extra_info("socket")` gives: the socket without the methods that would read, write or close it.
pub(super) fn guarded<'py>(socket: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    socket
        .py()
        .import("asyncio.trsock")?
        .getattr("TransportSocket")?
        .call1((socket,))
}

/// The address as `socket.getsockname` shows it: (host, port), (host, port, flowinfo, `scope_id`), a path, or bytes
/// for an abstract name; None where there is no address or its family is not known.
pub(super) fn address_object<'py>(py: Python<'py>, address: &Address) -> PyResult<Bound<'py, PyAny>> {
    match address.view() {
        AddressView::V4 { ip, port } => Ok((Ipv4Addr::from(ip).to_string(), port)
            .into_pyobject(py)?
            .into_any()),
        AddressView::V6 {
            ip,
            port,
            flowinfo,
            scope_id,
        } => Ok((socket::ipv6_text(ip), port, flowinfo, scope_id)
            .into_pyobject(py)?
            .into_any()),
        AddressView::Unix(path) if path.first() == Some(&0) => Ok(PyBytes::new(py, path).into_any()),
        AddressView::Unix(path) => {
            let decode = py.import("os")?.getattr("fsdecode")?;
            decode.call1((PyBytes::new(py, path),))
        }
        AddressView::Unnamed if address.family() == libc::AF_UNSPEC => Ok(none(py)),
        AddressView::Unnamed => Ok(PyString::new(py, "").into_any()),
        AddressView::Other => Ok(none(py)),
    }
}

/// Whether `address_object` can show the addresses of a family.
pub(super) fn is_known_family(family: i32) -> bool {
    matches!(family, libc::AF_INET | libc::AF_INET6 | libc::AF_UNIX)
}
