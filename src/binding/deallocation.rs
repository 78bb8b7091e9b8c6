//! `tp_dealloc` of the types that `new_type` makes. It frees a chain of objects of any length in a limited amount of
//! stack.
//!
//! Take a handle whose argument is a handle, whose argument is a handle, and so on. The calls that free it nest as deep
//! as the chain is long. From 3.14 on, CPython limits this depth for every type; earlier versions limit it only for
//! CPython's own types. For earlier versions, this module limits the depth to `MAX_DEPTH`: deeper objects are put
//! aside, and the outermost call frees them.
//!
//! ```text
//!   depth 0: dealloc(a) -> 1: dealloc(b) -> ... -> MAX_DEPTH: put aside
//!      |  <--------------------------------------------'
//!      '--> dealloc(each object that was put aside), at depth 1, until none is left
//! ```
//!
//! The depth belongs to the running stack. Each coro has its own count (`set_depth_of_stack`), because a coro may wait
//! in a finalizer. Greenlets share the count of their thread and may end in any order. So the count is only ever
//! increased and decreased by one, never set.
//!
//! Any thread may free objects: each thread has its own count and its own list.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::HAS_TRASHCAN;
use super::native_type::{NativeType, This};

/// The maximum number of nested calls. Each takes a few hundred bytes of stack, including the frames of CPython's
/// containers between them.
const MAX_DEPTH: u32 = 40;

/// An unreferenced object, the function that frees it, and whether the collector must track the object again before
/// that function is called.
type Waiting = (*mut ffi::PyObject, ffi::destructor, bool);

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static WAITING: RefCell<Vec<Waiting>> = const { RefCell::new(Vec::new()) };
}

/// Returns the cell that counts the depth of the running stack. Null means that the thread's own cell counts it.
type DepthOfStack = fn() -> *const Cell<u32>;

/// The function that `set_depth_of_stack` was given, as a pointer; null before that call.
static DEPTH_OF_STACK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Sets the function that returns the count of a coro's stack. The module `coro` calls this, because code in `binding`
/// may not use `coro`.
pub(crate) fn set_depth_of_stack(function: DepthOfStack) {
    DEPTH_OF_STACK.store(function as *mut (), Ordering::Release);
}

/// `tp_dealloc` of a native type.
pub(super) unsafe extern "C" fn deallocate<T: NativeType>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced object of this layout. The object is given to
    // `T::DEALLOC` here or later.
    unsafe {
        if HAS_TRASHCAN || !T::IS_COLLECTED || (*slf.cast::<T>()).is_empty() {
            T::DEALLOC(slf);
        } else {
            bounded(slf, T::DEALLOC);
        }
    }
}

/// The default of `NativeType::DEALLOC`.
pub(super) unsafe extern "C" fn drop_and_free<T: NativeType>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls `tp_dealloc` attached, once, with an unreferenced object of this layout. The objects of a
    // type that keeps this default are a valid `T` (contract of `DEALLOC`).
    unsafe {
        if T::IS_COLLECTED {
            ffi::PyObject_GC_UnTrack(slf.cast());
        }
        drop_contents::<T>(slf);
        free_memory(slf);
    }
}

/// `NativeType::DEALLOC` of a type with a `__weaklistoffset__`. It clears the weak references first.
///
/// # Safety
/// As for `tp_dealloc`: CPython calls it attached, once, with an unreferenced object of this layout. The collector
/// tracks objects of this type, and the object is a valid `T`.
pub(crate) unsafe extern "C" fn clear_weakrefs_drop_and_free<T: NativeType>(slf: *mut ffi::PyObject) {
    // SAFETY: by the contract. The offset, which subclasses inherit, is that of a pointer to the weak references.
    unsafe {
        ffi::PyObject_GC_UnTrack(slf.cast());
        let offset = (*ffi::Py_TYPE(slf)).tp_weaklistoffset;
        if !(*slf.byte_offset(offset).cast::<*mut ffi::PyObject>()).is_null() {
            ffi::PyObject_ClearWeakRefs(slf);
        }
        drop_contents::<T>(slf);
        free_memory(slf);
    }
}

/// Drops everything that an unreferenced, untracked object refers to, and all of its fields.
///
/// # Safety
/// Attached. The object is a valid `T`, and its fields are not used any more.
#[inline]
unsafe fn drop_contents<T: NativeType>(slf: *mut ffi::PyObject) {
    // SAFETY: by the contract.
    unsafe {
        T::clear(This::new(Python::assume_attached(), slf));
        ptr::drop_in_place(slf.cast::<T>());
    }
}

/// Frees the memory of an unreferenced, untracked object, and drops its reference to its type.
///
/// # Safety
/// Attached. The object's own fields are empty, and nothing uses it after this call.
#[inline(always)]
pub(crate) unsafe fn free_memory(slf: *mut ffi::PyObject) {
    // SAFETY: by the contract. Each type has the `tp_free` that belongs to the allocator of its objects: an inherited
    // one, or the one that a subclass has set. The type must outlive its instances, so their reference to it is dropped
    // last.
    unsafe {
        let kind = ffi::Py_TYPE(slf);
        if let Some(free) = (*kind).tp_free {
            free(slf.cast());
        }
        ffi::Py_DECREF(kind.cast());
    }
}

/// # Safety
/// As for `deallocate`.
#[inline(never)]
unsafe fn bounded(slf: *mut ffi::PyObject, free: ffi::destructor) {
    // SAFETY: by the contract. Nothing can reach an object that was put aside, so it is still unreferenced.
    unsafe {
        let depth = depth();
        if depth.get() >= MAX_DEPTH && put_aside(slf, free) {
            return;
        }
        depth.set(depth.get() + 1);
        free(slf);
        while depth.get() == 1
            && let Some((object, free, is_tracked)) = next()
        {
            if is_tracked {
                ffi::PyObject_GC_Track(object.cast());
            }
            free(object);
        }
        depth.set(depth.get() - 1);
    }
}

/// The depth cell of the running stack. It outlives all code that runs on that stack.
fn depth<'a>() -> &'a Cell<u32> {
    let function = DEPTH_OF_STACK.load(Ordering::Acquire);
    // SAFETY: only `set_depth_of_stack` stores here.
    let own = match unsafe { std::mem::transmute::<*mut (), Option<DepthOfStack>>(function) } {
        Some(function) => function(),
        None => ptr::null(),
    };
    // SAFETY: the cell of a running coro lives until the coro leaves its stack for the last time. The thread's cell has
    // no destructor, so it exists until the thread's end, and no other thread uses it.
    unsafe {
        own.as_ref()
            .unwrap_or_else(|| &*DEPTH.with(ptr::from_ref::<Cell<u32>>))
    }
}

/// Puts the object on the thread's list. False if there is no memory, or if the thread is ending and has no list any
/// more.
fn put_aside(object: *mut ffi::PyObject, free: ffi::destructor) -> bool {
    let put = WAITING.try_with(|waiting| {
        let mut waiting = waiting.borrow_mut();
        if waiting.try_reserve(1).is_err() {
            return false;
        }
        // SAFETY: attached; the collector must not see an object without references.
        let is_tracked = unsafe { ffi::PyObject_GC_IsTracked(object) != 0 };
        if is_tracked {
            // SAFETY: as above.
            unsafe { ffi::PyObject_GC_UnTrack(object.cast()) };
        }
        waiting.push((object, free, is_tracked));
        true
    });
    put.unwrap_or(false)
}

/// Takes an object from the thread's list.
fn next() -> Option<Waiting> {
    WAITING
        .try_with(|waiting| {
            let mut waiting = waiting.borrow_mut();
            let next = waiting.pop();
            if waiting.is_empty() && waiting.capacity() > 1024 {
                // The list has grown large, for a wide tree of objects. This frees its memory.
                *waiting = Vec::new();
            }
            next
        })
        .ok()
        .flatten()
}
