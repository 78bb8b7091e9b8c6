//! The attributes that Python code sets on a native object or on its type, and how native code respects them.
//!
//! asyncio's transports are ordinary objects: programs set `transport.write = f`, and tools replace methods on the
//! class. `InstanceDict` is the `__dict__` of a native object. The dict is created when it is first needed. Until then,
//! CPython's specialized method calls are as fast as for objects without a `__dict__`. (On Python 3.11, `prepare`
//! creates the dict together with the object, but calls are just as fast while it is empty.) `OwnMethods` tells whether
//! native code may call a method of such an object directly, or must call it through Python because Python code has
//! replaced it.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use pyo3::exceptions::PyAttributeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use super::names::Kept;
use super::native_type::{NativeType, This};
use super::rows::{Getter, call_getter};
use super::{HAS_LAZY_DICT, errors};

/// The dict of an object's own attributes. CPython reads and creates it through `__dictoffset__`. An
/// `InstanceDict` whose bytes are all zero has no dict.
#[repr(transparent)]
pub(crate) struct InstanceDict(AtomicPtr<ffi::PyObject>);

impl InstanceDict {
    /// Must be called once for a new object. On Python 3.11, it creates the dict at once.
    pub(crate) fn prepare(&self, _: Python<'_>) {
        if HAS_LAZY_DICT {
            return;
        }
        // SAFETY: attached. If memory runs out, the object has no dict yet, which only makes calls slower.
        unsafe {
            let dict = ffi::PyDict_New();
            if dict.is_null() {
                ffi::PyErr_Clear();
            }
            self.0.store(dict, Ordering::Release);
        }
    }

    /// True if the object has no dict, and so no attribute was ever set on it (Python 3.11: if its dict is empty at the
    /// moment).
    #[inline]
    fn is_unused(&self) -> bool {
        let dict = self.0.load(Ordering::Acquire);
        // SAFETY: a dict that the field owns. Versions without a lazy dict have a GIL, so no other thread replaces the
        // dict during the call.
        dict.is_null() || (!HAS_LAZY_DICT && unsafe { ffi::PyDict_Size(dict) } == 0)
    }

    /// The attribute that was set under this name, or None.
    pub(crate) fn get<'py>(&self, py: Python<'py>, name: &CStr) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.is_unused() {
            return Ok(None);
        }
        // SAFETY: a dict that the field owns, or null; from_borrowed adds a reference.
        let dict = unsafe { Bound::from_borrowed_ptr_or_opt(py, self.0.load(Ordering::Acquire)) };
        match dict {
            Some(dict) => dict.cast_into::<PyDict>()?.get_item(key(py, name)),
            None => Ok(None),
        }
    }

    /// Drops the dict, in `tp_clear` and `tp_dealloc`.
    pub(crate) fn clear(&self, py: Python<'_>) {
        let dict = self.0.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: the field owned the dict, and no other code takes it out of the field.
        drop(unsafe { Bound::from_owned_ptr_or_opt(py, dict) });
    }

    /// For `tp_traverse`.
    ///
    /// # Safety
    /// `visit` and `arg` are the arguments that the collector passed to `tp_traverse`.
    pub(crate) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let dict = self.0.load(Ordering::Acquire);
        if dict.is_null() {
            return 0;
        }
        // SAFETY: the caller passes the collector's own function and argument; the field keeps the dict alive.
        unsafe { visit(dict, arg) }
    }
}

/// The `__dict__` row in the getset table of a type with an `InstanceDict`.
pub(crate) fn dict_row() -> ffi::PyGetSetDef {
    ffi::PyGetSetDef {
        name: c"__dict__".as_ptr(),
        get: Some(ffi::PyObject_GenericGetDict),
        set: Some(ffi::PyObject_GenericSetDict),
        doc: c"The attributes that were set on this object.".as_ptr(),
        closure: ptr::null_mut(),
    }
}

fn key<'py>(py: Python<'py>, name: &CStr) -> Bound<'py, PyString> {
    PyString::intern(py, &name.to_string_lossy())
}

/// A type whose objects have an `InstanceDict`.
pub(crate) trait HasInstanceDict: NativeType {
    fn instance_dict(&self) -> &InstanceDict;
}

/// The closure of a `shown` row. It is never freed, like the row.
struct Shown<T> {
    name: &'static CStr,
    function: Getter<T>,
}

/// A row like that of `rows::getter`, for a private attribute that asyncio's transports have. A program that sets the
/// attribute can read the new value back, as in asyncio, but native code does not use that value. Once the program has
/// deleted the attribute, reading it gives the transport's own value again.
pub(crate) fn shown<T: HasInstanceDict>(
    name: &'static CStr,
    function: Getter<T>,
    doc: &'static CStr,
) -> ffi::PyGetSetDef {
    ffi::PyGetSetDef {
        name: name.as_ptr(),
        get: Some(get_shown::<T>),
        set: Some(set_shown::<T>),
        doc: doc.as_ptr(),
        closure: Box::into_raw(Box::new(Shown { name, function })).cast(),
    }
}

unsafe extern "C" fn get_shown<T: HasInstanceDict>(
    slf: *mut ffi::PyObject,
    closure: *mut c_void,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls getters in an attached thread, with an object of the type and the row's closure, which is
    // never freed.
    unsafe {
        let py = Python::assume_attached();
        let shown = &*closure.cast::<Shown<T>>();
        let own = errors::at_boundary(py, Err(()), || {
            let own = This::<T>::new(py, slf).instance_dict().get(py, shown.name)?;
            Ok(Ok(own.map(Bound::into_ptr)))
        });
        match own {
            Ok(Some(own)) => own,
            Ok(None) => call_getter(slf, shown.function),
            Err(()) => ptr::null_mut(),
        }
    }
}

unsafe extern "C" fn set_shown<T: HasInstanceDict>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    closure: *mut c_void,
) -> c_int {
    // SAFETY: CPython calls setters in an attached thread, with an object of the type, which has a dict, and with the
    // row's closure, which is never freed; value is null on deletion.
    unsafe {
        let py = Python::assume_attached();
        let name = (*closure.cast::<Shown<T>>()).name;
        errors::at_boundary(py, -1, || {
            if let Some(value) = Bound::from_borrowed_ptr_or_opt(py, value) {
                let dict =
                    Bound::from_owned_ptr_or_err(py, ffi::PyObject_GenericGetDict(slf, ptr::null_mut()))?;
                dict.cast_into::<PyDict>()?.set_item(key(py, name), value)?;
                return Ok(0);
            }
            if This::<T>::new(py, slf).instance_dict().get(py, name)?.is_none() {
                return Err(PyAttributeError::new_err(name.to_string_lossy().into_owned()));
            }
            let dict = Bound::from_owned_ptr_or_err(py, ffi::PyObject_GenericGetDict(slf, ptr::null_mut()))?;
            dict.cast_into::<PyDict>()?.del_item(key(py, name))?;
            Ok(0)
        })
    }
}

/// The body of a setter whose attribute cannot be deleted: deletion raises `AttributeError` with the text
/// `on_deletion`.
///
/// # Safety
/// These are the arguments that CPython has passed to a setter of a type whose layout is `T`.
pub(crate) unsafe fn set_value<T>(
    slf: *mut ffi::PyObject,
    value: *mut ffi::PyObject,
    on_deletion: &'static str,
    body: impl for<'py> FnOnce(This<'py, T>, Bound<'py, PyAny>) -> PyResult<()>,
) -> c_int {
    // SAFETY: CPython calls setters, attached, with an object of the type; value is null on deletion.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, -1, || {
            let Some(value) = Bound::from_borrowed_ptr_or_opt(py, value) else {
                return Err(PyAttributeError::new_err(on_deletion));
            };
            body(This::new(py, slf), value).map(|()| 0)
        })
    }
}

/// The version tag of a type; 0 if it has no tag at the moment. The tag changes with every change of the type or its
/// bases.
///
/// # Safety
/// `kind` is a live type object.
#[inline]
pub(crate) unsafe fn version_of(kind: *mut ffi::PyTypeObject) -> u32 {
    // SAFETY: by the caller's contract. Free-threaded builds write the tag atomically, and an atomic read costs nothing
    // extra.
    unsafe { AtomicU32::from_ptr(&raw mut (*kind).tp_version_tag).load(Ordering::Acquire) }
}

/// The methods of a native type that native code calls directly.
pub(crate) struct OwnMethods {
    /// Empty before `remember`.
    table: PyOnceLock<Table>,
    /// The type's version tag, if the type had these methods at the last check (`check_again`). 0 if it had others, and
    /// before the first check.
    version: AtomicU32,
}

struct Table {
    kind: Kept,
    methods: Vec<(&'static str, Kept)>,
}

impl OwnMethods {
    pub(crate) const fn new() -> Self {
        Self {
            table: PyOnceLock::new(),
            version: AtomicU32::new(0),
        }
    }

    /// Remembers the methods of a new type. The module's initialization calls this once.
    pub(crate) fn remember(&self, kind: &Bound<'_, PyAny>, names: &[&'static str]) -> PyResult<()> {
        let methods = names
            .iter()
            .map(|name| Ok((*name, Kept::new(&kind.getattr(*name)?))))
            .collect::<PyResult<_>>()?;
        let table = Table {
            kind: Kept::new(kind),
            methods,
        };
        self.table.get_or_init(kind.py(), || table);
        Ok(())
    }

    /// Whether a direct call does the same as a call through Python: `dict` is unused (`is_unused`), and the object's
    /// type still has its own methods.
    #[inline]
    pub(crate) fn are_in_force(&self, object: &Bound<'_, PyAny>, dict: &InstanceDict) -> bool {
        dict.is_unused() && self.are_those_of_type(object)
    }

    /// True if the object's type is the one that was remembered, and still has its own methods.
    #[inline]
    pub(crate) fn are_those_of_type(&self, object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: a live object has a live type.
        let version = unsafe { version_of(object.get_type_ptr()) };
        version != 0 && version == self.version.load(Ordering::Relaxed) || self.check_again(object)
    }

    /// Compares the type's methods with the remembered ones, and stores the type's version if they are the same.
    #[cold]
    fn check_again(&self, object: &Bound<'_, PyAny>) -> bool {
        let py = object.py();
        let Some(table) = self.table.get(py) else {
            return false;
        };
        let kind = table.kind.bind(py);
        if object.get_type_ptr().cast() != kind.as_ptr() {
            return false;
        }
        let are_own = table.methods.iter().all(|(name, own)| {
            kind.getattr(*name)
                .is_ok_and(|found| found.as_ptr() == own.as_ptr())
        });
        // The lookups have given the type a tag, unless CPython has run out of tags.
        let version = if are_own {
            // SAFETY: a kept type object.
            unsafe { version_of(table.kind.as_ptr().cast()) }
        } else {
            0
        };
        self.version.store(version, Ordering::Relaxed);
        are_own
    }
}
