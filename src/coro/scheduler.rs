//! The scheduler: brings a coro's stack into its slot, switches to it, and gets control back when the coro waits or
//! ends.
//!
//! ```text
//!   ready queue entry of a coro --> resume: stack into place, interpreter state, switch -----.
//!                                                                                            v
//!   next entry <-- interpreter state, bookkeeping <---------- switch back <--- leave() on the coro's stack
//! ```
//!
//! `resume` switches only from the thread's own stack. If it is called on the stack of a coro or in another thread, it
//! refuses to run the coro. `make_ready`, `start`, `prefetch_next` and the functions for the coro type run on any
//! stack. No borrow is held across a call into Python or a stack switch. The coro's side of the switch, `leave`, is in
//! `suspension`.

use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};

use grapeshot_core::arch;
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::coroutine::{Coro, CoroObject, Status};
use super::fiber::Fiber;
use super::function::{finish, run_on_stack, store};
use super::notifier::report;
use super::pulse::Subject;
use super::runtime::{Runtime, counters_of, with_runtime};
use super::{hooks, latency, profiling, pystate, stamps, tasks, thread_locals};
use crate::binding::current_thread;
use crate::binding::native_type::This;
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::Reactor;

/// The function that the loop calls for a coro's entry in its ready queue.
pub(super) unsafe fn resume_entry(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: only coros are queued with this function, and the queue holds a reference to the coro.
    resume(unsafe { This::new(py, object) })
}

/// Runs the coro until it waits, yields or ends. Returns Err only for an exception that must leave the loop.
#[inline]
pub(super) fn resume(coro: Coro<'_>) -> PyResult<()> {
    if coro.status.get() != Status::Ready {
        return Ok(());
    }
    with_runtime(|runtime| {
        if !runtime.current.get().is_null() || coro.thread.get() != runtime.thread || !pystate::may_run() {
            return refuse(runtime, coro);
        }
        if let Some(reactor) = reactor_of(coro) {
            prefetch_fiber(reactor, 0);
        }
        match runtime.install(coro, run_on_stack) {
            Ok(fiber) => {
                if runtime.options.late_ns.get() != 0 {
                    latency::begin(runtime, coro);
                }
                run(runtime, coro, fiber);
                let late_ns = runtime.options.late_ns.get();
                if late_ns != 0
                    && let Some(took_ns) = runtime.pulse.end(late_ns)
                {
                    return finish_late(runtime, coro, took_ns);
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

/// Reports that a coro cannot run here: it was resumed by a loop that runs inside another coro, in a thread that is not
/// its own, or while the interpreter exits. The coro's stack cannot be used in any of these cases.
#[cold]
fn refuse(runtime: &Runtime, coro: Coro<'_>) -> PyResult<()> {
    // The coro stays suspended until its own loop is closed or its own thread ends.
    coro.status.set(Status::Waiting);
    let why = if !pystate::may_run() {
        "no coro can run while the interpreter exits"
    } else if runtime.current.get().is_null() {
        "a coro can run only in the thread that created it"
    } else {
        "a coro cannot run another loop's coros"
    };
    report(coro, PyRuntimeError::new_err(why))
}

/// Logs a warning if this run, which took too long, held up other work. Then calls `finish` if the coro has ended.
#[cold]
fn finish_late(runtime: &Runtime, coro: Coro<'_>, took_ns: u64) -> PyResult<()> {
    // `finish` drops the runtime's reference to a coro that has ended.
    let kept = coro.to_bound();
    let warned = latency::warn(runtime, &kept, Subject::Coro, took_ns);
    let finished = if coro.is_done() {
        finish(runtime, coro)
    } else {
        Ok(())
    };
    drop(kept);
    finished.and(warned)
}

/// Called if the coro could not be resumed because there was no memory to bring its stack into place. A coro that has
/// never run ends with the error. Any other coro stays ready and is tried again in the next iteration, so that its
/// function does not see the error.
#[cold]
fn not_installed(runtime: &Runtime, coro: Coro<'_>, error: PyErr) -> PyResult<()> {
    if !coro.fiber.get().is_null() {
        queue(coro);
        return report(coro, error);
    }
    let py = coro.py();
    drop((coro.function.take(py), coro.args.take(py), coro.kwargs.take(py)));
    store(coro, Err(error));
    coro.status.set(Status::Done);
    finish(runtime, coro)
}

/// Switches to the coro, and returns when the coro has switched back.
#[inline(always)]
fn run(runtime: &Runtime, coro: Coro<'_>, fiber: *mut Fiber) {
    stamps::note(&runtime.stamps.entered);
    // SAFETY: attached; the fiber is the coro's and stays until `finish` dismantles it, after this call; its stack is
    // in place. Only raw pointers are used across the switch.
    unsafe {
        let thread = ffi::PyThreadState_Get();
        let profiled = pystate::has_native_profile(thread).then(|| profiling::prepare(runtime, coro));
        if profiled.is_some() {
            // `prepare` may have let another thread run, and that thread may have switched a monitoring tool on.
            if let Err(error) = (*fiber).state.instrument(coro.py()) {
                error.write_unraisable(coro.py(), None);
            }
        }
        coro.status.set(Status::Running);
        runtime.current.set(coro.as_ptr());
        let stats = &runtime.stats;
        stats.switches.set(stats.switches.get() + 1);
        if let Some(counters) = counters_of(&coro) {
            counters.coro_switches.add(1);
        }
        let (base, len_bytes) = ((*fiber).base, (*fiber).top - (*fiber).base);
        // `tasks::enter` allocates and calls Python, so it comes before the thread state becomes the coro's, and
        // `tasks::leave` comes after the thread state is the thread's own again.
        tasks::enter(fiber, coro);
        let version = pystate::version(thread);
        runtime.reprs.exchange(&mut (*fiber).reprs);
        let executor_of_coro = (*fiber).state.swap(thread);
        if let Some(version) = profiled {
            profiling::report_calls(runtime, coro, thread, version);
        }
        let is_protected = pystate::protect(thread, base, len_bytes);
        debug_assert!(is_protected, "accepted when the slot was made");
        if let Some(taken) = &mut (*fiber).taken {
            thread_locals::put_back(taken);
        }
        let to = (*fiber).sp;
        arch::switch(runtime.main_sp.as_ptr(), to);
        let is_deep = (*fiber).used_len() > thread_locals::MIN_DEPTH;
        if (*fiber).taken.is_some() || (is_deep && runtime.thread_locals.is_needed(coro.py())) {
            take_thread_locals(runtime, coro, fiber);
        }
        pystate::unprotect(thread);
        if pystate::has_native_profile(thread) {
            profiling::report_returns(runtime, coro, thread);
        }
        let own_executor = (*fiber).state.swap(thread);
        runtime.reprs.exchange(&mut (*fiber).reprs);
        (*fiber).state.note_version(thread);
        runtime.current.set(ptr::null_mut());
        pystate::resume_critical_sections();
        drop((executor_of_coro, own_executor));
        if pystate::version(thread) != version {
            // A monitoring tool was switched on or off while the coro ran. The interpreter could not see the frames of
            // the thread's own stack then, so their code is instrumented now.
            pystate::update_shown(coro.py(), thread);
        }
        tasks::leave(fiber, coro);
        if runtime.options.evicts_always.get() && !coro.is_done() && !coro.has_own_stack.get() {
            let shared = Rc::clone(&(*fiber).slot);
            // Without memory for the copy the stack stays in its slot, as it would without this option.
            let _ = runtime.evict(&shared);
        }
    }
    stamps::note(&runtime.stamps.left);
}

/// Removes the pointers into the coro's stack from the thread's variables, after the coro has left the stack.
///
/// # Safety
/// The fiber belongs to the coro. The thread has just switched away from the coro's stack, which is still in place.
#[cold]
#[inline(never)]
unsafe fn take_thread_locals(runtime: &Runtime, coro: Coro<'_>, fiber: *mut Fiber) {
    // SAFETY: by the contract.
    let fiber = unsafe { &mut *fiber };
    // The stack of a coro that has ended holds nothing.
    let stack = if coro.is_done() { 0..0 } else { fiber.sp..fiber.top };
    let (search, main_sp) = (&runtime.thread_locals, runtime.main_sp.get());
    // SAFETY: the stack is suspended in place (contract).
    unsafe { thread_locals::take(coro.py(), search, &mut fiber.taken, &stack, main_sp) };
}

/// Puts a coro into its loop's ready queue, after `claim`.
#[inline]
pub(super) fn queue(coro: Coro<'_>) {
    if let Some(event_loop) = coro.event_loop.get(coro.py()) {
        LoopObject::of(&event_loop).defer(coro.to_bound(), resume_entry);
    }
}

/// If the ready queue has this many entries, the data of a queued coro does not stay in the near caches until its turn
/// comes.
const MIN_PREFETCHED: usize = 32;

/// Prefetches data that the next coros in the ready queue will use. Called when the running coro is about to make a
/// system call. Prefetching the data of one coro takes two calls of this function: the first call prefetches the coro's
/// fiber, so that the second call can follow the fiber's pointers without waiting for memory.
#[inline]
pub(super) fn prefetch_next(reactor: &Reactor) {
    prefetch_fiber(reactor, 1);
    if reactor.ready.len() >= MIN_PREFETCHED
        && let Some(fiber) = ready_fiber(reactor, 0)
    {
        // SAFETY: the fiber of a coro that is ready, so no other code uses it.
        unsafe { (*fiber).prefetch_stack() };
    }
}

/// The reactor of the coro's loop.
#[inline]
pub(super) fn reactor_of(coro: Coro<'_>) -> Option<&Reactor> {
    // SAFETY: null, or the loop, which a coro keeps alive from its start to its end.
    let event_loop = unsafe { coro.event_loop.as_ptr().cast::<LoopObject>().as_ref() };
    event_loop.map(LoopObject::reactor)
}

/// Prefetches the fiber of a queued coro, if many coros are queued.
#[inline]
fn prefetch_fiber(reactor: &Reactor, offset: usize) {
    if reactor.ready.len() >= MIN_PREFETCHED
        && let Some(fiber) = ready_fiber(reactor, offset)
    {
        Fiber::prefetch(fiber);
    }
}

/// The fiber of the coro at position `offset` in the ready queue, if that entry is a coro with a fiber.
#[inline]
fn ready_fiber(reactor: &Reactor, offset: usize) -> Option<*mut Fiber> {
    let object = reactor.ready.deferred_at(offset, resume_entry)?;
    // SAFETY: a coro, which the queue keeps alive; nothing else runs here.
    let fiber = unsafe { (*object.cast::<CoroObject>()).fiber.get() };
    (!fiber.is_null()).then_some(fiber)
}

/// Makes a new, waiting or yielding coro ready. A waiting one is removed from the queue in which it waits. Does nothing
/// if another thread has just made the coro ready.
#[inline]
pub(super) fn make_ready(coro: Coro<'_>) {
    if coro.wait_node.exclusive(|| claim(coro)) {
        queue(coro);
    }
}

/// Marks the coro as ready and removes it from the queue in which it waits. The caller, and nobody else, then resumes
/// it or puts it into its loop's ready queue. Returns false if the coro was ready already. If the coro waits in a queue
/// that threads share, the caller must make this call inside the `exclusive` of that queue.
#[inline]
pub(super) fn claim(coro: Coro<'_>) -> bool {
    if coro.status.get() == Status::Ready {
        return false;
    }
    // The status is set before the coro leaves the queue, so that a thread that finds the coro in no queue also sees
    // the new status.
    coro.status.set(Status::Ready);
    coro.wait_node.unlink_now();
    true
}

/// Like `queue`, but may be called in any thread, even in one that has no loop. Wakes the coro's loop if the loop
/// sleeps.
pub(super) fn queue_from_anywhere(coro: Coro<'_>) {
    if coro.thread.get() == current_thread() {
        queue(coro);
    } else if let Some(event_loop) = coro.event_loop.get(coro.py()) {
        LoopObject::of(&event_loop)
            .reactor()
            .defer_from_anywhere(coro.to_bound(), resume_entry);
    }
}

/// Starts a new coro: the runtime keeps it alive from now on, and it runs in the next iteration.
pub(super) fn start(coro: Coro<'_>) -> PyResult<()> {
    let Some(event_loop) = coro.event_loop.get(coro.py()) else {
        return Err(PyRuntimeError::new_err("the coro has lost its loop"));
    };
    let limits = &LoopObject::of(&event_loop).reactor().limits;
    let count = || with_runtime(|runtime| runtime.live.count());
    let count_of_loop = || with_runtime(|runtime| runtime.live.count_of(event_loop.as_ptr()));
    if let Some(reached) = limits.coros_reached(count, count_of_loop) {
        return Err(reached.error(coro.py()));
    }
    let probe = &LoopObject::of(&event_loop).reactor().probe;
    if probe.note_task(&coro.to_bound())? && coro.status.get() != Status::New {
        return Ok(()); // the observer that was called by `note_task` has started it
    }
    if probe.is_debug() {
        coro.to_bound().call_method0("_note_origin")?;
    }
    with_runtime(|runtime| runtime.promise_stack(coro))?;
    with_runtime(|runtime| {
        if !runtime.is_watched.replace(true) {
            hooks::watch_thread(coro.py());
            latency::observe_running_loop(coro.py(), runtime);
        }
        runtime.reprs.set_up(coro.py());
        runtime.enter(coro);
    });
    make_ready(coro);
    Ok(())
}

/// The native type of coros.
static CORO_TYPE: AtomicPtr<ffi::PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// Stores the native type, which is never freed.
pub(super) fn set_type(kind: Bound<'_, PyType>) {
    CORO_TYPE.store(kind.into_ptr().cast(), Ordering::Release);
}

/// Whether `kind` is the native type or a subclass of it.
pub(super) fn is_coro_type(kind: &Bound<'_, PyType>) -> bool {
    // SAFETY: attached; two live types: CORO_TYPE is set when the module is made.
    unsafe { ffi::PyType_IsSubtype(kind.as_type_ptr(), CORO_TYPE.load(Ordering::Relaxed)) != 0 }
}

/// Whether `object` is an instance of the native type or of a subclass.
#[inline]
pub(super) fn is_coro(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: as above, with a live object.
    unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), CORO_TYPE.load(Ordering::Relaxed)) != 0 }
}

/// `object` as a coro. TypeError if it is not one.
#[inline]
pub(super) fn coro_from<'py>(object: &Bound<'py, PyAny>) -> PyResult<Coro<'py>> {
    if is_coro(object) {
        return Ok(coro_of(object));
    }
    Err(PyTypeError::new_err("a coro is required"))
}

/// `object` as a coro. The caller must know that it is one.
pub(super) fn coro_of<'py>(object: &Bound<'py, PyAny>) -> Coro<'py> {
    debug_assert!(is_coro(object));
    // SAFETY: called only with instances of the native type; the caller's reference keeps it.
    unsafe { This::new(object.py(), object.as_ptr()) }
}

const _: () = assert!(size_of::<CoroObject>() < 512);
