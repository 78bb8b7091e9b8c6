//! The `ssl.SSLObject` of a connection and its two memory BIOs, through which ciphertext goes in and out.
//!
//! ```text
//!   feed(ciphertext) --> incoming BIO --> [ SSLObject ] --> read() / read_into()   plaintext
//!      ciphertext() <-- outgoing BIO <-- [           ] <-- write(plaintext)
//! ```
//!
//! There are three ways to drive an `SSLObject`, of which the first possible one is used:
//! 1. Data goes directly through OpenSSL, without the BIOs (`direct`).
//! 2. The C object inside the `SSLObject` is called, without the Python methods around it.
//! 3. The Python methods are called: always for an instance of a subclass (`SSLContext.sslobject_class`), which may
//!    override them.
//!
//! Every call may run Python code (callbacks for SNI, PSK and messages), which may re-enter the transport. So nothing
//! is borrowed during a call.

use std::ptr::{self, NonNull};

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::buffer_view::BufferView;
use super::direct::{Direct, Lent, Outcome};
use super::openssl::{OpenSsl, Ssl};
use super::ssl_module::{SslModule, ssl_module};
use crate::binding::names::Kept;
use crate::binding::new_bytes::{self, NewBytes};
use crate::binding::object_cell::ObjectCell;

/// Data is discarded in pieces of up to this many bytes, which is the maximum length of a record's plaintext.
const DISCARD_LEN: usize = 16 * 1024;

/// The result of a read.
pub(super) enum Read<T> {
    Data(T),
    /// There is no data until the rest of a record has come.
    Again,
    /// The peer has sent `close_notify`.
    Closed,
}

pub(super) struct Engine {
    module: &'static SslModule,
    /// The `ssl.SSLObject`.
    object: ObjectCell,
    /// The `_ssl._SSLSocket` inside the object; empty if the object must be called through its Python methods.
    ssl_socket: ObjectCell,
    /// The two BIOs; empty if OpenSSL is called directly.
    incoming: ObjectCell,
    outgoing: ObjectCell,
    direct: Option<Direct>,
}

impl Engine {
    /// Makes two BIOs and wraps them. Raises the exceptions of `sslcontext.wrap_bio()`.
    pub(super) fn new(
        sslcontext: &Bound<'_, PyAny>,
        is_server: bool,
        server_hostname: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = sslcontext.py();
        let module = ssl_module(py)?;
        let incoming = module.memory_bio_type.bind(py).call0()?;
        let outgoing = module.memory_bio_type.bind(py).call0()?;
        let options = PyDict::new(py);
        options.set_item(intern!(py, "server_side"), is_server)?;
        options.set_item(intern!(py, "server_hostname"), server_hostname)?;
        let (object, ssl) = OpenSsl::created_by(|| {
            sslcontext.call_method(intern!(py, "wrap_bio"), (&incoming, &outgoing), Some(&options))
        });
        let object = object?;
        let mut engine = Self {
            module,
            object: ObjectCell::empty(),
            ssl_socket: ObjectCell::empty(),
            incoming: ObjectCell::empty(),
            outgoing: ObjectCell::empty(),
            direct: None,
        };
        if object.get_type().as_ptr() == module.ssl_object_type.as_ptr() {
            let ssl_socket = object.getattr(intern!(py, "_sslobj"))?;
            engine.direct = direct(&object, &ssl_socket, ssl, [&incoming, &outgoing])?;
            engine.ssl_socket.set(ssl_socket);
        }
        engine.object.set(object);
        if engine.direct.is_none() {
            engine.incoming.set(incoming);
            engine.outgoing.set(outgoing);
        }
        Ok(engine)
    }

    /// If OpenSSL is called directly: the `Direct` that does it, and the `_SSLSocket` that owns the `SSL`.
    #[inline]
    fn direct<'py>(&self, py: Python<'py>) -> Option<(&Direct, Bound<'py, PyAny>)> {
        Some((self.direct.as_ref()?, self.ssl_socket.get(py)?))
    }

    /// Removes errors that other code has left in OpenSSL's error queue. The next call would take them for errors of
    /// this connection.
    fn clear_errors(&self) {
        if let Some(direct) = &self.direct {
            direct.clear_errors();
        }
    }

    /// True if data goes directly through OpenSSL.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// True if the C object is called directly, without Python methods in between.
    pub(super) fn is_plain(&self) -> bool {
        self.ssl_socket.is_set()
    }

    /// The `ssl.SSLObject`; None only after the `cells` were emptied.
    pub(super) fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.object.get(py)
    }

    pub(super) fn certificate_error<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.module.certificate_error.bind(py)
    }

    /// Puts ciphertext where OpenSSL reads it.
    #[inline]
    pub(super) fn feed(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        if let Some(direct) = &self.direct {
            return direct.feed(data);
        }
        // SAFETY: MemoryBIO.write reads the memory, which the slice keeps valid, and releases it.
        unsafe {
            BufferView::with(py, data, |buffer| {
                call(py, self.module.bio_write, self.incoming.as_ptr(), buffer).map(drop)
            })
        }
    }

    /// The same as `feed`. But if OpenSSL is called directly, it reads `data` in place until the result is dropped, and
    /// only the bytes that it has not read by then are copied.
    #[inline]
    pub(super) fn lend<'a>(&'a self, py: Python<'_>, data: &'a [u8]) -> PyResult<Option<Lent<'a>>> {
        match &self.direct {
            Some(direct) => Ok(Some(direct.lend(data))),
            None => self.feed(py, data).map(|()| None),
        }
    }

    /// Makes space for the ciphertext of `plain_len` bytes that are going to be written. Each record has at least
    /// `overhead_len` bytes in addition to its plaintext and its header.
    #[inline]
    pub(super) fn prepare(&self, py: Python<'_>, plain_len: usize, overhead_len: usize) -> PyResult<()> {
        match &self.direct {
            Some(direct) => direct.prepare(py, plain_len, overhead_len),
            None => Ok(()),
        }
    }

    /// Takes ciphertext that OpenSSL has written. None if there is none. Call it until it returns None.
    #[inline]
    pub(super) fn ciphertext<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        if let Some(direct) = &self.direct {
            return direct.ciphertext(py);
        }
        let ciphertext = call(py, self.module.bio_read, self.outgoing.as_ptr(), ptr::null_mut())?;
        let ciphertext = ciphertext.cast_into::<PyBytes>()?;
        Ok((!ciphertext.as_bytes().is_empty()).then_some(ciphertext))
    }

    /// The number of bytes of ciphertext that OpenSSL has not read.
    pub(super) fn unread_len(&self, py: Python<'_>) -> PyResult<usize> {
        match &self.direct {
            Some(direct) => Ok(direct.unread_len()),
            None => pending_in(py, &self.incoming),
        }
    }

    /// The number of bytes of ciphertext that OpenSSL has written and that were not taken.
    pub(super) fn unsent_len(&self, py: Python<'_>) -> PyResult<usize> {
        match &self.direct {
            Some(direct) => Ok(direct.unsent_len()),
            None => pending_in(py, &self.outgoing),
        }
    }

    /// Continues the handshake. True when it is complete.
    pub(super) fn handshake(&self, py: Python<'_>) -> PyResult<bool> {
        self.clear_errors();
        let done = self.ask(
            py,
            self.module.do_handshake,
            intern!(py, "do_handshake"),
            ptr::null_mut(),
        )?;
        Ok(done.is_some())
    }

    /// Sends `close_notify` if that was not done yet, and checks for the peer's. True when both sides have sent it.
    pub(super) fn shutdown(&self, py: Python<'_>) -> PyResult<bool> {
        self.clear_errors();
        let done = self.ask(py, self.module.shutdown, intern!(py, "unwrap"), ptr::null_mut())?;
        Ok(done.is_some())
    }

    /// True if a decrypted record still has plaintext that was not read.
    pub(super) fn has_pending(&self, py: Python<'_>) -> PyResult<bool> {
        if let Some((direct, ssl_socket)) = self.direct(py) {
            // SAFETY: the object owns the SSL.
            return Ok(unsafe { direct.pending_len(&ssl_socket) } > 0);
        }
        match self.ask(py, self.module.pending, intern!(py, "pending"), ptr::null_mut())? {
            Some(count) => Ok(count.extract::<usize>()? > 0),
            None => Ok(false),
        }
    }

    /// Reads up to `capacity` bytes (at least 1) of plaintext, from one record.
    #[inline]
    pub(super) fn read<'py>(&self, py: Python<'py>, capacity: usize) -> PyResult<Read<Bound<'py, PyBytes>>> {
        if let Some((direct, ssl_socket)) = self.direct(py) {
            let mut plain = NewBytes::with_capacity(py, capacity)?;
            // SAFETY: only this function knows the new object. The object owns the SSL.
            match unsafe { direct.read(&ssl_socket, plain.as_mut_ptr(), plain.capacity())? } {
                Outcome::Done(count) => {
                    return Ok(Read::Data(plain.finish(count)?.cast_into::<PyBytes>()?));
                }
                Outcome::NeedsInput => return Ok(Read::Again),
                Outcome::Other => {}
            }
        }
        let capacity = capacity.max(1).into_pyobject(py)?;
        let Some(data) = self.ask(py, self.module.read, intern!(py, "read"), capacity.as_ptr())? else {
            return Ok(Read::Again);
        };
        let data = data.cast_into::<PyBytes>()?;
        if data.as_bytes().is_empty() {
            return Ok(Read::Closed);
        }
        Ok(Read::Data(data))
    }

    /// Reads all available plaintext and discards it. True if the peer has sent `close_notify`, now or before.
    pub(super) fn discard(&self, py: Python<'_>) -> PyResult<bool> {
        loop {
            match self.read(py, DISCARD_LEN) {
                Ok(Read::Data(_)) => {}
                Ok(Read::Again) => return Ok(false),
                Ok(Read::Closed) => return Ok(true),
                // A read raises `SSLZeroReturnError` after both sides have sent `close_notify`.
                Err(error) if error.is_instance(py, &self.module.zero_return.bind(py)) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads plaintext of one record into `memory`: 1 to `capacity` bytes. (`capacity` must not be 0, because a read of
    /// 0 bytes would look like the end of the stream.)
    ///
    /// # Safety
    /// `capacity` bytes (at least 1) at `memory` must be writable, and must stay valid during the call even if Python
    /// code runs.
    #[inline]
    pub(super) unsafe fn read_into(
        &self,
        py: Python<'_>,
        memory: *mut u8,
        capacity: usize,
    ) -> PyResult<Read<usize>> {
        debug_assert!(capacity > 0);
        if let Some((direct, ssl_socket)) = self.direct(py) {
            // SAFETY: the caller guarantees the memory. The object owns the SSL.
            match unsafe { direct.read(&ssl_socket, memory, capacity)? } {
                Outcome::Done(count) => return Ok(Read::Data(count)),
                Outcome::NeedsInput => return Ok(Read::Again),
                Outcome::Other => {}
            }
        }
        if !self.ssl_socket.is_set() {
            return Ok(match self.read(py, capacity)? {
                Read::Data(data) => {
                    let data = data.as_bytes();
                    let len = data.len().min(capacity);
                    // SAFETY: the caller guarantees `memory`.
                    unsafe { ptr::copy_nonoverlapping(data.as_ptr(), memory, len) };
                    Read::Data(len)
                }
                Read::Again => Read::Again,
                Read::Closed => Read::Closed,
            });
        }
        // SAFETY: the caller guarantees the memory; read(0, buffer) fills the buffer and releases it.
        let count = unsafe {
            BufferView::with_writable(py, memory, capacity, |buffer| {
                let call = [
                    ptr::null_mut(),
                    self.ssl_socket.as_ptr(),
                    self.module.zero.as_ptr(),
                    buffer,
                ];
                self.again(py, vectorcall(self.module.read, &call))
            })?
        };
        match count {
            None => Ok(Read::Again),
            Some(count) => match count.extract::<usize>()? {
                0 => Ok(Read::Closed),
                count => Ok(Read::Data(count)),
            },
        }
    }

    /// Encrypts bytes from the start of `data`, which must not be empty. Returns the number of bytes that were
    /// encrypted. None if the peer must send something first (renegotiation); then the same bytes must be passed again.
    #[inline]
    pub(super) fn write(&self, py: Python<'_>, data: &[u8]) -> PyResult<Option<usize>> {
        if let Some((direct, ssl_socket)) = self.direct(py) {
            // SAFETY: the object owns the SSL.
            match unsafe { direct.write(&ssl_socket, data)? } {
                Outcome::Done(count) => return Ok(Some(count)),
                Outcome::NeedsInput => return Ok(None),
                Outcome::Other => {}
            }
        }
        let count = if self.ssl_socket.is_set() {
            // SAFETY: _SSLSocket.write reads the memory, which the slice keeps valid, and releases it.
            unsafe {
                BufferView::with(py, data, |buffer| {
                    let call = [ptr::null_mut(), self.ssl_socket.as_ptr(), buffer];
                    self.again(py, vectorcall(self.module.write, &call))
                })?
            }
        } else {
            let copy = new_bytes::copied(py, data)?;
            self.ask(py, self.module.write, intern!(py, "write"), copy.as_ptr())?
        };
        count.map(|count| count.extract()).transpose()
    }

    /// Calls a method with one argument, or with none if `arg` is null: on the C object if that may be called directly,
    /// otherwise by its Python name. None if the peer must send something first.
    #[inline]
    fn ask<'py>(
        &self,
        py: Python<'py>,
        method: Kept,
        name: &Bound<'py, PyString>,
        arg: *mut ffi::PyObject,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let count = if arg.is_null() { 2 } else { 3 };
        // SAFETY: attached; all objects are kept alive by the engine or the caller, or are never freed; call[0] is the
        // free slot that the offset flag requires.
        unsafe {
            if self.ssl_socket.is_set() {
                let call = [ptr::null_mut(), self.ssl_socket.as_ptr(), arg];
                self.again(py, vectorcall(method, &call[..count]))
            } else {
                let call = [ptr::null_mut(), self.object.as_ptr(), arg];
                let result = ffi::PyObject_VectorcallMethod(
                    name.as_ptr(),
                    call[1..].as_ptr(),
                    (count - 1) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
                    ptr::null_mut(),
                );
                self.again(py, result)
            }
        }
    }

    /// Converts the result of a call. None if the call says that the peer must send something first.
    ///
    /// # Safety
    /// `result` is the return value of a C call: a new reference, or null with an exception set.
    #[inline]
    unsafe fn again<'py>(
        &self,
        py: Python<'py>,
        result: *mut ffi::PyObject,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if result.is_null() && self.module.clear_again(py) {
            return Ok(None);
        }
        // SAFETY: `result` comes from the caller, with the same contract.
        unsafe { Bound::from_owned_ptr_or_err(py, result).map(Some) }
    }

    /// The cells with the references, for the collector. Once they are emptied, nothing can be read or written.
    pub(super) fn cells(&self) -> [&ObjectCell; 4] {
        [&self.object, &self.ssl_socket, &self.incoming, &self.outgoing]
    }
}

/// Whether data of `object` may go directly through OpenSSL and not through the BIOs.
fn may_be_direct(object: &Bound<'_, PyAny>, bios: [&Bound<'_, PyAny>; 2]) -> PyResult<bool> {
    let py = object.py();
    for bio in bios {
        // If a program has replaced `wrap_bio()` with another function, that function may have kept or used a BIO.
        // SAFETY: a live object.
        let references = unsafe { ffi::Py_REFCNT(bio.as_ptr()) };
        let is_new = references == 1
            && bio.getattr(intern!(py, "pending"))?.eq(0)?
            && !bio.getattr(intern!(py, "eof"))?.is_truthy()?;
        if !is_new {
            return Ok(false);
        }
    }
    // OpenSSL calls back for each message and for each line of the key log. If such a call raises an exception, only
    // a method of `_SSLSocket` passes the exception on.
    let context = object.getattr(intern!(py, "context"))?;
    for name in [intern!(py, "_msg_callback"), intern!(py, "keylog_filename")] {
        if context
            .getattr_opt(name)?
            .is_some_and(|callback| !callback.is_none())
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Prepares the direct use of `ssl`, if it is the `SSL` of `ssl_socket`, OpenSSL can be called directly, and nothing
/// needs the BIOs.
fn direct(
    object: &Bound<'_, PyAny>,
    ssl_socket: &Bound<'_, PyAny>,
    ssl: Option<NonNull<Ssl>>,
    bios: [&Bound<'_, PyAny>; 2],
) -> PyResult<Option<Direct>> {
    let (Some(openssl), Some(ssl)) = (OpenSsl::loaded(), ssl) else {
        return Ok(None);
    };
    if !openssl.is_ssl_of(ssl, ssl_socket) || !may_be_direct(object, bios)? {
        return Ok(None);
    }
    // SAFETY: the SSL belongs to the object, which the engine keeps; its handshake has not begun.
    Ok(unsafe { Direct::new(openssl, ssl) })
}

/// `MemoryBIO.pending` of `bio`.
fn pending_in(py: Python<'_>, bio: &ObjectCell) -> PyResult<usize> {
    match bio.get(py) {
        Some(bio) => bio.getattr(intern!(py, "pending"))?.extract(),
        None => Ok(0),
    }
}

/// Calls `method(receiver)`, or `method(receiver, arg)` unless `arg` is null.
#[inline]
fn call(
    py: Python<'_>,
    method: Kept,
    receiver: *mut ffi::PyObject,
    arg: *mut ffi::PyObject,
) -> PyResult<Bound<'_, PyAny>> {
    let call = [ptr::null_mut(), receiver, arg];
    let count = if arg.is_null() { 2 } else { 3 };
    // SAFETY: attached; the caller keeps the objects alive. The receiver is never null: the engine's cells are emptied
    // only when the transport is being freed, and then nothing calls the engine any more.
    unsafe { Bound::from_owned_ptr_or_err(py, vectorcall(method, &call[..count])) }
}

/// Calls `method` with the arguments after the free first slot.
///
/// # Safety
/// The thread must be attached, and every argument must be a live object.
#[inline]
unsafe fn vectorcall(method: Kept, call: &[*mut ffi::PyObject]) -> *mut ffi::PyObject {
    // SAFETY: the caller's contract; call[0] is the free slot that the offset flag requires.
    unsafe {
        ffi::PyObject_Vectorcall(
            method.as_ptr(),
            call[1..].as_ptr(),
            (call.len() - 1) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            ptr::null_mut(),
        )
    }
}
