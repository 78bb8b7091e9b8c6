//! How a running coro waits: it records its new status, leaves its stack, and later continues with the value or the
//! exception that it was woken with.
//!
//! The functions that wait run on the coro's stack; the ones that only check a condition, such as `suspendable`, run on
//! any stack. Of all the things that coros wait for, this module knows only timers.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::arch;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::{Coro, Outcome, Status};
use super::errors::{self as coro_errors, ErrorClass};
use super::interruption::raise_pending;
use super::runtime::{Runtime, current, with_runtime};
use super::scheduler::make_ready;
use super::{latency, pystate};
use crate::binding::errors;
use crate::binding::native_type::This;
use crate::binding::object_result::none;
use crate::event_loop::handle::HandleRef;
use crate::event_loop::progress::Progress;
use crate::event_loop::pyloop::LoopObject;

/// The two addresses that a switch away from a coro's stack needs. Small enough to be returned in registers.
struct PreparedSwitch {
    /// The field that receives the coro's stack pointer.
    sp_place: NonNull<usize>,
    /// The stack pointer of the thread's own stack.
    main_sp: usize,
}

/// Prepares the running coro to leave its stack. The caller has already removed a stale `wake_value`, and has made the
/// coro either Waiting, or Ready and queued.
#[inline]
fn prepare_switch(coro: Coro<'_>) -> PyResult<PreparedSwitch> {
    with_runtime(|runtime| prepare_in(runtime, coro))
}

/// Like `prepare_switch`, for a caller that has no reference to the running coro.
#[inline]
fn prepare_running(py: Python<'_>) -> PyResult<PreparedSwitch> {
    with_runtime(|runtime| match runtime.running(py) {
        Some(coro) => prepare_in(runtime, coro),
        None => Err(no_coro()),
    })
}

#[inline]
fn prepare_in(runtime: &Runtime, coro: Coro<'_>) -> PyResult<PreparedSwitch> {
    coro.acts.set(0);
    let Some(fiber) = NonNull::new(coro.fiber.get()) else {
        return Err(PyRuntimeError::new_err("the coro has no stack"));
    };
    // SAFETY: a live fiber; only the address is taken.
    let sp_place = unsafe { NonNull::new_unchecked(&raw mut (*fiber.as_ptr()).sp) };
    Ok(PreparedSwitch {
        sp_place,
        main_sp: runtime.main_sp.get(),
    })
}

/// Takes the value that the finished wait returns, or raises the exception that is pending for the coro.
#[inline]
fn take_wakeup(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    // If the coro was woken and then interrupted, `wake_value` stays set, so that the waiting function can give the
    // value back.
    raise_pending(coro)?;
    let py = coro.py();
    Ok(coro.wake_value.take(py).unwrap_or_else(|| none(py)))
}

/// Leaves the coro's stack until the coro is woken.
///
/// # Safety
/// Attached, on the stack of the coro that the switch was prepared for. Nothing is borrowed.
#[inline(always)]
unsafe fn leave(switch: &PreparedSwitch) {
    // SAFETY: by the contract; the thread's own stack was left at `main_sp` by `run`. After the switch the thread state
    // is the coro's again.
    unsafe {
        arch::switch(switch.sp_place.as_ptr(), switch.main_sp);
        pystate::resume_critical_sections();
    }
}

/// Gives the thread back to the scheduler until the coro is woken. Returns the value or raises the exception that it
/// was woken with. The caller has met the conditions of `prepare_switch`.
#[inline]
pub(super) fn suspend(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    let switch = prepare_switch(coro)?;
    // SAFETY: this is the coro's stack.
    unsafe { leave(&switch) };
    take_wakeup(coro)
}

/// The body of a C function that may wait. `begin` decides whether it waits, and returns the data that `finish` needs.
/// `finish` gets the outcome of the wait and decides what the function returns.
///
/// Everything on the stack of a suspended coro takes up memory while the coro waits, and may be copied. So this
/// function keeps only the data that `begin` returned. The rest of the work is in separate functions, which have
/// returned before the switch or are called after it.
///
/// # Safety
/// Called by CPython, attached. If there is something to wait for, `begin` meets the conditions of `prepare_switch`.
#[inline(always)]
pub(super) unsafe fn wait_at_boundary<S, F, G>(begin: F, finish: G) -> *mut ffi::PyObject
where
    F: FnOnce(Python<'static>) -> PyResult<Progress<Bound<'static, PyAny>, S>>,
    G: FnOnce(Coro<'static>, S, Outcome<'static>) -> Outcome<'static>,
{
    enum Next<S> {
        Leave(PreparedSwitch, S),
        Return(*mut ffi::PyObject),
    }

    #[inline(never)]
    fn before<S, F>(begin: F) -> Next<S>
    where
        F: FnOnce(Python<'static>) -> PyResult<Progress<Bound<'static, PyAny>, S>>,
    {
        // SAFETY: attached (contract of the caller).
        let py = unsafe { Python::assume_attached() };
        errors::at_boundary(py, Next::Return(ptr::null_mut()), || {
            Ok(match begin(py)? {
                Progress::MustWait(kept) => Next::Leave(prepare_running(py)?, kept),
                Progress::Done(value) => Next::Return(value.into_ptr()),
            })
        })
    }

    #[inline(never)]
    fn after<S, G>(kept: S, finish: G) -> *mut ffi::PyObject
    where
        G: FnOnce(Coro<'static>, S, Outcome<'static>) -> Outcome<'static>,
    {
        // SAFETY: as above.
        let py = unsafe { Python::assume_attached() };
        errors::at_boundary(py, ptr::null_mut(), || {
            let coro = running(py)?;
            finish(coro, kept, take_wakeup(coro)).map(Bound::into_ptr)
        })
    }

    match before(begin) {
        Next::Leave(switch, kept) => {
            // SAFETY: `before` has checked that this is a coro's stack.
            unsafe { leave(&switch) };
            after(kept, finish)
        }
        Next::Return(value) => value,
    }
}

/// Like `wait_at_boundary`, for a function that may wait any number of times. Each call of `step` decides whether the
/// function waits (again) or returns. `step` gets the outcome of the previous wait, None the first time. `kept` is the
/// function's data that stays on the stack during the waits. It is dropped before the function raises, so that its
/// destructors run while no exception is set.
///
/// # Safety
/// As for `wait_at_boundary`.
#[inline(always)]
pub(super) unsafe fn wait_in_steps<S, F>(kept: S, step: F) -> *mut ffi::PyObject
where
    F: Fn(Python<'static>, &mut S, Option<Outcome<'static>>) -> PyResult<Progress<Bound<'static, PyAny>>>,
{
    /// The next action. A struct of two words is returned in registers, so it takes no room on the stack of a coro that
    /// waits.
    struct Next {
        /// The field that receives the coro's stack pointer; None: the call is over.
        sp_place: Option<NonNull<usize>>,
        /// The stack pointer of the thread's own stack, or the object to return (null: an exception is set).
        word: *mut ffi::PyObject,
    }

    impl Next {
        fn leave(switch: &PreparedSwitch) -> Self {
            Self {
                sp_place: Some(switch.sp_place),
                word: ptr::without_provenance_mut(switch.main_sp),
            }
        }

        fn over(value: *mut ffi::PyObject) -> Self {
            Self {
                sp_place: None,
                word: value,
            }
        }
    }

    #[inline(never)]
    fn make_step<S, F>(kept: &mut Option<S>, step: &F, is_first: bool) -> Next
    where
        F: Fn(Python<'static>, &mut S, Option<Outcome<'static>>) -> PyResult<Progress<Bound<'static, PyAny>>>,
    {
        // SAFETY: attached (contract of the caller).
        let py = unsafe { Python::assume_attached() };
        errors::at_boundary(py, Next::over(ptr::null_mut()), || {
            let outcome = if is_first {
                None
            } else {
                Some(take_wakeup(running(py)?))
            };
            let Some(state) = kept else {
                return Err(PyRuntimeError::new_err("the call is over"));
            };
            match step(py, state, outcome) {
                Ok(Progress::MustWait(())) => Ok(Next::leave(&prepare_running(py)?)),
                Ok(Progress::Done(value)) => {
                    *kept = None;
                    Ok(Next::over(value.into_ptr()))
                }
                Err(error) => {
                    *kept = None;
                    Err(error)
                }
            }
        })
    }

    let mut kept = Some(kept);
    let mut is_first = true;
    loop {
        let next = make_step(&mut kept, &step, is_first);
        let Some(sp_place) = next.sp_place else {
            return next.word;
        };
        let main_sp = next.word.addr();
        // SAFETY: `make_step` has checked that this is a coro's stack.
        unsafe { leave(&PreparedSwitch { sp_place, main_sp }) };
        is_first = false;
    }
}

/// The running coro.
#[inline]
pub(super) fn running(py: Python<'_>) -> PyResult<Coro<'_>> {
    current(py).ok_or_else(no_coro)
}

#[cold]
fn no_coro() -> PyErr {
    PyRuntimeError::new_err("no coro is running")
}

/// The running coro, if it can be suspended here: no panic is unwinding, no garbage collection is running on a stack
/// that may be evicted, the coro's frames are not being reported to a native profile function, no greenlet is running
/// on the stack, and this process was not forked by the coro.
#[inline]
pub(super) fn suspendable(py: Python<'_>) -> PyResult<Coro<'_>> {
    with_runtime(|runtime| match runtime.running(py) {
        Some(coro) if !std::thread::panicking() && !is_held(runtime, coro) && !is_in_greenlet(coro) => {
            Ok(coro)
        }
        other => Err(not_suspendable(py, other.is_some())),
    })
}

/// Whether the running coro can be suspended here, by the rules of `suspendable`.
#[inline]
pub(super) fn can_suspend(coro: Coro<'_>) -> bool {
    !std::thread::panicking() && !with_runtime(|runtime| is_held(runtime, coro)) && !is_in_greenlet(coro)
}

/// The running coro, if it has a loop to wait on. In a process that a coro has forked, the coro has no such loop: the
/// loop runs in the parent.
#[inline]
pub(super) fn current_on_loop(py: Python<'_>) -> Option<Coro<'_>> {
    let object = with_runtime(|runtime| {
        if runtime.is_forked.get() {
            ptr::null_mut()
        } else {
            runtime.current.get()
        }
    });
    // SAFETY: the running coro is kept by the runtime's table.
    (!object.is_null()).then(|| unsafe { This::new(py, object) })
}

/// Whether this process is a child that the running coro has forked.
#[inline]
pub(super) fn is_forked() -> bool {
    with_runtime(|runtime| runtime.is_forked.get())
}

/// Whether the coro must not leave its stack. That is so in a child process that the coro has forked. It is also so
/// while `Runtime::collecting` points to the coro: while the coro's frames are being reported to a native profile
/// function, or while a garbage collection is running on its stack and the stack could be evicted.
#[inline]
fn is_held(runtime: &Runtime, coro: Coro<'_>) -> bool {
    runtime.collecting.get() == coro.as_ptr() || runtime.is_forked.get()
}

/// Whether a greenlet runs on this coro's stack. A greenlet has chunks of its own for its Python frames. So while it
/// runs, the root chunk in use is not the coro's. (The coro's root chunk is followed in memory by the coro's fiber.)
/// The coro must not leave the stack then: the greenlet package would still regard the greenlet as the running one.
/// When greenlets switched next, it would save a part of the thread's own stack as the greenlet's.
#[inline]
fn is_in_greenlet(coro: Coro<'_>) -> bool {
    // SAFETY: attached. `tail` reads only the chunk's length, so the root chunk need not be one of ours.
    unsafe {
        let root = pystate::running_root();
        root.is_null() || pystate::tail(root) != coro.fiber.get().cast()
    }
}

#[cold]
fn not_suspendable(py: Python<'_>, is_coro: bool) -> PyErr {
    if !is_coro {
        return coro_errors::new(
            py,
            ErrorClass::YieldFromMain,
            "only a coro can wait here: start one with `await coro.run_sync(f)` in a task, `coro.spawn(f)` in a callback, \
             `coro.run(f)` elsewhere",
        );
    }
    if with_runtime(|runtime| runtime.is_forked.get()) {
        return coro_errors::new(
            py,
            ErrorClass::YieldFromMain,
            "this process was forked by a coro, which cannot wait here: its loop runs only in the parent process",
        );
    }
    PyRuntimeError::new_err(if std::thread::panicking() {
        "a coro cannot yield while it panics"
    } else if current(py).is_some_and(|coro| !with_runtime(|runtime| is_held(runtime, coro))) {
        "a coro cannot wait inside a greenlet that it has started (to use gevent and asyncio in one thread, see \
         grapeshot.gevent)"
    } else {
        "a coro cannot wait in a native profile function; in code that the garbage collector calls, it can wait only \
         if it was started with stack='own'"
    })
}

/// Drops the value that is left over if the coro was woken and then interrupted in an earlier wait. The drop may run
/// destructors, which may wait. Meanwhile other code may change what the coro is going to wait for, or interrupt the
/// coro. So call this function before you check whether the coro has to wait.
#[inline]
pub(super) fn forget_wake_value(coro: Coro<'_>) {
    if coro.wake_value.is_set() {
        drop(coro.wake_value.take(coro.py()));
    }
}

/// Begins a yield: the running coro goes to the end of the ready queue, unless it would run next anyway.
#[inline]
pub(super) fn begin_yield(coro: Coro<'_>) -> PyResult<Progress<Bound<'_, PyAny>>> {
    forget_wake_value(coro);
    raise_pending(coro)?;
    if runs_next(coro) {
        coro.acts.set(0);
        return Ok(Progress::Done(none(coro.py())));
    }
    make_ready(coro);
    Ok(Progress::MustWait(()))
}

/// Whether the coro that yields can go on without leaving its stack: the loop would run it next anyway, and nothing has
/// to be reported about its run (`latency::renew`).
#[inline]
fn runs_next(coro: Coro<'_>) -> bool {
    let py = coro.py();
    let Some(event_loop) = coro.event_loop.get(py) else {
        return false;
    };
    let event_loop = LoopObject::of(&event_loop);
    with_runtime(|runtime| {
        if runtime.options.evicts_always.get() {
            return false;
        }
        let runs_next = event_loop
            .reactor()
            .skip_iteration(py, event_loop)
            .is_some_and(|now_ns| latency::renew(runtime, now_ns));
        if runs_next {
            runtime.stats.switches.set(runtime.stats.switches.get() + 1);
            event_loop.reactor().probe.counters.coro_switches.add(1);
        }
        runs_next
    })
}

/// Begins a wait that ends when another part of the program wakes the coro.
#[inline]
pub(super) fn begin_wait(coro: Coro<'_>) -> PyResult<Progress<Bound<'_, PyAny>>> {
    forget_wake_value(coro);
    raise_pending(coro)?;
    coro.status.set(Status::Waiting);
    Ok(Progress::MustWait(()))
}

/// Waits and offers an object, which the receiver takes out of `wake_value` during the wait.
#[inline]
pub(super) fn wait_offering<'py>(coro: Coro<'py>, offer: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    raise_pending(coro)?;
    begin_offer(coro, offer);
    suspend(coro)
}

/// The first half of `wait_offering`, for a running coro that has no pending exception.
#[inline]
pub(super) fn begin_offer<'py>(coro: Coro<'py>, offer: Bound<'py, PyAny>) {
    coro.wake_value.set(offer);
    coro.status.set(Status::Waiting);
}

/// Called before each I/O operation of the running coro. Counts the operations since the last wait or yield. If there
/// were too many of them, the coro yields here, before it holds anything that an interruption could lose.
#[inline]
pub(super) fn begin_act(coro: Coro<'_>) -> PyResult<Progress<Bound<'_, PyAny>>> {
    let acts = coro.acts.get() + 1;
    let own_limit = coro.max_acts.get();
    let limit = if own_limit == 0 {
        with_runtime(|runtime| runtime.options.max_acts.get())
    } else {
        own_limit - 1
    };
    if acts > limit {
        return begin_yield(coro);
    }
    coro.acts.set(acts);
    Ok(Progress::Done(none(coro.py())))
}

/// Like `begin_act`, but complete: if the coro has to yield, it has yielded when `act` returns.
pub(super) fn act(coro: Coro<'_>) -> PyResult<()> {
    if let Progress::MustWait(()) = begin_act(coro)? {
        suspend(coro)?;
    }
    Ok(())
}

/// `_coro_end_sleep`, the function that a sleep's timer calls.
static END_SLEEP: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
pub(super) fn set_end_sleep(function: &Bound<'_, PyAny>) {
    END_SLEEP.store(function.clone().into_ptr(), Ordering::Release);
}

/// Begins a sleep of the running coro until the loop's clock shows `when_s`. `delay_s` is the delay that the caller
/// asked for, or 0 if the caller gave a deadline. Returns the timer that ends the sleep, for `end_sleep`.
pub(super) fn begin_sleep(
    coro: Coro<'_>,
    when_s: f64,
    delay_s: f64,
) -> PyResult<Progress<Bound<'_, PyAny>, HandleRef>> {
    if when_s.is_nan() {
        return Err(PyValueError::new_err("a time cannot be NaN"));
    }
    forget_wake_value(coro);
    raise_pending(coro)?;
    let handle = set_timer(coro, when_s, END_SLEEP.load(Ordering::Relaxed))?;
    handle.allow_slack(delay_s);
    coro.status.set(Status::Waiting);
    Ok(Progress::MustWait(handle))
}

/// Sets a timer for `when_s`. The timer makes the coro ready if the coro is waiting at that time, but not if it waits
/// in the queue of a lock or another primitive.
pub(super) fn set_wake_timer(coro: Coro<'_>, when_s: f64) -> PyResult<HandleRef> {
    set_timer(coro, when_s, END_SLEEP.load(Ordering::Relaxed))
}

/// `loop.time()` of the coro's loop.
pub(super) fn now_s(coro: Coro<'_>) -> PyResult<f64> {
    match coro.event_loop.get(coro.py()) {
        Some(event_loop) => LoopObject::of(&event_loop).clock().now_s(coro.py()),
        None => Ok(0.0), // `set_timer` then raises, because there is no loop
    }
}

/// Sets a timer that calls `function(coro)`. The caller must give the timer to `end_timer`.
#[inline]
pub(super) fn set_timer(coro: Coro<'_>, when_s: f64, function: *mut ffi::PyObject) -> PyResult<HandleRef> {
    let py = coro.py();
    let Some(event_loop) = coro.event_loop.get(py) else {
        return Err(PyRuntimeError::new_err("the coro has lost its loop"));
    };
    let handle = HandleRef::create(
        py,
        event_loop.as_ptr().cast(),
        function,
        &[coro.as_ptr()],
        with_runtime(|runtime| runtime.timer_context(py)),
        Some(when_s),
    )?;
    LoopObject::of(&event_loop).reactor().push_timer(handle.new_ref());
    Ok(handle)
}

/// Ends a sleep, after the wait.
pub(super) fn end_sleep<'py>(coro: Coro<'py>, handle: HandleRef, outcome: Outcome<'py>) -> Outcome<'py> {
    end_timer(coro, handle);
    outcome
}

/// Cancels the timer of a wait that has ended before the timer ran, so that the timer does not end a later wait. A
/// timer that is already due has moved from the loop's `timers` to the ready queue, so `timers` need not be told.
pub(super) fn end_timer(coro: Coro<'_>, timer: HandleRef) {
    let py = coro.py();
    let handle = timer.this(py);
    let was_scheduled = handle.is_scheduled();
    if handle.event_loop().is_some()
        && handle.cancel()
        && was_scheduled
        && let Some(event_loop) = coro.event_loop.get(py)
    {
        LoopObject::of(&event_loop)
            .reactor()
            .timers
            .note_cancelled(handle);
    }
    drop(timer);
}
