//! Native methods that return coroutines, and that introspection recognizes as coroutine functions.
//!
//! `inspect.iscoroutinefunction` looks for a flag in a code object. It treats any callable with a function's attributes
//! as a function. So if a method of `grapeshot.Loop` or of a stream returns a coroutine, the method is an object that
//! has the attributes of a stub: an `async def` with the method's signature and docstring, whose body never runs.
//! Calling the object calls the native method. Reading the attribute from an instance gives an ordinary bound method. A
//! call like `loop.sock_recv(...)` creates no bound method (`Py_TPFLAGS_METHOD_DESCRIPTOR`), as with CPython's own
//! method descriptors.

use std::ffi::{CStr, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::binding::native_type::{NativeType, This, new_type, slot, with_critical_section};
use crate::binding::object_cell::ObjectCell;
use crate::binding::rows::{members_slot, offset_member};
use crate::binding::{defer_counting, errors};

#[repr(C)]
struct CoroutineMethodObject {
    base: ffi::PyObject,
    vectorcall: Option<ffi::vectorcallfunc>,
    /// The function of the native method.
    native: ffi::PyCFunctionFastWithKeywords,
    /// The type that has the method. It is never freed.
    owner: *mut ffi::PyTypeObject,
    /// The Python function with the method's signature.
    stub: ObjectCell,
}

static METHOD_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

unsafe extern "C" {
    /// Public C API (`Doc/c-api/method.rst`), which pyo3-ffi does not export.
    fn PyMethod_New(function: *mut ffi::PyObject, receiver: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

unsafe extern "C" fn call(
    slf: *mut ffi::PyObject,
    args: *const *mut ffi::PyObject,
    nargsf: usize,
    kwnames: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls this, attached, with an object of the type, and arguments by the calling convention. The
    // native method is called only if the first argument is an instance of `owner`.
    unsafe {
        let count = ffi::PyVectorcall_NARGS(nargsf);
        let method = &*slf.cast::<CoroutineMethodObject>();
        if count > 0 && ffi::PyObject_TypeCheck(*args, method.owner) != 0 {
            let native = method.native;
            return native(*args, args.add(1), count - 1, kwnames);
        }
        refuse(slf)
    }
}

#[cold]
unsafe fn refuse(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: as in `call`.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let name = Bound::from_borrowed_ptr(py, slf).getattr("__qualname__")?;
            let owner = Bound::from_borrowed_ptr(py, (*slf.cast::<CoroutineMethodObject>()).owner.cast());
            Err(PyTypeError::new_err(format!(
                "{name}() needs a {} as its first argument",
                shown_owner(&owner)?
            )))
        })
    }
}

/// The name of the public class that derives from `owner`: `owner`'s name without leading underscores.
fn shown_owner(owner: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(owner
        .getattr("__name__")?
        .to_string()
        .trim_start_matches('_')
        .to_owned())
}

unsafe extern "C" fn bind(
    slf: *mut ffi::PyObject,
    instance: *mut ffi::PyObject,
    _owner: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_descr_get attached; instance is null or None if the attribute was read from the class.
    unsafe {
        if instance.is_null() || instance == ffi::Py_None() {
            ffi::Py_NewRef(slf)
        } else {
            PyMethod_New(slf, instance)
        }
    }
}

/// Attributes that the type does not have, such as `__code__`, come from the stub. So do `__doc__`, `__module__` and
/// `__class__`. The stub's `__class__` makes the object look like a function: a mock binds the functions of the class
/// that it imitates, but not other callables.
unsafe extern "C" fn getattro(slf: *mut ffi::PyObject, name: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_getattro, attached, with an object of the type and a string.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this: This<'_, CoroutineMethodObject> = This::new(py, slf);
            let text = Bound::from_borrowed_ptr(py, name).cast_into::<PyString>()?;
            let is_stubs = matches!(&*text.to_string_lossy(), "__class__" | "__doc__" | "__module__");
            if !is_stubs {
                let own = ffi::PyObject_GenericGetAttr(slf, name);
                if !own.is_null() {
                    return Ok(own);
                }
                if ffi::PyErr_ExceptionMatches(ffi::PyExc_AttributeError) == 0 {
                    return Err(PyErr::fetch(py));
                }
                ffi::PyErr_Clear();
            }
            match this.stub.get(py) {
                Some(stub) => Ok(stub.getattr(text)?.into_ptr()),
                None => Ok(ffi::Py_NewRef(ffi::Py_None())),
            }
        })
    }
}

unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: CPython calls tp_repr, attached, with an object of the type.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let name = Bound::from_borrowed_ptr(py, slf).getattr("__name__")?;
            let owner = Bound::from_borrowed_ptr(py, (*slf.cast::<CoroutineMethodObject>()).owner.cast());
            let owner = shown_owner(&owner)?;
            let text = format!("<coroutine method '{name}' of 'grapeshot.{owner}' objects>");
            Ok(text.into_pyobject(py)?.into_ptr())
        })
    }
}

impl NativeType for CoroutineMethodObject {
    const NAME: &'static CStr = c"grapeshot._core._CoroutineMethod";
    const DOC: &'static CStr = c"A native method that returns a coroutine.";
    /// CPython caches an attribute lookup in the bytecode only if the descriptor's type is immutable.
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION
        | ffi::Py_TPFLAGS_IMMUTABLETYPE
        | ffi::Py_TPFLAGS_METHOD_DESCRIPTOR
        | ffi::Py_TPFLAGS_HAVE_VECTORCALL;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.stub]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        with_critical_section(this, body)
    }
}

/// `_coroutine_method(stub, owner=Loop)`: the native method of `owner` with the stub's name, as a coroutine function.
#[pyfunction(name = "_coroutine_method", signature = (stub, owner=None))]
fn coroutine_method<'py>(
    stub: &Bound<'py, PyAny>,
    owner: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = stub.py();
    let name = stub.getattr("__name__")?.cast_into::<PyString>()?;
    let owner = match owner {
        Some(owner) => owner,
        None => py.import("grapeshot._core")?.getattr("Loop")?,
    };
    let descriptor = owner.getattr(&name)?;
    // SAFETY: attached. A method descriptor points to the row of a method table, which lives forever. Both structures
    // are part of the C API.
    unsafe {
        if ffi::Py_TYPE(descriptor.as_ptr()) != &raw mut ffi::PyMethodDescr_Type {
            return Err(PyTypeError::new_err(format!("{name} is not a native method")));
        }
        let row = (*descriptor.as_ptr().cast::<ffi::PyMethodDescrObject>()).d_method;
        if (*row).ml_flags != ffi::METH_FASTCALL | ffi::METH_KEYWORDS {
            return Err(PyTypeError::new_err(format!(
                "{name} has an unsupported calling convention"
            )));
        }
        let made = ffi::PyType_GenericAlloc(METHOD_TYPE.load(Ordering::Acquire), 0);
        let made = Bound::from_owned_ptr_or_err(py, made)?;
        let object = made.as_ptr().cast::<CoroutineMethodObject>();
        (*object).vectorcall = Some(call);
        (*object).native = (*row).ml_meth.PyCFunctionFastWithKeywords;
        // A type with native methods is made once and never freed.
        (*object).owner = (*descriptor.as_ptr().cast::<ffi::PyMethodDescrObject>())
            .d_common
            .d_type;
        (*object).stub.set(stub.clone());
        defer_counting(&made);
        Ok(made)
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let vectorcall = offset_member(
        c"__vectorcalloffset__",
        offset_of!(CoroutineMethodObject, vectorcall),
    );
    // SAFETY: the functions were written for this layout, and the tables are never freed.
    let kind = unsafe {
        new_type::<CoroutineMethodObject>(
            module,
            None,
            &[
                slot(ffi::Py_tp_call, ffi::PyVectorcall_Call as *mut c_void),
                slot(ffi::Py_tp_descr_get, bind as *mut c_void),
                slot(ffi::Py_tp_getattro, getattro as *mut c_void),
                slot(ffi::Py_tp_repr, repr as *mut c_void),
                members_slot(vec![vectorcall]),
            ],
        )?
    };
    METHOD_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    module.add_function(wrap_pyfunction!(coroutine_method, module)?)
}
