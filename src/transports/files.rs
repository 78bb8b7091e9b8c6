//! System calls on files, for the Python modules that implement `sendfile` and Unix sockets.
//!
//! These calls may wait for a disk, so they release the GIL while they run. They are native because tools that report
//! blocking calls in the loop's thread (blockbuster) replace Python's functions for these calls. The replacements allow
//! calls from asyncio's own functions, but not calls from grapeshot's.

use std::ffi::OsStr;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::ptr;

use grapeshot_core::sys::file;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::binding::{audit, errors};

/// `_file_len(fd)`: the length of a file in bytes.
#[pyfunction(name = "_file_len")]
fn file_len(py: Python<'_>, fd: RawFd) -> PyResult<u64> {
    py.detach(|| file::len_bytes(fd))
        .map_err(|error| errors::os_error(&error))
}

/// `_set_position(fd, offset)`: sets the position from which the next read of a file starts.
#[pyfunction(name = "_set_position")]
fn set_position(py: Python<'_>, fd: RawFd, offset: u64) -> PyResult<()> {
    py.detach(|| file::set_position(fd, offset))
        .map_err(|error| errors::os_error(&error))
}

/// `_send_file(socket_fd, file_fd, offset, count)`: like `os.sendfile`. If a signal interrupts the call, the signal's
/// Python handler runs and the call is repeated.
#[pyfunction(name = "_send_file")]
fn send_file(py: Python<'_>, socket_fd: RawFd, file_fd: RawFd, offset: i64, count: usize) -> PyResult<usize> {
    loop {
        match py.detach(|| file::send(socket_fd, file_fd, offset, count)) {
            Ok(sent) => return Ok(sent),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => py.check_signals()?,
            Err(error) => return Err(errors::os_error(&error)),
        }
    }
}

/// The bytes of a path, as `os.fsencode` returns them. ValueError if the path contains a null character.
fn encoded<'py>(path: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let py = path.py();
    let mut bytes: *mut ffi::PyObject = ptr::null_mut();
    // SAFETY: attached; on success the converter stores a new reference to a bytes object in `bytes`.
    unsafe {
        if ffi::PyUnicode_FSConverter(path.as_ptr(), (&raw mut bytes).cast()) == 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr_or_err(py, bytes)?.cast_into_unchecked())
    }
}

/// Runs `call` on the path. If it fails, the error has the path as its `filename`.
fn on_path<R: Send>(path: &Bound<'_, PyAny>, call: impl Fn(&OsStr) -> io::Result<R> + Sync) -> PyResult<R> {
    let bytes = encoded(path)?;
    let name = OsStr::from_bytes(bytes.as_bytes());
    path.py()
        .detach(|| call(name))
        .map_err(|error| errors::os_error_at(&error, path))
}

/// `_path_status(path)`: whether the path is a Unix socket, and its inode number.
#[pyfunction(name = "_path_status")]
fn path_status(path: &Bound<'_, PyAny>) -> PyResult<(bool, u64)> {
    let status = on_path(path, file::status)?;
    Ok((status.is_socket, status.inode))
}

/// `_remove_path(path)`: like `os.remove`.
#[pyfunction(name = "_remove_path")]
fn remove_path(path: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = path.py();
    // SAFETY: the format has one letter for each value; the object is borrowed for the call.
    let audited = unsafe { audit::PySys_Audit(c"os.remove".as_ptr(), c"Oi".as_ptr(), path.as_ptr(), -1) };
    audit::check(py, audited)?;
    on_path(path, file::remove)
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(file_len, module)?)?;
    module.add_function(wrap_pyfunction!(set_position, module)?)?;
    module.add_function(wrap_pyfunction!(send_file, module)?)?;
    module.add_function(wrap_pyfunction!(path_status, module)?)?;
    module.add_function(wrap_pyfunction!(remove_path, module)?)
}
