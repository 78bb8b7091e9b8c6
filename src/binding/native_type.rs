//! Python types made with `PyType_FromModuleAndSpec` and METH_FASTCALL methods instead of `#[pyclass]`, which costs too
//! much for methods that run once per callback or per packet (`call_soon` takes 150 ns with it and 92 ns without).
//!
//! `NativeType` describes the objects of a type, and `new_type` creates the type object. The methods of the type are
//! rows of a table (`rows`). Each row is made from a safe Rust function, which gets two arguments: a `This` (the object
//! whose method was called) and an `Args` (the arguments of the call).

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section;
use pyo3::types::{PyTuple, PyType};

use super::deallocation::{deallocate, drop_and_free};
use super::object_cell::ObjectCell;
use super::{HAS_GIL, errors};

/// The receiver of a native method: the object, and the proof that the thread is attached.
pub(crate) struct This<'py, T> {
    py: Python<'py>,
    object: *mut ffi::PyObject,
    layout: PhantomData<&'py T>,
}

impl<T> Clone for This<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for This<'_, T> {}

impl<'py, T> This<'py, T> {
    /// # Safety
    /// `object` has the layout `T` and stays alive for as long as the result is used.
    #[inline]
    pub(crate) unsafe fn new(py: Python<'py>, object: *mut ffi::PyObject) -> Self {
        Self {
            py,
            object,
            layout: PhantomData,
        }
    }

    #[inline]
    pub(crate) fn py(self) -> Python<'py> {
        self.py
    }

    #[inline]
    pub(crate) fn as_ptr(self) -> *mut ffi::PyObject {
        self.object
    }

    /// A new reference to the object.
    #[inline]
    pub(crate) fn to_bound(self) -> Bound<'py, PyAny> {
        // SAFETY: the object is alive (contract of `new`); from_borrowed adds a reference.
        unsafe { Bound::from_borrowed_ptr(self.py, self.object) }
    }
}

impl<T> Deref for This<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the contract of `new` guarantees layout and lifetime. All fields that change are cells, so shared
        // references are enough, and no exclusive reference exists during a call into Python.
        unsafe { &*self.object.cast::<T>() }
    }
}

/// Describes the objects of a native type.
pub(crate) trait NativeType: Sized {
    /// Fully qualified, e.g. `grapeshot._core.Handle`.
    const NAME: &'static CStr;
    const DOC: &'static CStr;
    const FLAGS: u64;
    /// False for a type whose objects hold no references that the collector has to see, and so have neither `cells` nor
    /// a `traverse_rest`. The collector does not track them, so `gc.get_objects()` cannot reveal them to other code.
    const IS_COLLECTED: bool = true;
    /// Frees an unreferenced object. `tp_dealloc` calls it, at once or a little later (see `deallocation`). The default
    /// calls `clear` and then drops all fields. With the default, an object must be a valid `T` from its allocation on,
    /// and `clear` must empty all of its cells.
    const DEALLOC: ffi::destructor = drop_and_free::<Self>;
    /// True if the object refers to no object whose deallocation could lead to further deallocations. Then
    /// deallocations do not nest any deeper.
    #[inline]
    fn is_empty(&self) -> bool {
        false
    }
    /// The cells with the object's references, except those that `traverse_rest` reports.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        []
    }
    /// Reports the references that are not in cells, except the reference to the type.
    ///
    /// # Safety
    /// Only the collector calls this. Nothing in it may run Python code.
    unsafe fn traverse_rest(&self, _visit: ffi::visitproc, _arg: *mut c_void) -> c_int {
        0
    }
    /// Reports every reference except the one to the type, for `tp_traverse`.
    ///
    /// # Safety
    /// As for `traverse_rest`.
    unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        // SAFETY: passed on.
        unsafe {
            let result = traverse_cells(self.cells(), visit, arg);
            if result != 0 {
                return result;
            }
            self.traverse_rest(visit, arg)
        }
    }
    /// Drops the references that can be part of a cycle. The default empties all cells.
    fn clear(this: This<'_, Self>) {
        Self::empty_cells(this);
    }
    /// Drops the contents of all cells, for `clear` and `DEALLOC`.
    #[inline]
    fn empty_cells(this: This<'_, Self>) {
        for cell in this.cells() {
            drop(cell.take(this.py()));
        }
    }

    /// Runs `body`, which touches the object's cells, while no other thread touches them. With a GIL, there is nothing
    /// to do. A free-threaded build admits only the thread that runs the object's loop, or one thread at a time
    /// while no thread runs it (`LoopObject::with_loop_access`). For an object that threads share, it admits one thread
    /// at a time (`with_critical_section`).
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R>;
}

/// Reports the references in `cells`. If `visit` returns a number other than 0, stops and returns that number.
///
/// # Safety
/// As for `NativeType::traverse_rest`.
pub(crate) unsafe fn traverse_cells<'a>(
    cells: impl IntoIterator<Item = &'a ObjectCell>,
    visit: ffi::visitproc,
    arg: *mut c_void,
) -> c_int {
    for cell in cells {
        // SAFETY: passed on.
        let result = unsafe { cell.traverse(visit, arg) };
        if result != 0 {
            return result;
        }
    }
    0
}

/// `NativeType::with_access` for an object that any thread may use, but only one thread at a time. While `body` waits
/// for another thread, other threads may use the object.
#[inline]
pub(crate) fn with_critical_section<T, R>(this: This<'_, T>, body: impl FnOnce() -> R) -> R {
    if HAS_GIL {
        body()
    } else {
        // A borrowed reference. The caller keeps the object alive, and if this took a reference of its own, threads
        // that share the object would contend for its count.
        // SAFETY: the object lives while `this` exists (contract of `This::new`), and the reference is never dropped.
        let object = ManuallyDrop::new(unsafe { Bound::from_owned_ptr(this.py, this.object) });
        critical_section::with_critical_section(&object, body)
    }
}

unsafe extern "C" fn traverse<T: NativeType>(
    slf: *mut ffi::PyObject,
    visit: ffi::visitproc,
    arg: *mut c_void,
) -> c_int {
    // SAFETY: the collector passes a live object of this type. An instance of a heap type reports its type.
    unsafe {
        let result = visit(ffi::Py_TYPE(slf).cast(), arg);
        if result != 0 {
            return result;
        }
        (*slf.cast::<T>()).traverse(visit, arg)
    }
}

unsafe extern "C" fn clear<T: NativeType>(slf: *mut ffi::PyObject) -> c_int {
    // SAFETY: the collector runs attached and passes a live object of this type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, 0, || {
            T::clear(This::new(py, slf));
            Ok(0)
        })
    }
}

/// One entry of a type spec.
pub(crate) fn slot(id: c_int, value: *mut c_void) -> ffi::PyType_Slot {
    ffi::PyType_Slot {
        slot: id,
        pfunc: value,
    }
}

/// Creates the heap type of `T`. `tp_traverse`, `tp_clear` and `tp_dealloc` come from its `NativeType`, and `slots`
/// adds other slots.
///
/// # Safety
/// `T::DEALLOC` and the slots are right for objects of layout `T`; the tables that they point to live forever.
pub(crate) unsafe fn new_type<'py, T: NativeType>(
    module: &Bound<'py, PyModule>,
    bases: Option<&Bound<'py, PyTuple>>,
    slots: &[ffi::PyType_Slot],
) -> PyResult<Bound<'py, PyType>> {
    let py = module.py();
    let mut all = vec![
        slot(ffi::Py_tp_doc, T::DOC.as_ptr().cast_mut().cast()),
        slot(ffi::Py_tp_dealloc, deallocate::<T> as *mut c_void),
    ];
    if T::IS_COLLECTED {
        all.push(slot(ffi::Py_tp_traverse, traverse::<T> as *mut c_void));
        all.push(slot(ffi::Py_tp_clear, clear::<T> as *mut c_void));
    }
    all.extend(slots.iter().map(|entry| slot(entry.slot, entry.pfunc)));
    all.push(slot(0, ptr::null_mut()));
    let collected = if T::IS_COLLECTED {
        ffi::Py_TPFLAGS_HAVE_GC
    } else {
        0
    };
    let mut spec = ffi::PyType_Spec {
        name: T::NAME.as_ptr(),
        basicsize: size_of::<T>() as c_int,
        itemsize: 0,
        flags: (T::FLAGS | u64::from(ffi::Py_TPFLAGS_DEFAULT as u32) | collected) as u32,
        slots: all.as_mut_ptr(),
    };
    // SAFETY: the spec and its slots outlive the call, which copies them. The caller guarantees that their contents are
    // right.
    unsafe {
        let made = ffi::PyType_FromModuleAndSpec(
            module.as_ptr(),
            &raw mut spec,
            bases.map_or(ptr::null_mut(), pyo3::Bound::as_ptr),
        );
        Ok(Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyType>())
    }
}

/// The body of `tp_repr`: the text that `describe` returns, or a text like that of `object.__repr__` if this thread may
/// not use the object now.
///
/// # Safety
/// Only CPython may call this, attached, with an object that has the layout `T`.
pub(crate) unsafe fn represent<T: NativeType>(
    slf: *mut ffi::PyObject,
    describe: impl FnOnce(This<'_, T>) -> PyResult<String>,
) -> *mut ffi::PyObject {
    // SAFETY: by the contract.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::<T>::new(py, slf);
            let mut described = None;
            let access = T::with_access(this, || {
                described = Some(describe(this));
                Ok(())
            });
            let text = if let Some(text) = described {
                text?
            } else {
                // This thread may not use the object.
                drop(access);
                format!("<{} object at {slf:p}>", T::NAME.to_string_lossy())
            };
            Ok(super::new_objects::string(py, &text)?.into_any().into_ptr())
        })
    }
}

/// Allocates the object in the `tp_new` of a type that takes no arguments. The object is zeroed. Raises TypeError if
/// there are arguments, unless `kind` is a subclass with an `__init__` of its own, which may take some.
///
/// # Safety
/// Attached, with the three arguments of `tp_new`.
pub(crate) unsafe fn alloc_without_arguments(
    py: Python<'_>,
    kind: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> PyResult<Bound<'_, PyAny>> {
    let address = |init: Option<ffi::initproc>| init.map(|init| init as usize);
    // SAFETY: by the contract, these are a type, a tuple, and a dict or null. The allocation returns a new reference,
    // or null with an exception set.
    unsafe {
        let is_empty =
            ffi::PyTuple_GET_SIZE(args) == 0 && (kwargs.is_null() || ffi::PyDict_Size(kwargs) == 0);
        if !is_empty && address((*kind).tp_init) == address(ffi::PyBaseObject_Type.tp_init) {
            let kind = Bound::from_borrowed_ptr(py, kind.cast()).cast_into_unchecked::<PyType>();
            return Err(PyTypeError::new_err(format!(
                "{}() takes no arguments",
                kind.name()?
            )));
        }
        Bound::from_owned_ptr_or_err(py, ffi::PyType_GenericAlloc(kind, 0))
    }
}
