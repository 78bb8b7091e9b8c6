//! `StreamReaderProtocol`: passes the data of a transport directly to the reader.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::offset_of;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyWeakrefMethods, PyWeakrefReference};

use super::attribute::{Customizable, flag_row, object_row, setattro};
use super::reader::{self, ReaderObject};
use super::{StreamType, new_object, with_access};
use crate::binding::args::Args;
use crate::binding::attributes::OwnMethods;
use crate::binding::native_type::{NativeType, This, new_type, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::{getset_slot, methods_slot, row};
use crate::transports::protocol::{ProtocolCalls, register_object_received};

#[repr(C)]
pub(super) struct ProtocolObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    /// A weak reference to the reader. As in asyncio, the protocol does not keep the reader alive, and drops data
    /// for a reader that is gone.
    reader: ObjectCell,
    is_paused: Cell<bool>,
    is_connection_lost: Cell<bool>,
    /// Whether a program has replaced `_drain_helper` on this object.
    is_customized: Cell<bool>,
}

type Protocol<'py> = This<'py, ProtocolObject>;

pub(super) static PROTOCOL_TYPE: StreamType = StreamType::new();

pub(super) static OWN_METHODS: OwnMethods = OwnMethods::new();

/// The native side of the object; None if its class is neither our protocol type nor a subclass of it.
#[inline]
fn protocol_of<'py>(object: &Bound<'py, PyAny>) -> Option<Protocol<'py>> {
    if !PROTOCOL_TYPE.has(object) {
        return None;
    }
    // SAFETY: a live object of a type with this layout, by the check; the caller's Bound keeps it alive.
    Some(unsafe { This::new(object.py(), object.as_ptr()) })
}

/// The reader; None if it has been freed.
fn reader_object(this: Protocol<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    match this.reader.get(this.py()) {
        None => Ok(None),
        Some(reference) => match reference.cast_exact::<PyWeakrefReference>() {
            Ok(reference) => Ok(reference.upgrade()),
            // A program has put an object of another kind here; we call that object as we would call a weak reference.
            Err(_) => Ok(Some(reference.call0()?).filter(|reader| !reader.is_none())),
        },
    }
}

/// True if a drain has no reason to wait or to raise an exception, as far as this protocol knows.
#[inline]
pub(super) fn is_drained(object: &Bound<'_, PyAny>) -> bool {
    protocol_of(object).is_some_and(|this| {
        !this.is_paused.get()
            && !this.is_connection_lost.get()
            && !this.is_customized.get()
            && OWN_METHODS.are_those_of_type(object)
    })
}

/// Feeds the reader natively if possible. Returns None if that is done, or if there is no reader. Otherwise returns the
/// reader, whose `feed_data(data)` the caller must call.
#[inline]
fn feed<'py>(this: Protocol<'py>, data: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(object) = reader_object(this)? else {
        return Ok(None);
    };
    if let Some(reader) = reader::reader_of(&object)
        && reader::has_own_methods(reader)
        && let Ok(bytes) = data.cast_exact::<PyBytes>()
        && ReaderObject::with_access(reader, || reader::feed(reader, bytes))?
    {
        return Ok(None);
    }
    Ok(Some(object))
}

/// Receives data from a native transport: see `register_object_received`.
fn received(calls: &ProtocolCalls, protocol: &Bound<'_, PyAny>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
    // SAFETY: the transport has checked that `data_received` of this type is bound to the protocol.
    let this: Protocol<'_> = unsafe { This::new(protocol.py(), protocol.as_ptr()) };
    match feed(this, data.as_any())? {
        None => Ok(()),
        Some(reader) => calls.in_context(protocol.py(), || {
            reader.call_method1("feed_data", (data,)).map(drop)
        }),
    }
}

fn data_received<'py>(this: Protocol<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(data) = args.get(0)
        && let Some(reader) = feed(this, &data)?
    {
        reader.call_method1("feed_data", (data,))?;
    }
    Ok(none(this.py()))
}

impl Customizable for ProtocolObject {
    const METHODS: &'static [&'static str] = &["_drain_helper"];

    fn is_customized(&self) -> &Cell<bool> {
        &self.is_customized
    }
}

impl NativeType for ProtocolObject {
    const NAME: &'static CStr = c"grapeshot._core._StreamReaderProtocol";
    const DOC: &'static CStr = c"The native part of grapeshot.streams.StreamReaderProtocol.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_BASETYPE;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.event_loop, &self.reader]
    }

    #[inline(always)]
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_access(this, &this.event_loop, body)
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let methods = vec![row!(
        method,
        data_received,
        _StreamReaderProtocol.data_received,
        "Feed data to the reader."
    )];
    register_object_received(&methods[0], received);
    let getters = vec![
        object_row::<ProtocolObject>(c"_loop", offset_of!(ProtocolObject, event_loop)),
        object_row::<ProtocolObject>(c"_stream_reader_wr", offset_of!(ProtocolObject, reader)),
        flag_row::<ProtocolObject>(c"_paused", offset_of!(ProtocolObject, is_paused)),
        flag_row::<ProtocolObject>(
            c"_connection_lost",
            offset_of!(ProtocolObject, is_connection_lost),
        ),
    ];
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<ProtocolObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_new, new_object as *mut c_void),
                slot(ffi::Py_tp_setattro, setattro::<ProtocolObject> as *mut c_void),
                methods_slot(methods),
                getset_slot(getters),
            ],
        )?
    };
    module.add(kind.name()?, &kind)?;
    PROTOCOL_TYPE.set_base(kind);
    Ok(())
}
