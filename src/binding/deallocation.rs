//! `tp_dealloc` of all native types: what hangs on one another is freed on a stack of any size, however long the chain.
//!
//! A handle whose argument is a handle whose argument is a handle ... is freed by calls that are as deep as the chain. From 3.14
//! on CPython cuts such calls off itself, for every type; before, only for types of its own. Here they are cut off at
//! `MAX_DEPTH`: what is deeper is put aside, and freed by the outermost call.
//!
//! ```text
//!   depth 0: dealloc(a) -> 1: dealloc(b) -> ... -> MAX_DEPTH: put aside
//!      |  <--------------------------------------------'
//!      '--> dealloc of what was put aside, at depth 1, until there is none
//! ```
//!
//! The depth is that of the stack that runs: coros count for themselves (`set_depth_of_stack`), as one may wait in a finalizer.
//! It is counted up and down and never set, since greenlets share the count of their thread and may end in any order.
//!
//! Belongs to no thread: each has its own count and its own list.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::ffi;

use super::HAS_TRASHCAN;
use super::native_type::NativeType;

/// Calls inside one another. Each takes a few hundred bytes of stack, with what CPython's containers use between them.
const MAX_DEPTH: u32 = 40;

/// An unreferenced object, what frees it, and whether the collector is to see it again before that.
type Waiting = (*mut ffi::PyObject, ffi::destructor, bool);

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static WAITING: RefCell<Vec<Waiting>> = const { RefCell::new(Vec::new()) };
}

/// Returns where the depth of the running stack is counted; null if it is the thread's own.
type DepthOfStack = fn() -> *const Cell<u32>;

/// A `DepthOfStack`, null for none.
static DEPTH_OF_STACK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Takes the function that knows of other stacks than the thread's own.
pub(crate) fn set_depth_of_stack(function: DepthOfStack) {
    DEPTH_OF_STACK.store(function as *mut (), Ordering::Release);
}

/// `tp_dealloc` of a native type.
pub(super) unsafe extern "C" fn deallocate<T: NativeType>(slf: *mut ffi::PyObject) {
    // SAFETY: CPython calls this attached, once, with an unreferenced object of this layout, which is given up to
    // `T::DEALLOC` here or later.
    unsafe {
        if HAS_TRASHCAN || !T::IS_COLLECTED || (*slf.cast::<T>()).is_empty() {
            T::DEALLOC(slf);
        } else {
            bounded(slf, T::DEALLOC);
        }
    }
}

/// # Safety
/// As for `deallocate`.
#[inline(never)]
unsafe fn bounded(slf: *mut ffi::PyObject, free: ffi::destructor) {
    // SAFETY: by the contract; what waits is as unreferenced as it was when it was put aside.
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

/// Where the running stack counts. It outlives what runs on that stack.
fn depth<'a>() -> &'a Cell<u32> {
    let function = DEPTH_OF_STACK.load(Ordering::Acquire);
    // SAFETY: only `set_depth_of_stack` stores here.
    let own = match unsafe { std::mem::transmute::<*mut (), Option<DepthOfStack>>(function) } {
        Some(function) => function(),
        None => ptr::null(),
    };
    // SAFETY: the cell of a running coro lives until its stack is left for good; that of the thread has no destructor, so it is
    // there until the thread's end, and nobody else's.
    unsafe {
        own.as_ref()
            .unwrap_or_else(|| &*DEPTH.with(ptr::from_ref::<Cell<u32>>))
    }
}

/// False if there is no memory, or no list any more because the thread ends.
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

fn next() -> Option<Waiting> {
    WAITING
        .try_with(|waiting| {
            let mut waiting = waiting.borrow_mut();
            let next = waiting.pop();
            if waiting.is_empty() && waiting.capacity() > 1024 {
                // A wide tree has passed.
                *waiting = Vec::new();
            }
            next
        })
        .ok()
        .flatten()
}
