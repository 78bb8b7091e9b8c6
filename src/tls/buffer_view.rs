//! `BufferView`: a Python object that gives a C function access to native memory for one call, through the buffer
//! protocol.
//!
//! `MemoryBIO.write`, `_SSLSocket.read` and `_SSLSocket.write` accept any buffer and release it before they return. So
//! one object can serve all of them, for a different piece of memory each time. The object is never passed to Python
//! code as an argument.
//!
//! But Python code may run during the call (callbacks of the `ssl` module), and may find the object in the C function's
//! tuple of arguments (`gc.get_objects()`). So each use exports only one view, which the C function takes before any
//! other code runs:
//!
//! ```text
//!   [ idle ] --with--> [ ready ] --bf_getbuffer--> [ exported ] --the call returns--> [ idle ]
//!      ^ BufferError                                  ^ BufferError
//! ```
//! If other code still has a reference to the object when the call has returned, the object is not used again.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::native_type::{NativeType, This, new_type, slot};

#[repr(C)]
pub(super) struct BufferView {
    base: ffi::PyObject,
    /// Null, except between the start of `with` and the moment when the C function takes its view.
    memory: Cell<*mut u8>,
    len_bytes: Cell<usize>,
    is_readonly: Cell<bool>,
}

static BUFFER_VIEW_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());
/// A spare object, or null. A call takes the object out. If a callback (SNI) then makes another such call before the
/// first one returns, that call makes an object of its own.
static SPARE: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

impl NativeType for BufferView {
    const NAME: &'static CStr = c"grapeshot._core._BufferView";
    const DOC: &'static CStr = c"Native memory for one call of a C function.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;
    const IS_COLLECTED: bool = false;

    /// Only the call that has taken the object out of `SPARE` uses it.
    fn with_access<R>(_: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        body()
    }
}

impl BufferView {
    /// Runs `call` with an object through which it can read `data`.
    ///
    /// # Safety
    /// `call` must pass the object only to a C function that takes a view of it before any other code can run, and that
    /// keeps neither the object nor the view.
    #[inline]
    pub(super) unsafe fn with<R>(
        py: Python<'_>,
        data: &[u8],
        call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
    ) -> PyResult<R> {
        // SAFETY: the caller's contract; nothing writes through a readonly view.
        unsafe { Self::with_memory(py, data.as_ptr().cast_mut(), data.len(), true, call) }
    }

    /// Runs `call` with an object through which it can read and write `len_bytes` bytes at `memory`.
    ///
    /// # Safety
    /// The same as for `with`. In addition the memory must be writable, and valid for as long as `call` runs.
    #[inline]
    pub(super) unsafe fn with_writable<R>(
        py: Python<'_>,
        memory: *mut u8,
        len_bytes: usize,
        call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
    ) -> PyResult<R> {
        // SAFETY: the caller's contract.
        unsafe { Self::with_memory(py, memory, len_bytes, false, call) }
    }

    /// # Safety
    /// The same as for `with` if `is_readonly`, otherwise the same as for `with_writable`.
    #[inline]
    unsafe fn with_memory<R>(
        py: Python<'_>,
        memory: *mut u8,
        len_bytes: usize,
        is_readonly: bool,
        call: impl FnOnce(*mut ffi::PyObject) -> PyResult<R>,
    ) -> PyResult<R> {
        let mut object = SPARE.swap(ptr::null_mut(), Ordering::Acquire);
        if object.is_null() {
            // SAFETY: `register` made the type for this layout, which is valid if all bytes are zero.
            object = unsafe {
                let made = ffi::PyType_GenericAlloc(BUFFER_VIEW_TYPE.load(Ordering::Relaxed), 0);
                Bound::from_owned_ptr_or_err(py, made)?.into_ptr()
            };
        }
        // SAFETY: every object in SPARE has this layout, and only this call uses this one now.
        let this = unsafe { &*object.cast::<Self>() };
        this.memory.set(memory);
        this.len_bytes.set(len_bytes);
        this.is_readonly.set(is_readonly);
        let result = call(object);
        this.memory.set(ptr::null_mut());
        // SAFETY: the object is live, and we hold a reference to it.
        let spare = if unsafe { ffi::Py_REFCNT(object) } == 1 {
            SPARE.swap(object, Ordering::Release)
        } else {
            object
        };
        if !spare.is_null() {
            // SAFETY: this drops the reference that SPARE held, or our own.
            unsafe { ffi::Py_DECREF(spare) };
        }
        result
    }
}

unsafe extern "C" fn get_buffer(slf: *mut ffi::PyObject, view: *mut ffi::Py_buffer, flags: c_int) -> c_int {
    // SAFETY: CPython calls this in an attached thread, with an object of this type and a view to fill.
    unsafe {
        let this = &*slf.cast::<BufferView>();
        let memory = this.memory.replace(ptr::null_mut());
        if memory.is_null() {
            (*view).obj = ptr::null_mut();
            let text = c"another view of this memory is in use";
            ffi::PyErr_SetString(ffi::PyExc_BufferError, text.as_ptr());
            return -1;
        }
        let len = this.len_bytes.get() as ffi::Py_ssize_t;
        let is_readonly = c_int::from(this.is_readonly.get());
        ffi::PyBuffer_FillInfo(view, slf, memory.cast(), len, is_readonly, flags)
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // SAFETY: the function was written for this layout.
    let kind = unsafe {
        new_type::<BufferView>(
            module,
            None,
            &[slot(ffi::Py_bf_getbuffer, get_buffer as *mut c_void)],
        )?
    };
    BUFFER_VIEW_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}
