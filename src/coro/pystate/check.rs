//! Checks the offsets against the running interpreter, once, when the package `grapeshot.coro` is imported.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::common_offsets::{CHUNK_SIZE, PREVIOUS_ITEM};
use super::{CFrame, field, frames, imp, instrumentation, unlocked};

/// How many levels of C recursion were left to the thread that imported `grapeshot.coro` (3.12 and 3.13). That is about
/// the number of levels that the interpreter allows each thread.
static C_LIMIT: AtomicI32 = AtomicI32::new(0);

/// `C_LIMIT`, which `self_check` sets.
pub(super) fn c_recursion_limit() -> c_int {
    C_LIMIT.load(Ordering::Relaxed)
}

/// Compares every field that can be checked. Returns None if all are at their offsets, else an error text.
pub(in crate::coro) fn self_check(py: Python<'_>) -> PyResult<Option<String>> {
    if let Some(reason) = imp::UNSUPPORTED
        .or_else(imp::look_up)
        .or_else(instrumentation::look_up)
        .or_else(unlocked::look_up)
    {
        return Ok(Some(reason.to_owned()));
    }
    if cfg!(all(Py_3_14, not(Py_3_15))) && jit_is_enabled(py)? {
        return Ok(Some(
            "coros do not work with the JIT compiler of CPython 3.14: set PYTHON_JIT=0 to switch it off"
                .to_owned(),
        ));
    }
    // SAFETY: attached. The offsets are inside the structure in every release of this minor version, so reading there
    // is safe; at worst a value is wrong.
    unsafe {
        let thread = ffi::PyThreadState_Get();
        let start = thread.cast::<u8>();
        let limit = *field::<c_int>(start, imp::RECURSION_LIMIT);
        let chunk: *mut u8 = *field(start, imp::DATASTACK_CHUNK);
        let top: usize = *field(start, imp::DATASTACK_TOP);
        let end: usize = *field(start, imp::DATASTACK_LIMIT);
        let remaining = *field::<c_int>(start, imp::RECURSION_REMAINING);
        let checks = [
            (
                *field::<*mut ffi::PyInterpreterState>(start, imp::INTERP) == ffi::PyInterpreterState_Get(),
                "interp",
            ),
            (
                *field::<std::ffi::c_ulong>(start, imp::THREAD_ID) as u64
                    == ffi::PyThread_get_thread_ident() as u64,
                "thread_id",
            ),
            (limit == ffi::Py_GetRecursionLimit(), "the recursion limit"),
            (0 < remaining && remaining <= limit, "the recursion depth"),
            (
                *field::<c_int>(start, imp::RECURSION_HEADROOM) == 0,
                "the recursion headroom",
            ),
            (has_c_recursion(start), "the depth of C recursion"),
            (has_tracing(thread), "the depth of tracing"),
            (
                (-1..=32).contains(&*field::<c_int>(start, imp::WHAT_EVENT)),
                "the event that is traced",
            ),
            (has_trash_nesting(py, start)?, "the depth of nested deallocation"),
            (
                imp::EXECUTOR.is_none_or(|offset| (*field::<usize>(start, offset)).is_multiple_of(8)),
                "the executor",
            ),
            (
                *field::<usize>(start, imp::CURRENT_EXCEPTION) == 0,
                "the current exception",
            ),
            (has_exc_info(start), "exc_info"),
            (!chunk.is_null(), "the data stack"),
            (
                (chunk as usize) < top
                    && top <= end
                    && chunk as usize + *field::<usize>(chunk, CHUNK_SIZE) == end,
                "the bounds of the data stack",
            ),
            (has_context(py, start)?, "context"),
            (has_frame(py, thread)?, "the frame"),
            (has_root_frame(start), "the base frame"),
            (has_caller(py, thread)?, "the frame of the caller"),
            (has_task(py, start)?, "the running task"),
            (has_running_loop(py, start)?, "the running loop"),
            (has_profile_object(py, start)?, "the profile function"),
        ];
        let wrong = match checks.iter().find(|(is_right, _)| !is_right) {
            Some((_, what)) => Some(*what),
            None => unlocked::check(py, start)?,
        };
        if wrong.is_none() {
            frames::measure(py)?;
        }
        Ok(wrong.map(|what| format!("this interpreter's thread state has an unexpected layout: {what}")))
    }
}

/// Whether the JIT compiler is on in this process. It cannot be switched on later. The JIT compiler of 3.14 may free
/// compiled code that is still running. A suspended stack, and a call of the evaluation loop from compiled code, each
/// hold a reference to the compiled code to which they return, but the compiler ignores these references.
fn jit_is_enabled(py: Python<'_>) -> PyResult<bool> {
    let Some(jit) = py.import("sys")?.getattr_opt("_jit")? else {
        return Ok(false);
    };
    jit.call_method0("is_enabled")?.is_truthy()
}

/// Checks that the stack of handled exceptions ends in the thread state's own entry.
unsafe fn has_exc_info(thread: *mut u8) -> bool {
    // SAFETY: as in `self_check`; the chain is short and ends in null.
    unsafe {
        let mut item: *mut u8 = *field(thread, imp::EXC_INFO);
        for _ in 0..1000 {
            if item == thread.add(imp::EXC_STATE) {
                return true;
            }
            if item.is_null() {
                return false;
            }
            item = *field(item, PREVIOUS_ITEM);
        }
        false
    }
}

/// Checks that a context becomes the current one when it is entered.
unsafe fn has_context(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    // SAFETY: attached; the context is entered and left on this thread.
    unsafe {
        let context = Bound::from_owned_ptr_or_err(py, ffi::PyContext_New())?;
        if ffi::PyContext_Enter(context.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        let is_right = *field::<*mut ffi::PyObject>(thread, imp::CONTEXT) == context.as_ptr();
        if ffi::PyContext_Exit(context.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(is_right)
    }
}

/// Checks that entering C recursion decrements the remaining levels by one. Stores how many levels are left.
unsafe fn has_c_recursion(thread: *mut u8) -> bool {
    let Some(offset) = imp::C_RECURSION_REMAINING else {
        C_LIMIT.store(c_int::MAX, Ordering::Relaxed);
        return true;
    };
    // SAFETY: as in `self_check`; entered and left on this thread.
    unsafe {
        let before = *field::<c_int>(thread, offset);
        if ffi::Py_EnterRecursiveCall(c"".as_ptr()) != 0 {
            ffi::PyErr_Clear();
            return false;
        }
        let inside = *field::<c_int>(thread, offset);
        ffi::Py_LeaveRecursiveCall();
        C_LIMIT.store(before, Ordering::Relaxed);
        before > 0 && inside == before - 1 && *field::<c_int>(thread, offset) == before
    }
}

/// Checks that entering tracing increments its depth by one.
unsafe fn has_tracing(thread: *mut ffi::PyThreadState) -> bool {
    // SAFETY: as in `self_check`; entered and left on this thread.
    unsafe {
        let place = field::<c_int>(thread.cast(), imp::TRACING);
        let before = *place;
        ffi::PyThreadState_EnterTracing(thread);
        let inside = *place;
        ffi::PyThreadState_LeaveTracing(thread);
        before >= 0 && inside == before + 1 && *place == before
    }
}

/// The depth of nested deallocation when the capsule below was deallocated.
static NESTING: AtomicI32 = AtomicI32::new(-1);

unsafe extern "C" fn note_nesting(_capsule: *mut ffi::PyObject) {
    if let Some(offset) = imp::TRASH_NESTING {
        // SAFETY: as in `self_check`: objects are deallocated by attached threads.
        let nesting = unsafe { *field::<c_int>(ffi::PyThreadState_Get().cast(), offset) };
        NESTING.store(nesting, Ordering::Relaxed);
    }
}

/// Checks that an object inside a list inside a list is deallocated two levels down.
unsafe fn has_trash_nesting(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    let Some(offset) = imp::TRASH_NESTING else {
        return Ok(true);
    };
    // SAFETY: as in `self_check`; the capsule's pointer is not null and is never used.
    unsafe {
        let before = *field::<c_int>(thread, offset);
        let capsule = ffi::PyCapsule_New(ptr::without_provenance_mut(1), ptr::null(), Some(note_nesting));
        let inner = PyList::new(py, [Bound::from_owned_ptr_or_err(py, capsule)?])?;
        drop(PyList::new(py, [inner])?);
        Ok(NESTING.load(Ordering::Relaxed) == before + 2 && *field::<c_int>(thread, offset) == before)
    }
}

/// Checks that the frame object of the current frame points to the innermost frame of the chain.
unsafe fn has_frame(py: Python<'_>, thread: *mut ffi::PyThreadState) -> PyResult<bool> {
    // SAFETY: attached; the getter returns a new reference or null.
    unsafe {
        let frame = ffi::PyThreadState_GetFrame(thread);
        if frame.is_null() {
            return Ok(true);
        }
        let frame = Bound::from_owned_ptr_or_err(py, frame.cast())?;
        let shown: *mut u8 = *field(frame.as_ptr().cast(), imp::F_FRAME);
        let chain = imp::innermost(*field(thread.cast(), imp::FRAME));
        Ok(shown == chain)
    }
}

/// Checks that a chain of frames ends in null or, on 3.15, in the base frame inside the thread state itself.
unsafe fn has_root_frame(thread: *mut u8) -> bool {
    let mut holder = CFrame { words: [0; 3] };
    // SAFETY: as in `self_check`; `holder` contains no frame. Memory inside the thread state is readable.
    unsafe {
        let root = imp::innermost(imp::root_frame(thread, &raw mut holder));
        if root.is_null() {
            return true;
        }
        let Some(end) = imp::RUNNING_TASK else {
            return false;
        };
        (imp::EXC_STATE..end).contains(&(root as usize).wrapping_sub(thread as usize))
            && *field::<usize>(root, imp::FRAME_PREVIOUS) == 0
    }
}

/// Checks that `previous` of the innermost frame leads to its caller, past the entry frames on this thread's stack
/// (3.12 and later; see the module `frames`).
unsafe fn has_caller(py: Python<'_>, thread: *mut ffi::PyThreadState) -> PyResult<bool> {
    /// An entry frame is at most this far above this function on the stack.
    const STACK_LEN: usize = 8 * 1024 * 1024;
    let here = &raw const thread as usize;
    // SAFETY: attached; the getters return new references or null; frames and this stack are readable.
    unsafe {
        let frame = ffi::PyThreadState_GetFrame(thread);
        if frame.is_null() {
            return Ok(true);
        }
        let frame = Bound::from_owned_ptr_or_err(py, frame.cast())?;
        let caller = ffi::PyFrame_GetBack(frame.as_ptr().cast());
        if caller.is_null() {
            return Ok(true);
        }
        let caller = Bound::from_owned_ptr_or_err(py, caller.cast())?;
        let wanted: *mut u8 = *field(caller.as_ptr().cast(), imp::F_FRAME);
        let mut previous: *mut u8 = *field(*field(frame.as_ptr().cast(), imp::F_FRAME), imp::FRAME_PREVIOUS);
        // There may be an entry frame for each call through C between the frame and its caller.
        for _ in 0..100 {
            if previous == wanted || !(here..here + STACK_LEN).contains(&(previous as usize)) {
                break;
            }
            previous = *field(previous, imp::FRAME_PREVIOUS);
        }
        Ok(previous == wanted)
    }
}

/// Checks that the object of the profile function is the one that `sys.getprofile` returns.
unsafe fn has_profile_object(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    let object = py.import("sys")?.call_method0("getprofile")?;
    // SAFETY: as in `self_check`.
    let found = unsafe { *field::<*mut ffi::PyObject>(thread, imp::PROFILE_OBJECT) };
    Ok(if found.is_null() {
        object.is_none()
    } else {
        found == object.as_ptr()
    })
}

/// Checks that the thread state contains asyncio's running loop, in versions where asyncio keeps it there.
unsafe fn has_running_loop(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    let Some(offset) = imp::RUNNING_LOOP else {
        return Ok(true);
    };
    let asyncio = py.import("_asyncio")?;
    // SAFETY: as in `self_check`.
    let running = || unsafe { *field::<*mut ffi::PyObject>(thread, offset) };
    let event_loop = asyncio.call_method0("_get_running_loop")?;
    if !event_loop.is_none() {
        return Ok(running() == event_loop.as_ptr());
    }
    let other = py.import("builtins")?.call_method0("object")?;
    asyncio.call_method1("_set_running_loop", (&other,))?;
    let is_right = running() == other.as_ptr();
    asyncio.call_method1("_set_running_loop", (py.None(),))?;
    Ok(is_right && running().is_null())
}

/// Checks that the thread state contains asyncio's current task, in versions where asyncio keeps it there.
unsafe fn has_task(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    let Some(offset) = imp::RUNNING_TASK else {
        return Ok(true);
    };
    let tasks = py.import("_asyncio")?;
    // SAFETY: as in `self_check`.
    let running = || unsafe { *field::<*mut ffi::PyObject>(thread, offset) };
    let before = running();
    if !before.is_null() {
        // This import runs in a task: compare with that task instead of entering one.
        let event_loop = tasks.call_method0("get_running_loop")?;
        let task = tasks.call_method1("current_task", (event_loop,))?;
        return Ok(task.as_ptr() == before);
    }
    let event_loop = tasks.call_method0("_get_running_loop")?;
    let other = py.import("builtins")?.call_method0("object")?;
    let (of, task) = if event_loop.is_none() {
        (other.clone(), other)
    } else {
        (event_loop, other)
    };
    if tasks.call_method0("_get_running_loop")?.is_none() {
        // Without a running loop asyncio does not read the task from the thread state.
        tasks.call_method1("_set_running_loop", (&of,))?;
        let result = tasks
            .call_method1("_enter_task", (&of, &task))
            .map(|_| running() == task.as_ptr());
        if result.is_ok() {
            tasks.call_method1("_leave_task", (&of, &task))?;
        }
        tasks.call_method1("_set_running_loop", (py.None(),))?;
        return result;
    }
    tasks.call_method1("_enter_task", (&of, &task))?;
    let is_right = running() == task.as_ptr();
    tasks.call_method1("_leave_task", (&of, &task))?;
    Ok(is_right)
}
