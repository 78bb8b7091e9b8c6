//! The `ssl.SSLObject` of a connection and its two memory BIOs: ciphertext in, plaintext out, and back.
//!
//! ```text
//!   feed(ciphertext) --> incoming BIO --> [ SSLObject ] --> read() / read_into()   plaintext
//!      ciphertext() <-- outgoing BIO <-- [           ] <-- write(plaintext)
//! ```
//!
//! The object inside an exact `SSLObject` is called without the Python methods around it. An instance of a subclass
//! (`SSLContext.sslobject_class`) is driven through its methods, since it may have its own.
//!
//! Every call may run Python code (SNI, ALPN, PSK, key log and message callbacks), which may come back into the
//! transport; nothing is borrowed meanwhile. Nothing here knows transports or protocols.

use std::ptr;

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::buffer_view::BufferView;
use super::ssl_module::{SslModule, ssl_module};
use crate::binding::names::Kept;
use crate::binding::new_bytes;
use crate::binding::object_cell::ObjectCell;

/// Plaintext of a record at most.
const DISCARD_LEN: usize = 16 * 1024;

/// The result of a read.
pub(super) enum Read<T> {
    Data(T),
    /// Nothing: the rest of a record must come first.
    Again,
    /// The peer's `close_notify`.
    Closed,
}

pub(super) struct Engine {
    module: &'static SslModule,
    /// The `ssl.SSLObject`.
    object: ObjectCell,
    /// The `_ssl._SSLSocket` inside, if nothing lies between.
    ssl_socket: ObjectCell,
    incoming: ObjectCell,
    outgoing: ObjectCell,
}

impl Engine {
    /// Wraps two new BIOs. Raises what `sslcontext.wrap_bio()` raises.
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
        let object =
            sslcontext.call_method(intern!(py, "wrap_bio"), (&incoming, &outgoing), Some(&options))?;
        let engine = Self {
            module,
            object: ObjectCell::empty(),
            ssl_socket: ObjectCell::empty(),
            incoming: ObjectCell::empty(),
            outgoing: ObjectCell::empty(),
        };
        if object.get_type().as_ptr() == module.ssl_object_type.as_ptr() {
            engine.ssl_socket.set(object.getattr(intern!(py, "_sslobj"))?);
        }
        engine.object.set(object);
        engine.incoming.set(incoming);
        engine.outgoing.set(outgoing);
        Ok(engine)
    }

    /// True if the C object is called without methods of a class in between.
    pub(super) fn is_plain(&self) -> bool {
        self.ssl_socket.is_set()
    }

    /// The `ssl.SSLObject`; None only once the `cells` are emptied.
    pub(super) fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.object.get(py)
    }

    pub(super) fn certificate_error<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.module.certificate_error.bind(py)
    }

    /// Puts ciphertext into the incoming BIO.
    #[inline]
    pub(super) fn feed(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        // SAFETY: MemoryBIO.write reads the memory, which the slice keeps, and releases it.
        unsafe {
            BufferView::with(py, data, |buffer| {
                call(py, self.module.bio_write, self.incoming.as_ptr(), buffer).map(drop)
            })
        }
    }

    /// All ciphertext that waits in the outgoing BIO, None if there is none.
    #[inline]
    pub(super) fn ciphertext<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let ciphertext = call(py, self.module.bio_read, self.outgoing.as_ptr(), ptr::null_mut())?;
        let ciphertext = ciphertext.cast_into::<PyBytes>()?;
        Ok((!ciphertext.as_bytes().is_empty()).then_some(ciphertext))
    }

    /// Bytes in the incoming BIO.
    pub(super) fn unread_len(&self, py: Python<'_>) -> PyResult<usize> {
        pending_in(py, &self.incoming)
    }

    /// Bytes in the outgoing BIO.
    pub(super) fn unsent_len(&self, py: Python<'_>) -> PyResult<usize> {
        pending_in(py, &self.outgoing)
    }

    /// Goes on with the handshake; true when it is complete.
    pub(super) fn handshake(&self, py: Python<'_>) -> PyResult<bool> {
        let done = self.ask(
            py,
            self.module.do_handshake,
            intern!(py, "do_handshake"),
            ptr::null_mut(),
        )?;
        Ok(done.is_some())
    }

    /// Sends `close_notify` and waits for the peer's; true when both have been seen.
    pub(super) fn shutdown(&self, py: Python<'_>) -> PyResult<bool> {
        let done = self.ask(py, self.module.shutdown, intern!(py, "unwrap"), ptr::null_mut())?;
        Ok(done.is_some())
    }

    /// True if plaintext of a record that was decrypted is still to be read.
    pub(super) fn has_pending(&self, py: Python<'_>) -> PyResult<bool> {
        match self.ask(py, self.module.pending, intern!(py, "pending"), ptr::null_mut())? {
            Some(count) => Ok(count.extract::<usize>()? > 0),
            None => Ok(false),
        }
    }

    /// Up to `capacity` bytes (at least 1) of plaintext, from one record.
    #[inline]
    pub(super) fn read<'py>(&self, py: Python<'py>, capacity: usize) -> PyResult<Read<Bound<'py, PyBytes>>> {
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

    /// Reads all plaintext that there is and discards it. True if the peer has sent `close_notify`, now or before.
    pub(super) fn discard(&self, py: Python<'_>) -> PyResult<bool> {
        loop {
            match self.read(py, DISCARD_LEN) {
                Ok(Read::Data(_)) => {}
                Ok(Read::Again) => return Ok(false),
                Ok(Read::Closed) => return Ok(true),
                // What a read raises after both sides have sent `close_notify`.
                Err(error) if error.is_instance(py, &self.module.zero_return.bind(py)) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads plaintext of one record to `memory`: how many bytes it was, 1 to `capacity`. A read of 0 bytes would look
    /// like the end.
    ///
    /// # Safety
    /// `capacity` bytes (at least 1) at `memory` may be written, and stay valid whatever Python code does meanwhile.
    #[inline]
    pub(super) unsafe fn read_into(
        &self,
        py: Python<'_>,
        memory: *mut u8,
        capacity: usize,
    ) -> PyResult<Read<usize>> {
        debug_assert!(capacity > 0);
        if !self.ssl_socket.is_set() {
            return Ok(match self.read(py, capacity)? {
                Read::Data(data) => {
                    let data = data.as_bytes();
                    let len = data.len().min(capacity);
                    // SAFETY: the caller vouches for `memory`.
                    unsafe { ptr::copy_nonoverlapping(data.as_ptr(), memory, len) };
                    Read::Data(len)
                }
                Read::Again => Read::Again,
                Read::Closed => Read::Closed,
            });
        }
        // SAFETY: the caller vouches for the memory; read(0, buffer) fills the buffer and releases it.
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

    /// Encrypts from the front of `data` (not empty); how many bytes it was, None if the peer must send something first
    /// (renegotiation), after which the same bytes have to be offered again.
    #[inline]
    pub(super) fn write(&self, py: Python<'_>, data: &[u8]) -> PyResult<Option<usize>> {
        let count = if self.ssl_socket.is_set() {
            // SAFETY: _SSLSocket.write reads the memory, which the slice keeps, and releases it.
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

    /// Calls a method with no argument (`arg` null) or one: on the C object if it can be reached, otherwise
    /// by its Python name. None: the peer must send something first.
    #[inline]
    fn ask<'py>(
        &self,
        py: Python<'py>,
        method: Kept,
        name: &Bound<'py, PyString>,
        arg: *mut ffi::PyObject,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let count = if arg.is_null() { 2 } else { 3 };
        // SAFETY: attached; all objects are kept by the engine or the caller, or are never freed, and call[0] is the
        // free place that the offset flag allows.
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

    /// # Safety
    /// `result` is what a C call has returned: a new reference, or null with an exception set.
    #[inline]
    unsafe fn again<'py>(
        &self,
        py: Python<'py>,
        result: *mut ffi::PyObject,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if result.is_null() && self.module.clear_again(py) {
            return Ok(None);
        }
        // SAFETY: passed on from the caller.
        unsafe { Bound::from_owned_ptr_or_err(py, result).map(Some) }
    }

    /// Once they are emptied, nothing can be read or written.
    pub(super) fn cells(&self) -> [&ObjectCell; 4] {
        [&self.object, &self.ssl_socket, &self.incoming, &self.outgoing]
    }
}

/// `MemoryBIO.pending` of `bio`.
fn pending_in(py: Python<'_>, bio: &ObjectCell) -> PyResult<usize> {
    match bio.get(py) {
        Some(bio) => bio.getattr(intern!(py, "pending"))?.extract(),
        None => Ok(0),
    }
}

/// `method(receiver)` or, unless `arg` is null, `method(receiver, arg)`.
#[inline]
fn call(
    py: Python<'_>,
    method: Kept,
    receiver: *mut ffi::PyObject,
    arg: *mut ffi::PyObject,
) -> PyResult<Bound<'_, PyAny>> {
    let call = [ptr::null_mut(), receiver, arg];
    let count = if arg.is_null() { 2 } else { 3 };
    // SAFETY: attached; the objects are kept by the caller, and a receiver of the wrong kind (null once the cells
    // are emptied) is never passed, since nothing calls the engine of a transport that is being freed.
    unsafe { Bound::from_owned_ptr_or_err(py, vectorcall(method, &call[..count])) }
}

/// Calls `method` with the arguments behind the free first place.
///
/// # Safety
/// Attached; every argument is a live object.
#[inline]
unsafe fn vectorcall(method: Kept, call: &[*mut ffi::PyObject]) -> *mut ffi::PyObject {
    // SAFETY: the caller's contract; call[0] is the free place that the offset flag allows.
    unsafe {
        ffi::PyObject_Vectorcall(
            method.as_ptr(),
            call[1..].as_ptr(),
            (call.len() - 1) | ffi::PY_VECTORCALL_ARGUMENTS_OFFSET,
            ptr::null_mut(),
        )
    }
}
