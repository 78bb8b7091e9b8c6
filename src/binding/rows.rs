//! Tables of methods and attributes: `row!` and `getter` make their rows from safe Rust functions.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use super::args::Args;
use super::errors;
use super::native_type::{NativeType, This, slot};
use super::object_result::ObjectResult;

/// The row of a method, or of a function of a module:
///
/// ```text
///   row!(how it is called, function, declaration in `_core.pyi`, docstring)
///
///   row!(method, close, StreamTransport.close, "Close the transport.")
///   row!(threadsafe_method, stop, Loop.stop, "Leave run_forever().")
///   row!(function, end_thread, _coro_end_thread, "Refuse to make more coros in this thread.")
///   row!(function, spawn, _coro_spawn as spawn, "Start a coro.")
///   row!(method(call_in_steps), receive, channel.receive, "Wait for a value.")
///   row!(method, <const R: bool> acquire::<R>, lock.acquire, "Acquire the lock.")
///   row!(method, get_loop, "get_loop()", "The loop that the wait belongs to.")
/// ```
///
/// - `method`: the function is a `fn(This<T>, Args) -> ObjectResult`. It is called only if this thread may use the
///   object (`NativeType::with_access`). `T` must be the layout of the objects of the type that gets the row.
/// - `threadsafe_method`: the same, for a method that any thread may call at any time. Its function may touch only
///   atomics, the inbox, values that never change, and `ObjectCell`s.
/// - `function`: the function is a `fn(Python, Args) -> ObjectResult`, and the row is for a module.
/// - `method(call)`, `function(call)`: the row calls `call(object, Args, function)`, which decides how to call the
///   function. This is for functions that wait, and for all methods of the native socket type (`coro/io`).
///
/// The declaration gives the row its name and its signature, so a row does not compile unless the stub has the
/// declaration. `as` is for a function whose name in the stub is not its name in `help()`. The stub cannot declare a
/// method whose type the module does not export. In the row of such a method, a string literal with the signature takes
/// the place of the declaration. If several types share a row, the row names the declaration of one of these types.
/// Stubtest compares the signature of the method with the stub for every one of the types.
///
/// The function gets all required arguments, and gets them by position (`Args::pass_to`). With `method(call)` and
/// `function(call)`, this depends on `call`.
///
/// A row inside a generic function must declare the generic parameter again: the function that CPython calls is then an
/// inner function, which cannot use the generic parameters of the outer one.
macro_rules! row {
    (method, $($row:tt)+) => {
        $crate::binding::rows::row!(@ Object, $crate::binding::rows::call_method, $($row)+)
    };
    (threadsafe_method, $($row:tt)+) => {
        $crate::binding::rows::row!(@ Object, $crate::binding::rows::call_threadsafe_method, $($row)+)
    };
    (function, $($row:tt)+) => {
        $crate::binding::rows::row!(@ Module, $crate::binding::rows::call_function, $($row)+)
    };
    (method($call:path), $($row:tt)+) => {
        $crate::binding::rows::row!(@ Object, $call, $($row)+)
    };
    (function($call:path), $($row:tt)+) => {
        $crate::binding::rows::row!(@ Module, $call, $($row)+)
    };
    (@ $receiver:ident, $call:path, <const $name:ident: $kind:ident> $($row:tt)+) => {
        $crate::binding::rows::row!(@@ $receiver, $call, [const $name: $kind], [::<$name>], $($row)+)
    };
    (@ $receiver:ident, $call:path, <$name:ident: $bound:ident> $($row:tt)+) => {
        $crate::binding::rows::row!(@@ $receiver, $call, [$name: $bound], [::<$name>], $($row)+)
    };
    (@ $receiver:ident, $call:path, $($row:tt)+) => {
        $crate::binding::rows::row!(@@ $receiver, $call, [], [], $($row)+)
    };
    (
        @@ $receiver:ident, $call:path, [$($declared:tt)*], [$($given:tt)*],
        $function:expr, $stub:tt $(. $method:ident)? $(as $shown:ident)?, $doc:literal
    ) => {{
        static SIGNATURE: $crate::binding::signature::Signature =
            $crate::binding::rows::signature!($stub $(. $method)? $(as $shown)?);
        unsafe extern "C" fn raw<$($declared)*>(
            object: *mut pyo3::ffi::PyObject,
            values: *const *mut pyo3::ffi::PyObject,
            nargs: pyo3::ffi::Py_ssize_t,
            kwnames: *mut pyo3::ffi::PyObject,
        ) -> *mut pyo3::ffi::PyObject {
            let function = $function;
            // SAFETY: only CPython calls this, attached, through the table of the type or module that got the row, and
            // keeps the object and the arguments alive until this returns.
            unsafe {
                let py = pyo3::Python::assume_attached();
                let args = $crate::binding::args::Args::new(py, values, nargs, kwnames, &SIGNATURE);
                $call(object, args, function)
            }
        }
        SIGNATURE.row(raw $($given)*, $crate::binding::signature::Receiver::$receiver, $doc)
    }};
}
pub(crate) use row;

/// The signature of a row, from the third argument of `row!`. The build script sets an environment variable for each
/// declaration in the stub.
macro_rules! signature {
    ($text:literal) => {
        $crate::binding::signature::Signature::new($text)
    };
    ($name:ident $(. $method:ident)?) => {
        $crate::binding::signature::Signature::new(env!(
            concat!("_core.", stringify!($name) $(, ".", stringify!($method))?),
            concat!("_core.pyi does not declare `", stringify!($name) $(, ".", stringify!($method))?, "`"),
        ))
    };
    ($name:ident as $shown:ident) => {
        $crate::binding::rows::signature!($name).shown_as(stringify!($shown))
    };
}
pub(crate) use signature;

/// Calls the function of a `method` row.
///
/// # Safety
/// CPython has called a method of `object` with these arguments, and `T` is the layout of `object`.
#[inline(always)]
pub(crate) unsafe fn call_method<T: NativeType>(
    object: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    function: for<'a, 'py> fn(This<'py, T>, Args<'a, 'py>) -> ObjectResult<'py>,
) -> *mut ffi::PyObject {
    // SAFETY: by the contract; the caller of the method keeps the object alive.
    let this = unsafe { This::new(args.py(), object) };
    errors::at_boundary(args.py(), ptr::null_mut(), || {
        T::with_access(this, || args.pass_to(this, function).map(Bound::into_ptr))
    })
}

/// Calls the function of a `threadsafe_method` row.
///
/// # Safety
/// As for `call_method`.
#[inline(always)]
pub(crate) unsafe fn call_threadsafe_method<T: NativeType>(
    object: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    function: for<'a, 'py> fn(This<'py, T>, Args<'a, 'py>) -> ObjectResult<'py>,
) -> *mut ffi::PyObject {
    // SAFETY: as in `call_method`.
    let this = unsafe { This::new(args.py(), object) };
    errors::at_boundary(args.py(), ptr::null_mut(), || {
        args.pass_to(this, function).map(Bound::into_ptr)
    })
}

/// Calls the function of a `function` row.
#[inline(always)]
pub(crate) fn call_function(
    _: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    function: for<'a, 'py> fn(Python<'py>, Args<'a, 'py>) -> ObjectResult<'py>,
) -> *mut ffi::PyObject {
    errors::at_boundary(args.py(), ptr::null_mut(), || {
        args.pass_to(args.py(), function).map(Bound::into_ptr)
    })
}

/// A method row that makes `kind[argument]` a `types.GenericAlias`, for annotations.
pub(crate) fn class_getitem() -> ffi::PyMethodDef {
    ffi::PyMethodDef {
        ml_name: c"__class_getitem__".as_ptr(),
        ml_meth: ffi::PyMethodDefPointer {
            PyCFunction: ffi::Py_GenericAlias,
        },
        ml_flags: ffi::METH_O | ffi::METH_CLASS,
        ml_doc: c"__class_getitem__($type, item, /)\n--\n\nFor annotations.".as_ptr(),
    }
}

/// The function of a getset row.
pub(crate) type Getter<T> = for<'py> fn(This<'py, T>) -> ObjectResult<'py>;

/// A row of a getset table. The function is called only if this thread may use the object (`NativeType::with_access`).
/// `T` must be the layout of the objects of the type that gets the row.
pub(crate) fn getter<T: NativeType>(
    name: &'static CStr,
    function: Getter<T>,
    doc: &'static CStr,
) -> ffi::PyGetSetDef {
    getter_row(name, get::<T>, function, doc)
}

/// `getter` for an attribute that any thread may read at any time. Its function may touch only atomics, values that
/// never change, and `ObjectCell`s.
pub(crate) fn threadsafe_getter<T: NativeType>(
    name: &'static CStr,
    function: Getter<T>,
    doc: &'static CStr,
) -> ffi::PyGetSetDef {
    getter_row(name, get_threadsafe::<T>, function, doc)
}

/// Makes a row whose closure is `function`. CPython passes the closure to `get`.
fn getter_row<T>(
    name: &'static CStr,
    get: ffi::getter,
    function: Getter<T>,
    doc: &'static CStr,
) -> ffi::PyGetSetDef {
    ffi::PyGetSetDef {
        name: name.as_ptr(),
        get: Some(get),
        set: None,
        doc: doc.as_ptr(),
        closure: function as *mut c_void,
    }
}

unsafe extern "C" fn get<T: NativeType>(
    object: *mut ffi::PyObject,
    function: *mut c_void,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls getters attached, with a live object of the type that got the row, and with the row's
    // closure, which is a `Getter<T>` (see `getter_row`).
    unsafe { call_getter(object, std::mem::transmute::<*mut c_void, Getter<T>>(function)) }
}

unsafe extern "C" fn get_threadsafe<T: NativeType>(
    object: *mut ffi::PyObject,
    function: *mut c_void,
) -> *mut ffi::PyObject {
    // SAFETY: as in `get`.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, Getter<T>>(function);
        let this: This<'_, T> = This::new(Python::assume_attached(), object);
        errors::at_boundary(this.py(), ptr::null_mut(), || function(this).map(Bound::into_ptr))
    }
}

/// Calls the function of a getter.
///
/// # Safety
/// CPython has called a getter of `object`, and `T` is the layout of `object`.
pub(crate) unsafe fn call_getter<T: NativeType>(
    object: *mut ffi::PyObject,
    function: Getter<T>,
) -> *mut ffi::PyObject {
    // SAFETY: by the contract; CPython calls getters attached.
    let this: This<'_, T> = unsafe { This::new(Python::assume_attached(), object) };
    errors::at_boundary(this.py(), ptr::null_mut(), || {
        T::with_access(this, || function(this).map(Bound::into_ptr))
    })
}

/// A method or getset table that lives forever, with the zero row that ends it.
pub(crate) fn leak_table<R>(rows: Vec<R>, end: R) -> *mut c_void {
    let mut rows = rows;
    rows.push(end);
    Box::leak(rows.into_boxed_slice()).as_mut_ptr().cast()
}

/// A member of a type: a field of its objects, `offset` bytes from their start, that Python code can use as an
/// attribute.
pub(crate) fn member(name: &'static CStr, type_code: c_int, offset: usize, flags: c_int) -> ffi::PyMemberDef {
    ffi::PyMemberDef {
        name: name.as_ptr(),
        type_code,
        offset: offset as ffi::Py_ssize_t,
        flags,
        doc: ptr::null(),
    }
}

/// The member that tells `CPython` the offset of a pointer in the objects of a type: the pointer to their weak
/// references (`__weaklistoffset__`), to their attributes (`__dictoffset__`) or to the function that a call runs
/// (`__vectorcalloffset__`).
pub(crate) fn offset_member(name: &'static CStr, offset: usize) -> ffi::PyMemberDef {
    member(name, ffi::Py_T_PYSSIZET, offset, ffi::Py_READONLY)
}

/// The slot of a type's members; the table lives forever.
pub(crate) fn members_slot(rows: Vec<ffi::PyMemberDef>) -> ffi::PyType_Slot {
    slot(ffi::Py_tp_members, leak_table(rows, ffi::PyMemberDef::default()))
}

/// The slot of a type's methods; the table lives forever.
pub(crate) fn methods_slot(rows: Vec<ffi::PyMethodDef>) -> ffi::PyType_Slot {
    slot(ffi::Py_tp_methods, leak_table(rows, ffi::PyMethodDef::zeroed()))
}

/// The slot of a type's getters; the table lives forever.
pub(crate) fn getset_slot(rows: Vec<ffi::PyGetSetDef>) -> ffi::PyType_Slot {
    slot(ffi::Py_tp_getset, leak_table(rows, ffi::PyGetSetDef::default()))
}

/// Adds the native methods of `base` to its subclass `kind` too, because CPython specializes only calls of methods that
/// it finds on the exact type of the object. A method is not added if `kind`, or a class between the two, replaces it.
pub(crate) fn bind_methods(
    kind: &Bound<'_, PyType>,
    base: &Bound<'_, PyAny>,
    methods: Vec<ffi::PyMethodDef>,
) -> PyResult<()> {
    let mut missing = Vec::with_capacity(methods.len());
    for method in methods {
        // SAFETY: the names in method tables are C strings that live forever.
        let name = unsafe { CStr::from_ptr(method.ml_name) }.to_string_lossy();
        if kind.getattr(name.as_ref())?.is(&base.getattr(name.as_ref())?) {
            missing.push(method);
        }
    }
    extend_type(kind.as_any(), missing)
}

/// Adds native methods to a heap type. The caller guarantees that the type's objects have the layout that the methods
/// expect. The type is one that a lower layer has created, or a subclass of such a type.
pub(crate) fn extend_type(kind: &Bound<'_, PyAny>, methods: Vec<ffi::PyMethodDef>) -> PyResult<()> {
    let py = kind.py();
    for definition in methods {
        let definition = Box::leak(Box::new(definition));
        // SAFETY: the definition is leaked; the caller guarantees that the type is right.
        let (name, descriptor) = unsafe {
            let name = CStr::from_ptr(definition.ml_name);
            let made = ffi::PyDescr_NewMethod(kind.as_ptr().cast(), definition);
            (name, Bound::from_owned_ptr_or_err(py, made)?)
        };
        kind.setattr(name.to_string_lossy().as_ref(), descriptor)?;
    }
    Ok(())
}

/// Adds a function to the module, as the attribute `prefix` + the row's name. `owner` is the function's `__module__`.
pub(crate) fn add_function(
    module: &Bound<'_, PyModule>,
    definition: ffi::PyMethodDef,
    prefix: &str,
    owner: &CStr,
) -> PyResult<()> {
    let py = module.py();
    let owner = PyString::new(py, &owner.to_string_lossy());
    let definition = Box::leak(Box::new(definition));
    // SAFETY: the definition is leaked, and its name is a C string that lives forever.
    let (name, made) = unsafe {
        let name = CStr::from_ptr(definition.ml_name);
        let made = ffi::PyCFunction_NewEx(definition, ptr::null_mut(), owner.as_ptr());
        (name, Bound::from_owned_ptr_or_err(py, made)?)
    };
    module.add(format!("{prefix}{}", name.to_string_lossy()).as_str(), made)
}
