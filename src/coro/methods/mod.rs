//! The Python interface: the methods of `Coro`, and the functions of the native module on which the package
//! `grapeshot.coro` is built.

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

use super::{io, latency, scheduler, suspension, sync};
use crate::binding::errors;
use crate::binding::native_type::Args;
use crate::binding::signature::{Receiver, Signature};

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// Makes a row of a function table from `fn(Python, Args)`.
macro_rules! function {
    ($body:path, $signature:literal, $doc:literal) => {{
        static SIGNATURE: Signature = Signature::new($signature);
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
                    let args = Args::new(py, args, nargs, kwnames, &SIGNATURE);
                    args.pass_to(py, $body).map(Bound::into_ptr)
                })
            }
        }
        SIGNATURE.row(raw, Receiver::Module, $doc)
    }};
}

/// Makes a row from `fn(Python, Args) -> PyResult<Begun<S>>` and `fn(Coro, S, Outcome) -> Outcome`, for a function that
/// waits between the two; see `suspension::wait_at_boundary`.
macro_rules! waiting_function {
    ($begin:path, $finish:path, $signature:literal, $doc:literal) => {{
        static SIGNATURE: Signature = Signature::new($signature);
        unsafe extern "C" fn raw(
            _: *mut ffi::PyObject,
            args: *const *mut ffi::PyObject,
            nargs: ffi::Py_ssize_t,
            kwnames: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject {
            // SAFETY: only CPython calls this, attached, through a METH_FASTCALL|METH_KEYWORDS function; `begin` runs
            // before `raw` returns, while the arguments are alive.
            unsafe {
                suspension::wait_at_boundary(
                    |py| Args::new(py, args, nargs, kwnames, &SIGNATURE).pass_to(py, $begin),
                    $finish,
                )
            }
        }
        SIGNATURE.row(raw, Receiver::Module, $doc)
    }};
}

/// The functions that `grapeshot.coro` gives to users, under these names.
fn public_functions() -> Vec<ffi::PyMethodDef> {
    vec![
        function!(
            spawn::new,
            "new(function, /, *args, name=None, context=None, stack='shared', **kwargs)",
            "\
                Make a coro that will run function(*args, **kwargs). Call start() on the coro to start it.\n\n\
                The options are the same as for spawn()."
        ),
        function!(
            spawn::spawn,
            "spawn(function, /, *args, name=None, context=None, stack='shared', **kwargs)",
            "\
                Start a coro that runs function(*args, **kwargs), and return it.\n\n\
                It runs in the loop's next iteration. If no loop is running yet, the thread's next coro.run() or\n\
                coro.event_loop() runs it.\n\n\
                name: the name in repr() and in messages. The default is 'coro <id>'.\n\
                context: the contextvars.Context in which the coro runs. The default is a copy of the current one.\n\
                stack: 'shared', the default: several coros share the stack. It may be evicted while the coro waits.\n\
                    'own': a stack that is never evicted, for C code that hands out pointers to its stack.\n\n\
                Raises TypeError if function cannot be called or is async. Raises RuntimeError if an event loop that\n\
                is not grapeshot's runs in this thread. Raises MemoryError if no stack is left for stack='own'."
        ),
        function!(
            functions::current,
            "current()",
            "Return the running coro. Raises YieldFromMain if no coro is running."
        ),
        waiting_function!(
            functions::begin_yield,
            functions::return_outcome,
            "yield_slice()",
            "Let all ready coros and callbacks run, and then continue."
        ),
        waiting_function!(
            functions::begin_wait,
            functions::return_outcome,
            "wait(coros=..., timeout=None, count=None)",
            "\
                Wait until all coros, or count of them, have ended, or until timeout seconds have passed.\n\n\
                Returns a list of the coros that have ended, at most count, in the order in which they ended. coros\n\
                may also contain asyncio's futures and tasks. wait() does not raise their exceptions.\n\n\
                Without arguments: wait until schedule() is called with this coro, and return the value passed to it."
        ),
        function!(
            functions::now,
            "now()",
            "Return the time of the loop's clock, in seconds."
        ),
        waiting_function!(
            functions::begin_sleep_until,
            suspension::end_sleep,
            "sleep_absolute(when, /)",
            "Wait until coro.now() reaches when."
        ),
        waiting_function!(
            functions::begin_sleep_for,
            suspension::end_sleep,
            "sleep_relative(delay, /)",
            "Wait for delay seconds."
        ),
        function!(
            stacks::statistics,
            "stack_info()",
            "\
                Return statistics of this thread's coros: switches, evictions, bytes_copied, started, live,\n\
                bytes_saved, slots, evicts_always."
        ),
        function!(
            stacks::set_slots,
            "set_stack_slots(count, /)",
            "\
                Let new coros of this thread share count stacks (1 to 4096).\n\n\
                None, the default: up to eight coros at a time have a stack each, and all others \
                share one."
        ),
        function!(
            functions::set_selfishness,
            "set_selfishness(count, /)",
            "\
                Let coros of this thread yield after count I/O operations in a row that did not wait (initially 4).\n\
                Returns the previous number."
        ),
        function!(
            functions::set_exception_notifier,
            "set_exception_notifier(function, /)",
            "\
                Call function(coro, exception) when an exception ends a coro of this process. Returns the previous\n\
                function.\n\n\
                It is not called for CancelledError (or its subclass Interrupted), SystemExit or KeyboardInterrupt.\n\
                With None, the loop's exception handler gets the exceptions that were never retrieved."
        ),
    ]
}

/// The functions for the package's own use.
fn functions() -> Vec<ffi::PyMethodDef> {
    vec![
        function!(
            spawn::check,
            "_coro_check_function(function, caller, /)",
            "Raise TypeError unless a coro can run the function."
        ),
        function!(
            spawn::spawn_hiding,
            "_coro_spawn_hiding(function, /, *args, name=None, context=None, stack='shared', **kwargs)",
            "Like spawn(), for a coro in which asyncio's functions see no running loop."
        ),
        function!(
            functions::hide_loop,
            "_coro_hide_loop()",
            "Hide the loop from the running coro. Return the current task, for _coro_show_loop()."
        ),
        function!(
            functions::show_loop,
            "_coro_show_loop(task, /)",
            "Show the loop again to the running coro, which must be hiding it, with this current task."
        ),
        function!(
            functions::is_hidden,
            "_coro_is_hidden()",
            "Return whether the running coro hides the loop."
        ),
        function!(
            functions::running_loop,
            "_coro_running_loop()",
            "Return the loop that runs in this thread, even if the running coro hides it, or None."
        ),
        function!(
            functions::current_or_none,
            "_coro_current_or_none()",
            "Return the running coro, or None."
        ),
        waiting_function!(
            functions::begin_wait_for_wake,
            functions::return_interruption,
            "_coro_wait_for_wake()",
            "Wait until this coro is woken. Return the exception that interrupted it, or None."
        ),
        function!(
            functions::end_sleep,
            "_coro_end_sleep(coro, /)",
            "Wake a sleeping coro. Its timer calls this."
        ),
        function!(
            functions::end_wait,
            "_coro_end_wait(coro, /)",
            "End a wait with a timeout. Its timer calls this."
        ),
        function!(
            functions::live,
            "_coro_live()",
            "Return the coros of this thread that have started and not ended."
        ),
        function!(
            stacks::set_stamps,
            "_coro_set_switch_stamps(on, /)",
            "Set whether all threads record the times of switches."
        ),
        function!(
            stacks::switch_stamps,
            "_coro_switch_stamps()",
            "Return when a coro of this thread was last entered and left: wall and CPU nanoseconds of each."
        ),
        function!(
            functions::wait_info,
            "_coro_wait_info(coro, /)",
            "Return the descriptor or the queue that a coro waits for, or None."
        ),
        waiting_function!(
            functions::begin_act,
            functions::return_outcome,
            "_coro_act()",
            "Count an I/O operation of the running coro. Yield if too many in a row did not wait."
        ),
        function!(
            functions::shut_down,
            "_coro_shut_down(loop, rounds, /)",
            "End coros whose loop does not run. Return how many are left."
        ),
        function!(
            functions::end_thread,
            "_coro_end_thread()",
            "Refuse to make more coros in this thread, which is ending."
        ),
        function!(
            functions::after_fork,
            "_coro_after_fork()",
            "Forget the parent's coros in a forked child. Return the coro that forked, or None."
        ),
        function!(
            functions::report_error_of_thread,
            "_coro_report_error_of_thread(exception, function, /)",
            "Pass an exception that a thread's function raised to sys.unraisablehook."
        ),
        function!(
            functions::begins_thread,
            "_coro_begins_thread()",
            "Return whether a patched thread that is started here becomes a coro."
        ),
        function!(
            functions::can_wait,
            "_coro_can_wait()",
            "Return whether a coro is running here that can wait."
        ),
        function!(
            functions::monotonic,
            "_coro_monotonic()",
            "Return the time of time.monotonic(), even if a program has replaced that function."
        ),
        function!(
            io::socket_type,
            "_coro_socket_type(base, /)",
            "Return the native type of sockets, which derives from socket.socket."
        ),
        function!(
            io::bind_methods,
            "_coro_bind_socket_methods(kind, /)",
            "Put the native methods of sockets on the class itself, except the ones that it overrides."
        ),
        function!(
            io::end_closed_wait,
            "_coro_end_closed_wait(sock, is_write, coro, /)",
            "End a wait on a socket that another thread has closed."
        ),
        function!(
            io::read_now,
            "_coro_read_now(fd, length, /)",
            "Read from a descriptor without blocking, whatever its mode. Return None if that is impossible."
        ),
        function!(
            io::write_now,
            "_coro_write_now(fd, data, /)",
            "Write to a descriptor without blocking, whatever its mode. Return None if that is impossible."
        ),
        function!(
            io::is_on_loop,
            "_coro_is_on_loop()",
            "Return whether a coro is running here that can wait on its loop."
        ),
        function!(
            functions::unwatch,
            "_coro_unwatch()",
            "Let the watchdog ignore this thread until its next run."
        ),
        function!(
            functions::stop_watchdog,
            "_coro_stop_watchdog()",
            "Stop the watchdog until the next run, before a fork or at exit."
        ),
        function!(
            functions::set_latency_limit,
            "_coro_set_latency_limit(seconds, /)",
            "Set how long code may block a loop of this thread before it is reported. Return the previous limit."
        ),
        function!(
            functions::set_default_latency_limit,
            "_coro_set_default_latency_limit(seconds, /)",
            "Set that limit for this thread and for threads that start later."
        ),
        function!(
            functions::report_always,
            "_coro_report_always(flag, /)",
            "Set whether to report late runs even if no other work waits for their end."
        ),
        function!(
            functions::run_number,
            "_coro_run_number()",
            "Return how many times a coro of this thread was resumed."
        ),
        function!(
            functions::send_signal,
            "_coro_send_signal(number, handler, /)",
            "Send a signal to this process if handler is still its handler. Return whether it was sent."
        ),
        function!(
            functions::set_hooks,
            "_coro_set_hooks(pending_loop, watch_thread, wait_for, report_late, end_child, run_forever, /)",
            "Set the functions of the package that the native code calls."
        ),
        function!(
            functions::evict_always,
            "_coro_evict_always(flag, /)",
            "Set whether this thread's stacks are evicted after each switch."
        ),
        function!(
            functions::fail_evictions,
            "_coro_fail_evictions(count, /)",
            "Make evictions and new stacks fail, for tests."
        ),
        function!(
            functions::note_collection,
            "_coro_note_collection(phase, info, /)",
            "Record that a garbage collection begins or has ended on this stack."
        ),
        function!(
            functions::set_registry,
            "_coro_set_registry(registry, register, unregister, /)",
            "Set how coros are added to asyncio.all_tasks()."
        ),
        function!(
            functions::panic,
            "_coro_panic(function, /)",
            "Panic, and call a function during the unwinding, for tests."
        ),
        function!(
            functions::set_up,
            "_coro_setup(errors, kind, /)",
            "Set the package's classes. Return the reason why coros are not available, or None."
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
    for definition in public_functions().into_iter().chain(io::wait_functions()) {
        add(module, definition, "_coro_", c"grapeshot.coro")?;
    }
    module.add("_coro_latency_hint", latency::HINT)?;
    // It replaces `_thread.get_ident`, and pickles refer to a function by its module and name.
    let ident = function!(
        functions::ident,
        "get_ident()",
        "Return the id of the running coro, or the ident of the thread if no coro is running."
    );
    add(module, ident, "_coro_", c"_thread")?;
    suspension::set_end_sleep(&module.getattr("_coro_end_sleep")?);
    sync::set_end_wait(&module.getattr("_coro_end_wait")?);
    Ok(())
}

/// Adds a function to the native module under the name `prefix` + its own name. `owner` becomes its `__module__`.
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
        (name, Bound::from_owned_ptr_or_err(py, made)?)
    };
    module.add(format!("{prefix}{}", name.to_string_lossy()).as_str(), made)
}
