//! The part of the interpreter's thread state that belongs to a coro, and is swapped at each switch of the stack.
//!
//! The layout of `PyThreadState` is not part of the stable ABI, so each minor version has a file with its details
//! (`v311.rs` to `v315.rs`) and a table with the offsets of the fields (`v311_offsets.rs` to `v315_offsets.rs`; the
//! free-threaded builds of 3.14 and 3.15 have tables of their own). The offsets are checked against the headers when
//! the crate is built (`build_offsets.rs`), and against the running interpreter when the package `grapeshot.coro` is
//! imported (`self_check`). On a version without such files the crate builds, but importing `grapeshot.coro` raises
//! `ImportError`.
//!
//! | field | why it is the coro's |
//! |---|---|
//! | `cframe` (up to 3.12) or `current_frame` | the chain of Python frames, down to the coro's `root_frame` |
//! | `exc_info` | the exceptions that the coro's `except` blocks are handling (`sys.exc_info()`, bare `raise`) |
//! | `context`, `context_ver` | its `contextvars` |
//! | `datastack_*` | the memory of its Python frames |
//! | recursion counters | how deep its calls are nested |
//! | `recursion_headroom` | while an exception is made, the depth may exceed the limit; the coro may yield just then |
//! | `tracing`, `what_event` | the coro may yield inside a trace function |
//! | trash nesting (up to 3.12) | the coro may yield inside a nested deallocation |
//! | the executor (3.13 and later) | the JIT-compiled code that is running (`HeldExecutor`) |
//! | the running task (3.14 and later) | asyncio's current task: the coro itself, unless other code sets another one |
//! | `critical_section`, `c_stack_refs` (free-threaded) | lists whose nodes lie on the stack (`free_threaded.rs`) |
//!
//! Trace and profile functions, `delete_later` and all other fields belong to the thread. From 3.14 on, two more
//! parts of the thread state change for the time that a coro runs: the module `tasks` exchanges the running loop if the
//! coro hides it, and `protect` sets the bounds of the C stack.
//!
//! When the scheduler swaps the coro's part, it runs on the thread's own stack, and the thread is attached.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

use common_offsets::{EXC_INFO_LEN, PREVIOUS_ITEM};
use unlocked::Unlocked;

use crate::binding::HAS_GIL;

/// A table of offsets. Each row has the name of a constant and its value, and says what the value is in C: the offset
/// of a field, with the field's type, or the size of a structure:
///
/// ```text
///   TRACING: usize = 60 => "int" PyThreadState.tracing;
///   EXECUTOR: Option<usize> = Some(272) => "void *" PyThreadState.current_executor;
///   EVAL_BREAKER: Option<usize> = None;              only other versions have this field
///   CFRAME_LEN: usize = 24 => sizeof(_PyCFrame);
/// ```
///
/// Here the rows become constants. The tables are also modules of the build script, which has its own macro of this
/// name: there the rows become assertions for the C compiler (`build_offsets.rs`).
macro_rules! offsets {
    ($(
        $name:ident: $kind:ty = $value:expr
        $(=> $c_type:literal $owner:ident $(. $field:ident)+)?
        $(=> sizeof($whole:ident))?
    ;)*) => {
        $(pub(in crate::coro::pystate) const $name: $kind = $value;)*
    };
}

mod common_offsets;

#[cfg(all(Py_3_11, not(Py_3_12)))]
#[path = "v311.rs"]
mod imp;
#[cfg(all(Py_3_12, not(Py_3_13)))]
#[path = "v312.rs"]
mod imp;
#[cfg(all(Py_3_13, not(Py_3_14), not(Py_GIL_DISABLED)))]
#[path = "v313.rs"]
mod imp;
#[cfg(all(Py_3_14, not(Py_3_15)))]
#[path = "v314.rs"]
mod imp;
#[cfg(all(Py_3_15, not(Py_3_16)))]
#[path = "v315.rs"]
mod imp;
#[cfg(any(Py_3_16, all(Py_GIL_DISABLED, not(Py_3_14))))]
#[path = "none.rs"]
mod imp;

#[cfg(all(Py_GIL_DISABLED, Py_3_14, not(Py_3_16)))]
#[path = "free_threaded.rs"]
mod unlocked;
#[cfg(not(all(Py_GIL_DISABLED, Py_3_14, not(Py_3_16))))]
#[path = "with_gil.rs"]
mod unlocked;

/// Whether asyncio keeps the running task in the thread state, so that `PyState::swap` swaps it too.
pub(super) const SWAPS_TASK: bool = imp::RUNNING_TASK.is_some();
/// Whether the field `EXECUTOR` of the thread state is an owned reference.
const OWNS_EXECUTOR: bool = cfg!(not(Py_3_14));

mod check;
mod chunk;
mod code;
mod frames;
mod instrumentation;
mod profile;
mod spare_chunks;

pub(super) use check::self_check;
pub(super) use chunk::{Chunks, first_frame, tail};
pub(super) use code::{has_known_code, is_async_function};
pub(super) use frames::{Relinked, Suspended};
pub(super) use instrumentation::{update_shown, version};
pub(super) use profile::{
    Event, Version, call_probe, frames, has_native_profile, has_version, is_tracing, set_up, tell,
};
pub(super) use spare_chunks::keep_chunks;

/// The bytes of stack to allow for one level of C recursion (3.12 and 3.13). Measured on 3.13: `sorted(key=)` takes the
/// most, 1.3 KiB, because it keeps the runs that it merges on the stack; `repr`, `json`, `compile` and calls through C
/// take 150 to 350 bytes.
const C_LEVEL_LEN: usize = 2 * 1024;

/// The part of a thread state that belongs to one stack. The pointers except `context`, `executor` and `task` are
/// borrowed: the coro keeps their targets alive.
#[repr(C)]
pub(super) struct PyState {
    /// `cframe` or `current_frame`.
    frame: *mut u8,
    exc_info: *mut ExcInfo,
    /// An owned reference, which each swap exchanges with the one in the thread state.
    context: *mut ffi::PyObject,
    chunk: *mut u8,
    chunk_top: *mut u8,
    chunk_limit: *mut u8,
    /// The executor to which the stack returns: an owned reference or null, even if `OWNS_EXECUTOR` is false.
    executor: *mut ffi::PyObject,
    /// The task that asyncio sees (3.14 and later): the coro itself, or the task that was current when the coro was
    /// suspended.
    task: *mut ffi::PyObject,
    /// The depth of Python calls. The thread state has the number of calls that are left instead, which depends on the
    /// limit, and the limit may change while the coro waits.
    py_depth: c_int,
    c_remaining: c_int,
    headroom: c_int,
    tracing: c_int,
    what_event: c_int,
    trash_nesting: c_int,
    /// The version of the instrumentation that the code of the frames has.
    version: usize,
    /// The part that only a free-threaded build has.
    unlocked: Unlocked,
}

const _: () =
    assert!(PREVIOUS_ITEM == std::mem::offset_of!(ExcInfo, previous) && EXC_INFO_LEN == size_of::<ExcInfo>());

/// `_PyErr_StackItem`.
#[repr(C)]
pub(super) struct ExcInfo {
    value: *mut ffi::PyObject,
    previous: *mut ExcInfo,
}

/// `_PyCFrame` of 3.11 and 3.12 (on 3.12 it has no `use_tracing` and is shorter).
#[repr(C)]
pub(super) struct CFrame {
    words: [usize; 3],
}

/// The structures that a coro's thread state points to. Their addresses do not change during the coro's life.
#[repr(C)]
pub(super) struct ThreadStateRoot {
    exc_info: ExcInfo,
    cframe: CFrame,
}

/// A reference to the executor of a stack that continues.
///
/// An executor is a piece of code that the JIT compiler has made. Running it takes no reference. If it becomes invalid
/// meanwhile, it is freed only when no thread state shows it as the current one. So a stack that does not run holds a
/// reference to the executor to which it returns, as CPython does while an executor calls the evaluation loop.
pub(super) struct HeldExecutor(*mut ffi::PyObject);

impl HeldExecutor {
    /// Exchanges the executors of two stacks: the one that is left and the one that continues. If the thread state's
    /// field is not an owned reference (`OWNS_EXECUTOR` is false), this function makes a reference to the executor of
    /// the stack that is left, and keeps it in `other` while that stack is suspended. The result is then the reference
    /// that was made in the same way for the stack that continues.
    ///
    /// # Safety
    /// Attached. `current` is the field of the thread state, and `other` an owned reference or null.
    #[inline(always)]
    unsafe fn exchange(current: *mut *mut ffi::PyObject, other: &mut *mut ffi::PyObject) -> Self {
        // SAFETY: by the contract; the executor that is running is alive.
        unsafe {
            let held = if OWNS_EXECUTOR { ptr::null_mut() } else { *other };
            ptr::swap(current, other);
            if !OWNS_EXECUTOR {
                ffi::Py_XINCREF(*other);
            }
            Self(held)
        }
    }
}

impl Drop for HeldExecutor {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: an owned reference or null. It is dropped by the thread that has made the switch, attached.
        unsafe { ffi::Py_XDECREF(self.0) };
    }
}

impl ThreadStateRoot {
    pub(super) const fn new() -> Self {
        Self {
            exc_info: ExcInfo {
                value: ptr::null_mut(),
                previous: ptr::null_mut(),
            },
            cframe: CFrame { words: [0; 3] },
        }
    }
}

impl PyState {
    /// A state in which nothing is set.
    pub(super) const fn empty() -> Self {
        Self {
            frame: ptr::null_mut(),
            exc_info: ptr::null_mut(),
            context: ptr::null_mut(),
            chunk: ptr::null_mut(),
            chunk_top: ptr::null_mut(),
            chunk_limit: ptr::null_mut(),
            executor: ptr::null_mut(),
            task: ptr::null_mut(),
            py_depth: 0,
            c_remaining: 0,
            headroom: 0,
            tracing: 0,
            what_event: -1,
            trash_nesting: 0,
            version: 0,
            unlocked: Unlocked::empty(),
        }
    }

    /// The state of a stack on which nothing has run yet: no frames, no exception, no context.
    ///
    /// # Safety
    /// Attached, on the thread that the stack belongs to. `root` stays where it is, and `chunk` is one of `Chunks`,
    /// given back only after the coro has ended.
    pub(super) unsafe fn fresh(root: *mut ThreadStateRoot, chunk: *mut u8, stack_len: usize) -> Self {
        // SAFETY: the attached thread's state and `root` are alive, and the chunk is one of ours (contract); only
        // addresses are computed.
        let (frame, exc_info, (chunk_top, chunk_limit)) = unsafe {
            (
                imp::root_frame(ffi::PyThreadState_Get().cast(), &raw mut (*root).cframe),
                &raw mut (*root).exc_info,
                chunk::bounds(chunk),
            )
        };
        Self {
            frame,
            exc_info,
            chunk,
            chunk_top,
            chunk_limit,
            c_remaining: check::c_recursion_limit().min((stack_len / C_LEVEL_LEN) as c_int),
            ..Self::empty()
        }
    }

    /// Exchanges this state with the thread's. Drop the result after the switch, when Python code may run.
    ///
    /// # Safety
    /// `thread` is the attached thread's state. The call is a part of a switch to or from the stack that this state
    /// belongs to. No exception is set.
    #[inline(always)]
    #[must_use]
    pub(super) unsafe fn swap(&mut self, thread: *mut ffi::PyThreadState) -> HeldExecutor {
        let thread = thread.cast::<u8>();
        // SAFETY: the offsets fit this interpreter (checked at build and at import), and the thread is attached.
        unsafe {
            self.unlocked.swap(thread);
            imp::before_swap(thread, self.frame, self.tracing);
            ptr::swap(field(thread, imp::FRAME), &raw mut self.frame);
            ptr::swap(field(thread, imp::EXC_INFO), &raw mut self.exc_info);
            ptr::swap(field(thread, imp::CONTEXT), &raw mut self.context);
            let version = field::<u64>(thread, imp::CONTEXT_VER);
            *version = (*version).wrapping_add(1);
            ptr::swap(field(thread, imp::DATASTACK_CHUNK), &raw mut self.chunk);
            ptr::swap(field(thread, imp::DATASTACK_TOP), &raw mut self.chunk_top);
            ptr::swap(field(thread, imp::DATASTACK_LIMIT), &raw mut self.chunk_limit);
            ptr::swap(field(thread, imp::TRACING), &raw mut self.tracing);
            ptr::swap(field(thread, imp::WHAT_EVENT), &raw mut self.what_event);
            let limit = *field::<c_int>(thread, imp::RECURSION_LIMIT);
            let remaining = field::<c_int>(thread, imp::RECURSION_REMAINING);
            let depth = limit - *remaining;
            *remaining = limit - self.py_depth;
            self.py_depth = depth;
            ptr::swap(field(thread, imp::RECURSION_HEADROOM), &raw mut self.headroom);
            if let Some(offset) = imp::C_RECURSION_REMAINING {
                ptr::swap(field(thread, offset), &raw mut self.c_remaining);
            }
            if let Some(offset) = imp::TRASH_NESTING {
                ptr::swap(field(thread, offset), &raw mut self.trash_nesting);
            }
            if let Some(offset) = imp::RUNNING_TASK {
                ptr::swap(field(thread, offset), &raw mut self.task);
            }
            match imp::EXECUTOR {
                Some(offset) => HeldExecutor::exchange(field(thread, offset), &mut self.executor),
                None => HeldExecutor(ptr::null_mut()),
            }
        }
    }

    /// The innermost Python frame of a state that is not in use by the thread, null if there is none.
    ///
    /// # Safety
    /// The stack that the state belongs to is in its place.
    pub(super) unsafe fn innermost(&self) -> *mut u8 {
        // SAFETY: the pointer is the coro's root or lies on its stack (contract).
        unsafe { imp::innermost(self.frame) }
    }

    /// Called before the stack of a state that is not in use by the thread is evicted.
    ///
    /// # Safety
    /// The stack is in its place.
    #[inline(always)]
    pub(super) unsafe fn leave_slot(&mut self) {
        // SAFETY: by the contract.
        unsafe { self.unlocked.leave_slot() };
    }

    /// Called when the stack is in its place again.
    #[inline(always)]
    pub(super) fn return_to_slot(&mut self) {
        self.unlocked.return_to_slot();
    }

    /// Reports those references of the stack that the collector finds by itself only while the stack runs. In builds
    /// with the GIL there are none. `innermost`: the innermost frame, or null. `is_own`: this is the state of a
    /// thread's own stack.
    ///
    /// # Safety
    /// Called by the collector, for a state that is not in use by the thread.
    pub(super) unsafe fn traverse(
        &self,
        innermost: *mut u8,
        is_own: bool,
        visit: ffi::visitproc,
        arg: *mut c_void,
    ) -> c_int {
        // SAFETY: by the contract.
        unsafe { self.unlocked.traverse(innermost, is_own, visit, arg) }
    }

    /// Called in the child of a fork, for the coro that has forked.
    pub(super) fn after_fork(&mut self) {
        self.unlocked.after_fork();
    }

    /// The top of the data stack of a state that is not in use by the thread.
    pub(super) fn data_top(&self) -> *mut u8 {
        self.chunk_top
    }

    /// Records that the code of the frames has the current instrumentation, because the stack ran until now.
    ///
    /// # Safety
    /// `thread` is a live thread state.
    #[inline(always)]
    pub(super) unsafe fn note_version(&mut self, thread: *mut ffi::PyThreadState) {
        if imp::EVAL_BREAKER.is_some() {
            // SAFETY: by the contract.
            self.version = unsafe { version(thread) };
        }
    }

    /// Instruments the code of the frames if that is necessary before they continue. Raises `MemoryError` on failure.
    ///
    /// # Safety
    /// The state belongs to a stack of this thread, which is suspended in its place.
    #[inline(always)]
    pub(super) unsafe fn instrument(&mut self, py: Python<'_>) -> PyResult<()> {
        if imp::EVAL_BREAKER.is_none() {
            return Ok(());
        }
        // SAFETY: attached, so the thread state is alive. The stack is suspended in its place (contract).
        unsafe {
            let thread = ffi::PyThreadState_Get();
            if self.version != version(thread) {
                instrumentation::update(py, self.innermost())?;
                self.note_version(thread);
            }
        }
        Ok(())
    }

    /// The field with the running task, an owned reference or null.
    pub(super) fn task(&mut self) -> &mut *mut ffi::PyObject {
        &mut self.task
    }

    /// The length of the memory for the Python frames, in bytes. If the coro is running, its chunks are in the thread
    /// state.
    pub(super) fn frames_len(&self, is_running: bool) -> usize {
        let chunk = if is_running {
            // SAFETY: attached; the field is the innermost chunk of the stack that runs.
            unsafe { *field::<*mut u8>(ffi::PyThreadState_Get().cast(), imp::DATASTACK_CHUNK) }
        } else {
            self.chunk
        };
        // SAFETY: a chain of live chunks.
        unsafe { chunk::total_len(chunk) }
    }

    /// The innermost chunk; its chain ends in the root chunk.
    pub(super) fn chunk(&self) -> *mut u8 {
        self.chunk
    }
}

/// The root chunk of the Python frames that run in this thread, null if there has been no frame yet.
///
/// # Safety
/// Attached.
#[inline]
pub(super) unsafe fn running_root() -> *mut u8 {
    // SAFETY: attached; the field is the innermost chunk of the stack that runs.
    unsafe {
        chunk::root(*field::<*mut u8>(
            ffi::PyThreadState_Get().cast(),
            imp::DATASTACK_CHUNK,
        ))
    }
}

/// The field of the thread state with asyncio's running loop (an owned reference or null). None before 3.14, where
/// asyncio keeps it elsewhere.
///
/// # Safety
/// Attached. The field is valid as long as the thread exists.
#[inline]
pub(super) unsafe fn running_loop_place() -> Option<*mut *mut ffi::PyObject> {
    // SAFETY: attached; the offset fits this interpreter.
    imp::RUNNING_LOOP.map(|offset| unsafe { field(ffi::PyThreadState_Get().cast(), offset) })
}

/// Like `running_loop_place`, for the current task.
///
/// # Safety
/// As for `running_loop_place`.
#[inline]
pub(super) unsafe fn running_task_place() -> Option<*mut *mut ffi::PyObject> {
    // SAFETY: as above.
    imp::RUNNING_TASK.map(|offset| unsafe { field(ffi::PyThreadState_Get().cast(), offset) })
}

/// A field of a C structure.
///
/// # Safety
/// There is a field of type `T` at `offset`.
#[inline(always)]
unsafe fn field<T>(object: *mut u8, offset: usize) -> *mut T {
    // SAFETY: by the contract.
    unsafe { object.add(offset).cast() }
}

/// The frame object of `innermost`, None if that is null.
///
/// # Safety
/// Attached; `innermost` is the innermost frame of a suspended stack or of this thread's own stack, or null.
pub(super) unsafe fn frame_object(py: Python<'_>, innermost: *mut u8) -> Option<Bound<'_, PyAny>> {
    let mut holder = CFrame { words: [0; 3] };
    // SAFETY: the thread state shows the chain of `innermost` only while the getter runs. The getter allocates at most
    // a frame object, and the collector is switched off for that time.
    unsafe {
        let thread = ffi::PyThreadState_Get();
        let place = field::<*mut u8>(thread.cast(), imp::FRAME);
        // Without a GIL, the collector does not run in the getter anyway, and other threads may need it meanwhile.
        let was_enabled = if HAS_GIL { ffi::PyGC_Disable() } else { 0 };
        let own = std::mem::replace(&mut *place, imp::show(&raw mut holder, innermost));
        let frame = ffi::PyThreadState_GetFrame(thread);
        *place = own;
        if was_enabled != 0 {
            ffi::PyGC_Enable();
        }
        Bound::from_owned_ptr_or_opt(py, frame.cast())
    }
}

/// Whether coros may be resumed. A free-threaded build resumes none while the interpreter exits.
#[inline(always)]
pub(super) fn may_run() -> bool {
    unlocked::may_run()
}

/// Called on a stack that continues, after the switch. If C code on this stack held a lock, free-threaded builds take
/// the lock again here. While the thread waits for the lock, other threads may run, as in any call into Python.
///
/// # Safety
/// Attached, and the thread state belongs to the stack that runs.
#[inline(always)]
pub(super) unsafe fn resume_critical_sections() {
    // SAFETY: by the contract.
    unsafe { unlocked::resume_critical_sections() };
}

/// Tells the interpreter the bounds of the stack that C code is about to run on, so that deep recursion ends in
/// `RecursionError`. Returns false, with an exception set, if the interpreter refuses the stack.
///
/// # Safety
/// The thread is attached, and about to switch to that stack.
#[inline(always)]
pub(super) unsafe fn protect(thread: *mut ffi::PyThreadState, base: usize, len_bytes: usize) -> bool {
    // SAFETY: by the contract.
    unsafe { imp::protect(thread, base, len_bytes) }
}

/// Tells the interpreter that C code runs on the thread's own stack again.
///
/// # Safety
/// The thread is attached and on its own stack.
#[inline(always)]
pub(super) unsafe fn unprotect(thread: *mut ffi::PyThreadState) {
    // SAFETY: by the contract.
    unsafe { imp::unprotect(thread) }
}
