//! Exposes fields of native objects as attributes that asyncio's own code reads and sets.
//!
//! All getset rows of one kind share their functions. The closure of a row is the byte offset of its field.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::binding::attributes::set_value;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{bool_object, none};

/// A row for the `ObjectCell` at `offset` in `T`. An empty cell is None in Python.
pub(super) fn object_row<T: NativeType>(name: &'static CStr, offset: usize) -> ffi::PyGetSetDef {
    row(name, offset, get_object::<T>, set_object::<T>)
}

/// A row for the `Cell<bool>` at `offset` in `T`.
pub(super) fn flag_row<T: NativeType>(name: &'static CStr, offset: usize) -> ffi::PyGetSetDef {
    row(name, offset, get_flag::<T>, set_flag::<T>)
}

fn row(name: &'static CStr, offset: usize, get: ffi::getter, set: ffi::setter) -> ffi::PyGetSetDef {
    ffi::PyGetSetDef {
        name: name.as_ptr(),
        get: Some(get),
        set: Some(set),
        doc: c"The same as in asyncio's class.".as_ptr(),
        closure: ptr::without_provenance_mut(offset),
    }
}

/// The field of type `F` at the offset that is stored as the row's closure.
///
/// # Safety
/// `slf` must be a live object whose layout has a field of type `F` at that offset.
unsafe fn field<'a, F>(slf: *mut ffi::PyObject, closure: *mut c_void) -> &'a F {
    // SAFETY: by the caller's contract.
    unsafe { &*slf.byte_add(closure.addr()).cast::<F>() }
}

unsafe extern "C" fn get_object<T: NativeType>(
    slf: *mut ffi::PyObject,
    closure: *mut c_void,
) -> *mut ffi::PyObject {
    // SAFETY: the thread is attached, and CPython passes an object of the type and the closure of the row.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let cell = field::<ObjectCell>(slf, closure);
            let this: This<'_, T> = This::new(py, slf);
            T::with_access(this, || Ok(cell.get(py).unwrap_or_else(|| none(py)).into_ptr()))
        })
    }
}

unsafe extern "C" fn set_object<T: NativeType>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    closure: *mut c_void,
) -> c_int {
    // SAFETY: as in `get_object`.
    unsafe {
        with_value::<T>(slf, value, |this, value| {
            let value = Some(value).filter(|value| !value.is_none());
            drop(field::<ObjectCell>(slf, closure).replace(value, this.py()));
            Ok(())
        })
    }
}

unsafe extern "C" fn get_flag<T: NativeType>(
    slf: *mut ffi::PyObject,
    closure: *mut c_void,
) -> *mut ffi::PyObject {
    // SAFETY: as in `get_object`.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let flag = field::<Cell<bool>>(slf, closure);
            let this: This<'_, T> = This::new(py, slf);
            T::with_access(this, || Ok(bool_object(py, flag.get()).into_ptr()))
        })
    }
}

unsafe extern "C" fn set_flag<T: NativeType>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    closure: *mut c_void,
) -> c_int {
    // SAFETY: as in `get_object`.
    unsafe {
        with_value::<T>(slf, value, |_, value| {
            let is_set = value.is_truthy()?;
            field::<Cell<bool>>(slf, closure).set(is_set);
            Ok(())
        })
    }
}

/// Runs the body of a setter. Raises `AttributeError` if the attribute is to be deleted.
///
/// # Safety
/// `slf` and `value` must be the arguments with which CPython called a setter of a type whose layout is `T`.
pub(super) unsafe fn with_value<T: NativeType>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    body: impl for<'py> FnOnce(This<'py, T>, Bound<'py, PyAny>) -> PyResult<()>,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe {
        set_value(
            slf,
            value,
            "cannot delete attribute",
            |this: This<'_, T>, value| T::with_access(this, || body(this, value)),
        )
    }
}

/// A native type. Each of its objects remembers whether a program has replaced one of `METHODS` on that object.
pub(super) trait Customizable: NativeType {
    /// Names of methods. If one is replaced on an object, native code no longer stands in for that object's methods.
    const METHODS: &'static [&'static str];

    fn is_customized(&self) -> &Cell<bool>;
}

/// The `tp_setattro` of a customizable type.
///
/// # Safety
/// Only CPython may call this, as `tp_setattro` with an object of type `T`.
pub(super) unsafe extern "C" fn setattro<T: Customizable>(
    slf: *mut ffi::PyObject,
    name: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
) -> c_int {
    // SAFETY: by the caller's contract. The thread is attached, the name is alive, and value is null on deletion.
    unsafe {
        let this = &*slf.cast::<T>();
        let name_object = Bound::from_borrowed_ptr(Python::assume_attached(), name);
        if let Ok(name) = name_object.cast::<PyString>()
            && name.to_str().is_ok_and(|name| T::METHODS.contains(&name))
        {
            this.is_customized().set(true);
        }
        ffi::PyObject_GenericSetAttr(slf, name, value)
    }
}
