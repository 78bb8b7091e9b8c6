//! What `grapeshot.rpc` has natively: packets that a peer has made to hurt are refused, and large ones are decoded
//! without a garbage collection in between.

use grapeshot_core::msgpack::{self, Fault};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::binding::HAS_GIL;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(decode_msgpack, module)?)
}

/// `_decode_msgpack(decode, packet)`: calls a decoder of msgpack that runs no Python code with a packet.
///
/// Raises `ValueError` without calling it if lists that are keys have more than 3,000 values, if there are more than 20,000
/// floats or dates as keys, if integers are keys that a dict needs very long for, or if values are nested too deep.
///
/// Decoding makes no garbage, but each of the collections that it would cause looks at all that it has made so far:
/// 1 MiB of empty lists takes 80 ms without them and 300 ms with them (`CPython` 3.11). So there are none meanwhile. With a
/// GIL no other thread can run, and see that; without one they could, and this is left out.
#[pyfunction(name = "_decode_msgpack")]
fn decode_msgpack<'py>(
    decode: &Bound<'py, PyAny>,
    packet: &Bound<'py, PyBytes>,
) -> PyResult<Bound<'py, PyAny>> {
    match msgpack::find_fault(packet.as_bytes()) {
        None => {}
        Some(Fault::ContainersAsKeys) => {
            return Err(PyValueError::new_err(
                "the tuples that are keys of dicts have more than 3000 values",
            ));
        }
        Some(Fault::NumbersAsKeys) => {
            return Err(PyValueError::new_err(
                "a dict with such numbers or dates as keys would take very long",
            ));
        }
        Some(Fault::TooDeep) => return Err(PyValueError::new_err("lists and dicts are nested too deep")),
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
