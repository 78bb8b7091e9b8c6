//! A Python object that lends native memory to one call of a C function through the buffer protocol.
//!
//! `MemoryBIO.write`, `_SSLSocket.read` and `_SSLSocket.write` take any buffer and let go of it before they return, so
//! one object serves all of them, with another piece of memory each time. It is never handed to Python code.
//!
//! But Python code may run meanwhile (callbacks of the `ssl` module), and find the object in the C function's tuple of
//! arguments (`gc.get_objects()`). So each loan gives one view, which the C function takes before anything else runs:
//!
//! ```text
//!   [ idle ] --lend--> [ lent ] --bf_getbuffer--> [ taken ] --the call returns--> [ idle ]
//!      ^ BufferError                                 ^ BufferError
//! ```
//! An object that somebody else still knows when the call has returned is not used again.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::{NativeType, This, new_type, slot};

#[repr(C)]
struct WindowObject {
    base: ffi::PyObject,
    /// Null unless it is lent and nobody has taken the view yet.
    memory: Cell<*mut u8>,
    len_bytes: Cell<usize>,
    is_readonly: Cell<bool>,
}

static WINDOW_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// The window that is not in use. Taken out while it is, since a call may come back to here (SNI callbacks).
static SPARE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for WindowObject {
    const NAME: &'static CStr = c"grapeshot._core._Window";
    const DOC: &'static CStr = c"Native memory, lent for one call.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const IS_COLLECTED: bool = false;
    const DEALLOC: ffi::destructor = dealloc;

    unsafe fn traverse(&self, _: ffi::visitproc, _: *mut c_void) -> c_int {
        0
    }

    fn clear(_: This<'_, Self>) {}

    /// Whoever has taken it out of `SPARE` is alone with it.
    fn with_access<R>(_: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        body()
    }
}

/// Runs `call` with an object through which it can read `data`.
///
/// # Safety
/// `call` only passes the object to a C function that takes a view of it before anything else can run, and keeps neither
/// the object nor the view.
#[inline]
pub(super) unsafe fn lend<R>(
    py: Python<'_>,
    data: &[u8],
    call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
) -> PyResult<R> {
    // SAFETY: the caller's contract; nothing writes to memory that is lent for reading.
    unsafe { lend_memory(py, data.as_ptr().cast_mut(), data.len(), true, call) }
}

/// Runs `call` with an object through which it can read and write `len_bytes` bytes at `memory`.
///
/// # Safety
/// As for `lend`, and the memory may be written and is valid for as long as `call` runs.
#[inline]
pub(super) unsafe fn lend_writable<R>(
    py: Python<'_>,
    memory: *mut u8,
    len_bytes: usize,
    call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
) -> PyResult<R> {
    // SAFETY: the caller's contract.
    unsafe { lend_memory(py, memory, len_bytes, false, call) }
}

/// # Safety
/// As for `lend_writable`, and for `lend` if `is_readonly`.
#[inline]
unsafe fn lend_memory<R>(
    py: Python<'_>,
    memory: *mut u8,
    len_bytes: usize,
    is_readonly: bool,
    call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
) -> PyResult<R> {
    let mut object = SPARE.swap(ptr::null_mut(), Ordering::Acquire);
    if object.is_null() {
        // SAFETY: the type is made by `register` for this layout, in which zeroes are valid.
        object = unsafe {
            Bound::from_owned_ptr_or_err(
                py,
                ffi::PyType_GenericAlloc(WINDOW_TYPE.load(Ordering::Relaxed), 0),
            )?
            .into_ptr()
        };
    }
    // SAFETY: every object in SPARE has this layout, and nobody else uses this one now.
    let window = unsafe { &*object.cast::<WindowObject>() };
    window.memory.set(memory);
    window.len_bytes.set(len_bytes);
    window.is_readonly.set(is_readonly);
    let result = call(object);
    window.memory.set(ptr::null_mut());
    // SAFETY: a live object, of which we hold a reference.
    let spare = if unsafe { ffi::Py_REFCNT(object) } == 1 {
        SPARE.swap(object, Ordering::Release)
    } else {
        object
    };
    if !spare.is_null() {
        // SAFETY: the reference that SPARE held, or our own.
        unsafe { ffi::Py_DECREF(spare) };
    }
    result
}

unsafe extern "C" fn get_buffer(slf: *mut ffi::PyObject, view: *mut ffi::Py_buffer, flags: c_int) -> c_int {
    // SAFETY: CPython calls this attached with an object of this type and a view to fill.
    unsafe {
        let window = &*slf.cast::<WindowObject>();
        let memory = window.memory.replace(ptr::null_mut());
        if memory.is_null() {
            (*view).obj = ptr::null_mut();
            let text = c"this memory is lent to nobody else";
            ffi::PyErr_SetString(ffi::PyExc_BufferError, text.as_ptr());
            return -1;
        }
        let len = window.len_bytes.get() as ffi::Py_ssize_t;
        let is_readonly = c_int::from(window.is_readonly.get());
        ffi::PyBuffer_FillInfo(view, slf, memory.cast(), len, is_readonly, flags)
    }
}

unsafe extern "C" fn dealloc(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached with an unreferenced window, which owns nothing.
    unsafe {
        let kind = ffi::Py_TYPE(slf);
        ffi::PyObject_Free(slf.cast());
        ffi::Py_DECREF(kind.cast());
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: the functions are those of this layout.
    let kind = unsafe {
        new_type::<WindowObject>(
            module,
            None,
            &[slot(ffi::Py_bf_getbuffer, get_buffer as *mut c_void)],
        )?
    };
    WINDOW_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
