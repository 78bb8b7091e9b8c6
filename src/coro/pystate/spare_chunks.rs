//! Keeps free chunks of data stacks for the next calls that need one.
//!
//! CPython maps a chunk of 16 KiB when a frame does not fit into the last chunk, and unmaps it as soon as that frame
//! returns. So while the small root chunk of a coro (`chunk`) is full, CPython alone would do a mapping, a page fault
//! and an unmapping for each call. Chunks come from the interpreter's arena allocator, so an allocator in front of it
//! keeps some of them.
//!
//! There is one allocator for the process. Any attached thread may call it, for example when a Python frame needs a new
//! chunk.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, TryLockError};

use pyo3::ffi;
use pyo3::prelude::*;

/// `DATA_STACK_CHUNK_SIZE` of CPython. Nothing else in an interpreter allocates arenas of this size; if something did,
/// it would simply get such a block.
const LEN: usize = 16 * 1024;
/// The largest number of chunks to keep: half a megabyte.
const KEPT: usize = 32;

struct Free(*mut c_void);

// SAFETY: a free block is used only by the list that it is in.
unsafe impl Send for Free {}

/// The data of the allocator.
struct Keeper {
    /// The interpreter's previous allocator. Its functions may be called from any attached thread.
    base: ffi::PyObjectArenaAllocator,
    kept: Mutex<Vec<Free>>,
}

impl Keeper {
    /// Calls a function with the list, if it can be locked without waiting. Returns None if another thread has locked
    /// the list. This may happen in a free-threaded build, or if interpreters have GILs of their own. If another thread
    /// held the lock when the process forked, the list stays locked in the child.
    fn with_kept<R>(&self, function: impl FnOnce(&mut Vec<Free>) -> R) -> Option<R> {
        match self.kept.try_lock() {
            Ok(mut kept) => Some(function(&mut kept)),
            Err(TryLockError::Poisoned(_) | TryLockError::WouldBlock) => None,
        }
    }
}

/// Made once and never freed. The allocator's own context is not used: in a free-threaded build, another thread may
/// call the new function with the old context while both are being replaced.
static KEEPER: AtomicPtr<Keeper> = AtomicPtr::new(ptr::null_mut());

extern "C" fn allocate(_context: *mut c_void, len: usize) -> *mut c_void {
    // SAFETY: `keep_chunks` stored the keeper before it gave this function to the interpreter.
    let keeper = unsafe { &*KEEPER.load(Ordering::Acquire) };
    if len == LEN
        && let Some(Some(block)) = keeper.with_kept(Vec::pop)
    {
        return block.0;
    }
    keeper
        .base
        .alloc
        .map_or(ptr::null_mut(), |base| base(keeper.base.ctx, len))
}

extern "C" fn free(_context: *mut c_void, block: *mut c_void, len: usize) {
    // SAFETY: as in `allocate`.
    let keeper = unsafe { &*KEEPER.load(Ordering::Acquire) };
    let keep = |kept: &mut Vec<Free>| {
        let has_place = kept.len() < kept.capacity();
        if has_place {
            kept.push(Free(block));
        }
        has_place
    };
    if len == LEN && keeper.with_kept(keep) == Some(true) {
        return;
    }
    if let Some(base) = keeper.base.free {
        base(keeper.base.ctx, block, len);
    }
}

/// Puts the allocator in front of the interpreter's, once per process.
pub(in crate::coro) fn keep_chunks(_attached: Python<'_>) {
    static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
    if IS_INSTALLED.swap(true, Ordering::Relaxed) {
        return;
    }
    let mut arena = ffi::PyObjectArenaAllocator {
        ctx: ptr::null_mut(),
        alloc: None,
        free: None,
    };
    // SAFETY: attached; the pointers are to a live struct, and the new functions do not use their context. Blocks that
    // the interpreter has already allocated may be freed through the new allocator, which passes them on or keeps them.
    unsafe {
        ffi::PyObject_GetArenaAllocator(&raw mut arena);
        let keeper = Box::leak(Box::new(Keeper {
            base: arena,
            kept: Mutex::new(Vec::with_capacity(KEPT)),
        }));
        KEEPER.store(keeper, Ordering::Release);
        arena = ffi::PyObjectArenaAllocator {
            ctx: ptr::null_mut(),
            alloc: Some(allocate),
            free: Some(free),
        };
        ffi::PyObject_SetArenaAllocator(&raw mut arena);
    }
}
