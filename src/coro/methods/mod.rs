//! What Python sees: the methods of `Coro` and the functions of the native module that the package `coro` is built on.

mod coro;
mod facade;
mod functions;
mod making;
mod stacks;

use std::ffi::CStr;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

use super::{scheduler, suspension, waiting};
use crate::event_loop::errors;
use crate::event_loop::native_type::Args;

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// A row of a function table around `fn(Python, Args)`.
macro_rules! function {
    ($name:literal, $body:path, $doc:literal) => {{
        unsafe extern "C" fn raw(
            _: *mut ffi::PyObject,
            args: *const *mut ffi::PyObject,
            nargs: ffi::Py_ssize_t,
            kwnames: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject {
            // SAFETY: only CPython calls this, attached, through a METH_FASTCALL|METH_KEYWORDS function.
            unsafe {
                let py = Python::assume_attached();
                errors::at_boundary(py, ptr::null_mut(), || {
                    $body(py, Args::from_fastcall(py, args, nargs, kwnames)).map(Bound::into_ptr)
                })
            }
        }
        definition($name, raw, $doc)
    }};
}

/// A row around `fn(Python, Args) -> PyResult<Begun<S>>` and `fn(Coro, S, Outcome) -> Outcome` for a function that waits between the
/// two, see `suspension::wait_at_boundary`.
macro_rules! waiting_function {
    ($name:literal, $begin:path, $finish:path, $doc:literal) => {{
        unsafe extern "C" fn raw(
            _: *mut ffi::PyObject,
            args: *const *mut ffi::PyObject,
            nargs: ffi::Py_ssize_t,
            kwnames: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject {
            // SAFETY: only CPython calls this, attached, through a METH_FASTCALL|METH_KEYWORDS function; `begin` comes before
            // it has returned.
            unsafe {
                suspension::wait_at_boundary(
                    |py| $begin(py, Args::from_fastcall(py, args, nargs, kwnames)),
                    $finish,
                )
            }
        }
        definition($name, raw, $doc)
    }};
}

fn definition(
    name: &'static CStr,
    raw: ffi::PyCFunctionFastWithKeywords,
    doc: &'static CStr,
) -> ffi::PyMethodDef {
    ffi::PyMethodDef {
        ml_name: name.as_ptr(),
        ml_meth: ffi::PyMethodDefPointer {
            PyCFunctionFastWithKeywords: raw,
        },
        ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
        ml_doc: doc.as_ptr(),
    }
}

fn functions() -> Vec<ffi::PyMethodDef> {
    vec![
        function!(
            c"_coro_new",
            making::new,
            c"new(function, *args, name=None, context=None, stack='shared', **kwargs)"
        ),
        function!(
            c"_coro_spawn",
            making::spawn,
            c"spawn(function, *args, name=None, context=None, stack='shared', **kwargs)"
        ),
        function!(
            c"_coro_check_function",
            making::check,
            c"TypeError unless a coro can run a function."
        ),
        function!(
            c"_coro_current",
            functions::current,
            c"The coro that runs; YieldFromMain if none does."
        ),
        function!(
            c"_coro_current_or_none",
            functions::current_or_none,
            c"The coro that runs, or None."
        ),
        waiting_function!(
            c"_coro_yield_slice",
            functions::begin_yield,
            functions::return_outcome,
            c"Let everything run that is ready."
        ),
        waiting_function!(
            c"_coro_wait",
            functions::begin_wait,
            functions::return_outcome,
            c"Wait until somebody wakes this coro."
        ),
        waiting_function!(
            c"_coro_wait_for_wake",
            functions::begin_wait_for_wake,
            functions::return_interruption,
            c"Wait until somebody wakes this coro; return what has interrupted it, or None."
        ),
        waiting_function!(
            c"_coro_sleep_absolute",
            functions::begin_sleep_until,
            suspension::end_sleep,
            c"Wait until loop.time() is there."
        ),
        waiting_function!(
            c"_coro_sleep_relative",
            functions::begin_sleep_for,
            suspension::end_sleep,
            c"Wait for so many seconds."
        ),
        function!(c"_coro_end_sleep", functions::end_sleep, c"What a timer calls."),
        function!(
            c"_coro_end_wait",
            functions::end_wait,
            c"What the timer of a limited wait calls."
        ),
        function!(
            c"_coro_live",
            functions::live,
            c"The coros of this thread between start and end."
        ),
        function!(
            c"_coro_statistics",
            stacks::statistics,
            c"Counters of this thread's coros."
        ),
        function!(
            c"_coro_set_stack_slots",
            stacks::set_slots,
            c"How many stacks coros share from now on."
        ),
        function!(
            c"_coro_set_selfishness",
            functions::set_selfishness,
            c"After how much I/O that is ready at once coros yield; the number before."
        ),
        waiting_function!(
            c"_coro_act",
            functions::begin_act,
            functions::return_outcome,
            c"The running coro begins I/O, which may be ready at once."
        ),
        function!(
            c"_coro_set_latency_warning",
            functions::set_latency_warning,
            c"After how many seconds without a yield to warn; the number before."
        ),
        function!(
            c"_coro_set_exception_notifier",
            functions::set_exception_notifier,
            c"Who hears of exceptions that end coros; the one before."
        ),
        function!(
            c"_coro_shut_down",
            functions::shut_down,
            c"End coros whose loop does not run; how many are left."
        ),
        function!(
            c"_coro_end_thread",
            functions::end_thread,
            c"Make no more coros in this thread."
        ),
        function!(
            c"_coro_after_fork",
            functions::after_fork,
            c"In a forked child: the loop stays with the parent."
        ),
        function!(
            c"_coro_set_hooks",
            functions::set_hooks,
            c"Take what the package does for native code."
        ),
        function!(
            c"_coro_evict_always",
            functions::evict_always,
            c"Whether this thread's stacks are moved away after each switch."
        ),
        function!(
            c"_coro_fail_evacuations",
            functions::fail_evacuations,
            c"Let evacuations and new stacks fail, for tests."
        ),
        function!(
            c"_coro_note_collection",
            functions::note_collection,
            c"Note that a garbage collection begins or has ended here."
        ),
        function!(
            c"_coro_set_registry",
            functions::set_registry,
            c"Take the set in which asyncio keeps the tasks that are not its own."
        ),
        function!(
            c"_coro_panic",
            functions::panic,
            c"Panic, and call a function while unwinding, for tests."
        ),
        function!(
            c"_coro_setup",
            functions::set_up,
            c"Take the package's classes; why there are no coros, or None."
        ),
    ]
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    facade::register(module)?;
    let kind = coro::make_type(module)?;
    scheduler::set_type(kind.clone());
    module.add("Coro", kind)?;
    for definition in functions() {
        let definition = Box::leak(Box::new(definition));
        // SAFETY: the definition is leaked, its name a C string literal.
        let (name, made) = unsafe {
            let name = CStr::from_ptr(definition.ml_name);
            let made = ffi::PyCFunction_NewEx(definition, ptr::null_mut(), ptr::null_mut());
            (name, errors::owned(module.py(), made)?)
        };
        module.add(name.to_string_lossy().as_ref(), made)?;
    }
    suspension::set_end_sleep(&module.getattr("_coro_end_sleep")?);
    waiting::set_end_wait(&module.getattr("_coro_end_wait")?);
    Ok(())
}
