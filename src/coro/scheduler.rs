//! Who runs: the runtime of a thread brings a coro's stack into place, switches to it, and gets the thread back when
//! the coro waits or ends.
//!
//! ```text
//!   ready queue entry of a coro --> resume: stack into place, interpreter state, switch -----.
//!                                                                                            v
//!   next entry <-- interpreter state, bookkeeping <---------- switch back <--- leave() on the coro's stack
//! ```
//!
//! Everything but `leave` and the function of a coro runs on the thread's own stack. Belongs to its thread; nothing
//! here stays borrowed across a call into Python or a switch.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::arch;
use super::coroutine::{Coro, CoroObject, Status};
use super::errors::{self as coro_errors, Kind};
use super::machine::{Machine, SharedSlot};
use super::runtime::{Runtime, current, with_runtime};
use super::{hooks, interruption, latency, notifier, pystate, tasks};
use crate::event_loop::handle::HandleRef;
use crate::event_loop::native_type::{This, none};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::{calls, errors};
use crate::sys::clock;

/// The entry of a coro in the loop's ready queue.
pub(super) unsafe fn resume_entry(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `make_ready` with a coro, whose reference the queue holds.
    resume(unsafe { This::new(py, object) })
}

/// Runs the coro until it waits or ends. Err is only for what must leave the loop.
#[inline]
pub(super) fn resume(coro: Coro<'_>) -> PyResult<()> {
    if coro.status.get() != Status::Ready {
        return Ok(());
    }
    with_runtime(|runtime| {
        if !runtime.current.get().is_null() || coro.thread.get() != runtime.thread {
            return refuse(runtime, coro);
        }
        match runtime.install(coro) {
            Ok(machine) => {
                let limit_ns = runtime.options.latency_ns.get();
                let began_ns = if limit_ns == 0 { 0 } else { clock::coarse_ns() };
                run(runtime, coro, machine);
                if limit_ns != 0 {
                    let took_ns = clock::coarse_ns() - began_ns;
                    if took_ns >= limit_ns {
                        return finish_late(runtime, coro, took_ns);
                    }
                }
                if coro.is_done() {
                    return finish(runtime, coro);
                }
                Ok(())
            }
            Err(error) => not_installed(runtime, coro, error),
        }
    })
}

/// A loop that runs inside a coro, or in another thread than the coro was started in: its stack cannot be used here.
#[cold]
fn refuse(runtime: &Runtime, coro: Coro<'_>) -> PyResult<()> {
    // It waits for its own loop's close or its own thread's end.
    coro.status.set(Status::Waiting);
    let why = if runtime.current.get().is_null() {
        "a coro can run only in the thread that it was made in"
    } else {
        "a coro cannot run another loop's coros"
    };
    report(coro, PyRuntimeError::new_err(why))
}

/// `finish`, if it has ended, and a warning of the time it took.
#[cold]
fn finish_late(runtime: &Runtime, coro: Coro<'_>, took_ns: u64) -> PyResult<()> {
    // A coro that has ended is given up by `finish`.
    let kept = coro.to_bound();
    let warned = latency::warn(coro, took_ns);
    let finished = if coro.is_done() {
        finish(runtime, coro)
    } else {
        Ok(())
    };
    drop(kept);
    finished.and(warned)
}

/// There was no memory for the coro to run; nothing was changed. One that has never run ends with the error. Another
/// stays ready and tries again in the next turn: its function is not to know.
#[cold]
fn not_installed(runtime: &Runtime, coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    // SAFETY: only looked at, on the thread's own stack.
    if !coro.machine.get().is_null() {
        queue(coro);
        return report(coro, error);
    }
    let py = coro.py();
    drop((coro.function.take(py), coro.args.take(py), coro.kwargs.take(py)));
    store(coro, Err(error));
    coro.status.set(Status::Done);
    finish(runtime, coro)
}

/// The switch there and back.
#[inline(always)]
fn run(runtime: &Runtime, coro: Coro<'_>, machine: *mut Machine) {
    coro.status.set(Status::Running);
    runtime.current.set(coro.as_ptr());
    let stats = &runtime.stats;
    stats.switches.set(stats.switches.get() + 1);
    // SAFETY: attached; the machine is the coro's and stays until it is dismantled below; its stack is in place. Only
    // raw pointers are used across the switch.
    unsafe {
        let thread = ffi::PyThreadState_Get();
        let (base, len_bytes) = {
            let shared: &SharedSlot = &(&(*machine)).slot;
            let slot = &shared.slot;
            (slot.base(), slot.len_bytes())
        };
        (*machine).state.swap(thread);
        let is_protected = pystate::protect(thread, base, len_bytes);
        debug_assert!(is_protected, "accepted when the slot was made");
        tasks::enter(machine, coro);
        let to = (*machine).sp;
        arch::switch(runtime.main_sp.as_ptr(), to);
        tasks::leave(machine, coro);
        pystate::unprotect(thread);
        (*machine).state.swap(thread);
        runtime.current.set(ptr::null_mut());
        if runtime.options.evicts_always.get() && !coro.is_done() && !coro.has_own_stack.get() {
            let shared = Rc::clone(&(*machine).slot);
            // Without memory the stack stays in place, as it would without this mode.
            let _ = runtime.evacuate(&shared);
        }
    }
}

/// What a wait returns or raises.
pub(super) type Outcome<'py> = PyResult<Bound<'py, PyAny>>;

/// Where to switch to in order to leave a coro's stack. Small enough to be returned in registers.
struct Departure {
    /// Where the coro's stack pointer is kept.
    sp_place: NonNull<usize>,
    main_sp: usize,
}

/// Gets the running coro ready to leave. The caller has set its status (Ready and queued, or Waiting), and no stale
/// `wake_value` is left.
#[inline]
fn departure(coro: Coro<'_>) -> PyResult<Departure> {
    coro.acts.set(0);
    let Some(machine) = NonNull::new(coro.machine.get()) else {
        return Err(PyRuntimeError::new_err("the coro has no stack"));
    };
    // SAFETY: a live machine; only the address is taken.
    let sp_place = unsafe { NonNull::new_unchecked(&raw mut (*machine.as_ptr()).sp) };
    Ok(Departure {
        sp_place,
        main_sp: with_runtime(|runtime| runtime.main_sp.get()),
    })
}

/// What the wait that is over returns or raises.
#[inline]
fn arrival(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    // What it was woken with before an interruption stays for whoever has waited to give it back.
    raise_pending(coro)?;
    let py = coro.py();
    Ok(coro.wake_value.take(py).unwrap_or_else(|| none(py)))
}

/// Leaves the coro's stack until it is woken.
///
/// # Safety
/// Attached, on the stack of the coro that the departure was made for. Nothing is borrowed.
#[inline(always)]
unsafe fn leave(departure: &Departure) {
    // SAFETY: by the contract; the thread's own stack was left at `main_sp` by `run`.
    unsafe { arch::switch(departure.sp_place.as_ptr(), departure.main_sp) };
}

/// Gives the thread back to the scheduler until the coro is woken; returns or raises what it is woken with. The caller has
/// done what `departure` wants.
#[inline]
fn suspend(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    let departure = departure(coro)?;
    // SAFETY: this is the coro's stack.
    unsafe { leave(&departure) };
    arrival(coro)
}

/// What the first half of a waiting function has come to.
pub(super) enum Begun<'py, S> {
    /// The coro waits, or is ready again; this is for the second half.
    Waits(S),
    /// There is no need to wait: this is returned.
    IsOver(Bound<'py, PyAny>),
}

/// The body of a C function that waits. `begin` decides whether it does, and has something to be kept for `finish`, which
/// gets the outcome of the wait and decides what the function returns.
///
/// What a suspended coro has on its stack is copied at each switch and kept while it waits. So there is nothing here but what
/// `begin` wants to be kept: all else is in functions of their own, which have returned by then, or not begun.
///
/// # Safety
/// Called by CPython, attached. If there is something to wait for, `begin` leaves the running coro as `departure` wants it.
#[inline(always)]
pub(super) unsafe fn wait_at_boundary<S, F, G>(begin: F, finish: G) -> *mut ffi::PyObject
where
    F: FnOnce(Python<'static>) -> PyResult<Begun<'static, S>>,
    G: FnOnce(Coro<'static>, S, Outcome<'static>) -> Outcome<'static>,
{
    enum Next<S> {
        Leave(Departure, S),
        Return(*mut ffi::PyObject),
    }

    #[inline(never)]
    fn before<S, F>(begin: F) -> Next<S>
    where
        F: FnOnce(Python<'static>) -> PyResult<Begun<'static, S>>,
    {
        // SAFETY: attached (contract of the caller).
        let py = unsafe { Python::assume_attached() };
        errors::at_boundary(py, Next::Return(ptr::null_mut()), || {
            Ok(match begin(py)? {
                Begun::Waits(kept) => Next::Leave(departure(running(py)?)?, kept),
                Begun::IsOver(value) => Next::Return(value.into_ptr()),
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
            finish(coro, kept, arrival(coro)).map(Bound::into_ptr)
        })
    }

    match before(begin) {
        Next::Leave(departure, kept) => {
            // SAFETY: `before` has found out that this is a coro's stack.
            unsafe { leave(&departure) };
            after(kept, finish)
        }
        Next::Return(value) => value,
    }
}

/// The running coro.
#[inline]
fn running(py: Python<'_>) -> PyResult<Coro<'_>> {
    current(py).ok_or_else(|| PyRuntimeError::new_err("no coro is running"))
}

/// What a running coro must fulfil to be suspended here: it is the current one, nothing unwinds, the garbage collector
/// does not run on a stack that moves, and no greenlet runs on it.
#[inline]
pub(super) fn suspendable(py: Python<'_>) -> PyResult<Coro<'_>> {
    match current(py) {
        Some(coro) if !std::thread::panicking() && !is_held(coro) && !is_in_greenlet(coro) => Ok(coro),
        other => Err(not_suspendable(py, other.is_some())),
    }
}

/// Whether the coro must not leave its stack: the garbage collector runs on it, or it has forked and this is the child.
#[inline]
fn is_held(coro: Coro<'_>) -> bool {
    with_runtime(|runtime| runtime.collecting.get() == coro.as_ptr() || runtime.is_forked.get())
}

/// Whether something else than this coro's function runs on its stack: a greenlet has frames of its own, and the package
/// would take the thread's own stack for the rest of it if another coro or the loop went on meanwhile.
#[inline]
fn is_in_greenlet(coro: Coro<'_>) -> bool {
    // SAFETY: attached; a root chunk that is none of ours is only asked for its length.
    unsafe {
        let root = pystate::running_root();
        root.is_null() || pystate::tail(root) != coro.machine.get().cast()
    }
}

#[cold]
fn not_suspendable(py: Python<'_>, is_coro: bool) -> PyErr {
    if !is_coro {
        return coro_errors::new(
            py,
            Kind::YieldFromMain,
            "only a coro can wait: this runs on the thread's own stack",
        );
    }
    if with_runtime(|runtime| runtime.is_forked.get()) {
        return coro_errors::new(
            py,
            Kind::YieldFromMain,
            "this process was forked by a coro, and its loop runs in the parent",
        );
    }
    PyRuntimeError::new_err(if std::thread::panicking() {
        "a coro cannot yield while it panics"
    } else if current(py).is_some_and(|coro| !is_held(coro)) {
        "a coro cannot wait in a greenlet that was started in it: only outside of greenlets"
    } else {
        "a coro cannot wait in what the garbage collector calls, unless it has a stack of its own"
    })
}

/// Puts the coro into its loop's ready queue.
#[inline]
fn queue(coro: Coro<'_>) {
    if let Some(event_loop) = coro.event_loop.get(coro.py()) {
        LoopObject::of(&event_loop)
            .reactor()
            .defer(coro.to_bound(), resume_entry);
    }
}

/// New or waiting becomes ready; one that stood in line does not any more.
#[inline]
pub(super) fn make_ready(coro: Coro<'_>) {
    coro.place_in_line.leave();
    coro.status.set(Status::Ready);
    queue(coro);
}

/// The exception that has come while the coro ran or waited, raised before it waits or goes on.
#[inline]
fn raise_pending(coro: Coro<'_>) -> PyResult<()> {
    if coro.wake_exception.is_set()
        && let Some(error) = interruption::pop(coro)
    {
        return Err(error);
    }
    Ok(())
}

/// Drops what is left of an earlier wait that was interrupted after it had been woken.
#[inline]
pub(super) fn forget_wake_value(coro: Coro<'_>) {
    if coro.wake_value.is_set() {
        drop(coro.wake_value.take(coro.py()));
    }
}

/// The running coro goes behind everything that is ready now.
#[inline]
pub(super) fn begin_yield(coro: Coro<'_>) -> PyResult<Begun<'_, ()>> {
    raise_pending(coro)?;
    forget_wake_value(coro);
    make_ready(coro);
    Ok(Begun::Waits(()))
}

/// The running coro waits until somebody wakes it.
#[inline]
pub(super) fn begin_wait(coro: Coro<'_>) -> PyResult<Begun<'_, ()>> {
    raise_pending(coro)?;
    forget_wake_value(coro);
    coro.status.set(Status::Waiting);
    Ok(Begun::Waits(()))
}

/// Waits until somebody wakes the coro.
#[inline]
pub(super) fn wait(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    begin_wait(coro)?;
    suspend(coro)
}

/// The same for a coro that has something to give away: who takes it takes it out of `wake_value`.
#[inline]
pub(super) fn wait_offering<'py>(coro: Coro<'py>, offer: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    raise_pending(coro)?;
    coro.wake_value.set(offer);
    coro.status.set(Status::Waiting);
    suspend(coro)
}

/// The running coro begins an I/O operation. One that waits begins the count anew; too many in a row that do not, and
/// the coro yields here, before it has anything that could be lost.
#[inline]
pub(super) fn begin_act(coro: Coro<'_>) -> PyResult<Begun<'_, ()>> {
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
    Ok(Begun::IsOver(none(coro.py())))
}

/// `_coro_end_sleep`, which timers call.
static END_SLEEP: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());
/// An empty context for it, so that none is copied per sleep.
static EMPTY_CONTEXT: AtomicPtr<ffi::PyObject> = AtomicPtr::new(ptr::null_mut());

pub(super) fn set_end_sleep(function: &Bound<'_, PyAny>) {
    END_SLEEP.store(function.clone().into_ptr(), Ordering::Release);
    // SAFETY: attached. Null (no memory) makes the handle copy the current context instead.
    EMPTY_CONTEXT.store(unsafe { ffi::PyContext_New() }, Ordering::Release);
}

/// The running coro waits until the loop's clock shows `when_s`, by a timer in the loop's heap: that one is returned, for
/// `end_sleep`.
pub(super) fn begin_sleep(coro: Coro<'_>, when_s: f64) -> PyResult<Begun<'_, HandleRef>> {
    let py = coro.py();
    if when_s.is_nan() {
        return Err(PyValueError::new_err("a time cannot be NaN"));
    }
    raise_pending(coro)?;
    let Some(event_loop) = coro.event_loop.get(py) else {
        return Err(PyRuntimeError::new_err("the coro has lost its loop"));
    };
    let handle = HandleRef::create(
        py,
        event_loop.as_ptr().cast(),
        END_SLEEP.load(Ordering::Relaxed),
        &[coro.as_ptr()],
        EMPTY_CONTEXT.load(Ordering::Relaxed),
        Some(when_s),
    )?;
    LoopObject::of(&event_loop)
        .reactor()
        .push_timer(py, handle.new_ref());
    coro.status.set(Status::Waiting);
    Ok(Begun::Waits(handle))
}

/// After the wait. The timer of one that was interrupted, or woken by somebody else, must not end a later one; if it is due
/// already, it lies in the ready queue, and is in no heap any more.
pub(super) fn end_sleep<'py>(coro: Coro<'py>, handle: HandleRef, outcome: Outcome<'py>) -> Outcome<'py> {
    let py = coro.py();
    let was_scheduled = handle.is_scheduled(py);
    if handle.event_loop(py).is_some()
        && handle.cancel(py)
        && was_scheduled
        && let Some(event_loop) = coro.event_loop.get(py)
    {
        LoopObject::of(&event_loop).reactor().timer_cancelled(py, handle);
    }
    handle.release(py);
    outcome
}

/// The innermost Python frame of a suspended coro as an object; None if it runs, has not begun or has ended.
pub(super) fn frame(coro: Coro<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = coro.py();
    if !matches!(coro.status.get(), Status::Ready | Status::Waiting) {
        return Ok(None);
    }
    // SAFETY: the coro is suspended, so nobody else looks at its machine. The chain of an evacuated stack was relinked
    // past what is not there, and its innermost frame lies on the heap.
    unsafe {
        let Some(machine) = coro.machine.get().as_ref() else {
            return Ok(None);
        };
        let innermost = if machine.saved.is_some() {
            machine.innermost
        } else {
            machine.state.innermost()
        };
        Ok(pystate::frame_object(py, innermost))
    }
}

/// Starts a new coro: it is kept from now on, and runs in the next turn.
pub(super) fn start(coro: Coro<'_>) -> PyResult<()> {
    tasks::register(coro)?;
    with_runtime(|runtime| {
        if !runtime.is_watched.replace(true) {
            hooks::watch_thread(coro.py());
        }
        runtime.enter(coro);
    });
    make_ready(coro);
    Ok(())
}

/// The first and only function on a coro's stack. As in `wait_at_boundary`, hardly anything of it stays on the stack while the
/// coro's function runs.
pub(super) unsafe extern "C" fn run_on_stack(argument: *mut c_void) -> ! {
    // SAFETY: the scheduler switches here attached, with the coro that `build` has laid the stack out for. The arguments are
    // a tuple and a dict or null; the coro keeps them, and is kept by the runtime.
    unsafe {
        let coro: Coro<'static> = This::new(Python::assume_attached(), argument.cast());
        if begin(coro) {
            let result = calls::call(coro.function.as_ptr(), coro.args.as_ptr(), coro.kwargs.as_ptr());
            end(coro, result);
        }
        let main_sp = with_runtime(|runtime| runtime.main_sp.get());
        let unused = UnsafeCell::new(0);
        // The thread's own stack was left there; nobody comes back to this one.
        arch::switch(unused.get(), main_sp);
    }
    std::process::abort()
}

/// Enters the coro's context. False if the function is not to be called, and the outcome is there: an exception that came
/// before the first run is raised instead.
#[inline(never)]
fn begin(coro: Coro<'static>) -> bool {
    conclude(coro, || {
        let py = coro.py();
        drop(coro.wake_value.take(py));
        if !coro.context.is_set() {
            return Err(PyRuntimeError::new_err("the coro has lost its context"));
        }
        // SAFETY: a live context, left in `leave_context` on the same stack. The stack's own context is null until then.
        if unsafe { ffi::PyContext_Enter(coro.context.as_ptr()) } != 0 {
            return Err(errors::fetch(py));
        }
        if let Err(error) = raise_pending(coro) {
            return leave_context(coro, Err(error)).map(Some);
        }
        if coro.function.is_set() && coro.args.is_set() {
            return Ok(None);
        }
        let lost = PyRuntimeError::new_err("the coro has lost its function");
        leave_context(coro, Err(lost)).map(Some)
    })
}

/// Takes over what the function has returned, null if it has raised.
#[inline(never)]
fn end(coro: Coro<'static>, result: *mut ffi::PyObject) {
    conclude(coro, || {
        let py = coro.py();
        // SAFETY: a new reference, or null with an exception set.
        let result = unsafe { errors::owned(py, result) };
        // Dropped here: their finalizers may still use the coro's stack.
        drop((coro.function.take(py), coro.args.take(py), coro.kwargs.take(py)));
        leave_context(coro, result).map(Some)
    });
}

/// The outcome of the function, after the notifier has heard of an error, in the coro's context.
fn leave_context<'py>(coro: Coro<'py>, outcome: Outcome<'py>) -> Outcome<'py> {
    let outcome = outcome.map_err(|error| notifier::tell(coro, error));
    // SAFETY: entered in `begin` on this stack; a failed outcome holds its exception itself.
    if unsafe { ffi::PyContext_Exit(coro.context.as_ptr()) } != 0 {
        return Err(errors::fetch(coro.py()));
    }
    outcome
}

/// Runs a part of the coro's outermost function: an outcome ends the coro, a panic does so as an exception. True if the coro
/// goes on.
#[inline(always)]
fn conclude<'py, F>(coro: Coro<'py>, part: F) -> bool
where
    F: FnOnce() -> PyResult<Option<Bound<'py, PyAny>>>,
{
    let outcome =
        catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|payload| Err(errors::panic_error(&*payload)));
    let outcome = match outcome {
        Ok(None) => return true,
        Ok(Some(value)) => Ok(value),
        Err(error) => Err(error),
    };
    store(coro, outcome);
    coro.status.set(Status::Done);
    false
}

/// Notes the outcome. Nothing that has a destructor may be left on the stack after it.
fn store(coro: Coro<'_>, outcome: PyResult<Bound<'_, PyAny>>) {
    match outcome {
        Ok(value) => coro.result.set(value),
        Err(error) => {
            let py = coro.py();
            coro.is_unseen.set(!coro.is_notified.get());
            // Kept for `take_outcome`.
            if let Some(traceback) = error.traceback(py) {
                coro.result.set(traceback.into_any());
            }
            coro.exception.set(error.into_value(py).into_bound(py).into_any());
        }
    }
}

/// Bookkeeping of a coro that has ended, on the thread's own stack: callbacks are scheduled as those of a Future.
fn finish(runtime: &Runtime, coro: Coro<'_>) -> PyResult<()> {
    let py = coro.py();
    runtime.dismantle(coro);
    runtime.is_forked.set(false);
    tasks::unregister(coro);
    let kept = runtime.leave(coro);
    drop(coro.context.take(py));
    let event_loop = coro.event_loop.get(py);
    if let Some(callbacks) = coro.callbacks.take(py)
        && let Some(event_loop) = &event_loop
        && !LoopObject::of(event_loop).reactor().is_closed()
        && let Err(error) = schedule_callbacks(coro, &callbacks, event_loop)
    {
        report(coro, error)?;
    }
    let leaving = coro.exception.get(py).and_then(|exception| {
        let error = PyErr::from_value(exception);
        errors::leaves_loop(py, &error).then_some(error)
    });
    drop(kept);
    match leaving {
        Some(error) => {
            coro.is_unseen.set(false);
            Err(error)
        }
        None => Ok(()),
    }
}

/// Wakes the coros among the callbacks, and schedules `callback(coro)` for the others, in their order.
fn schedule_callbacks(
    coro: Coro<'_>,
    callbacks: &Bound<'_, PyAny>,
    event_loop: &Bound<'_, PyAny>,
) -> PyResult<()> {
    for entry in callbacks.cast::<PyList>()?.iter() {
        let entry = entry.cast_into::<PyTuple>()?;
        let (callback, context) = (entry.get_item(0)?, entry.get_item(1)?);
        LoopObject::of(event_loop).soon(&callback, &[coro.as_ptr()], &context)?;
    }
    Ok(())
}

/// An error of the scheduler's own: to the loop's exception handler.
#[cold]
fn report(coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    match coro.event_loop.get(coro.py()) {
        Some(event_loop) => errors::report(
            &event_loop,
            "Error on switching to a coro",
            error,
            &[("coro", &coro.to_bound())],
        ),
        None => Ok(()),
    }
}

/// The coro that has the object as its Python side.
pub(super) fn coro_of<'py>(object: &Bound<'py, PyAny>) -> Coro<'py> {
    // SAFETY: called only with instances of the native type; the caller's reference keeps it.
    unsafe { This::new(object.py(), object.as_ptr()) }
}

const _: () = assert!(size_of::<CoroObject>() < 512);
