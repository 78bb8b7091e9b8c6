//! `Fiber`: the stack and the interpreter state of one coro, from its first run to its end.
//!
//! Only the coro's thread changes a fiber. In builds with the GIL, other threads may read it through `frame`.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::rc::Rc;

use grapeshot_core::arch;
use grapeshot_core::stack::{Saved, StackSlot};
use grapeshot_core::sys::faults::FaultMessage;
use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::{Coro, CoroObject, Status};
use super::pystate::{self, PyState, Relinked, ThreadStateRoot};
use super::reprs::Contents;
use super::thread_locals::Taken;
use crate::binding::HAS_GIL;

/// Occupies the tail of a memory block. The block begins with the coro's root chunk, which holds the coro's first
/// Python frames (`pystate::Chunks`).
#[repr(C)]
pub(super) struct Fiber {
    // The fields that each switch uses come first, so that they share few cache lines.
    /// The coro's stack pointer while it is suspended.
    pub(super) sp: usize,
    /// The lowest address of the slot, and the address just above its highest one.
    pub(super) base: usize,
    pub(super) top: usize,
    /// Thread-local variables that pointed into the stack when the coro was last suspended (`thread_locals`).
    pub(super) taken: Option<Box<Taken>>,
    /// While the coro is suspended: the containers whose `repr` is in progress on the coro's stack. While it runs:
    /// the containers whose `repr` is in progress on the thread's own stack (`reprs`).
    pub(super) reprs: Option<Box<Contents>>,
    /// Used only if the coro hides the loop (`tasks`). While the coro is suspended: the running loop that the coro's
    /// code sees (null if it sees none). While the coro runs: the thread's running loop. An owned reference, or null.
    pub(super) running_loop: *mut ffi::PyObject,
    pub(super) state: PyState,
    pub(super) slot: Rc<SharedSlot>,
    /// The bytes of the stack while they are not in the slot.
    pub(super) saved: Option<Saved>,
    /// The coro that the fiber belongs to.
    pub(super) coro: *mut ffi::PyObject,
    pub(super) relinked: Relinked,
    /// The innermost Python frame of the stack. Valid only while the stack is evicted.
    pub(super) innermost: *mut u8,
    /// The interpreter state points here, so a fiber must not move.
    pub(super) root: ThreadStateRoot,
}

/// A slot, and the fiber whose stack occupies it.
pub(super) struct SharedSlot {
    pub(super) stack: StackSlot,
    /// The fiber whose stack is in the slot, null if the slot is free.
    pub(super) occupant: Cell<*mut Fiber>,
    /// This is one of the single slots (`slots`): only one coro at a time has it.
    pub(super) is_single: Cell<bool>,
}

impl SharedSlot {
    /// A free slot with this stack. The slot is registered as the owner of the stack, so that the fault handler can
    /// name a coro that overflows it.
    pub(super) fn new(stack: StackSlot) -> Rc<Self> {
        let shared = Rc::new(Self {
            stack,
            occupant: Cell::new(ptr::null_mut()),
            is_single: Cell::new(false),
        });
        shared.stack.set_owner(Rc::as_ptr(&shared).cast());
        shared
    }
}

/// Writes the name of the coro whose stack has overflowed. Runs in a signal handler, so it neither allocates nor calls
/// Python. The fault occurred in this thread, so the coro in the slot is the running one.
pub(super) unsafe fn describe_overflow(owner: *const c_void, message: &mut FaultMessage) {
    // SAFETY: the owner is a slot that lives as long as its stack is in use; its occupant is the fiber of a live coro.
    unsafe {
        let shared = &*owner.cast::<SharedSlot>();
        message.push_str("grapeshot: ");
        if let Some(fiber) = shared.occupant.get().as_ref() {
            let coro = &*fiber.coro.cast::<CoroObject>();
            message.push_str("coro ");
            message.push_number(coro.id.get());
            let name = coro.name.as_ptr();
            if !name.is_null() {
                message.push_str(" (");
                push_name(name, message);
                message.push_str(")");
            }
        } else {
            message.push_str("a coro");
        }
        message.push_str(" has used up its stack of ");
        message.push_number((shared.stack.len_bytes() / (1024 * 1024)) as u64);
        message.push_str(" MiB");
    }
}

/// Appends a Python string by reading its memory: a signal handler cannot call Python.
unsafe fn push_name(name: *mut ffi::PyObject, message: &mut FaultMessage) {
    // SAFETY: a coro's name is a str, and its data has the length and the character width that its header gives.
    unsafe {
        let (data, kind) = (ffi::PyUnicode_DATA(name), ffi::PyUnicode_KIND(name));
        for index in 0..ffi::PyUnicode_GET_LENGTH(name) as usize {
            message.push_code_point(match kind {
                ffi::PyUnicode_1BYTE_KIND => u32::from(*data.cast::<u8>().add(index)),
                ffi::PyUnicode_2BYTE_KIND => u32::from(*data.cast::<u16>().add(index)),
                _ => *data.cast::<u32>().add(index),
            });
        }
    }
}

const _: () = assert!(align_of::<Fiber>() == 8);

/// At most this much of a stack is prefetched. When the copy starts, the hardware prefetches the rest by itself.
const MAX_PREFETCHED_LEN: usize = 1024;
const LINE_LEN: usize = 64;

#[inline]
fn prefetch(start: *const u8, len_bytes: usize) {
    for offset in (0..len_bytes).step_by(LINE_LEN) {
        arch::prefetch(start.wrapping_add(offset));
    }
}

impl Fiber {
    /// How many bytes of the suspended stack are in use.
    pub(super) fn used_len(&self) -> usize {
        self.top - self.sp
    }

    /// Prefetches a fiber.
    #[inline]
    pub(super) fn prefetch(fiber: *const Self) {
        prefetch(fiber.cast(), size_of::<Self>());
    }

    /// Prefetches the stack and its innermost frame, if the stack is evicted.
    #[inline]
    pub(super) fn prefetch_stack(&self) {
        if let Some(saved) = &self.saved {
            prefetch(saved.as_ptr(), saved.len_bytes().min(MAX_PREFETCHED_LEN));
            prefetch(self.innermost, 2 * LINE_LEN);
        }
    }

    /// The innermost Python frame of the stack that is not in use: the coro's stack while the coro is suspended, the
    /// thread's own stack while the coro runs. Null if there is none.
    ///
    /// # Safety
    /// That stack is either evicted or in place, and is not being copied.
    unsafe fn innermost_frame(&self) -> *mut u8 {
        if self.saved.is_some() {
            self.innermost
        } else {
            // SAFETY: by the contract.
            unsafe { self.state.innermost() }
        }
    }
}

/// Reports the references of the stack that is not in use: the coro's stack or the thread's own. The collector of a
/// free-threaded build does not find these references by itself (`PyState::traverse`).
///
/// # Safety
/// Called by the collector; `fiber` is null or the fiber of a live coro.
pub(super) unsafe fn traverse(
    fiber: *mut Fiber,
    is_running: bool,
    visit: ffi::visitproc,
    arg: *mut c_void,
) -> c_int {
    if HAS_GIL {
        return 0;
    }
    // SAFETY: by the contract. While the coro runs, `fiber.state` belongs to the thread's own stack, which is never
    // evicted.
    unsafe {
        match fiber.as_ref() {
            Some(fiber) => {
                let innermost = fiber.innermost_frame();
                fiber.state.traverse(innermost, is_running, visit, arg)
            }
            None => 0,
        }
    }
}

/// Called in the child of a fork, for the coro that has forked.
pub(super) fn after_fork(coro: Coro<'_>) {
    // SAFETY: the coro is the caller, and nothing else uses its fiber before this returns.
    if let Some(fiber) = unsafe { coro.fiber.get().as_mut() } {
        fiber.state.after_fork();
    }
}

/// The innermost Python frame of a suspended coro as a frame object; None if the coro is running, has not begun or has
/// ended.
pub(super) fn frame(coro: Coro<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = coro.py();
    if !matches!(coro.status.get(), Status::Ready | Status::Waiting) {
        return Ok(None);
    }
    // SAFETY: the coro is suspended, so its fiber has no other user. If its stack is evicted, the chain of Python
    // frames leaves out the entry frames, which were on that stack (`Relinked`). The innermost frame is on the heap.
    unsafe {
        let Some(fiber) = coro.fiber.get().as_ref() else {
            return Ok(None);
        };
        Ok(pystate::frame_object(py, fiber.innermost_frame()))
    }
}
