//! Does the running interpreter look as the offsets say? Asked once, when the module is imported.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;

use super::{field, imp};
use crate::event_loop::errors;

/// Levels of C recursion that the interpreter allows a thread (3.12 and 3.13).
static C_LIMIT: AtomicI32 = AtomicI32::new(0);

/// As noted by `self_check`.
pub(super) fn c_recursion_limit() -> c_int {
    C_LIMIT.load(Ordering::Relaxed)
}

/// None if every field that can be compared is where the offsets say, else what differs.
pub(in crate::coro) fn self_check(py: Python<'_>) -> PyResult<Option<&'static str>> {
    if let Some(reason) = imp::UNSUPPORTED.or_else(imp::look_up) {
        return Ok(Some(reason));
    }
    // SAFETY: attached. Reading at the offsets is what is to be justified: they lie inside the structure in every
    // release of this minor version, so at worst a value is wrong.
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
                *field::<usize>(start, imp::CURRENT_EXCEPTION) == 0,
                "the current exception",
            ),
            (has_exc_info(start), "exc_info"),
            (!chunk.is_null(), "the data stack"),
            (
                (chunk as usize) < top && top <= end && chunk as usize + *field::<usize>(chunk, 8) == end,
                "the bounds of the data stack",
            ),
            (has_context(py, start)?, "context"),
            (has_frame(py, thread)?, "the frame"),
            (has_task(py, start)?, "the running task"),
        ];
        if let Some(offset) = imp::C_RECURSION_REMAINING {
            C_LIMIT.store(*field::<c_int>(start, offset), Ordering::Relaxed);
        } else {
            C_LIMIT.store(c_int::MAX, Ordering::Relaxed);
        }
        Ok(checks
            .iter()
            .find(|(is_right, _)| !is_right)
            .map(|(_, what)| *what))
    }
}

/// The stack of handled exceptions ends in the thread state's own entry.
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
            item = *field(item, size_of::<usize>());
        }
        false
    }
}

/// A context that is entered becomes the current one.
unsafe fn has_context(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    // SAFETY: attached; the context is entered and left on this thread.
    unsafe {
        let context = errors::owned(py, ffi::PyContext_New())?;
        if ffi::PyContext_Enter(context.as_ptr()) != 0 {
            return Err(errors::fetch(py));
        }
        let is_right = *field::<*mut ffi::PyObject>(thread, imp::CONTEXT) == context.as_ptr();
        if ffi::PyContext_Exit(context.as_ptr()) != 0 {
            return Err(errors::fetch(py));
        }
        Ok(is_right)
    }
}

/// The frame object of the current frame points to the innermost frame of the chain.
unsafe fn has_frame(py: Python<'_>, thread: *mut ffi::PyThreadState) -> PyResult<bool> {
    /// `f_frame` in `PyFrameObject` (`Include/internal/pycore_frame.h`): after the header and `f_back`.
    const F_FRAME: usize = 24;
    // SAFETY: attached; the getter gives a new reference or null.
    unsafe {
        let frame = ffi::PyThreadState_GetFrame(thread);
        if frame.is_null() {
            return Ok(true);
        }
        let frame = errors::owned(py, frame.cast())?;
        let shown: *mut u8 = *field(frame.as_ptr().cast(), F_FRAME);
        let chain = imp::innermost(*field(thread.cast(), imp::FRAME));
        Ok(shown == chain)
    }
}

/// The task that is entered lies in the thread state, where asyncio keeps it there.
unsafe fn has_task(py: Python<'_>, thread: *mut u8) -> PyResult<bool> {
    let Some(offset) = imp::RUNNING_TASK else {
        return Ok(true);
    };
    let tasks = py.import("_asyncio")?;
    // SAFETY: as in `self_check`.
    let running = || unsafe { *field::<*mut ffi::PyObject>(thread, offset) };
    let before = running();
    if !before.is_null() {
        // Imported inside a task: there is nothing to try out, but something to compare with.
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
        // Without a running loop asyncio would look for the task elsewhere.
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
