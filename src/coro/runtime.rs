//! The coro state of a thread: the stacks, which stack occupies which slot, and the live coros.
//!
//! A coro's stack must lie in the coro's slot while the coro runs. If another coro of the same slot is to run, the
//! stack that lies there is evicted: copied out of the slot until its coro runs again.
//!
//! Each thread has its own `Runtime`. Only code on the thread's own stack puts stacks into slots and evicts them. No
//! borrow is held across a call into Python or a stack switch.

use std::cell::{Cell, RefCell};
use std::ptr;
use std::rc::Rc;

use grapeshot_core::arch::{self, Entry};
use grapeshot_core::stack::{Arenas, Lease, Pool, StackError, StackSlot};
use grapeshot_core::sys::faults::AlternateStack;
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::coroutine::{Coro, CoroObject};
use super::fiber::{Fiber, SharedSlot, describe_overflow};
use super::live::LiveCoros;
use super::pulse::{OwnPulse, default_limit_ns, late_after};
use super::pystate::{Chunks, PyState, Relinked, Suspended, ThreadStateRoot};
use super::reprs::ReprList;
use super::slots::Slots;
use super::stamps::Stamps;
use super::thread_locals::Search;
use super::{pystate, tasks};
use crate::binding::current_thread;
use crate::binding::deallocation;
use crate::binding::native_type::This;
use crate::binding::object_cell::ObjectCell;
use crate::event_loop::probe::Counters;
use crate::event_loop::pyloop::LoopObject;

/// The default of `Options::max_acts`.
const DEFAULT_MAX_ACTS: u16 = 4;
/// The length of one stack, in address space.
pub(super) const STACK_LEN: usize = 8 * 1024 * 1024;

/// The coro state of one thread.
pub(super) struct Runtime {
    /// `threading.get_ident()` of the thread.
    pub(super) thread: u64,
    /// The thread has started a coro, or has set a limit for the watchdog. From then on the Python package is notified
    /// when the thread ends, and the thread's loops are observed (`latency`).
    pub(super) is_watched: Cell<bool>,
    /// The id of the thread state that is being deleted, because the thread ends; 0 before that. While this is set, no
    /// more coros may start.
    ending: Cell<i64>,
    /// The running coro has forked, and this process is the child. The coro's loop runs in the parent.
    pub(super) is_forked: Cell<bool>,
    /// The coro that is running, null on the thread's own stack.
    pub(super) current: Cell<*mut ffi::PyObject>,
    /// The coro that must not wait now; null if there is none. Either a garbage collection is running on the coro's
    /// stack, so the stack must not be evicted (`collector`), or the coro's frames are being reported to a native
    /// profile function (`profiling`).
    pub(super) collecting: Cell<*mut ffi::PyObject>,
    /// Whether a collection runs on the stack of `collecting`.
    pub(super) is_collecting: Cell<bool>,
    /// The value of `collecting` before that collection began: null, unless the collection began while the coro's
    /// frames were being reported to a native profile function.
    pub(super) collecting_before: Cell<*mut ffi::PyObject>,
    /// The stack pointer of the thread's own stack while a coro runs.
    pub(super) main_sp: Cell<usize>,
    /// An empty context that the timers of this thread's coros share, so that no context is copied for each sleep.
    timer_context: ObjectCell,
    pub(super) thread_locals: Search,
    pub(super) reprs: ReprList,
    pub(super) slots: Slots,
    /// The address space that stacks are taken from.
    stacks: Arenas,
    /// The signal stack that the fault handler runs on, unless the thread already had an alternate stack.
    alternate: RefCell<Option<AlternateStack>>,
    has_alternate: Cell<bool>,
    pool: RefCell<Pool>,
    chunks: RefCell<Chunks>,
    /// The coros that have started and not ended.
    pub(super) live: LiveCoros,
    pub(super) stats: Stats,
    pub(super) stamps: Stamps,
    pub(super) options: Options,
    /// The current run of this thread, which the watchdog reads.
    pub(super) pulse: OwnPulse,
}

/// Totals since the thread's first coro. Only `saved_len` is a current amount: the bytes of all evicted stacks.
#[derive(Default)]
pub(super) struct Stats {
    pub(super) switches: Cell<u64>,
    pub(super) evictions: Cell<u64>,
    pub(super) copied_len: Cell<u64>,
    pub(super) saved_len: Cell<usize>,
    pub(super) started: Cell<u64>,
}

/// Where a coro's stack is, for `Coro.stack_info()`.
pub(super) struct StackReport {
    pub(super) place: &'static str,
    /// The index of its shared slot, None if the coro has its slot to itself.
    pub(super) slot: Option<usize>,
    pub(super) used_len: usize,
    /// The memory of its Python frames.
    pub(super) frames_len: usize,
}

pub(super) struct Options {
    /// A warning is logged if one run (of a coro, task, callback or protocol method) holds up other work for this long;
    /// 0 for never.
    pub(super) latency_ns: Cell<u64>,
    /// The same limit, adjusted for the resolution of the coarse clock (`pulse::late_after`).
    pub(super) late_ns: Cell<u64>,
    /// How many I/O operations a coro may complete without waiting before it must yield.
    pub(super) max_acts: Cell<u16>,
    /// Whether the stack is evicted after each switch and the slot is overwritten, so that a stale pointer into the
    /// stack fails early (`GRAPESHOT_CORO_EVICT=always`).
    pub(super) evicts_always: Cell<bool>,
    /// The number of evictions and new stacks that are still to fail as if memory were exhausted (for tests).
    pub(super) failing_evictions: Cell<u32>,
}

thread_local! {
    static RUNTIME: Runtime = Runtime::new();
}

/// The id of the current thread state. No other thread state of this interpreter has the same id.
fn thread_state_id(_: Python<'_>) -> i64 {
    // SAFETY: attached, so there is a current thread state.
    unsafe { ffi::PyThreadState_GetID(ffi::PyThreadState_Get()) }
}

/// The thread's runtime.
#[inline]
pub(super) fn with_runtime<R>(body: impl FnOnce(&Runtime) -> R) -> R {
    RUNTIME.with(body)
}

/// The coro that runs here, or None on the thread's own stack.
#[inline]
pub(super) fn current(py: Python<'_>) -> Option<Coro<'_>> {
    with_runtime(|runtime| runtime.running(py))
}

/// Like `current`, but also works in a thread whose thread-local variables are already being destroyed.
#[inline]
pub(super) fn current_anywhere(py: Python<'_>) -> Option<Coro<'_>> {
    match RUNTIME.try_with(|runtime| runtime.current.get()) {
        // SAFETY: the running coro is kept by the table of live coros.
        Ok(object) if !object.is_null() => Some(unsafe { This::new(py, object) }),
        Ok(_) | Err(_) => None,
    }
}

/// Like `current`, as a borrowed pointer: null on the thread's own stack.
#[inline]
pub(super) fn current_ptr() -> *mut ffi::PyObject {
    with_runtime(|runtime| runtime.current.get())
}

/// The counters of the coro's loop. None once the coro has lost its loop.
#[inline]
pub(super) fn counters_of(coro: &CoroObject) -> Option<&Counters> {
    let event_loop = coro.event_loop.as_ptr().cast::<LoopObject>();
    // SAFETY: null, or the coro's loop, to which it holds a reference.
    unsafe { event_loop.as_ref() }.map(|event_loop| &event_loop.reactor().probe.counters)
}

/// Counts the end of a coro in its loop's counters.
fn note_end(coro: &CoroObject) {
    if let Some(counters) = counters_of(coro) {
        counters.coros_ended.add(1);
        counters
            .pinned_coros_ended
            .add(u64::from(coro.has_own_stack.get()));
    }
}

/// The depth counter of nested deallocations on the running coro's stack; null on the thread's own stack.
fn dealloc_depth() -> *const Cell<u32> {
    let current = RUNTIME.try_with(|runtime| runtime.current.get());
    match current {
        // SAFETY: the running coro is kept by the table of live coros.
        Ok(object) if !object.is_null() => unsafe { &raw const (*object.cast::<CoroObject>()).dealloc_depth },
        // Err: the thread is ending and has already destroyed its thread-local variables.
        Ok(_) | Err(_) => ptr::null(),
    }
}

impl Runtime {
    fn new() -> Self {
        deallocation::set_depth_of_stack(dealloc_depth);
        Self {
            thread: current_thread(),
            is_watched: Cell::new(false),
            ending: Cell::new(0),
            is_forked: Cell::new(false),
            current: Cell::new(ptr::null_mut()),
            collecting: Cell::new(ptr::null_mut()),
            is_collecting: Cell::new(false),
            collecting_before: Cell::new(ptr::null_mut()),
            main_sp: Cell::new(0),
            timer_context: ObjectCell::empty(),
            thread_locals: Search::new(),
            reprs: ReprList::new(),
            slots: Slots::new(),
            stacks: Arenas::new(STACK_LEN, describe_overflow),
            alternate: RefCell::new(None),
            has_alternate: Cell::new(false),
            pool: RefCell::new(Pool::new()),
            chunks: RefCell::new(Chunks::new(size_of::<Fiber>())),
            live: LiveCoros::default(),
            stats: Stats::default(),
            stamps: Stamps::default(),
            options: Options {
                latency_ns: Cell::new(default_limit_ns()),
                late_ns: Cell::new(late_after(default_limit_ns())),
                max_acts: Cell::new(DEFAULT_MAX_ACTS),
                evicts_always: Cell::new(
                    std::env::var("GRAPESHOT_CORO_EVICT").is_ok_and(|text| text == "always"),
                ),
                failing_evictions: Cell::new(0),
            },
            pulse: OwnPulse::new(),
        }
    }

    /// The coro that runs, or None on the thread's own stack.
    #[inline]
    pub(super) fn running<'py>(&self, py: Python<'py>) -> Option<Coro<'py>> {
        let object = self.current.get();
        // SAFETY: the running coro is kept by the table of live coros.
        (!object.is_null()).then(|| unsafe { This::new(py, object) })
    }

    /// A borrowed context for a timer; null if there is no memory for it (the handle then copies the current one).
    #[inline]
    pub(super) fn timer_context(&self, py: Python<'_>) -> *mut ffi::PyObject {
        if !self.timer_context.is_set() {
            self.make_timer_context(py);
        }
        self.timer_context.as_ptr()
    }

    #[cold]
    fn make_timer_context(&self, py: Python<'_>) {
        // SAFETY: attached; a new reference, or null with an exception set.
        match unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyContext_New()) } {
            Ok(context) => self.timer_context.set(context),
            Err(_no_memory) => {}
        }
    }

    /// Marks the thread as ending, and drops what it keeps for its coros' timers and `repr` calls.
    pub(super) fn end_thread(&self, py: Python<'_>) {
        self.ending.set(thread_state_id(py));
        self.reprs.forget(py);
        drop(self.timer_context.take(py));
    }

    /// Whether the thread is ending. A thread that C code has created gets a new thread state for each of its calls
    /// into Python (`PyGILState_Ensure`), so it can have coros again after its old thread state was deleted.
    pub(super) fn is_ending(&self, py: Python<'_>) -> bool {
        let ending = self.ending.get();
        if ending != 0 && ending != thread_state_id(py) {
            self.ending.set(0);
            self.is_watched.set(false);
        }
        self.ending.get() != 0
    }

    /// Where the stack of a coro of this thread is; None before its first run and after its end. `is_running`: the coro
    /// is the caller, so its stack is the current one.
    pub(super) fn stack_report(&self, coro: Coro<'_>, is_running: bool) -> Option<StackReport> {
        // SAFETY: the coro belongs to this thread, so no other thread uses its fiber, and no other code of this thread
        // runs before this function returns.
        let fiber = unsafe { coro.fiber.get().as_ref() }?;
        let here = ptr::from_ref(&fiber).addr();
        let used_len = if is_running {
            fiber.top.saturating_sub(here)
        } else {
            fiber.used_len()
        };
        Some(StackReport {
            place: if fiber.saved.is_some() {
                "evicted"
            } else {
                "in place"
            },
            slot: self.slots.index_of(&fiber.slot),
            used_len,
            frames_len: fiber.state.frames_len(is_running),
        })
    }

    /// Reserves a stack for a coro that needs its own, before the coro starts.
    ///
    /// # Errors
    /// `MemoryError`: no stack can be reserved.
    #[inline]
    pub(super) fn promise_stack(&self, coro: Coro<'_>) -> PyResult<()> {
        if coro.has_own_stack.get() && !coro.is_promised.get() {
            self.stacks.promise().map_err(|error| no_stack(&error))?;
            coro.is_promised.set(true);
        }
        Ok(())
    }

    /// Releases the stack that was reserved for the coro, if there is one.
    #[inline]
    pub(super) fn forgo_stack(&self, coro: Coro<'_>) {
        if coro.is_promised.replace(false) {
            self.stacks.forgo();
        }
    }

    /// Adds a coro to the table of live coros, when it is started.
    pub(super) fn enter(&self, coro: Coro<'_>) {
        self.live.add(coro);
        self.stats.started.set(self.stats.started.get() + 1);
        if let Some(counters) = counters_of(&coro) {
            counters.coros_started.add(1);
            counters
                .pinned_coros_started
                .add(u64::from(coro.has_own_stack.get()));
        }
    }

    /// Removes a coro from the table, after its end. Returns the table's reference.
    pub(super) fn leave<'py>(&self, coro: Coro<'py>) -> Bound<'py, PyAny> {
        self.forgo_stack(coro);
        note_end(&coro);
        let (kept, is_last) = self.live.remove(coro);
        if is_last {
            self.pool.borrow_mut().clear();
        }
        kept
    }

    /// Removes all coros except the running one from the table and returns the table's references.
    pub(super) fn take_others<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let others = self.live.remove_others(py, self.current.get());
        for coro in &others {
            // SAFETY: the table contains only coros.
            note_end(unsafe { &*coro.as_ptr().cast() });
        }
        others
    }

    /// The slot for the stack of a new coro: one of its own, or one of the thread's slots.
    fn assign_slot(&self, coro: Coro<'_>) -> PyResult<Rc<SharedSlot>> {
        let py = coro.py();
        if coro.has_own_stack.get() {
            return self.make_slot(py, || {
                if coro.is_promised.replace(false) {
                    self.stacks.take_promised()
                } else {
                    self.stacks.take()
                }
            });
        }
        self.slots.take(|| self.make_slot(py, || self.stacks.take()))
    }

    fn make_slot<F>(&self, py: Python<'_>, take: F) -> PyResult<Rc<SharedSlot>>
    where
        F: FnOnce() -> Result<Lease, StackError>,
    {
        if !self.has_alternate.replace(true) {
            *self.alternate.borrow_mut() = AlternateStack::install().map_err(|error| {
                self.has_alternate.set(false);
                no_stack(&StackError::Memory(error))
            })?;
        }
        let shared = SharedSlot::new(StackSlot::new(take().map_err(|error| no_stack(&error))?));
        // Whether the interpreter accepts a stack depends only on that stack, so this is checked once per stack.
        // SAFETY: attached, on the thread's own stack; `unprotect` makes the interpreter use the bounds of the thread's
        // own stack again before anything else runs.
        unsafe {
            let thread = ffi::PyThreadState_Get();
            let is_accepted = pystate::protect(thread, shared.stack.base(), shared.stack.len_bytes());
            pystate::unprotect(thread);
            if !is_accepted {
                return Err(PyErr::fetch(py));
            }
        }
        Ok(shared)
    }

    /// Evicts the suspended stack that occupies `shared`. Returns None, with nothing changed, if there is no memory for
    /// the copy.
    #[inline]
    pub(super) fn evict(&self, shared: &SharedSlot) -> Option<()> {
        let occupant = shared.occupant.get();
        if occupant.is_null() {
            return Some(());
        }
        if self.fails_on_purpose() {
            return None;
        }
        // SAFETY: the occupant is the fiber of a live, suspended coro of this thread; no other code uses it.
        let fiber = unsafe { &mut *occupant };
        let len_bytes = fiber.used_len();
        let saved = self.pool.borrow_mut().take(len_bytes)?;
        // SAFETY: the stack is suspended in its slot, and its frames are relinked before it leaves the slot.
        unsafe {
            fiber.innermost = fiber.state.innermost();
            let start = pystate::first_frame(occupant.cast(), size_of::<Fiber>());
            fiber.relinked.skip(&Suspended {
                slot: &shared.stack,
                sp: fiber.sp,
                innermost: fiber.innermost,
                data: (start, fiber.state.data_top()),
            });
            fiber.state.leave_slot();
            shared.stack.evict(fiber.sp, &saved);
        }
        fiber.saved = Some(saved);
        shared.occupant.set(ptr::null_mut());
        let stats = &self.stats;
        stats.evictions.set(stats.evictions.get() + 1);
        stats.copied_len.set(stats.copied_len.get() + len_bytes as u64);
        stats.saved_len.set(stats.saved_len.get() + len_bytes);
        // SAFETY: the fiber's coro lives as long as the fiber.
        if let Some(counters) = counters_of(unsafe { &*fiber.coro.cast::<CoroObject>() }) {
            counters.coro_evictions.add(1);
            counters.coro_bytes_copied.add(len_bytes as u64);
        }
        if self.options.evicts_always.get() {
            // SAFETY: the slot is free now.
            unsafe { shared.stack.poison(fiber.sp) };
        }
        Some(())
    }

    /// Brings the coro's stack into its slot. `entry` is the function that a new stack starts with. Raises
    /// `MemoryError` if there is no memory for one of the steps, such as evicting the stack that occupies the slot.
    #[inline]
    pub(super) fn install(&self, coro: Coro<'_>, entry: Entry) -> PyResult<*mut Fiber> {
        let pointer = coro.fiber.get();
        // SAFETY: only the scheduler uses fibers, on the thread's own stack, and it holds no other reference.
        let Some(fiber) = (unsafe { pointer.as_mut() }) else {
            return self.build(coro, entry);
        };
        let shared = Rc::as_ptr(&fiber.slot);
        // SAFETY: the fiber keeps its slot.
        let shared = unsafe { &*shared };
        // A stack that was made for one coro (`stack="own"`) is never evicted.
        if coro.has_own_stack.get() || shared.occupant.get() == pointer {
            // SAFETY: the stack is suspended in its place.
            unsafe { fiber.state.instrument(coro.py())? };
            return Ok(pointer);
        }
        // The prefetched data arrives while the stack that occupies the slot is copied out.
        fiber.prefetch_stack();
        self.evict(shared).ok_or_else(no_memory)?;
        if let Some(saved) = fiber.saved.take() {
            // SAFETY: the slot is free, and `saved` was copied out of this slot.
            unsafe {
                shared.stack.restore(&saved);
                fiber.relinked.restore();
                fiber.state.return_to_slot();
            }
            let len_bytes = saved.len_bytes();
            let stats = &self.stats;
            stats.copied_len.set(stats.copied_len.get() + len_bytes as u64);
            stats.saved_len.set(stats.saved_len.get() - len_bytes);
            if let Some(counters) = counters_of(&coro) {
                counters.coro_bytes_copied.add(len_bytes as u64);
            }
            self.pool.borrow_mut().give(saved);
        }
        shared.occupant.set(pointer);
        // SAFETY: the stack is suspended, and is in its place now.
        unsafe { fiber.state.instrument(coro.py())? };
        Ok(pointer)
    }

    /// Makes the fiber of a coro that has not run yet and prepares its stack in the slot, so that the first switch to
    /// it calls `entry`.
    #[cold]
    fn build(&self, coro: Coro<'_>, entry: Entry) -> PyResult<*mut Fiber> {
        let shared = self.assign_slot(coro)?;
        let Some(chunk) = self.clear_for_new(&shared) else {
            self.slots.give(&shared);
            return Err(no_memory());
        };
        // SAFETY: the tail of the block has the length and the alignment of a fiber, and does not move; the slot is
        // free, so its top can be written to.
        let fiber = unsafe {
            let fiber = pystate::tail(chunk).cast::<Fiber>();
            fiber.write(Fiber {
                coro: coro.as_ptr(),
                sp: arch::prepare(shared.stack.top(), entry, coro.as_ptr().cast()),
                base: shared.stack.base(),
                top: shared.stack.top(),
                saved: None,
                relinked: Relinked::new(),
                innermost: ptr::null_mut(),
                taken: None,
                reprs: None,
                running_loop: ptr::null_mut(),
                state: PyState::fresh(&raw mut (*fiber).root, chunk, shared.stack.len_bytes()),
                root: ThreadStateRoot::new(),
                slot: shared,
            });
            let made = &mut *fiber;
            tasks::begin(made, coro);
            made.slot.occupant.set(fiber);
            fiber
        };
        coro.fiber.set(fiber);
        Ok(fiber)
    }

    /// Evicts the stack that occupies the slot, and takes a block of memory for a new fiber. None if there is not
    /// enough memory for the copy of that stack or for the block.
    fn clear_for_new(&self, shared: &SharedSlot) -> Option<*mut u8> {
        self.evict(shared)?;
        if self.fails_on_purpose() {
            return None;
        }
        self.chunks.borrow_mut().take()
    }

    /// Whether this allocation must fail because a test has asked for it.
    #[inline]
    fn fails_on_purpose(&self) -> bool {
        let failing = self.options.failing_evictions.get();
        if failing > 0 {
            self.options.failing_evictions.set(failing - 1);
        }
        failing > 0
    }

    /// Frees the fiber of a coro that has ended.
    pub(super) fn dismantle(&self, coro: Coro<'_>) {
        let fiber = coro.fiber.replace(ptr::null_mut());
        // SAFETY: as in `install`; the coro has ended, so its fiber has no other user. Its function has returned, so
        // none of its frames is alive, and the block with the fiber and the frames can be reused.
        unsafe {
            let Some(taken) = fiber.as_mut() else {
                return;
            };
            taken.slot.occupant.set(ptr::null_mut());
            self.slots.give(&taken.slot);
            tasks::end(taken, coro.py());
            let chunk = taken.state.chunk();
            fiber.drop_in_place();
            self.chunks.borrow_mut().give(chunk);
        }
    }
}

#[cold]
fn no_memory() -> PyErr {
    PyMemoryError::new_err("no memory for a coro's stack")
}

#[cold]
fn no_stack(error: &StackError) -> PyErr {
    PyMemoryError::new_err(format!("no memory for a coro's stack: {error}"))
}
