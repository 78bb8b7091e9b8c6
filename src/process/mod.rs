//! Watches child processes, and calls a function when a child has ended.
//!
//! Watches are used on the loop's thread only. Python code (`_loop/subprocess.py`) starts the child, and makes its
//! pipes and its transport.

mod child;

use std::os::fd::IntoRawFd;

use grapeshot_core::sys::child::open_watch;
use pyo3::prelude::*;

use crate::binding::errors;
use crate::binding::rows::extend_type;

/// Makes the type of the watches, and adds the method `_watch_child` to `grapeshot._core.Loop` and the function
/// `_open_child_watch` to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    child::register(module)?;
    module.add_function(wrap_pyfunction!(open_child_watch, module)?)?;
    extend_type(&module.getattr("Loop")?, child::loop_methods())
}

/// `_open_child_watch(pid)`: opens a descriptor that becomes readable when the child has ended. Coros wait for this
/// descriptor and fetch the status themselves. (They do not call `os.pidfd_open`, which CPython lacks if it was built
/// with the headers of an old kernel.)
#[pyfunction(name = "_open_child_watch")]
fn open_child_watch(pid: libc::pid_t) -> PyResult<i32> {
    let fd = open_watch(pid).map_err(|error| errors::os_error(&error))?;
    Ok(fd.into_raw_fd())
}
