//! The cyclic garbage collector and moving stacks do not go together.
//!
//! While it runs, the heads of its lists of objects lie on the C stack, and the objects point to them. A finalizer or a
//! weak reference's callback that it calls must therefore not let the stack be moved away: a coro that tries to wait
//! there gets a `RuntimeError`. Where the stack never moves (`stack="own"`) it may wait. Finalizers that are called
//! because the last reference went away may wait anywhere.
//!
//! The package puts `note` in front of `gc.callbacks`, where the interpreter calls it before and after each collection,
//! on the stack that the collection runs on.

use std::ptr;

use pyo3::prelude::*;

use super::runtime::with_runtime;
use super::scheduler::coro_of;

/// A collection begins or has ended (`phase` is `"start"` or `"stop"`) on the stack that runs.
pub(super) fn note(py: Python<'_>, phase: &Bound<'_, PyAny>) -> PyResult<()> {
    let is_start = phase.extract::<&str>()? == "start";
    with_runtime(|runtime| {
        let current = runtime.current.get();
        if !is_start {
            // A coro with a stack of its own may have let others run meanwhile, none of which can have collected.
            runtime.collecting.set(ptr::null_mut());
        } else if !current.is_null() {
            // SAFETY: the running coro is kept by the runtime's table.
            let coro = unsafe { Bound::from_borrowed_ptr(py, current) };
            if !coro_of(&coro).has_own_stack.get() {
                runtime.collecting.set(current);
            }
        }
    });
    Ok(())
}
