//! The objects of the `ssl` module that native code needs. They are fetched when the first TLS connection is made, so
//! importing grapeshot does not import `ssl` and works in a Python without it.
//!
//! The table is read-only once loaded, so any attached thread may read it.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::openssl::OpenSsl;
use crate::binding::names::Kept;

pub(super) struct SslModule {
    /// `ssl.SSLObject`. If the type of an object is exactly this one, the C object inside it may be called directly.
    pub(super) ssl_object_type: Kept,
    pub(super) memory_bio_type: Kept,
    pub(super) certificate_error: Kept,
    want_read: Kept,
    syscall_error: Kept,
    pub(super) zero_return: Kept,
    /// Methods of `_ssl._SSLSocket`, the object inside an `SSLObject`.
    pub(super) read: Kept,
    pub(super) write: Kept,
    pub(super) pending: Kept,
    pub(super) do_handshake: Kept,
    pub(super) shutdown: Kept,
    /// Methods of `ssl.MemoryBIO`.
    pub(super) bio_read: Kept,
    pub(super) bio_write: Kept,
    /// The number 0.
    pub(super) zero: Kept,
}

static LOADED: PyOnceLock<SslModule> = PyOnceLock::new();

/// The table, which is loaded at the first call. `ImportError` if Python has no `ssl`.
pub(super) fn ssl_module(py: Python<'_>) -> PyResult<&'static SslModule> {
    LOADED.get_or_try_init(py, || SslModule::load(py))
}

impl SslModule {
    fn load(py: Python<'_>) -> PyResult<Self> {
        let ssl = py.import("ssl")?;
        let native = py.import("_ssl")?;
        let socket = native.getattr("_SSLSocket")?;
        let bio = ssl.getattr("MemoryBIO")?;
        let kept = |owner: &Bound<'_, PyAny>, name: &str| owner.getattr(name).map(|found| Kept::new(&found));
        OpenSsl::load(&native);
        Ok(Self {
            ssl_object_type: kept(ssl.as_any(), "SSLObject")?,
            memory_bio_type: Kept::new(&bio),
            certificate_error: kept(ssl.as_any(), "CertificateError")?,
            want_read: kept(ssl.as_any(), "SSLWantReadError")?,
            syscall_error: kept(ssl.as_any(), "SSLSyscallError")?,
            zero_return: kept(ssl.as_any(), "SSLZeroReturnError")?,
            read: kept(&socket, "read")?,
            write: kept(&socket, "write")?,
            pending: kept(&socket, "pending")?,
            do_handshake: kept(&socket, "do_handshake")?,
            shutdown: kept(&socket, "shutdown")?,
            bio_read: kept(&bio, "read")?,
            bio_write: kept(&bio, "write")?,
            zero: Kept::new(0_i32.into_pyobject(py)?.as_any()),
        })
    }

    /// If the current exception says that OpenSSL needs more data from the peer, clears it and returns true. As in
    /// asyncio, `SSLSyscallError` counts as such an exception.
    pub(super) fn clear_again(&self, _: Python<'_>) -> bool {
        // SAFETY: attached, with an exception set; both classes are kept alive.
        unsafe {
            let is_again = ffi::PyErr_ExceptionMatches(self.want_read.as_ptr()) != 0
                || ffi::PyErr_ExceptionMatches(self.syscall_error.as_ptr()) != 0;
            if is_again {
                ffi::PyErr_Clear();
            }
            is_again
        }
    }
}
