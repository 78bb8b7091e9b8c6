//! The freelist of free-threaded builds, which keeps nothing.

use pyo3::ffi;

pub(crate) struct Freelist;

#[expect(clippy::unused_self, reason = "the other freelist needs it")]
impl Freelist {
    pub(crate) const fn new() -> Self {
        Self
    }

    /// New objects are tracked.
    pub(crate) const IS_TRACKED: bool = true;

    /// A zeroed, tracked object with one reference, or null with MemoryError set.
    ///
    /// # Safety
    /// Attached.
    pub(crate) unsafe fn take_or_alloc(&self, kind: *mut ffi::PyTypeObject) -> *mut ffi::PyObject {
        // SAFETY: attached (contract).
        unsafe { ffi::PyType_GenericAlloc(kind, 0) }
    }

    /// Frees an untracked, unreferenced object.
    ///
    /// # Safety
    /// Attached; called from the `tp_dealloc` of the object, which does nothing more with it.
    pub(crate) unsafe fn give(&self, object: *mut ffi::PyObject) {
        // SAFETY: the caller gives up the object (contract). The instance's reference to its type is dropped last.
        unsafe {
            let kind = ffi::Py_TYPE(object);
            ffi::PyObject_GC_Del(object.cast());
            ffi::Py_DECREF(kind.cast());
        }
    }
}
