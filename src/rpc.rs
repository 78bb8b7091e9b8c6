//! The native part of `grapeshot.rpc`: decoding a msgpack packet. A packet that an attacker has crafted to be slow to
//! decode is refused. In builds with a GIL, the garbage collector is paused while a packet is decoded.

use grapeshot_core::msgpack::{self, Fault};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::binding::HAS_GIL;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(decode_msgpack, module)?)
}

/// `_decode_msgpack(decode, packet)`: calls `decode(packet)`. `decode` must be a msgpack decoder that runs no Python
/// code.
///
/// Raises `ValueError` without calling `decode` if
///
/// - the arrays and maps that are map keys, and the values inside them, are more than 3,000 in total;
/// - more than 20,000 floats and extension values (such as dates) are map keys;
/// - integers that are map keys collide so often that a dict would take very long;
/// - a map has more than 1,000 integers and also more than 1,000 other values as keys; or
/// - arrays and maps are nested more than 1,024 deep.
///
/// Decoding creates no garbage, but it creates enough objects to trigger garbage collections, and each collection
/// traverses everything that has been decoded so far: 1 MiB of empty lists takes 80 ms to decode without collections
/// and 300 ms with them (`CPython` 3.11). So with a GIL, the collector is disabled during the call; no other thread
/// can run in that time and notice. Without a GIL, other threads could notice, so there the collector stays on.
#[pyfunction(name = "_decode_msgpack")]
fn decode_msgpack<'py>(
    decode: &Bound<'py, PyAny>,
    packet: &Bound<'py, PyBytes>,
) -> PyResult<Bound<'py, PyAny>> {
    match msgpack::find_fault(packet.as_bytes()) {
        None => {}
        Some(Fault::ContainersAsKeys) => {
            return Err(PyValueError::new_err(
                "arrays used as map keys contain more than 3000 values",
            ));
        }
        Some(Fault::NumbersAsKeys) => {
            return Err(PyValueError::new_err(
                "too many numbers or dates are used as map keys, or they collide too often",
            ));
        }
        Some(Fault::TooDeep) => return Err(PyValueError::new_err("arrays and maps are nested too deeply")),
    }
    if !HAS_GIL {
        return decode.call1((packet,));
    }
    // SAFETY: attached.
    let was_enabled = unsafe { ffi::PyGC_Disable() };
    let result = decode.call1((packet,));
    if was_enabled != 0 {
        // SAFETY: attached.
        unsafe { ffi::PyGC_Enable() };
    }
    result
}
