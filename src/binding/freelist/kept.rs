//! The freelist of builds with the GIL.

use std::cell::UnsafeCell;
use std::ptr;

use pyo3::ffi;

/// The maximum number of kept objects, of about 128 bytes each. After a burst of this many callbacks, new handles need
/// no allocation, and so do not count towards the next garbage collection.
const CAPACITY: usize = 16384;

struct Stack {
    objects: [*mut ffi::PyObject; CAPACITY],
    len: usize,
}

pub(crate) struct Freelist(UnsafeCell<Stack>);

// SAFETY: every access happens attached to the only interpreter (subinterpreters are refused), so the GIL orders the
// accesses. No code that could release the GIL runs during an access: `take_or_alloc` calls the allocator only after
// its access.
unsafe impl Sync for Freelist {}

impl Freelist {
    #[allow(clippy::large_stack_arrays)] // evaluated at compile time, for a static
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new(Stack {
            objects: [ptr::null_mut(); CAPACITY],
            len: 0,
        }))
    }

    /// New objects are untracked. If an object can become part of an unreachable cycle, the caller of `take_or_alloc`
    /// must track it.
    pub(crate) const IS_TRACKED: bool = false;

    /// Returns an untracked object of `kind` with one reference. Its fields after the header are as they were when
    /// `give` received the object, or zeroed if the object is new. Null with MemoryError set if there is no memory.
    ///
    /// # Safety
    /// Attached. All objects of this list have the same size, whatever their `kind`, and CPython manages neither a dict
    /// nor weak references in front of them (`Py_TPFLAGS_PREHEADER`).
    #[inline]
    pub(crate) unsafe fn take_or_alloc(&self, kind: *mut ffi::PyTypeObject) -> *mut ffi::PyObject {
        // SAFETY: the GIL is held (contract), and no other code runs inside the borrow, which ends before `alloc`.
        unsafe {
            let stack = &mut *self.0.get();
            if stack.len == 0 {
                return alloc(kind);
            }
            stack.len -= 1;
            let object = *stack.objects.get_unchecked(stack.len);
            ffi::PyObject_Init(object, kind)
        }
    }

    /// Takes back an untracked, unreferenced object, whose fields must be empty.
    ///
    /// # Safety
    /// Attached; called from the `tp_dealloc` of the object, which does nothing more with it.
    #[inline]
    pub(crate) unsafe fn give(&self, object: *mut ffi::PyObject) {
        // SAFETY: the GIL is held (contract). The type must outlive its instances, so the instance's reference to it is
        // dropped last.
        unsafe {
            let kind = ffi::Py_TYPE(object);
            let stack = &mut *self.0.get();
            if stack.len < CAPACITY {
                *stack.objects.get_unchecked_mut(stack.len) = object;
                stack.len += 1;
            } else {
                ffi::PyObject_GC_Del(object.cast());
            }
            ffi::Py_DECREF(kind.cast());
        }
    }
}

#[cold]
unsafe fn alloc(kind: *mut ffi::PyTypeObject) -> *mut ffi::PyObject {
    // SAFETY: attached (contract of the caller). The collector's allocator gives tp_basicsize bytes with the header
    // set, and the bytes after the header are zeroed here.
    unsafe {
        let object = ffi::PyObject_GC_New::<ffi::PyObject>(kind);
        if !object.is_null() {
            let header = size_of::<ffi::PyObject>();
            ptr::write_bytes(
                object.cast::<u8>().add(header),
                0,
                (*kind).tp_basicsize as usize - header,
            );
        }
        object
    }
}
