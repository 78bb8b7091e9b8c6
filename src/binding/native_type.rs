//! Python types made with `PyType_FromSpec` and METH_FASTCALL methods instead of `#[pyclass]`, which costs too much for
//! methods that run once per callback or per packet (`call_soon` takes 150 ns with it and 92 ns without).
//!
//! `NativeType` describes the objects of a type, and `new_type` creates the type object. `method!` and `getter!` make
//! rows of its tables from safe Rust functions. Such a function gets a `This`, the object whose method was called, and
//! an `Args` with the arguments.

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section;
use pyo3::types::{PyBool, PyNone, PyString, PyTuple, PyType};

use super::deallocation::{deallocate, drop_and_free};
use super::object_cell::ObjectCell;
use super::signature::Signature;
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

/// The arguments of one `METH_FASTCALL|METH_KEYWORDS` call, borrowed from the caller.
#[derive(Clone, Copy)]
pub(crate) struct Args<'a, 'py> {
    py: Python<'py>,
    values: &'a [*mut ffi::PyObject],
    positional: usize,
    kwnames: *mut ffi::PyObject,
    signature: &'static Signature,
}

impl<'a, 'py> Args<'a, 'py> {
    #[inline]
    pub(crate) fn py(&self) -> Python<'py> {
        self.py
    }

    /// # Safety
    /// The four values are the arguments of one `METH_FASTCALL|METH_KEYWORDS` call.
    #[inline]
    pub(crate) unsafe fn new(
        py: Python<'py>,
        args: *const *mut ffi::PyObject,
        nargs: ffi::Py_ssize_t,
        kwnames: *mut ffi::PyObject,
        signature: &'static Signature,
    ) -> Self {
        let positional = nargs as usize;
        let keywords = if kwnames.is_null() {
            0
        } else {
            // SAFETY: kwnames is a tuple by the calling convention.
            unsafe { ffi::PyTuple_GET_SIZE(kwnames) as usize }
        };
        let total = positional + keywords;
        let values = if total == 0 {
            &[][..]
        } else {
            // SAFETY: by the calling convention the array holds the positional values, followed by the keyword values.
            unsafe { std::slice::from_raw_parts(args, total) }
        };
        Self {
            py,
            values,
            positional,
            kwnames,
            signature,
        }
    }

    /// The positional arguments as borrowed pointers.
    #[inline]
    pub(crate) fn positional(&self) -> &'a [*mut ffi::PyObject] {
        &self.values[..self.positional]
    }

    /// All values as borrowed pointers: first the positional ones, then the keyword ones.
    pub(crate) fn values(&self) -> &'a [*mut ffi::PyObject] {
        self.values
    }

    /// The tuple of keyword names, null if there is none.
    pub(crate) fn kwnames(&self) -> *mut ffi::PyObject {
        self.kwnames
    }

    /// Positional argument `index` as a new reference.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<Bound<'py, PyAny>> {
        let object = *self.positional().get(index)?;
        // SAFETY: arguments are alive for the length of the call; from_borrowed adds a reference.
        Some(unsafe { Bound::from_borrowed_ptr(self.py, object) })
    }

    /// The name of the function that was called.
    pub(crate) fn name(&self) -> &'static str {
        self.signature.name()
    }

    /// True if the call gives all required parameters by position, and, if the signature has no other parameters,
    /// nothing else.
    #[inline(always)]
    fn fits_signature(&self) -> bool {
        if self.signature.is_fixed() {
            self.positional == self.signature.required() && self.kwnames.is_null()
        } else {
            self.positional >= self.signature.required()
        }
    }

    /// Calls `body` with `receiver` and with arguments that fit the signature.
    #[inline(always)]
    pub(crate) fn pass_to<C, R>(
        self,
        receiver: C,
        body: impl FnOnce(C, Args<'_, 'py>) -> PyResult<R>,
    ) -> PyResult<R> {
        if self.fits_signature() {
            body(receiver, self)
        } else {
            // Without `black_box`, the compiler makes a second copy of the body for this call, and then does not inline
            // the first one.
            let body = std::hint::black_box(body);
            self.rearrange(|args| body(receiver, args))
        }
    }

    /// Calls `body` for arguments that do not fit (see `fits_signature`): required parameters that are given by name
    /// move to their positions. Raises TypeError if a required one is missing, or if the call gives one that the
    /// signature does not have.
    #[cold]
    #[inline(never)]
    fn rearrange<R>(self, body: impl FnOnce(Args<'_, 'py>) -> PyResult<R>) -> PyResult<R> {
        let required = self.signature.required();
        let names = self.signature.parameters();
        let mut values = self.positional().to_vec();
        let mut others: Vec<_> = self.keywords().collect();
        while values.len() < required {
            let name = names[values.len()];
            let found = others
                .iter()
                .position(|(keyword, _)| !name.is_empty() && keyword.to_string() == name);
            match found {
                Some(index) => values.push(others.remove(index).1),
                None => break,
            }
        }
        let is_left_over = self.signature.is_fixed() && (values.len() > required || !others.is_empty());
        if values.len() < required || is_left_over {
            for (keyword, _) in &others {
                let keyword = keyword.to_string();
                if names.iter().take(self.positional).any(|name| *name == keyword) {
                    return Err(self.multiple_values(&keyword));
                }
            }
            let kind = if self.signature.is_fixed() {
                "exactly"
            } else {
                "at least"
            };
            return Err(self.wrong_count(&format!("{kind} {required}"), others.first()));
        }
        let positional = values.len();
        values.extend(others.iter().map(|(_, value)| *value));
        let kwnames = if others.is_empty() {
            None
        } else {
            Some(PyTuple::new(self.py, others.iter().map(|(name, _)| name))?)
        };
        body(Args {
            py: self.py,
            values: &values,
            positional,
            kwnames: kwnames.as_ref().map_or(ptr::null_mut(), Bound::as_ptr),
            signature: self.signature,
        })
    }

    /// The TypeError for a call that should have `expected` positional arguments, or, if `keyword` is given, for that
    /// unexpected keyword argument.
    #[cold]
    pub(crate) fn wrong_count(
        &self,
        expected: &str,
        keyword: Option<&(Bound<'py, PyAny>, *mut ffi::PyObject)>,
    ) -> PyErr {
        let name = self.name();
        if let Some((keyword, _)) = keyword {
            return PyTypeError::new_err(format!(
                "{name}() got an unexpected keyword argument {}",
                keyword
                    .repr()
                    .map_or_else(|_| String::new(), |text| text.to_string())
            ));
        }
        let given = match self.positional {
            1 => "1 was given".to_owned(),
            count => format!("{count} were given"),
        };
        PyTypeError::new_err(match expected {
            "exactly 0" => format!("{name}() takes no arguments, but {given}"),
            "exactly 1" => format!("{name}() takes exactly one argument, but {given}"),
            expected => {
                let plural = if expected.ends_with(" 1") { "" } else { "s" };
                format!("{name}() takes {expected} positional argument{plural}, but {given}")
            }
        })
    }

    /// The keyword arguments as (name, borrowed value).
    pub(crate) fn keywords(&self) -> impl Iterator<Item = (Bound<'py, PyAny>, *mut ffi::PyObject)> + 'a
    where
        'py: 'a,
    {
        let (py, kwnames) = (self.py, self.kwnames);
        self.values[self.positional..]
            .iter()
            .enumerate()
            .map(move |(index, value)| {
                // SAFETY: the tuple has one name for each keyword value, by the calling convention.
                let name = unsafe {
                    Bound::from_borrowed_ptr(py, ffi::PyTuple_GET_ITEM(kwnames, index as ffi::Py_ssize_t))
                };
                (name, *value)
            })
    }

    #[cold]
    fn multiple_values(&self, parameter: &str) -> PyErr {
        PyTypeError::new_err(format!(
            "{}() got multiple values for argument '{parameter}'",
            self.name()
        ))
    }

    /// The values of the signature's first `N` parameters; None for a parameter with a default that the call does not
    /// give. Raises TypeError for too many, unknown or duplicate arguments.
    pub(crate) fn bind<const N: usize>(&self) -> PyResult<[Option<Bound<'py, PyAny>>; N]> {
        let mut bound: [Option<Bound<'py, PyAny>>; N] = [const { None }; N];
        let by_position = self.signature.by_position();
        if self.positional > by_position {
            let expected = format!("at most {by_position}");
            return Err(self.wrong_count(&expected, self.keywords().next().as_ref()));
        }
        for (index, value) in bound.iter_mut().enumerate() {
            *value = self.get(index);
        }
        if self.kwnames.is_null() {
            return Ok(bound);
        }
        let names = self.signature.parameters();
        debug_assert_eq!(names.len(), N);
        for (name, value) in self.keywords() {
            let text = name.cast::<PyString>()?.to_string_lossy().into_owned();
            let Some(index) = names.iter().position(|known| !text.is_empty() && *known == text) else {
                return Err(PyTypeError::new_err(format!(
                    "{}() got an unexpected keyword argument '{text}'",
                    self.name()
                )));
            };
            if bound[index].is_some() {
                return Err(self.multiple_values(&text));
            }
            // SAFETY: keyword values are alive for the length of the call; from_borrowed adds a reference.
            bound[index] = Some(unsafe { Bound::from_borrowed_ptr(self.py, value) });
        }
        Ok(bound)
    }
}

/// The body of a method wrapper: see `method!`.
///
/// # Safety
/// Only CPython may call this, through a method table of a type whose objects have the layout `T`.
#[inline(always)]
pub(crate) unsafe fn call_method<T: NativeType>(
    slf: *mut ffi::PyObject,
    args: *const *mut ffi::PyObject,
    nargs: ffi::Py_ssize_t,
    kwnames: *mut ffi::PyObject,
    signature: &'static Signature,
    body: for<'a, 'py> fn(This<'py, T>, Args<'a, 'py>) -> PyResult<Bound<'py, PyAny>>,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls methods attached. The method descriptor has checked `slf` against the type, and the caller
    // keeps it alive. The arguments follow the METH_FASTCALL|METH_KEYWORDS convention.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::new(py, slf);
            let args = Args::new(py, args, nargs, kwnames, signature);
            T::with_access(this, || args.pass_to(this, body).map(Bound::into_ptr))
        })
    }
}

/// The body of a method wrapper that any thread may call at any time: see `threadsafe_method!`.
///
/// # Safety
/// As for `call_method`.
#[inline(always)]
pub(crate) unsafe fn call_threadsafe_method<T: NativeType>(
    slf: *mut ffi::PyObject,
    args: *const *mut ffi::PyObject,
    nargs: ffi::Py_ssize_t,
    kwnames: *mut ffi::PyObject,
    signature: &'static Signature,
    body: for<'a, 'py> fn(This<'py, T>, Args<'a, 'py>) -> PyResult<Bound<'py, PyAny>>,
) -> *mut ffi::PyObject {
    // SAFETY: as in `call_method`.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let args = Args::new(py, args, nargs, kwnames, signature);
            args.pass_to(This::new(py, slf), body).map(Bound::into_ptr)
        })
    }
}

/// The body of a getter wrapper: see `getter!`.
///
/// # Safety
/// As for `call_method`.
pub(crate) unsafe fn call_getter<T: NativeType>(
    slf: *mut ffi::PyObject,
    body: for<'py> fn(This<'py, T>) -> PyResult<Bound<'py, PyAny>>,
) -> *mut ffi::PyObject {
    // SAFETY: as in `call_method`.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            let this = This::new(py, slf);
            T::with_access(this, || body(this).map(Bound::into_ptr))
        })
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

/// A row of a method table, made from a `fn(This<T>, Args) -> PyResult<Bound<PyAny>>`, a signature, such as
/// `"call_at(when, callback, *args, context=None)"`, and a docstring. All required arguments are present when the
/// function runs.
macro_rules! method {
    (@ $call:ident, $layout:ty, $body:path, $signature:literal, $doc:literal) => {{
        static SIGNATURE: $crate::binding::signature::Signature =
            $crate::binding::signature::Signature::new($signature);
        unsafe extern "C" fn raw(
            slf: *mut pyo3::ffi::PyObject,
            args: *const *mut pyo3::ffi::PyObject,
            nargs: pyo3::ffi::Py_ssize_t,
            kwnames: *mut pyo3::ffi::PyObject,
        ) -> *mut pyo3::ffi::PyObject {
            // SAFETY: only CPython calls this, through the method table of the type with this layout.
            unsafe {
                $crate::binding::native_type::$call::<$layout>(
                    slf, args, nargs, kwnames, &SIGNATURE, $body,
                )
            }
        }
        SIGNATURE.row(raw, $crate::binding::signature::Receiver::Object, $doc)
    }};
    ($layout:ty, $body:path, $signature:literal, $doc:literal) => {
        $crate::binding::native_type::method!(@ call_method, $layout, $body, $signature, $doc)
    };
}
pub(crate) use method;

/// `method!` for a method that any thread may call at any time. Its function may touch only atomics, the inbox and
/// values that never change.
macro_rules! threadsafe_method {
    ($layout:ty, $body:path, $signature:literal, $doc:literal) => {
        $crate::binding::native_type::method!(@ call_threadsafe_method, $layout, $body, $signature, $doc)
    };
}
pub(crate) use threadsafe_method;

/// The body of a getter wrapper that any thread may call at any time: see `threadsafe_getter!`.
///
/// # Safety
/// As for `call_method`.
pub(crate) unsafe fn call_threadsafe_getter<T: NativeType>(
    slf: *mut ffi::PyObject,
    body: for<'py> fn(This<'py, T>) -> PyResult<Bound<'py, PyAny>>,
) -> *mut ffi::PyObject {
    // SAFETY: as in `call_method`.
    unsafe {
        let py = Python::assume_attached();
        errors::at_boundary(py, ptr::null_mut(), || {
            body(This::new(py, slf)).map(Bound::into_ptr)
        })
    }
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

/// A row of a getset table, made from a `fn(This<T>) -> PyResult<Bound<PyAny>>`.
macro_rules! getter {
    (@ $call:ident, $layout:ty, $name:literal, $body:path, $doc:literal) => {{
        unsafe extern "C" fn raw(
            slf: *mut pyo3::ffi::PyObject,
            _: *mut std::ffi::c_void,
        ) -> *mut pyo3::ffi::PyObject {
            // SAFETY: only CPython calls this, through the getset table of the type with this layout.
            unsafe { $crate::binding::native_type::$call::<$layout>(slf, $body) }
        }
        pyo3::ffi::PyGetSetDef {
            name: $name.as_ptr(),
            get: Some(raw),
            set: None,
            doc: $doc.as_ptr(),
            closure: std::ptr::null_mut(),
        }
    }};
    ($layout:ty, $name:literal, $body:path, $doc:literal) => {
        $crate::binding::native_type::getter!(@ call_getter, $layout, $name, $body, $doc)
    };
}
pub(crate) use getter;

/// `getter!` for an attribute that any thread may read at any time. Its function may touch only atomics and values that
/// never change.
macro_rules! threadsafe_getter {
    ($layout:ty, $name:literal, $body:path, $doc:literal) => {
        $crate::binding::native_type::getter!(@ call_threadsafe_getter, $layout, $name, $body, $doc)
    };
}
pub(crate) use threadsafe_getter;

/// Describes the objects of a native type.
pub(crate) trait NativeType: Sized {
    /// Fully qualified, e.g. `grapeshot._core.Handle`.
    const NAME: &'static CStr;
    const DOC: &'static CStr;
    const FLAGS: u64;
    /// False for a type whose objects hold no references, and so have neither `cells` nor a `traverse_rest`. The
    /// collector does not track them, so `gc.get_objects()` cannot reveal them to other code.
    const IS_COLLECTED: bool = true;
    /// Frees an unreferenced object. `tp_dealloc` calls it, at once or a little later (see `deallocation`). The default
    /// calls `clear` and then drops all fields. With the default, an object must be a valid `T` from its allocation on,
    /// and `clear` must empty all of its cells.
    const DEALLOC: ffi::destructor = drop_and_free::<Self>;
    /// True if freeing this object now frees no other object that could continue a chain, so that deallocations do not
    /// nest any deeper.
    #[inline]
    fn is_empty(&self) -> bool {
        false
    }
    /// The cells with the object's references, except those that `traverse_rest` reports.
    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        []
    }
    /// Reports the references that are not in cells. The caller reports the reference to the type.
    ///
    /// # Safety
    /// Only the collector calls this. Nothing in it may run Python code.
    unsafe fn traverse_rest(&self, _visit: ffi::visitproc, _arg: *mut c_void) -> c_int {
        0
    }
    /// Reports every reference, for `tp_traverse`.
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
    /// to do. A free-threaded build admits only the thread that runs the object's loop
    /// (`LoopObject::with_loop_access`), or, for an object that threads share, one thread at a time
    /// (`with_critical_section`).
    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R>;
}

/// Reports the references in `cells`. Stops if the collector returns anything but 0, and returns that.
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

/// `NativeType::with_access` for an object that any thread may use, one at a time. While `body` waits for another
/// thread, other threads may get in.
#[inline]
pub(crate) fn with_critical_section<T, R>(this: This<'_, T>, body: impl FnOnce() -> R) -> R {
    if HAS_GIL {
        body()
    } else {
        critical_section::with_critical_section(&this.to_bound(), body)
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

/// The slot of a type's methods; the table lives forever.
pub(crate) fn methods_slot(rows: Vec<ffi::PyMethodDef>) -> ffi::PyType_Slot {
    slot(ffi::Py_tp_methods, leak_table(rows, ffi::PyMethodDef::zeroed()))
}

/// The slot of a type's getters; the table lives forever.
pub(crate) fn getset_slot(rows: Vec<ffi::PyGetSetDef>) -> ffi::PyType_Slot {
    slot(ffi::Py_tp_getset, leak_table(rows, ffi::PyGetSetDef::default()))
}

/// Creates the heap type of `T`. `tp_traverse`, `tp_clear` and `tp_dealloc` come from its `NativeType`, and `slots`
/// adds the rest.
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

/// None, as a method's result.
#[inline]
pub(crate) fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    PyNone::get(py).to_owned().into_any()
}

/// True or False, as a method's result.
pub(crate) fn bool_object(py: Python<'_>, value: bool) -> Bound<'_, PyAny> {
    PyBool::new(py, value).to_owned().into_any()
}

/// A method or getset table that lives forever, with the zero row that ends it.
pub(crate) fn leak_table<R>(rows: Vec<R>, end: R) -> *mut c_void {
    let mut rows = rows;
    rows.push(end);
    Box::leak(rows.into_boxed_slice()).as_mut_ptr().cast()
}

/// The member table of a type whose objects keep their weak references `offset` bytes from their start.
pub(crate) fn weaklist_member(offset: usize) -> *mut c_void {
    leak_table(
        vec![ffi::PyMemberDef {
            name: c"__weaklistoffset__".as_ptr(),
            type_code: ffi::Py_T_PYSSIZET,
            offset: offset as ffi::Py_ssize_t,
            flags: ffi::Py_READONLY,
            doc: ptr::null(),
        }],
        ffi::PyMemberDef::default(),
    )
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

/// Adds the native methods of `base` to its subclass `kind` too, because CPython specializes only calls of methods that
/// it finds on the exact type of the object. Methods that `kind`, or a class between the two, replaces are not added.
pub(crate) fn bind_methods(
    kind: &Bound<'_, PyType>,
    base: &Bound<'_, PyAny>,
    methods: Vec<ffi::PyMethodDef>,
) -> PyResult<()> {
    let mut missing = Vec::with_capacity(methods.len());
    for method in methods {
        // SAFETY: method tables consist of C string literals.
        let name = unsafe { CStr::from_ptr(method.ml_name) }.to_string_lossy();
        if kind.getattr(name.as_ref())?.is(&base.getattr(name.as_ref())?) {
            missing.push(method);
        }
    }
    extend_type(kind.as_any(), missing)
}

/// Adds native methods to a heap type. The caller guarantees that the type's objects have the layout of these methods.
/// The type is one that a lower room has created, or a subclass of such a type.
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
