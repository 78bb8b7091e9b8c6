//! The cyclic garbage collector must not run on a stack that is evicted.
//!
//! While the collector runs, the heads of its lists of objects lie on the C stack, and objects point to them. So the
//! stack must stay in its place during a collection. A coro that tries to wait in a finalizer or in a weak reference's
//! callback that the collector calls gets a `RuntimeError`. A coro with a stack of its own (`stack="own"`) may wait
//! there. A finalizer that runs because the last reference has gone may wait anywhere.
//!
//! The package puts `note` first in `gc.callbacks`. The interpreter calls it before and after each collection, on the
//! stack that the collection runs on.

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
            // A coro with a stack of its own may have let other coros run meanwhile. None of them can have started a
            // collection.
            runtime.collecting.set(ptr::null_mut());
        } else if !current.is_null() {
            // SAFETY: the runtime's table keeps the running coro alive.
            let coro = unsafe { Bound::from_borrowed_ptr(py, current) };
            if !coro_of(&coro).has_own_stack.get() {
                runtime.collecting.set(current);
            }
        }
    });
    Ok(())
}
