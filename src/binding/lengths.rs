//! Lengths that programs pass to native functions.

use pyo3::ffi;

/// The number of bytes, if `number` is an int (not of a subclass) above 0 and within range. For anything else the
/// caller leaves the work to Python's own method, which handles 0 and raises the right error for a wrong value.
///
/// # Safety
/// `number` is null or a live object.
#[inline]
pub(crate) unsafe fn ordinary_len(number: *mut ffi::PyObject) -> Option<usize> {
    // SAFETY: the object is alive (contract). Only an exact int is converted, which fails only if the number is out of
    // range.
    unsafe {
        if number.is_null() || ffi::PyLong_CheckExact(number) == 0 {
            return None;
        }
        let len = ffi::PyLong_AsSsize_t(number);
        if len == -1 {
            ffi::PyErr_Clear();
        }
        usize::try_from(len).ok().filter(|len| *len > 0)
    }
}

/// Whether `number` is the int 0 (not of a subclass).
///
/// # Safety
/// `number` is a live object.
#[inline]
pub(crate) unsafe fn is_zero(number: *mut ffi::PyObject) -> bool {
    // SAFETY: the object is alive (contract). The conversion of an exact int fails only if it is out of range.
    unsafe {
        if ffi::PyLong_CheckExact(number) == 0 {
            return false;
        }
        let value = ffi::PyLong_AsSsize_t(number);
        if value == -1 {
            ffi::PyErr_Clear();
        }
        value == 0
    }
}
