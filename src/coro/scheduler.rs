//! Who runs: the runtime of a thread brings a coro's stack into place, switches to it, and gets the thread back when
//! the coro waits or ends.
//!
//! ```text
//!   ready queue entry of a coro --> resume: stack into place, interpreter state, switch -----.
//!                                                                                            v
//!   next entry <-- interpreter state, bookkeeping <---------- switch back <--- suspend() on the coro's stack
//! ```
//!
//! Everything but `suspend` and the function of a coro runs on the thread's own stack. Belongs to its thread; nothing
//! here stays borrowed across a call into Python or a switch.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};

use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::arch;
use super::coroutine::{Coro, CoroObject, Status};
use super::errors::{self as coro_errors, Kind};
use super::machine::{Machine, SharedSlot};
use super::pystate::{self, Base, Chunks, PyState, Relinked};
use super::stack::{Pool, Slot};
use super::tasks;
use crate::event_loop::errors;
use crate::event_loop::handle::HandleRef;
use crate::event_loop::native_type::{This, none};
use crate::event_loop::pyloop::LoopObject;
use crate::event_loop::reactor::current_thread;

/// Address space of one stack.
pub(super) const STACK_LEN: usize = 8 * 1024 * 1024;
/// What a thread has for its coros.
pub(super) struct Runtime {
    /// The coro whose stack runs now, null on the thread's own stack.
    current: Cell<*mut ffi::PyObject>,
    /// Where the thread's own stack was left.
    main_sp: Cell<usize>,
    shared: RefCell<Vec<Rc<SharedSlot>>>,
    /// Which of them the next coro gets.
    next_slot: Cell<usize>,
    pool: RefCell<Pool>,
    chunks: RefCell<Chunks>,
    /// References to the coros between their start and their end; null where a place is free.
    live: RefCell<Vec<*mut ffi::PyObject>>,
    free_places: RefCell<Vec<usize>>,
    pub(super) stats: Stats,
    pub(super) options: Options,
}

/// Counted since the thread's first coro.
#[derive(Default)]
pub(super) struct Stats {
    pub(super) switches: Cell<u64>,
    pub(super) evacuations: Cell<u64>,
    pub(super) copied_len: Cell<u64>,
    pub(super) saved_len: Cell<usize>,
    pub(super) started: Cell<u64>,
}

pub(super) struct Options {
    /// Stacks that coros share.
    pub(super) slots: Cell<usize>,
    /// Evacuate after each switch and poison what is left (`GRAPESHOT_CORO_EVICT=always`).
    pub(super) evicts_always: Cell<bool>,
    /// Fail so many evacuations from now on, as if there were no memory (for tests).
    pub(super) failing_evacuations: Cell<u32>,
}

thread_local! {
    static RUNTIME: Runtime = Runtime::new();
}

/// The thread's runtime.
#[inline]
pub(super) fn with_runtime<R>(body: impl FnOnce(&Runtime) -> R) -> R {
    RUNTIME.with(body)
}

/// The coro that runs here, or None on the thread's own stack.
#[inline]
pub(super) fn current(py: Python<'_>) -> Option<Coro<'_>> {
    let object = with_runtime(|runtime| runtime.current.get());
    if object.is_null() {
        None
    } else {
        // SAFETY: the running coro is kept by the runtime's table.
        Some(unsafe { This::new(py, object) })
    }
}

impl Runtime {
    fn new() -> Self {
        Self {
            current: Cell::new(ptr::null_mut()),
            main_sp: Cell::new(0),
            shared: RefCell::new(Vec::new()),
            next_slot: Cell::new(0),
            pool: RefCell::new(Pool::new()),
            chunks: RefCell::new(Chunks::new()),
            live: RefCell::new(Vec::new()),
            free_places: RefCell::new(Vec::new()),
            stats: Stats::default(),
            options: Options {
                slots: Cell::new(1),
                evicts_always: Cell::new(
                    std::env::var("GRAPESHOT_CORO_EVICT").is_ok_and(|text| text == "always"),
                ),
                failing_evacuations: Cell::new(0),
            },
        }
    }

    /// New references to the coros between their start and their end.
    pub(super) fn live<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let live = self.live.borrow();
        live.iter()
            .filter(|object| !object.is_null())
            // SAFETY: the table holds a reference to each.
            .map(|object| unsafe { Bound::from_borrowed_ptr(py, *object) })
            .collect()
    }

    /// Keeps a coro that has been started.
    pub(super) fn enter(&self, coro: Coro<'_>) {
        let object = coro.to_bound().into_ptr();
        let place = self.free_places.borrow_mut().pop();
        let mut live = self.live.borrow_mut();
        let place = if let Some(place) = place {
            live[place] = object;
            place
        } else {
            live.push(object);
            live.len() - 1
        };
        coro.place.set(place);
        self.stats.started.set(self.stats.started.get() + 1);
    }

    /// Gives up a coro that has ended; the reference goes to the caller.
    fn leave<'py>(&self, coro: Coro<'py>) -> Bound<'py, PyAny> {
        let place = coro.place.get();
        let object = std::mem::replace(&mut self.live.borrow_mut()[place], ptr::null_mut());
        self.free_places.borrow_mut().push(place);
        // SAFETY: the table held a reference since `enter`.
        unsafe { Bound::from_owned_ptr(coro.py(), object) }
    }

    /// A stack for a new coro: one of its own, or one of the shared ones in turn.
    fn assign_slot(&self, has_own_stack: bool) -> std::io::Result<Rc<SharedSlot>> {
        let make = || -> std::io::Result<Rc<SharedSlot>> {
            Ok(Rc::new(SharedSlot {
                slot: Slot::new(STACK_LEN)?,
                occupant: Cell::new(ptr::null_mut()),
            }))
        };
        if has_own_stack {
            return make();
        }
        let mut shared = self.shared.borrow_mut();
        let count = self.options.slots.get().max(1);
        let index = self.next_slot.get() % count;
        self.next_slot.set(index + 1);
        while shared.len() <= index {
            shared.push(make()?);
        }
        Ok(Rc::clone(&shared[index]))
    }

    /// Moves the suspended stack that lies in `shared` out of it. None if there is no memory for it; then nothing
    /// was changed.
    #[inline]
    fn evacuate(&self, shared: &SharedSlot) -> Option<()> {
        let occupant = shared.occupant.get();
        if occupant.is_null() {
            return Some(());
        }
        let failing = self.options.failing_evacuations.get();
        if failing > 0 {
            self.options.failing_evacuations.set(failing - 1);
            return None;
        }
        // SAFETY: the occupant is the machine of a live coro of this thread, which is suspended: nobody else looks at
        // it.
        let machine = unsafe { &mut *occupant };
        let len_bytes = machine.used_len();
        let saved = self.pool.borrow_mut().take(len_bytes)?;
        // SAFETY: the stack is suspended in place; its frames are relinked while it still is.
        unsafe {
            machine.innermost = machine.state.innermost();
            machine.relinked.skip(machine.innermost, &shared.slot);
            shared.slot.evacuate(machine.sp, &saved);
        }
        machine.saved = Some(saved);
        shared.occupant.set(ptr::null_mut());
        let stats = &self.stats;
        stats.evacuations.set(stats.evacuations.get() + 1);
        stats.copied_len.set(stats.copied_len.get() + len_bytes as u64);
        stats.saved_len.set(stats.saved_len.get() + len_bytes);
        if self.options.evicts_always.get() {
            // SAFETY: the slot is free now.
            unsafe { shared.slot.poison(machine.sp) };
        }
        Some(())
    }

    /// Brings the coro's stack into its slot. MemoryError if the one that lies there cannot be moved away.
    #[inline]
    fn install(&self, coro: Coro<'_>) -> PyResult<*mut Machine> {
        // SAFETY: only the scheduler touches machines, on the thread's own stack, and no other reference is held.
        let place = unsafe { &mut *coro.machine.get() };
        let Some(machine) = place else {
            return self.build(coro);
        };
        let pointer: *mut Machine = &raw mut **machine;
        let shared = Rc::as_ptr(&machine.slot);
        // SAFETY: the machine keeps its slot.
        let shared = unsafe { &*shared };
        if shared.occupant.get() == pointer {
            return Ok(pointer);
        }
        self.evacuate(shared).ok_or_else(no_memory)?;
        if let Some(saved) = machine.saved.take() {
            // SAFETY: the slot is free, and the bytes were taken out of it.
            unsafe {
                shared.slot.restore(&saved);
                machine.relinked.restore();
            }
            let len_bytes = saved.len_bytes();
            let stats = &self.stats;
            stats.copied_len.set(stats.copied_len.get() + len_bytes as u64);
            stats.saved_len.set(stats.saved_len.get() - len_bytes);
            self.pool.borrow_mut().give(saved);
        }
        shared.occupant.set(pointer);
        Ok(pointer)
    }

    /// Makes the machine of a coro that has not run yet, with its stack laid out in the slot.
    #[cold]
    fn build(&self, coro: Coro<'_>) -> PyResult<*mut Machine> {
        let shared = self
            .assign_slot(coro.has_own_stack.get())
            .map_err(|error| errors::os_error(&error))?;
        self.evacuate(&shared).ok_or_else(no_memory)?;
        let chunk = self.chunks.borrow_mut().take().ok_or_else(no_memory)?;
        let mut machine = Box::new(Machine {
            slot: Rc::clone(&shared),
            sp: 0,
            saved: None,
            relinked: Relinked::new(),
            innermost: ptr::null_mut(),
            state: PyState::empty(),
            base: Base::new(),
        });
        // SAFETY: the base lies in the box, which does not move; the slot is free, so its top can be written to.
        unsafe {
            machine.state = PyState::fresh(&raw mut machine.base, chunk, shared.slot.len_bytes());
            machine.sp = arch::prepare(shared.slot.top(), run_on_stack, coro.as_ptr().cast());
        }
        tasks::begin(&mut machine, coro);
        let pointer: *mut Machine = &raw mut *machine;
        shared.occupant.set(pointer);
        // SAFETY: as in `install`.
        unsafe { *coro.machine.get() = Some(machine) };
        Ok(pointer)
    }

    /// Takes the machine of a coro that has ended apart.
    fn dismantle(&self, coro: Coro<'_>) {
        // SAFETY: as in `install`; the coro does not run any more.
        let Some(mut machine) = (unsafe { (*coro.machine.get()).take() }) else {
            return;
        };
        machine.slot.occupant.set(ptr::null_mut());
        tasks::end(&mut machine, coro.py());
        // SAFETY: its function has returned, so none of its frames is alive.
        unsafe { self.chunks.borrow_mut().give(machine.state.chunk()) };
    }
}

#[cold]
fn no_memory() -> PyErr {
    PyMemoryError::new_err("no memory to move a coro's stack to")
}

/// The entry of a coro in the loop's ready queue.
pub(super) unsafe fn resume_entry(py: Python<'_>, object: *mut ffi::PyObject) -> PyResult<()> {
    // SAFETY: queued by `make_ready` with a coro, whose reference the queue holds.
    resume(unsafe { This::new(py, object) })
}

/// Runs the coro until it waits or ends. Err is only for what must leave the loop.
#[inline]
fn resume(coro: Coro<'_>) -> PyResult<()> {
    if coro.status.get() != Status::Ready {
        return Ok(());
    }
    RUNTIME.with(|runtime| {
        if !runtime.current.get().is_null() {
            return report(
                coro,
                PyRuntimeError::new_err("a coro cannot run another loop's coros"),
            );
        }
        match runtime.install(coro) {
            Ok(machine) => {
                run(runtime, coro, machine);
                if coro.is_done() {
                    return finish(runtime, coro);
                }
                Ok(())
            }
            Err(error) => {
                // Nothing was changed: the coro stays ready, and tries again in the next turn.
                report(coro, error)?;
                queue(coro);
                Ok(())
            }
        }
    })
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
        pystate::protect(thread, base, len_bytes);
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

/// Gives the thread back to the scheduler until the coro is woken; returns or raises what it is woken with. The caller
/// has set the status (Ready and queued, or Waiting).
#[inline]
pub(super) fn suspend(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    let py = coro.py();
    if coro.wake_value.is_set() {
        drop(coro.wake_value.take(py));
    }
    let (main_sp, sp_place) = RUNTIME.with(|runtime| {
        // SAFETY: the running coro has a machine; only its address is taken.
        let sp_place = unsafe {
            (*coro.machine.get())
                .as_mut()
                .map_or(ptr::null_mut(), |machine| &raw mut machine.sp)
        };
        (runtime.main_sp.get(), sp_place)
    });
    // SAFETY: this is the coro's stack, and the thread's own was left at `main_sp` by `run`. Nothing is borrowed.
    unsafe { arch::switch(sp_place, main_sp) };
    match coro.wake_exception.take(py) {
        // What it was woken with before the interruption stays for `_undelivered`.
        Some(exception) => Err(PyErr::from_value(exception)),
        None => Ok(coro.wake_value.take(py).unwrap_or_else(|| none(py))),
    }
}

/// What a running coro must fulfil to be suspended here: it is the current one, and nothing unwinds.
#[inline]
pub(super) fn suspendable(py: Python<'_>) -> PyResult<Coro<'_>> {
    match current(py) {
        Some(coro) if !std::thread::panicking() => Ok(coro),
        Some(_) => Err(PyRuntimeError::new_err("a coro cannot yield while it panics")),
        None => Err(coro_errors::new(
            py,
            Kind::YieldFromMain,
            "only a coro can wait: this runs on the thread's own stack",
        )),
    }
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

/// New or waiting becomes ready.
#[inline]
pub(super) fn make_ready(coro: Coro<'_>) {
    coro.status.set(Status::Ready);
    queue(coro);
}

/// The exception that came while the coro ran, raised before it waits.
#[inline]
fn raise_pending(coro: Coro<'_>) -> PyResult<()> {
    if coro.wake_exception.is_set()
        && let Some(exception) = coro.wake_exception.take(coro.py())
    {
        return Err(PyErr::from_value(exception));
    }
    Ok(())
}

/// `yield_slice()`: behind everything that is ready now.
#[inline]
pub(super) fn yield_slice(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    raise_pending(coro)?;
    make_ready(coro);
    suspend(coro)
}

/// Waits until somebody wakes the coro.
#[inline]
pub(super) fn wait(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    raise_pending(coro)?;
    coro.status.set(Status::Waiting);
    suspend(coro)
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

/// Waits until the loop's clock shows `when_s`, by a timer in the loop's heap.
pub(super) fn sleep_until(coro: Coro<'_>, when_s: f64) -> PyResult<Bound<'_, PyAny>> {
    let py = coro.py();
    if when_s.is_nan() {
        return Err(PyValueError::new_err("a time cannot be NaN"));
    }
    raise_pending(coro)?;
    let Some(event_loop) = coro.event_loop.get(py) else {
        return Err(PyRuntimeError::new_err("the coro has lost its loop"));
    };
    let native = LoopObject::of(&event_loop);
    let handle = HandleRef::create(
        py,
        event_loop.as_ptr().cast(),
        END_SLEEP.load(Ordering::Relaxed),
        &[coro.as_ptr()],
        EMPTY_CONTEXT.load(Ordering::Relaxed),
        Some(when_s),
    )?;
    native.reactor().push_timer(py, handle.new_ref());
    let result = wait(coro);
    if result.is_err() && handle.is_scheduled(py) && handle.cancel(py) {
        native.reactor().timer_cancelled(py, handle);
    }
    handle.release(py);
    result
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
        let Some(machine) = (*coro.machine.get()).as_ref() else {
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
pub(super) fn start(coro: Coro<'_>) {
    coro.thread.set(current_thread());
    with_runtime(|runtime| runtime.enter(coro));
    make_ready(coro);
}

/// The first and only function on a coro's stack.
unsafe extern "C" fn run_on_stack(argument: *mut c_void) -> ! {
    // SAFETY: the scheduler switches here attached, with the coro that `build` has laid the stack out for.
    let coro: Coro<'static> = unsafe { This::new(Python::assume_attached(), argument.cast()) };
    let caught = catch_unwind(AssertUnwindSafe(|| run_function(coro)));
    let outcome = match caught {
        Ok(outcome) => outcome,
        Err(payload) => Err(errors::panic_error(&*payload)),
    };
    store(coro, outcome);
    coro.status.set(Status::Done);
    let main_sp = with_runtime(|runtime| runtime.main_sp.get());
    let unused = UnsafeCell::new(0);
    // SAFETY: the thread's own stack was left there; nobody comes back to this one.
    unsafe { arch::switch(unused.get(), main_sp) };
    std::process::abort()
}

/// The function in its context; an exception that came before the first run is raised instead.
fn run_function(coro: Coro<'_>) -> PyResult<Bound<'_, PyAny>> {
    let py = coro.py();
    drop(coro.wake_value.take(py));
    if let Some(exception) = coro.wake_exception.take(py) {
        return Err(PyErr::from_value(exception));
    }
    let (Some(function), Some(args), Some(context)) =
        (coro.function.take(py), coro.args.take(py), coro.context.get(py))
    else {
        return Err(PyRuntimeError::new_err("the coro has lost its function"));
    };
    let kwargs = coro.kwargs.take(py);
    // SAFETY: a live context, left below on the same stack. The stack's own context is null until then.
    if unsafe { ffi::PyContext_Enter(context.as_ptr()) } != 0 {
        return Err(errors::fetch(py));
    }
    // SAFETY: attached; the arguments are a tuple and a dict or null, kept by this function.
    let result = unsafe {
        errors::owned(
            py,
            ffi::PyObject_Call(
                function.as_ptr(),
                args.as_ptr(),
                kwargs.as_ref().map_or(ptr::null_mut(), Bound::as_ptr),
            ),
        )
    };
    // Dropped here: their finalizers may still use the coro's stack.
    drop((function, args, kwargs));
    // SAFETY: entered above on this stack; a failed result holds its exception itself.
    if unsafe { ffi::PyContext_Exit(context.as_ptr()) } != 0 {
        return Err(errors::fetch(py));
    }
    result
}

/// Notes the outcome. Nothing that has a destructor may be left on the stack after it.
fn store(coro: Coro<'_>, outcome: PyResult<Bound<'_, PyAny>>) {
    match outcome {
        Ok(value) => coro.result.set(value),
        Err(error) => {
            let py = coro.py();
            coro.is_unseen.set(true);
            coro.exception.set(error.into_value(py).into_bound(py).into_any());
        }
    }
}

/// Bookkeeping of a coro that has ended, on the thread's own stack: callbacks are scheduled as those of a Future.
fn finish(runtime: &Runtime, coro: Coro<'_>) -> PyResult<()> {
    let py = coro.py();
    runtime.dismantle(coro);
    let kept = runtime.leave(coro);
    drop(coro.context.take(py));
    let event_loop = coro.event_loop.get(py);
    if let Some(callbacks) = coro.callbacks.take(py)
        && let Some(event_loop) = &event_loop
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
    let py = coro.py();
    for entry in callbacks.cast::<PyList>()?.iter() {
        let entry = entry.cast_into::<PyTuple>()?;
        let (callback, context) = (entry.get_item(0)?, entry.get_item(1)?);
        let keywords = PyDict::new(py);
        keywords.set_item("context", context)?;
        event_loop.call_method("call_soon", (callback, coro.to_bound()), Some(&keywords))?;
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
