//! A watch on a child process: a `Source` over an fd that becomes readable when the child has ended.
//!
//! Used on the loop's thread only. The loop's fd table keeps the watch alive. The watch fetches the child's status once
//! and calls back in the same step, so that no code can send a signal to a process number that the system has already
//! given to another process.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::sys::child::{ExitWatch, Reaped};
use grapeshot_core::sys::poller::{Interest, Readiness, Token};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::args::Args;
use crate::binding::errors;
use crate::binding::native_type::{NativeType, This, new_type, represent, slot};
use crate::binding::object_cell::ObjectCell;
use crate::binding::object_result::{ObjectResult, none};
use crate::binding::rows::row;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::{FdUse, Reactor};
use crate::event_loop::source::{Source, SourceRef};

/// An object whose bytes are all zero is valid: it is a watch that is over.
#[repr(C)]
struct ChildObject {
    base: ffi::PyObject,
    event_loop: ObjectCell,
    /// `callback(returncode)`; the argument is None if other code has already fetched the child's status.
    callback: ObjectCell,
    /// The context that the callback runs in.
    context: ObjectCell,
    /// None once the child's end has been noticed, and between `on_displaced` and `watch_again`.
    exit: Cell<Option<Box<ExitWatch>>>,
    pid: Cell<libc::pid_t>,
    /// Identifies the entry in the fd table.
    token: Cell<Token>,
}

static CHILD_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

impl Source for ChildObject {
    fn on_ready(this: This<'_, Self>, _: Readiness) -> PyResult<()> {
        let Some(exit) = this.exit.take() else {
            return Ok(());
        };
        match exit.reap() {
            Reaped::Running => {
                this.exit.set(Some(exit));
                Ok(())
            }
            Reaped::Ended(code) => finish(this, exit, Some(code)),
            Reaped::Unknown => finish(this, exit, None),
        }
    }

    fn interest(&self) -> Interest {
        Interest::READ
    }

    fn has_descriptor(this: This<'_, Self>) -> bool {
        let exit = this.exit.take();
        let is_open = exit.as_ref().is_some_and(|exit| exit.is_open());
        this.exit.set(exit);
        is_open
    }

    /// Called after other code has closed the descriptor of the watch.
    fn on_displaced(this: This<'_, Self>) {
        drop(this.exit.take());
        if let Some(event_loop) = this.event_loop.get(this.py()) {
            LoopObject::of(&event_loop)
                .reactor()
                .ready
                .defer(this.to_bound(), watch_again);
        }
    }
}

/// Watches the child again with a new descriptor. This uses the process number, which belongs to the child until its
/// status is fetched. If other code has fetched the status, `ExitWatch::new` reports ESRCH. (On Linux without pidfds,
/// where a thread waits for the child, `new` succeeds, and the watch soon ends without a status.)
unsafe fn watch_again(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: `on_displaced` has queued this call with a watch, and the queue holds a reference to that watch.
    let this: This<'_, ChildObject> = unsafe { This::new(py, object) };
    let (Some(event_loop), true) = (this.event_loop.get(py), this.callback.is_set()) else {
        return Ok(());
    };
    let watched = ExitWatch::new(this.pid.get())
        .and_then(|exit| enter(this, LoopObject::of(&event_loop).reactor(), exit));
    match watched {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => call_back(this, &event_loop, None),
        Err(error) => errors::report(
            &event_loop,
            "The exit of a child process cannot be watched any longer",
            errors::os_error(&error),
            &[],
        ),
    }
}

/// Enters the watch into the fd table with the descriptor of `exit`.
fn enter(this: This<'_, ChildObject>, reactor: &Reactor, exit: ExitWatch) -> io::Result<()> {
    let fd = exit.fd();
    this.exit.set(Some(Box::new(exit)));
    let source = SourceRef::new::<ChildObject>(this);
    let token = reactor
        .descriptors
        .register(this.py(), fd, FdUse::Source(source), Interest::READ)?;
    this.token.set(token);
    Ok(())
}

/// Ends the watch and calls the callback.
fn finish(this: This<'_, ChildObject>, exit: Box<ExitWatch>, code: Option<i32>) -> PyResult<()> {
    let py = this.py();
    let Some(event_loop) = this.event_loop.get(py) else {
        return Ok(());
    };
    let fd_use = LoopObject::of(&event_loop)
        .reactor()
        .descriptors
        .unregister(this.token.get(), Interest::READ);
    drop(exit);
    drop(fd_use);
    call_back(this, &event_loop, code)
}

fn call_back(this: This<'_, ChildObject>, event_loop: &Bound<'_, PyAny>, code: Option<i32>) -> PyResult<()> {
    let py = this.py();
    let (Some(callback), Some(context)) = (this.callback.take(py), this.context.take(py)) else {
        return Ok(());
    };
    match context.call_method1("run", (callback, code)) {
        Ok(_) => Ok(()),
        Err(error) => errors::report(
            event_loop,
            "Exception in the callback for the exit of a child process",
            error,
            &[],
        ),
    }
}

impl NativeType for ChildObject {
    const NAME: &'static CStr = c"grapeshot._core._Child";
    const DOC: &'static CStr = c"A child process that the loop watches until it ends.";
    const FLAGS: u64 = ffi::Py_TPFLAGS_DISALLOW_INSTANTIATION;

    fn cells(&self) -> impl IntoIterator<Item = &ObjectCell> {
        [&self.event_loop, &self.callback, &self.context]
    }

    fn with_access<R>(this: This<'_, Self>, body: impl FnOnce() -> PyResult<R>) -> PyResult<R> {
        LoopObject::with_access_of(this.py(), &this.event_loop, body)
    }
}

unsafe extern "C" fn repr(slf: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and CPython calls tp_repr with an object of this type.
    unsafe { represent::<ChildObject>(slf, |this| Ok(format!("<_Child pid={}>", this.pid.get()))) }
}

/// `loop._watch_child(pid, callback)`.
fn watch_child<'py>(this: This<'py, LoopObject>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let py = this.py();
    this.reactor().check_closed()?;
    let (Some(pid), Some(callback)) = (args.get(0), args.get(1)) else {
        return Err(PyTypeError::new_err("_watch_child() takes a pid and a callback"));
    };
    let pid = pid.extract::<libc::pid_t>()?;
    let exit = ExitWatch::new(pid).map_err(|error| errors::os_error(&error))?;
    // SAFETY: attached; the call returns a new reference or null with an exception set.
    let context = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_CopyCurrent())? };
    // SAFETY: `register` made the type for this layout; the allocation comes zeroed, which is a valid state.
    let child = unsafe {
        let made = ffi::PyType_GenericAlloc(CHILD_TYPE.load(Ordering::Relaxed), 0);
        Bound::from_owned_ptr_or_err(py, made)?
    };
    // SAFETY: the object was made just above with this layout, and `child` keeps it alive.
    let body: This<'_, ChildObject> = unsafe { This::new(py, child.as_ptr()) };
    body.event_loop.set(this.to_bound());
    body.callback.set(callback);
    body.context.set(context);
    body.pid.set(pid);
    enter(body, this.reactor(), exit).map_err(|error| errors::os_error(&error))?;
    Ok(none(py))
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let slots = [slot(ffi::Py_tp_repr, repr as *mut c_void)];
    // SAFETY: the functions were written for this layout.
    let kind = unsafe { new_type::<ChildObject>(module, None, &slots)? };
    CHILD_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
    Ok(())
}

/// The methods that this module adds to the loop's type.
pub(super) fn loop_methods() -> Vec<ffi::PyMethodDef> {
    vec![row!(
        method,
        watch_child,
        Loop._watch_child,
        "Call callback(returncode) when the child has ended."
    )]
}
