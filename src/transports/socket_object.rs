//! Between descriptors and Python: `socket.socket` objects and address tuples, made only when someone asks.

use std::ffi::CStr;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::RawFd;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::sys::socket::{Address, AddressView};

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

/// What `get_extra_info("socket")` gives: the socket without the methods that would read, write or close it.
pub(super) fn guarded<'py>(socket: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    socket
        .py()
        .import("asyncio.trsock")?
        .getattr("TransportSocket")?
        .call1((socket,))
}

/// The address as `socket.getsockname` shows it: (host, port), (host, port, flowinfo, `scope_id`), a path, or bytes
/// for an abstract name; None where the family is not known.
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
        } => {
            let mut host = Ipv6Addr::from(ip).to_string();
            if scope_id != 0 {
                host.push('%');
                host.push_str(&interface_name(scope_id));
            }
            Ok((host, port, flowinfo, scope_id).into_pyobject(py)?.into_any())
        }
        AddressView::Unix(path) if path.first() == Some(&0) => Ok(PyBytes::new(py, path).into_any()),
        AddressView::Unix(path) => {
            let decode = py.import("os")?.getattr("fsdecode")?;
            decode.call1((PyBytes::new(py, path),))
        }
        AddressView::Unnamed => Ok(PyString::new(py, "").into_any()),
        AddressView::Other => Ok(py.None().into_bound(py)),
    }
}

/// The interface of a scope id as getnameinfo(3) writes it: its name, or the number where it has none.
fn interface_name(scope_id: u32) -> String {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the IF_NAMESIZE bytes that if_indextoname(3) asks for; it ends what it writes with NUL.
    unsafe {
        if libc::if_indextoname(scope_id, name.as_mut_ptr()).is_null() {
            return scope_id.to_string();
        }
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    }
}
