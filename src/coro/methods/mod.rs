//! What Python sees: the methods of `Coro` and the functions of the native module that the package `coro` is built on.

mod coro;
mod functions;
mod spawn;
mod stacks;
mod task_api;

use std::ffi::CStr;
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{scheduler, suspension, sync};
use crate::binding::errors;
use crate::binding::native_type::Args;

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

/// A row around `fn(Python, Args) -> PyResult<Begun<S>>` and `fn(Coro, S, Outcome) -> Outcome` for a function that
/// waits between the two, see `suspension::wait_at_boundary`.
macro_rules! waiting_function {
    ($name:literal, $begin:path, $finish:path, $doc:literal) => {{
        unsafe extern "C" fn raw(
            _: *mut ffi::PyObject,
            args: *const *mut ffi::PyObject,
            nargs: ffi::Py_ssize_t,
            kwnames: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject {
            // SAFETY: only CPython calls this, attached, through a METH_FASTCALL|METH_KEYWORDS function; `begin` comes
            // before it has returned.
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

/// What `grapeshot.coro` shows to users, under these names.
fn public_functions() -> Vec<ffi::PyMethodDef> {
    vec![
        function!(
            c"new",
            spawn::new,
            c"new(function, /, *args, name=None, context=None, stack='shared', **kwargs)\n--\n\n\
                Make a coro of function(*args, **kwargs), and do not start it: co.start() does.\n\n\
                The options are those of spawn()."
        ),
        function!(
            c"spawn",
            spawn::spawn,
            c"spawn(function, /, *args, name=None, context=None, stack='shared', **kwargs)\n--\n\n\
                Start a coro that runs function(*args, **kwargs); return it. It runs in the next turn of the loop.\n\n\
                Where no loop runs yet, the thread's next coro.run() or coro.event_loop() runs it.\n\n\
                name: what repr() and messages call it, 'coro <id>' by default.\n\
                context: the contextvars.Context that it runs in; by default a copy of the current one.\n\
                stack: 'shared', a place that it shares with other coros: its stack is moved away while it waits. 'own': one\n\
                    that never moves, for C code that lends out pointers to its stack.\n\n\
                Raises TypeError for what cannot be called and for an async function, RuntimeError if another event loop\n\
                than grapeshot's runs in this thread."
        ),
        function!(
            c"current",
            functions::current,
            c"current()\n--\n\n\
                Return the coro that runs. YieldFromMain if none does."
        ),
        waiting_function!(
            c"yield_slice",
            functions::begin_yield,
            functions::return_outcome,
            c"yield_slice()\n--\n\n\
                Let everything run that is ready, then go on."
        ),
        waiting_function!(
            c"wait",
            functions::begin_wait,
            functions::return_outcome,
            c"wait(coros=..., timeout=None, count=None)\n--\n\n\
                Wait until all coros have ended, or count of them, or timeout seconds are over.\n\n\
                Returns a list of those that have ended, in the order in which they did, at most count. Futures and tasks of\n\
                asyncio can be waited for as well. Nothing that they have raised is raised here.\n\n\
                Without arguments: wait until schedule() is called with this coro; return the value that it is given."
        ),
        function!(
            c"now",
            functions::now,
            c"now()\n--\n\n\
                Return the time of the loop's clock, in seconds."
        ),
        waiting_function!(
            c"sleep_absolute",
            functions::begin_sleep_until,
            suspension::end_sleep,
            c"sleep_absolute(when, /)\n--\n\n\
                Wait until coro.now() is when."
        ),
        waiting_function!(
            c"sleep_relative",
            functions::begin_sleep_for,
            suspension::end_sleep,
            c"sleep_relative(delay, /)\n--\n\n\
                Wait for delay seconds."
        ),
        function!(
            c"stack_info",
            stacks::statistics,
            c"stack_info()\n--\n\n\
                Return numbers of this thread's coros: switches, evacuations, bytes_copied, started, live, bytes_saved, slots,\n\
                evicts_always."
        ),
        function!(
            c"set_stack_slots",
            stacks::set_slots,
            c"set_stack_slots(count, /)\n--\n\n\
                Let later coros of this thread share count stacks (1 to 4096; 1 at the start)."
        ),
        function!(
            c"set_selfishness",
            functions::set_selfishness,
            c"set_selfishness(count, /)\n--\n\n\
                Let coros of this thread yield after count I/O operations that were ready at once (4 at the start). Returns the\n\
                number before."
        ),
        function!(
            c"set_latency_warning",
            functions::set_latency_warning,
            c"set_latency_warning(seconds, /)\n--\n\n\
                Warn of coros of this thread that run for so long without a yield (0.2 at the start), on the logger asyncio; 0 or\n\
                None: of none. Returns the limit before.\n\n\
                A first record says where the coro is, with its stack, while it is still in the way; a second one, when it yields\n\
                or ends, how long it took and where it was when the time ran out."
        ),
        function!(
            c"set_exception_notifier",
            functions::set_exception_notifier,
            c"set_exception_notifier(function, /)\n--\n\n\
                Call function(coro, exception) when an exception ends a coro of this process; return the one before.\n\n\
                It is not called for CancelledError (Interrupted among them), SystemExit and KeyboardInterrupt. None: the\n\
                exception handler of the loop is told of exceptions that nobody has retrieved."
        ),
    ]
}

/// What the package uses.
fn functions() -> Vec<ffi::PyMethodDef> {
    vec![
        function!(
            c"_coro_check_function",
            spawn::check,
            c"TypeError unless a coro can run a function."
        ),
        function!(
            c"_coro_current_or_none",
            functions::current_or_none,
            c"The coro that runs, or None."
        ),
        waiting_function!(
            c"_coro_wait_for_wake",
            functions::begin_wait_for_wake,
            functions::return_interruption,
            c"Wait until somebody wakes this coro; return what has interrupted it, or None."
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
        waiting_function!(
            c"_coro_act",
            functions::begin_act,
            functions::return_outcome,
            c"The running coro begins I/O, which may be ready at once."
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
            c"_coro_unwatch",
            functions::unwatch,
            c"Let the watchdog leave this thread alone until its next coro runs."
        ),
        function!(
            c"_coro_stop_watchdog",
            functions::stop_watchdog,
            c"End the watchdog until the next coro runs: before a fork, or at the exit."
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
            c"_coro_fail_evictions",
            functions::fail_evictions,
            c"Let evictions and new stacks fail, for tests."
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
    task_api::register(module)?;
    let kind = coro::make_type(module)?;
    scheduler::set_type(kind.clone());
    module.add("Coro", kind)?;
    for definition in functions() {
        add(module, definition, "", c"grapeshot._core")?;
    }
    for definition in public_functions() {
        add(module, definition, "_coro_", c"grapeshot.coro")?;
    }
    suspension::set_end_sleep(&module.getattr("_coro_end_sleep")?);
    sync::set_end_wait(&module.getattr("_coro_end_wait")?);
    Ok(())
}

/// Adds a function to the native module, as `prefix` and its name. `owner` is the module that it says it is of.
fn add(
    module: &Bound<'_, PyModule>,
    definition: ffi::PyMethodDef,
    prefix: &str,
    owner: &CStr,
) -> PyResult<()> {
    let py = module.py();
    let owner = PyString::new(py, &owner.to_string_lossy());
    let definition = Box::leak(Box::new(definition));
    // SAFETY: the definition is leaked, its name a C string literal.
    let (name, made) = unsafe {
        let name = CStr::from_ptr(definition.ml_name);
        let made = ffi::PyCFunction_NewEx(definition, ptr::null_mut(), owner.as_ptr());
        (name, errors::owned(py, made)?)
    };
    module.add(format!("{prefix}{}", name.to_string_lossy()).as_str(), made)
}
