//! Keeps a stack from being evicted (copied out of its place) while the cyclic garbage collector runs on it.
//!
//! While the collector runs, the heads of its object lists are on the C stack, and objects point to them. So the stack
//! must stay in place during a collection. If a coro tries to wait in a finalizer or weak reference callback that the
//! collector has called, the wait raises `RuntimeError`. A coro with a stack of its own (`stack="own"`) may wait there.
//! A finalizer that runs because the last reference was dropped may wait in any coro.
//!
//! The package puts `_coro_note_collection` at the front of `gc.callbacks`. The interpreter calls this function before
//! and after each collection, on the stack that the collection runs on. The function calls `note`.

use std::ptr;

use pyo3::prelude::*;

use super::runtime::with_runtime;
use super::scheduler::coro_of;

/// Called when a collection begins (`phase` is `"start"`) or has ended (`"stop"`) on the current stack.
pub(super) fn note(py: Python<'_>, phase: &Bound<'_, PyAny>) -> PyResult<()> {
    let is_start = phase.extract::<&str>()? == "start";
    with_runtime(|runtime| {
        let current = runtime.current.get();
        if !is_start {
            // A coro with a stack of its own may have waited during the collection, so other coros may have run. None
            // of them can have started a collection, because the collector does not nest. So if `is_collecting` is set,
            // the start of this collection has set it.
            if runtime.is_collecting.replace(false) {
                runtime
                    .collecting
                    .set(runtime.collecting_before.replace(ptr::null_mut()));
            }
        } else if !current.is_null() {
            // SAFETY: the runtime's table keeps the running coro alive.
            let coro = unsafe { Bound::from_borrowed_ptr(py, current) };
            if !coro_of(&coro).has_own_stack.get() {
                runtime.is_collecting.set(true);
                runtime.collecting_before.set(runtime.collecting.replace(current));
            }
        }
    });
    Ok(())
}
