//! The Python interface: the methods of `Coro`, and the functions of the native module on which the package
//! `grapeshot.coro` is built.

mod coro;
mod functions;
mod spawn;
mod stacks;
mod task_api;

use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::{Coro, Outcome};
use super::{io, latency, scheduler, suspension, sync};
use crate::binding::args::Args;
use crate::binding::rows::{add_function, row};
use crate::event_loop::progress::Progress;

/// Calls `begin`, the first of the two functions that a `row!` names. If `begin` returns `MustWait`, this waits and
/// then calls `finish`, the second function: see `suspension::wait_at_boundary`.
///
/// # Safety
/// CPython has called a function with these arguments. If there is something to wait for, `begin` meets the conditions
/// of `suspension::prepare_switch`.
#[inline(always)]
unsafe fn call_waiting<S>(
    _: *mut ffi::PyObject,
    args: Args<'static, 'static>,
    (begin, finish): (
        impl FnOnce(Python<'static>, Args<'_, 'static>) -> PyResult<Progress<Bound<'static, PyAny>, S>>,
        impl FnOnce(Coro<'static>, S, Outcome<'static>) -> Outcome<'static>,
    ),
) -> *mut ffi::PyObject {
    // SAFETY: by the contract; `begin` runs before this returns, while the arguments are alive.
    unsafe { suspension::wait_at_boundary(move |py| args.pass_to(py, begin), finish) }
}

/// The functions that `grapeshot.coro` gives to users, under these names.
fn public_functions() -> Vec<ffi::PyMethodDef> {
    vec![
        row!(
            function,
            spawn::new,
            _coro_new as new,
            "\
                Make a coro that will run function(*args, **kwargs). Call start() on the coro to start it.\n\n\
                The options are the same as for spawn()."
        ),
        row!(
            function,
            spawn::spawn,
            _coro_spawn as spawn,
            "\
                Start a coro that runs function(*args, **kwargs), and return it.\n\n\
                It runs in the loop's next iteration. If no loop is running yet, the thread's next coro.run() or\n\
                coro.event_loop() runs it.\n\n\
                name: the name in repr() and in messages. The default is 'coro <id>'.\n\
                context: the contextvars.Context in which the coro runs. The default is a copy of the current one.\n\
                stack: 'shared', the default: several coros share a stack. While a coro waits, its part of the stack\n\
                    may be copied away.\n\
                    'own': a stack that never moves, for C code that hands out pointers to its stack.\n\n\
                Raises TypeError if function cannot be called or is async. Raises RuntimeError if an event loop that\n\
                is not grapeshot's runs in this thread. Raises MemoryError if no stack is left for stack='own'.\n\
                Raises LimitError if loop.set_limits() allows no more coros."
        ),
        row!(
            function,
            functions::current,
            _coro_current as current,
            "Return the running coro. Raises YieldFromMain if no coro is running."
        ),
        row!(
            function(call_waiting),
            (functions::begin_yield, functions::return_outcome),
            _coro_yield_slice as yield_slice,
            "Let all ready coros and callbacks run, and then continue."
        ),
        row!(
            function(call_waiting),
            (functions::begin_wait, functions::return_outcome),
            _coro_wait as wait,
            "\
                Wait until all coros, or count of them, have ended, or until timeout seconds have passed.\n\n\
                Returns a list of the coros that have ended, at most count: first those that had ended before the\n\
                call, in the order of coros, and then the others in the order in which they ended. coros may also\n\
                contain asyncio's futures and tasks. wait() does not raise their exceptions.\n\n\
                Without arguments: wait until schedule() is called with this coro, and return the value passed to it."
        ),
        row!(
            function,
            functions::now,
            _coro_now as now,
            "Return the time of the loop's clock, in seconds."
        ),
        row!(
            function(call_waiting),
            (functions::begin_sleep_until, suspension::end_sleep),
            _coro_sleep_absolute as sleep_absolute,
            "Wait until coro.now() reaches when."
        ),
        row!(
            function(call_waiting),
            (functions::begin_sleep_for, suspension::end_sleep),
            _coro_sleep_relative as sleep_relative,
            "Wait for delay seconds."
        ),
        row!(
            function,
            stacks::statistics,
            _coro_stack_info as stack_info,
            "\
                Return statistics of this thread's coros: switches, evictions, bytes_copied, started, live,\n\
                bytes_saved, slots, evicts_always."
        ),
        row!(
            function,
            stacks::set_slots,
            _coro_set_stack_slots as set_stack_slots,
            "\
                Set how many stacks the new coros of this thread share (count: 1 to 4096).\n\n\
                None, the default: up to eight coros at a time have a stack each, and all others \
                share one."
        ),
        row!(
            function,
            functions::set_selfishness,
            _coro_set_selfishness as set_selfishness,
            "\
                Let coros of this thread yield after count I/O operations in a row that did not wait (initially 4).\n\
                Returns the previous number."
        ),
        row!(
            function,
            functions::set_exception_notifier,
            _coro_set_exception_notifier as set_exception_notifier,
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
        row!(
            function,
            spawn::check,
            _coro_check_function,
            "Raise TypeError unless a coro can run the function."
        ),
        row!(
            function,
            spawn::spawn_hiding,
            _coro_spawn_hiding,
            "Like spawn(), for a coro in which asyncio's functions see no running loop."
        ),
        row!(
            function,
            functions::hide_loop,
            _coro_hide_loop,
            "Hide the loop from the running coro. Return the current task, for _coro_show_loop()."
        ),
        row!(
            function,
            functions::show_loop,
            _coro_show_loop,
            "Undo _coro_hide_loop() in the running coro, and make task its current task."
        ),
        row!(
            function,
            functions::is_hidden,
            _coro_is_hidden,
            "Return whether the running coro hides the loop."
        ),
        row!(
            function,
            functions::running_loop,
            _coro_running_loop,
            "Return the loop that runs in this thread, even if the running coro hides it, or None."
        ),
        row!(
            function,
            functions::current_or_none,
            _coro_current_or_none,
            "Return the running coro, or None."
        ),
        row!(
            function,
            functions::end_sleep,
            _coro_end_sleep,
            "Wake a sleeping coro. The timer of the sleep calls this."
        ),
        row!(
            function,
            functions::end_wait,
            _coro_end_wait,
            "End a wait whose timeout has expired. The timer of the wait calls this."
        ),
        row!(
            function,
            functions::live,
            _coro_live,
            "Return the coros of this thread that have started and not ended."
        ),
        row!(
            function,
            stacks::set_stamps,
            _coro_set_switch_stamps,
            "Set whether all threads record the times of switches."
        ),
        row!(
            function,
            stacks::switch_stamps,
            _coro_switch_stamps,
            "Return when a coro of this thread was last entered and left: wall and CPU nanoseconds of each."
        ),
        row!(
            function,
            functions::wait_info,
            _coro_wait_info,
            "Return the descriptor or the queue that a coro waits for, or None."
        ),
        row!(
            function(call_waiting),
            (functions::begin_act, functions::return_outcome),
            _coro_act,
            "Count an I/O operation of the running coro. Yield if too many in a row did not wait."
        ),
        row!(
            function,
            functions::shut_down,
            _coro_shut_down,
            "Shut down this thread's coros of a loop. The loop need not be running. Return how many coros are left."
        ),
        row!(
            function,
            functions::end_thread,
            _coro_end_thread,
            "Refuse to make more coros in this thread, which is ending."
        ),
        row!(
            function,
            functions::after_fork,
            _coro_after_fork,
            "Forget the parent's coros in a forked child. Return the coro that forked, or None."
        ),
        row!(
            function,
            functions::report_error_of_thread,
            _coro_report_error_of_thread,
            "Call sys.unraisablehook with an exception that a thread's function raised."
        ),
        row!(
            function,
            functions::begins_thread,
            _coro_begins_thread,
            "Return whether a patched thread that is started here becomes a coro."
        ),
        row!(
            function,
            functions::set_undisturbed,
            _coro_set_undisturbed,
            "Set whether interruptions leave the running coro waiting for locks and queues that threads share."
        ),
        row!(
            function,
            functions::can_wait,
            _coro_can_wait,
            "Return whether the caller runs in a coro that can wait."
        ),
        row!(
            function,
            functions::monotonic,
            _coro_monotonic,
            "Return the time of time.monotonic(), even if a program has replaced that function."
        ),
        row!(
            function,
            io::socket_type,
            _coro_socket_type,
            "Return the native type of sockets, which derives from socket.socket."
        ),
        row!(
            function,
            io::bind_methods,
            _coro_bind_socket_methods,
            "Put the native methods of sockets on a subclass, except the ones that it overrides."
        ),
        row!(
            function,
            io::end_closed_wait,
            _coro_end_closed_wait,
            "End a wait on a socket that another thread has closed."
        ),
        row!(
            function,
            io::read_now,
            _coro_read_now,
            "Read from a descriptor without blocking, whatever its mode. Return None if the system cannot do that."
        ),
        row!(
            function,
            io::write_now,
            _coro_write_now,
            "Write to a descriptor without blocking, whatever its mode. Return None if the system cannot do that."
        ),
        row!(
            function,
            io::is_on_loop,
            _coro_is_on_loop,
            "Return whether the caller runs in a coro that can wait on its loop."
        ),
        row!(
            function,
            functions::unwatch,
            _coro_unwatch,
            "Make the watchdog ignore this thread until a loop next runs code in it."
        ),
        row!(
            function,
            functions::stop_watchdog,
            _coro_stop_watchdog,
            "Stop the watchdog. It starts again when a loop next runs code in a thread that has a latency limit."
        ),
        row!(
            function,
            functions::set_latency_limit,
            _coro_set_latency_limit,
            "Set how long code may block a loop of this thread before it is reported. Return the previous limit."
        ),
        row!(
            function,
            functions::set_default_latency_limit,
            _coro_set_default_latency_limit,
            "Set the latency limit of this thread and of threads that start later."
        ),
        row!(
            function,
            functions::report_always,
            _coro_report_always,
            "Set whether to report late runs even if no other work waits for their end."
        ),
        row!(
            function,
            functions::run_number,
            _coro_run_number,
            "Return how many times this thread has resumed a coro, counted over all its coros."
        ),
        row!(
            function,
            functions::send_signal,
            _coro_send_signal,
            "Send a signal to this process if handler still handles that signal. Return whether it was sent."
        ),
        row!(
            function,
            functions::set_hooks,
            _coro_set_hooks,
            "Set the functions of the package that the native code calls."
        ),
        row!(
            function,
            functions::evict_always,
            _coro_evict_always,
            "Set whether this thread's stacks are evicted after each switch."
        ),
        row!(
            function,
            functions::fail_evictions,
            _coro_fail_evictions,
            "Make evictions and new stacks fail, for tests."
        ),
        row!(
            function,
            functions::note_collection,
            _coro_note_collection,
            "Record that a garbage collection begins or has ended on this stack."
        ),
        row!(
            function,
            functions::live_tasks,
            _coro_live_tasks,
            "Return the live coros of all threads for asyncio.all_tasks(), without daemons and unregistered coros."
        ),
        row!(
            function,
            functions::panic,
            _coro_panic,
            "Panic, and call a function during the unwinding, for tests."
        ),
        row!(
            function,
            functions::set_up,
            _coro_setup,
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
        add_function(module, definition, "", c"grapeshot._core")?;
    }
    for definition in public_functions().into_iter().chain(io::wait_functions()) {
        add_function(module, definition, "_coro_", c"grapeshot.coro")?;
    }
    module.add("_coro_latency_hint", latency::HINT)?;
    // `get_ident` replaces `_thread.get_ident`, so its module must be `_thread`: a pickle refers to a function by its
    // module and name.
    let ident = row!(
        function,
        functions::ident,
        _coro_get_ident as get_ident,
        "Return the id of the running coro, or the ident of the thread if no coro is running."
    );
    add_function(module, ident, "_coro_", c"_thread")?;
    suspension::set_end_sleep(&module.getattr("_coro_end_sleep")?);
    sync::set_end_wait(&module.getattr("_coro_end_wait")?);
    Ok(())
}
