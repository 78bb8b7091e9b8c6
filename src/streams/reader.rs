//! `StreamReader`: the data that it holds, how data gets in and out, and how a waiting coroutine is woken.
//!
//! ```text
//!                 reader is empty                          more comes
//!   data (bytes) ----------------> [ chunk, consumed ] ------------------> [ bytearray ]
//!                                     | taken                                 | taken
//!                                     v                                       v
//!                       the object itself, or a copy of a part        a copy of a part
//! ```
//! Data that one read of the transport brings to an empty reader is not copied, provided that it is taken whole and
//! before more comes. The attribute `_buffer` is a bytearray, as in asyncio: reading the attribute moves all held data
//! into the bytearray.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyTuple};

use super::attribute::{Customizable, flag_row, object_row, setattro, with_value};
use super::operation::{self, Kind};
use super::{StreamType, call, new_object, stock, with_access};
use crate::binding::args::Args;
use crate::binding::attributes::OwnMethods;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, new_type, slot};
use crate::binding::new_bytes;
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getset_slot, getter, methods_slot, row};
use crate::event_loop::waiter;

#[repr(C)]
pub(super) struct ReaderObject {
    base: ffi::PyObject,
    pub(super) event_loop: ObjectCell,
    pub(super) transport: ObjectCell,
    /// The native waiter of the coroutine that waits for data, or the Future that asyncio's own code waits for.
    pub(super) waiter: ObjectCell,
    pub(super) exception: ObjectCell,
    /// The held data as `bytes`, while the bytearray is empty.
    chunk: ObjectCell,
    /// The bytearray, or another object if a program has set one (see `is_customized`). The cell is empty if there is
    /// neither.
    buffer: ObjectCell,
    limit_object: ObjectCell,
    /// The number of bytes of the chunk that have been taken. At least one byte is left.
    consumed: Cell<usize>,
    /// The limit in bytes. 0 if the limit object is not a positive integer of ordinary size; then asyncio's code does
    /// all the work.
    limit: Cell<usize>,
    /// The native waiter is woken only when at least this many bytes are held.
    pub(super) wanted: Cell<usize>,
    pub(super) is_eof: Cell<bool>,
    pub(super) is_paused: Cell<bool>,
    /// Whether a program has replaced a method of this object, or set its buffer to an object that is not a bytearray.
    is_customized: Cell<bool>,
}

pub(super) type Reader<'py> = This<'py, ReaderObject>;

pub(super) static READER_TYPE: StreamType = StreamType::new();

pub(super) static OWN_METHODS: OwnMethods = OwnMethods::new();

/// The native side of an object; None if its class is neither our reader type nor a subclass of it.
#[inline]
pub(super) fn reader_of<'py>(object: &Bound<'py, PyAny>) -> Option<Reader<'py>> {
    if !READER_TYPE.has(object) {
        return None;
    }
    // SAFETY: a live object of a type with this layout, by the check; the caller's Bound keeps it alive.
    Some(unsafe { This::new(object.py(), object.as_ptr()) })
}

/// True if the reader has grapeshot's own methods, so that native code may act instead of them.
#[inline]
pub(super) fn has_own_methods(this: Reader<'_>) -> bool {
    !this.is_customized.get() && this.limit.get() > 0 && OWN_METHODS.are_those_of_type(&this.to_bound())
}

impl ReaderObject {
    /// The limit in bytes; 0 if it is not a positive integer of ordinary size.
    pub(super) fn limit(&self) -> usize {
        self.limit.get()
    }
}

/// The number of bytes that the reader holds.
#[inline]
pub(super) fn len_bytes(this: Reader<'_>) -> usize {
    // SAFETY: the cells hold objects of these types, because the callers have checked that the reader is not
    // customized. Neither call runs other code.
    unsafe {
        if this.chunk.is_set() {
            return ffi::PyBytes_Size(this.chunk.as_ptr()) as usize - this.consumed.get();
        }
        if this.buffer.is_set() {
            return ffi::PyByteArray_Size(this.buffer.as_ptr()) as usize;
        }
        0
    }
}

/// Runs `body` with the held data. `body` must not run other code.
pub(super) fn with_bytes<R>(this: Reader<'_>, body: impl FnOnce(&[u8]) -> R) -> R {
    let len = len_bytes(this);
    // SAFETY: the memory belongs to the chunk or to the bytearray, and stays valid while no other code runs.
    unsafe {
        let start = if this.chunk.is_set() {
            ffi::PyBytes_AsString(this.chunk.as_ptr()).add(this.consumed.get())
        } else if len > 0 {
            ffi::PyByteArray_AsString(this.buffer.as_ptr())
        } else {
            return body(&[]);
        };
        body(std::slice::from_raw_parts(start.cast(), len))
    }
}

// ---- data gets in ------------------------------------------------------------------------------------------------

/// Does the work of `feed_data` without Python code. Returns false, with nothing changed, if asyncio's own function
/// must do the work: after the end of the stream, if the reader must now pause the transport, or if the waiter is not
/// native but a Future.
#[inline]
pub(super) fn feed(this: Reader<'_>, data: &Bound<'_, PyBytes>) -> PyResult<bool> {
    let added = data.as_bytes().len();
    if this.is_eof.get() {
        return Ok(false);
    }
    if added == 0 {
        return Ok(true);
    }
    let total = len_bytes(this) + added;
    let is_too_much = total > this.limit.get().saturating_mul(2);
    if is_too_much && !this.is_paused.get() && this.transport.is_set() {
        return Ok(false);
    }
    let waiter = this.waiter.get(this.py());
    if waiter.as_ref().is_some_and(|waiter| !waiter::is_waiter(waiter)) {
        return Ok(false);
    }
    push(this, data)?;
    if let Some(waiter) = waiter
        && total >= this.wanted.get()
    {
        this.wanted.set(0);
        drop(this.waiter.take(this.py()));
        waiter::set_done(waiter::waiter_of(&waiter))?;
    }
    Ok(true)
}

/// Adds data to the held data.
#[inline]
fn push(this: Reader<'_>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
    if !this.chunk.is_set() && is_buffer_unused(this) {
        this.consumed.set(0);
        this.chunk.put_new(data.clone().into_any().into_ptr());
        return Ok(());
    }
    append(&gathered(this)?, data.as_bytes())
}

/// True if the bytearray is empty and no other code has a reference to it.
#[inline]
fn is_buffer_unused(this: Reader<'_>) -> bool {
    let buffer = this.buffer.as_ptr();
    // SAFETY: the cell holds a bytearray, because the callers have checked that the reader is not customized.
    buffer.is_null() || unsafe { ffi::PyByteArray_Size(buffer) == 0 && ffi::Py_REFCNT(buffer) == 1 }
}

/// Moves all held data into the bytearray and returns it.
fn gathered(this: Reader<'_>) -> PyResult<Bound<'_, PyByteArray>> {
    let py = this.py();
    if !this.buffer.is_set() {
        this.buffer.set(PyByteArray::new(py, &[]).into_any());
    }
    let Some(buffer) = this.buffer.get(py) else {
        return Err(PyTypeError::new_err("the reader has no buffer"));
    };
    let buffer = buffer.cast_into::<PyByteArray>()?;
    if let Some(chunk) = this.chunk.get(py) {
        append(
            &buffer,
            &chunk.cast::<PyBytes>()?.as_bytes()[this.consumed.get()..],
        )?;
        drop(this.chunk.take(py));
    }
    Ok(buffer)
}

fn append(buffer: &Bound<'_, PyByteArray>, data: &[u8]) -> PyResult<()> {
    let old_len = buffer.len();
    buffer.resize(old_len + data.len())?;
    // SAFETY: a live bytearray with room for `data`, which lies elsewhere. No Python code runs during the copy.
    unsafe {
        let start = ffi::PyByteArray_AsString(buffer.as_ptr()).cast::<u8>();
        ptr::copy_nonoverlapping(data.as_ptr(), start.add(old_len), data.len());
    }
    Ok(())
}

/// Calls asyncio's own `feed_data(data)`.
#[cold]
pub(super) fn feed_by_asyncio<'py>(reader: &Bound<'py, PyAny>, data: &Bound<'py, PyAny>) -> PyResult<()> {
    let py = reader.py();
    call(stock(py)?.feed_data, PyTuple::new(py, [reader, data])?).map(drop)
}

fn feed_data<'py>(this: Reader<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let Some(data) = args.get(0) else {
        return Ok(none(this.py()));
    };
    if has_own_methods(this)
        && let Ok(bytes) = data.cast_exact::<PyBytes>()
        && feed(this, bytes)?
    {
        return Ok(none(this.py()));
    }
    feed_by_asyncio(&this.to_bound(), &data)?;
    Ok(none(this.py()))
}

// ---- data gets out -----------------------------------------------------------------------------------------------

/// Takes out the first `len` bytes. The reader must hold that many, and `len` must be at least 1.
#[inline]
pub(super) fn take(this: Reader<'_>, len: usize) -> ObjectResult<'_> {
    let py = this.py();
    if !this.chunk.is_set() {
        return take_from_buffer(this, len);
    }
    let is_all = len == len_bytes(this);
    if is_all && this.consumed.get() == 0 {
        return Ok(this.chunk.take(py).unwrap_or_else(|| none(py)));
    }
    let taken = with_bytes(this, |held| new_bytes::copied(py, &held[..len]))?;
    if is_all {
        drop(this.chunk.take(py));
    } else {
        this.consumed.set(this.consumed.get() + len);
    }
    Ok(taken)
}

fn take_from_buffer(this: Reader<'_>, len: usize) -> ObjectResult<'_> {
    let py = this.py();
    let buffer = gathered(this)?;
    let taken = with_bytes(this, |held| new_bytes::copied(py, &held[..len]))?;
    if len == buffer.len() {
        buffer.resize(0)?;
    } else {
        // SAFETY: a live sequence; the result -1 means that an exception is set (other code has a view of the
        // bytearray) and nothing was changed.
        let deleted = unsafe { ffi::PySequence_DelSlice(buffer.as_ptr(), 0, len as ffi::Py_ssize_t) };
        if deleted < 0 {
            return Err(PyErr::fetch(py));
        }
    }
    Ok(taken)
}

// ---- Python interface --------------------------------------------------------------------------------------------

#[inline]
fn start<'py>(this: Reader<'py>, args: Args<'_, 'py>, kind: Kind) -> ObjectResult<'py> {
    let argument = if args.kwnames().is_null() && args.positional().len() == 1 {
        args.get(0)
    } else {
        let [argument] = args.bind()?;
        argument
    };
    operation::of_reader(this, kind, argument)
}

#[inline(always)]
fn read<'py>(this: Reader<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start(this, args, Kind::Read)
}

fn read_exactly<'py>(this: Reader<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start(this, args, Kind::ReadExactly)
}

fn read_until<'py>(this: Reader<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    start(this, args, Kind::ReadUntil)
}

fn read_line<'py>(this: Reader<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    operation::of_reader(this, Kind::ReadLine, None)
}

unsafe extern "C" fn next_line(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_anext, attached, with an object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: Reader<'_> = This::new(py, slf);
            ReaderObject::with_access(this, || {
                operation::of_reader(this, Kind::Next, None).map(Bound::into_ptr)
            })
        })
    }
}

unsafe extern "C" fn iterate(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls am_aiter with a live object.
    unsafe { ffi::Py_NewRef(slf) }
}

fn get_buffer(this: Reader<'_>) -> ObjectResult<'_> {
    if let Some(buffer) = this.buffer.get(this.py())
        && !buffer.is_exact_instance_of::<PyByteArray>()
    {
        return Ok(buffer);
    }
    gathered(this).map(Bound::into_any)
}

unsafe extern "C" fn set_buffer(slf: *mut ffi::PyObject, value: *mut ffi::PyObject, _: *mut c_void) -> c_int {
    // SAFETY: CPython calls a setter of this type.
    unsafe {
        with_value::<ReaderObject>(slf, value, |this, value| {
            if !value.is_exact_instance_of::<PyByteArray>() {
                this.is_customized.set(true);
            }
            let _before = (
                this.chunk.take(this.py()),
                this.buffer.replace(Some(value), this.py()),
            );
            Ok(())
        })
    }
}

fn get_limit(this: Reader<'_>) -> ObjectResult<'_> {
    Ok(this
        .limit_object
        .get(this.py())
        .unwrap_or_else(|| none(this.py())))
}

unsafe extern "C" fn set_limit(slf: *mut ffi::PyObject, value: *mut ffi::PyObject, _: *mut c_void) -> c_int {
    // SAFETY: CPython calls a setter of this type.
    unsafe {
        with_value::<ReaderObject>(slf, value, |this, value| {
            this.limit.set(value.extract::<usize>().unwrap_or(0));
            this.limit_object.set(value);
            Ok(())
        })
    }
}

impl Customizable for ReaderObject {
    const METHODS: &'static [&'static str] = &[
        "feed_data",
        "read",
        "readexactly",
        "readuntil",
        "readline",
        "exception",
        "_maybe_resume_transport",
        "_wait_for_data",
        "_wakeup_waiter",
    ];

    fn is_customized(&self) -> &Cell<bool> {
        &self.is_customized
    }
}

impl NativeType for ReaderObject {
    const NAME: &'static CStr = c"grapeshot._core._StreamReader";
    const DOC: &'static CStr = c"The native part of grapeshot.streams.StreamReader.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [
            &self.event_loop,
            &self.transport,
            &self.waiter,
            &self.exception,
            &self.chunk,
            &self.buffer,
            &self.limit_object,
        ]
    }

    #[inline(always)]
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_access(this, &this.event_loop, body)
    }
}

pub(super) fn methods() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            method,
            read,
            _StreamReader.read,
            "A coroutine: read up to n bytes."
        ),
        row!(
            method,
            read_exactly,
            _StreamReader.readexactly,
            "A coroutine: read exactly n bytes."
        ),
        row!(
            method,
            read_until,
            _StreamReader.readuntil,
            "A coroutine: read up to and including the separator."
        ),
        row!(
            method,
            read_line,
            _StreamReader.readline,
            "A coroutine: read one line."
        ),
        row!(
            method,
            feed_data,
            _StreamReader.feed_data,
            "Hold data until it is read."
        ),
    ]
}

fn getters() -> Vec<ffi::PyGetSetDef> {
    let object = object_row::<ReaderObject>;
    let flag = flag_row::<ReaderObject>;
    vec![
        object(c"_loop", offset_of!(ReaderObject, event_loop)),
        object(c"_transport", offset_of!(ReaderObject, transport)),
        object(c"_waiter", offset_of!(ReaderObject, waiter)),
        object(c"_exception", offset_of!(ReaderObject, exception)),
        flag(c"_eof", offset_of!(ReaderObject, is_eof)),
        flag(c"_paused", offset_of!(ReaderObject, is_paused)),
        ffi::PyGetSetDef {
            set: Some(set_buffer),
            ..getter(c"_buffer", get_buffer, c"The held data, as a bytearray.")
        },
        ffi::PyGetSetDef {
            set: Some(set_limit),
            ..getter(c"_limit", get_limit, c"The limit in bytes.")
        },
    ]
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<ReaderObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_new, new_object as *mut c_void),
                slot(ffi::Py_tp_setattro, setattro::<ReaderObject> as *mut c_void),
                slot(ffi::Py_am_aiter, iterate as *mut c_void),
                slot(ffi::Py_am_anext, next_line as *mut c_void),
                methods_slot(methods()),
                getset_slot(getters()),
            ],
        )?
    };
    module.add(kind.name()?, &kind)?;
    READER_TYPE.set_base(kind);
    Ok(())
}
