//! Reads and writes that never block, even on a descriptor in blocking mode: `_coro_read_now` and `_coro_write_now`.

use std::os::fd::RawFd;

use grapeshot_core::sys::at_once;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::exports::View;
use crate::binding::new_bytes::NewBytes;
use crate::binding::object_result::{ObjectResult, none};

/// The largest number of bytes that the kernel transfers in one call.
const MAX_LEN: usize = 0x7fff_f000;

/// `_coro_read_now(fd, length)`: returns bytes, or None if the system has no non-blocking read for this kind of file.
pub(in crate::coro) fn read_now<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (Some(fd), Some(length)) = (args.get(0), args.get(1)) else {
        return Err(PyTypeError::new_err(
            "_coro_read_now() takes a descriptor and a length",
        ));
    };
    let (fd, length) = (fd.extract::<RawFd>()?, length.extract::<usize>()?.min(MAX_LEN));
    let mut data = NewBytes::with_capacity(py, length)?;
    // SAFETY: the object is unshared and has at least `length` bytes.
    match unsafe { at_once::read_now(fd, data.as_mut_ptr(), length) } {
        Ok(Some(len_bytes)) => data.finish(len_bytes),
        Ok(None) => Ok(none(py)),
        Err(error) => Err(errors::os_error(&error)),
    }
}

/// `_coro_write_now(fd, data)`: returns the number of bytes written, or None if the system has no non-blocking write
/// for this kind of file.
pub(in crate::coro) fn write_now<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (Some(fd), Some(data)) = (args.get(0), args.get(1)) else {
        return Err(PyTypeError::new_err(
            "_coro_write_now() takes a descriptor and data",
        ));
    };
    let fd = fd.extract::<RawFd>()?;
    let view = View::new(&data, ffi::PyBUF_SIMPLE)?;
    let octets = view.as_bytes();
    match at_once::write_now(fd, &octets[..octets.len().min(MAX_LEN)]) {
        Ok(Some(len_bytes)) => Ok(len_bytes.into_pyobject(py)?.into_any()),
        Ok(None) => Ok(none(py)),
        Err(error) => Err(errors::os_error(&error)),
    }
}
