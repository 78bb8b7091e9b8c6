//! The functions of the native module on which the package `grapeshot.coro` is built. The ones that make coros are in
//! `spawn`, most of those about stacks in `stacks`, and those for I/O in `io`.

use grapeshot_core::arch;
use grapeshot_core::sys::signals;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyString, PyType};

use super::coro::check_thread;
use super::spawn;
use crate::binding::args::Args;
use crate::binding::native_type::This;
use crate::binding::new_objects;
use crate::binding::object_result::{ObjectResult, bool_object, none};
use crate::coro::coroutine::{Coro, Outcome, Status};
use crate::coro::errors::{self as coro_errors, ErrorClass};
use crate::coro::runtime::{current as running, with_runtime};
use crate::coro::{
    collector, ending, fiber, hooks, latency, live, notifier, pystate, report, scheduler, suspension, sync,
    tasks, threads, visibility, watchdog,
};
use crate::event_loop::handle::HandleRef;
use crate::event_loop::loop_clock::time_s;
use crate::event_loop::progress::Progress;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Direction;

pub(super) fn current<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    match running(py) {
        Some(coro) => Ok(coro.to_bound()),
        None => Err(coro_errors::new(
            py,
            ErrorClass::YieldFromMain,
            "no coro runs here: use `await coro.run_sync(f)` in asyncio, `coro.run(f)` elsewhere",
        )),
    }
}

pub(super) fn current_or_none<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(running(py).map_or_else(|| none(py), This::to_bound))
}

/// The running coro, for functions that only a coro can call.
fn require_running(py: Python<'_>) -> PyResult<Coro<'_>> {
    running(py).ok_or_else(|| coro_errors::new(py, ErrorClass::YieldFromMain, "no coro runs here"))
}

pub(super) fn hide_loop<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    visibility::hide(require_running(py)?)
}

pub(super) fn show_loop<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let task = args.get(0).unwrap_or_else(|| none(py));
    visibility::show(require_running(py)?, &task)?;
    Ok(none(py))
}

pub(super) fn is_hidden<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(PyBool::new(py, visibility::is_hidden(py)).to_owned().into_any())
}

pub(super) fn running_loop<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    visibility::running_loop(py)
}

pub(super) fn begin_yield<'py>(py: Python<'py>, _: Args<'_, 'py>) -> PyResult<Progress<Bound<'py, PyAny>>> {
    suspension::begin_yield(suspension::suspendable(py)?)
}

pub(super) fn begin_wait<'py>(py: Python<'py>, args: Args<'_, 'py>) -> PyResult<Progress<Bound<'py, PyAny>>> {
    if !args.values().is_empty() {
        return hooks::wait_for(py, &args).map(Progress::Done);
    }
    suspension::begin_wait(suspension::suspendable(py)?)
}

/// Returns the outcome of the wait unchanged.
pub(super) fn return_outcome<'py>(_: Coro<'py>, (): (), outcome: Outcome<'py>) -> Outcome<'py> {
    outcome
}

/// `now()`: the current time, on the clock that `sleep_absolute` uses.
pub(super) fn now<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let now_s = if let Some(coro) = running(py) {
        suspension::now_s(coro)?
    } else {
        let event_loop = visibility::running_loop(py)?;
        if LoopObject::is_loop(&event_loop) {
            LoopObject::of(&event_loop).clock().now_s(py)?
        } else {
            time_s()
        }
    };
    new_objects::float(py, now_s)
}

/// `_coro_monotonic()`: the time of `time.monotonic()`, even if a program has replaced that function.
pub(super) fn monotonic<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(time_s().into_pyobject(py)?.into_any())
}

pub(super) fn begin_sleep_until<'py>(
    py: Python<'py>,
    args: Args<'_, 'py>,
) -> PyResult<Progress<Bound<'py, PyAny>, HandleRef>> {
    let when_s = args.get(0).map_or(Ok(0.0), |when| when.extract::<f64>())?;
    suspension::begin_sleep(suspension::suspendable(py)?, when_s, 0.0)
}

pub(super) fn begin_sleep_for<'py>(
    py: Python<'py>,
    args: Args<'_, 'py>,
) -> PyResult<Progress<Bound<'py, PyAny>, HandleRef>> {
    let delay_s = args.get(0).map_or(Ok(0.0), |delay| delay.extract::<f64>())?;
    let coro = suspension::suspendable(py)?;
    suspension::begin_sleep(coro, suspension::now_s(coro)? + delay_s, delay_s)
}

/// Wakes a sleeping coro. The timer of the sleep calls this.
pub(super) fn end_sleep<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(object) = args.get(0) {
        let coro = scheduler::coro_from(&object)?;
        check_thread(coro)?;
        if coro.status.get() == Status::Waiting && !coro.wait_node.is_queued() {
            scheduler::make_ready(coro);
        }
    }
    Ok(none(py))
}

/// Ends a wait whose timeout has expired. The timer of the wait calls this.
pub(super) fn end_wait<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(object) = args.get(0) {
        let coro = scheduler::coro_from(&object)?;
        check_thread(coro)?;
        sync::end_wait(coro);
    }
    Ok(none(py))
}

pub(super) fn live<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(PyList::new(py, with_runtime(|runtime| runtime.live.all(py)))?.into_any())
}

/// `_coro_live_tasks()`: returns a list of the live coros of all threads, for `asyncio.all_tasks()`. Daemons
/// (`_make_daemon`) and coros that a program has unregistered from asyncio's tasks are left out.
pub(super) fn live_tasks<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    live::tasks_of_all_threads(py)
}

/// `_coro_wait_info(coro)`: `("read", fd)` or `("write", fd)` for a wait on a descriptor. For a wait in a queue,
/// `("queue", address)` with the address of the queue, which is a part of the object that the coro waits for, such as a
/// lock. None if the coro waits for neither.
pub(super) fn wait_info<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let Some(coro) = args.get(0) else {
        return Err(PyTypeError::new_err("_coro_wait_info() takes a coro"));
    };
    let coro = scheduler::coro_from(&coro)?;
    check_thread(coro)?;
    if coro.status.get() != Status::Waiting {
        return Ok(none(py));
    }
    let address = coro.wait_node.queue_address();
    if address != 0 {
        return Ok(("queue", address).into_pyobject(py)?.into_any());
    }
    let Some(event_loop) = coro.event_loop.get(py) else {
        return Ok(none(py));
    };
    match LoopObject::of(&event_loop)
        .reactor()
        .descriptors
        .find_waiter(coro.as_ptr())
    {
        Some((fd, Direction::Read)) => Ok(("read", fd).into_pyobject(py)?.into_any()),
        Some((fd, Direction::Write)) => Ok(("write", fd).into_pyobject(py)?.into_any()),
        None => Ok(none(py)),
    }
}

/// Reads the argument of `set_selfishness` or `set_max_selfish_acts`.
pub(super) fn acts(count: &Bound<'_, PyAny>) -> PyResult<u16> {
    match count.extract::<i64>()? {
        // `set_max_selfish_acts` stores the number plus 1.
        count if count < i64::from(u16::MAX) && count >= 0 => Ok(count as u16),
        _ => Err(PyValueError::new_err(
            "the number of operations must be between 0 and 65534",
        )),
    }
}

/// `_coro_set_selfishness(n)`: returns the previous number.
pub(super) fn set_selfishness<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit = args.get(0).map_or(Ok(0), |count| acts(&count))?;
    let before = with_runtime(|runtime| runtime.options.max_acts.replace(limit));
    Ok(before.into_pyobject(py)?.into_any())
}

/// `_coro_act()`: called before an I/O operation. If the coro has begun too many operations without waiting, it yields.
/// Outside of a coro this does nothing.
pub(super) fn begin_act<'py>(py: Python<'py>, _: Args<'_, 'py>) -> PyResult<Progress<Bound<'py, PyAny>>> {
    match running(py) {
        Some(_) => suspension::begin_act(suspension::suspendable(py)?),
        None => Ok(Progress::Done(none(py))),
    }
}

/// `_coro_set_latency_limit(seconds)`: returns the previous limit.
pub(super) fn set_latency_limit<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let before = latency::set_limit(py, limit_ns(&args)?)?;
    Ok((before as f64 / 1e9).into_pyobject(py)?.into_any())
}

/// `_coro_set_default_latency_limit(seconds)`: sets the limit of this thread and of threads that start later.
pub(super) fn set_default_latency_limit<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let limit_ns = limit_ns(&args)?;
    with_runtime(|runtime| latency::set_default_limit(runtime, limit_ns));
    Ok(none(py))
}

/// The limit in the first argument: seconds, or None for 0.
fn limit_ns(args: &Args<'_, '_>) -> PyResult<u64> {
    let seconds = args.get(0).filter(|limit| !limit.is_none());
    let seconds = seconds.map_or(Ok(0.0), |limit| limit.extract::<f64>())?;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!(
            "the limit must be 0 seconds or more, got {seconds}"
        )));
    }
    // The cast saturates: a limit of centuries is as good as no limit.
    Ok((seconds * 1e9).ceil() as u64)
}

/// `_coro_report_always(flag)`: sets whether to report late runs even if no other work waits for their end.
pub(super) fn report_always<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    latency::report_always(args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?);
    Ok(none(py))
}

/// `_coro_set_exception_notifier(function)`: returns the previous function, or None.
pub(super) fn set_exception_notifier<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let function = args.get(0).filter(|function| !function.is_none());
    if let Some(function) = &function
        && !function.is_callable()
    {
        return Err(PyTypeError::new_err("the notifier must be a function or None"));
    }
    Ok(notifier::exchange(py, function).unwrap_or_else(|| none(py)))
}

/// `_coro_shut_down(event_loop, rounds)`: shuts down this thread's coros of `event_loop` (None: of all loops). The loop
/// need not be running. Returns how many are left.
pub(super) fn shut_down<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let event_loop = args.get(0).filter(|event_loop| !event_loop.is_none());
    let rounds = args.get(1).map_or(Ok(1), |rounds| rounds.extract::<usize>())?;
    let left = ending::shut_down(py, event_loop.as_ref(), rounds)?;
    Ok(left.into_pyobject(py)?.into_any())
}

/// `_coro_end_thread()`: marks this thread as ending, so that no more coros are made in it.
pub(super) fn end_thread<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    with_runtime(|runtime| runtime.end_thread(py));
    Ok(none(py))
}

/// `_coro_after_fork()`: called in the child. Returns the coro that has forked, or None.
pub(super) fn after_fork<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let forker = running(py);
    with_runtime(|runtime| {
        watchdog::after_fork(&runtime.pulse);
        runtime.is_forked.set(forker.is_some());
        if let Some(forker) = forker {
            fiber::after_fork(forker);
        }
    });
    if forker.is_some() {
        ending::forget_others(py);
    }
    Ok(forker.map_or_else(|| none(py), This::to_bound))
}

/// `get_ident()` of the patched `_thread`.
pub(super) fn ident<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    Ok(threads::Party::running(py).ident().into_pyobject(py)?.into_any())
}

/// `_coro_report_error_of_thread(exception, function)`: passes the exception to `sys.unraisablehook`.
pub(super) fn report_error_of_thread<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let (Some(exception), Some(function)) = (args.get(0), args.get(1)) {
        threads::report_error_of(&function, PyErr::from_value(exception));
    }
    Ok(none(py))
}

/// `_coro_begins_thread()`: whether a patched thread that is started here becomes a coro. The result is true in a coro,
/// and in a task or callback of a loop that has coros. It is false in a process that a coro has forked, because the
/// loop runs in the parent.
pub(super) fn begins_thread<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let is_coro = if running(py).is_some() {
        !suspension::is_forked()
    } else {
        let event_loop = tasks::running_loop(py)?;
        let live = with_runtime(|runtime| runtime.live.all(py));
        live.iter()
            .any(|object| scheduler::coro_of(object).event_loop.as_ptr() == event_loop.as_ptr())
    };
    Ok(bool_object(py, is_coro))
}

/// `_coro_can_wait()`: whether a coro runs here that can be suspended now.
pub(super) fn can_wait<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let can_wait = running(py).is_some() && suspension::suspendable(py).is_ok();
    Ok(bool_object(py, can_wait))
}

/// `_coro_set_undisturbed(flag)`: with true, an interruption ends the running coro's wait for a lock or queue of
/// `threads` only if that wait has a time limit. Returns what was set before. Outside of a coro it does nothing.
pub(super) fn set_undisturbed<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let flag = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    let before = running(py).is_some_and(|coro| coro.is_undisturbed.replace(flag));
    Ok(bool_object(py, before))
}

/// `_coro_unwatch()`: makes the watchdog ignore this thread until the thread's next run (`pulse`). Called when a loop
/// of this thread is closed, and when the thread ends. It does nothing if the loop is closed by code that another loop
/// of this thread is running.
pub(super) fn unwatch<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    with_runtime(|runtime| {
        if runtime.pulse.running_since().is_none() {
            watchdog::unwatch(&runtime.pulse);
        }
    });
    Ok(none(py))
}

/// `_coro_run_number()`: how often this thread has resumed a coro, counted over all its coros.
pub(super) fn run_number<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    let count = with_runtime(|runtime| runtime.stats.switches.get());
    Ok(count.into_pyobject(py)?.into_any())
}

/// `_coro_send_signal(number, handler)`: sends the signal to this process if `handler` still handles that signal.
/// Returns whether the signal was sent.
pub(super) fn send_signal<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let (Some(number), Some(handler)) = (args.get(0), args.get(1)) else {
        return Ok(none(py));
    };
    let current = py.import("_signal")?.getattr("getsignal")?.call1((&number,))?;
    let number: i32 = number.extract()?;
    // With a GIL the handler cannot change between the check and the signal, because the main thread would need the GIL
    // to change it.
    let is_sent = current.is(&handler) && signals::send(number).is_ok();
    Ok(is_sent.into_pyobject(py)?.to_owned().into_any())
}

/// `_coro_stop_watchdog()`: stops the watchdog, which starts again with the next run (`pulse`) in a thread that has a
/// latency limit. Called before a fork and at exit.
pub(super) fn stop_watchdog<'py>(py: Python<'py>, _: Args<'_, 'py>) -> ObjectResult<'py> {
    watchdog::stop(py);
    Ok(none(py))
}

/// `_coro_set_hooks(pending_loop, watch_thread, wait_for, report_late, end_child, run_forever)`.
pub(super) fn set_hooks<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let [
        Some(pending_loop),
        Some(watch_thread),
        Some(wait_for),
        Some(report_late),
        Some(end_child),
        Some(run),
    ] = [0, 1, 2, 3, 4, 5].map(|index| args.get(index))
    {
        let run_forever = report::code_of(&run)?;
        hooks::set(
            [pending_loop, watch_thread, wait_for, report_late, end_child],
            run_forever,
        );
        latency::install(scheduler::resume_entry);
    }
    Ok(none(py))
}

pub(super) fn evict_always<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let is_on = args.get(0).map_or(Ok(true), |flag| flag.is_truthy())?;
    with_runtime(|runtime| runtime.options.evicts_always.set(is_on));
    Ok(none(py))
}

pub(super) fn fail_evictions<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    let count: u32 = args.get(0).map_or(Ok(0), |count| count.extract())?;
    with_runtime(|runtime| runtime.options.failing_evictions.set(count));
    Ok(none(py))
}

/// `_coro_note_collection(phase, info)`: a callback for `gc.callbacks`.
pub(super) fn note_collection<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if let Some(phase) = args.get(0) {
        collector::note(py, &phase)?;
    }
    Ok(none(py))
}

/// `_coro_panic(function)`: panics, and calls `function` during the unwinding. Tests have no other way to run code
/// there.
pub(super) fn panic<'py>(_: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    struct CalledWhileUnwinding<'py>(Option<Bound<'py, PyAny>>);
    impl Drop for CalledWhileUnwinding<'_> {
        fn drop(&mut self) {
            if let Some(function) = &self.0
                && let Err(error) = function.call0()
            {
                error.write_unraisable(function.py(), Some(function));
            }
        }
    }
    let _guard = CalledWhileUnwinding(args.get(0));
    panic!("a test has asked for it")
}

/// `_coro_setup(errors, kind)`: stores the package's exception classes and its class `Coro`. Returns None, or the
/// reason why coros are not available.
pub(super) fn set_up<'py>(py: Python<'py>, args: Args<'_, 'py>) -> ObjectResult<'py> {
    if !arch::IS_SUPPORTED {
        return Ok(PyString::new(py, "coros are supported only on x86-64 and AArch64").into_any());
    }
    if let Some(reason) = pystate::self_check(py)? {
        return Ok(PyString::new(py, &reason).into_any());
    }
    if let (Some(module), Some(kind)) = (args.get(0), args.get(1)) {
        let kind = kind.cast_into::<PyType>()?;
        if !scheduler::is_coro_type(&kind) {
            return Err(PyTypeError::new_err(
                "a subclass of grapeshot._core.Coro is required",
            ));
        }
        coro_errors::set_classes(&module)?;
        tasks::set_up(py)?;
        pystate::set_up(py)?;
        if !pystate::has_known_code(&kind.getattr("join")?)? {
            return Ok(PyString::new(py, "unknown layout of the interpreter's code objects").into_any());
        }
        pystate::keep_chunks(py);
        spawn::set_type(kind);
    }
    Ok(none(py))
}
