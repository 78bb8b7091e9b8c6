//! `Waiters`: coros of any thread, real threads and tasks of any loop that wait for the same thing, in their order of
//! arrival.
//!
//! ```text
//!   Waiters   coros: WaitQueue      [ A 1 ] <--> [ C 3 ] <--> [ D 4 ]      each with its ticket (WaitNode.request)
//!             threads: VecDeque     [ B 2 ] , [ E 5 ]
//!             tasks: TaskWaiters    [ F 6 ]                                only a shared queue has tasks
//!
//!   grant_first: the request of the waiter with the smallest ticket is granted
//!     a coro      its loop's ready queue gets the coro, and the loop is woken if it sleeps
//!     a thread    its semaphore is released; the thread blocks on that semaphore, and holds no GIL meanwhile
//!     a task      the future that it awaits is set in the task's loop
//! ```
//!
//! All of this is used with the GIL held or, in a free-threaded build, in a critical section of the object that
//! contains the `Waiters`. So no thread sees a half-finished step. There is one exception: a coro may leave its
//! `WaitQueue` in its own thread outside of that section. `WaitQueue::exclusive` orders these accesses.
//!
//! A waiter leaves the queue when it is granted its request, when its timeout expires, or when it is interrupted. A
//! waiter that is interrupted after a grant, before it runs, gives the grant back, so nothing is lost. Waiting involves
//! no polling.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{c_int, c_longlong, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::task_waiters::{TaskWaiter, TaskWaiters};
use crate::binding::current_thread;
use crate::binding::object_result::none;
use crate::coro::coroutine::Coro;
use crate::coro::sync::limit::{Deadline, Limit};
use crate::coro::sync::object::{EndedWait, wait_in_queue};
use crate::coro::wait_queue::WaitQueue;
use crate::coro::{interruption, runtime, scheduler, suspension};
use crate::event_loop::pyloop::LoopObject;

// From `pythread.h`, which pyo3 does not cover.
unsafe extern "C" {
    fn PyThread_allocate_lock() -> *mut c_void;
    fn PyThread_free_lock(lock: *mut c_void);
    fn PyThread_acquire_lock(lock: *mut c_void, waits: c_int) -> c_int;
    fn PyThread_acquire_lock_timed(
        lock: *mut c_void,
        microseconds: c_longlong,
        is_interrupted: c_int,
    ) -> c_int;
    fn PyThread_release_lock(lock: *mut c_void);
}

/// `PyLockStatus`.
const TIMED_OUT: c_int = 0;
const INTERRUPTED: c_int = 2;
/// The longest single wait of a thread, in microseconds. A longer wait consists of several.
const LONGEST_WAIT: u128 = 1 << 50;

/// How many forks lead from the first process to this one. The waiters of the parent do not exist in the child.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts the forks from now on.
pub(super) fn watch_forks() {
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function only counts, which is safe in the child of any fork. If there is no memory for the
        // registration, forks are not noticed.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// The number of forks that lead to this process. A record that was made with another number concerns a parent process.
#[inline]
pub(in crate::coro) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// A coro, or a real thread while no coro runs in it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::coro) struct Party {
    /// The coro's `id`, or `get_ident()` of the thread; 0 for `NOBODY`. The ids of coros are counted up from 1 and the
    /// idents of threads are addresses, so the two never coincide.
    ident: u64,
    is_coro: bool,
}

impl Party {
    pub(super) const NOBODY: Self = Self {
        ident: 0,
        is_coro: false,
    };

    /// Stands for any task. A task waits only for sources that have no holder.
    const TASK: Self = Self {
        ident: u64::MAX,
        is_coro: false,
    };

    /// The running coro, or this thread if no coro is running.
    #[inline]
    pub(in crate::coro) fn running(py: Python<'_>) -> Self {
        match runtime::current_anywhere(py) {
            Some(coro) => Self::of_coro(coro),
            None => Self {
                ident: current_thread(),
                is_coro: false,
            },
        }
    }

    fn of_coro(coro: Coro<'_>) -> Self {
        Self {
            ident: coro.id.get(),
            is_coro: true,
        }
    }

    #[inline]
    pub(in crate::coro) fn ident(self) -> u64 {
        self.ident
    }

    #[inline]
    pub(super) fn is_nobody(self) -> bool {
        self.ident == 0
    }

    /// The coro with this id, if it is a live coro of the current thread. It cannot run while this thread blocks.
    fn coro_of_this_thread(self, py: Python<'_>) -> Option<Bound<'_, PyAny>> {
        let coros = if self.is_coro {
            runtime::with_runtime(|runtime| runtime.live.all(py))
        } else {
            Vec::new()
        };
        coros
            .into_iter()
            .find(|object| scheduler::coro_of(object).id.get() == self.ident)
    }

    /// Whether the party is a real thread other than the current one. That thread keeps running while this one blocks.
    fn is_other_thread(self) -> bool {
        !self.is_coro && !self.is_nobody() && self.ident != current_thread()
    }
}

/// A real thread that waits. Both the thread and the queue hold a reference to this value, so an interpreter that ends
/// a thread during its wait leaves no dangling pointer.
pub(super) struct ThreadWaiter {
    /// Locked until the thread is woken.
    semaphore: *mut c_void,
    is_granted: AtomicBool,
    party: Party,
    ticket: i64,
}

// SAFETY: any thread may release the semaphore, and the other fields are atomic or do not change.
unsafe impl Send for ThreadWaiter {}
// SAFETY: as above.
unsafe impl Sync for ThreadWaiter {}

impl ThreadWaiter {
    fn new(py: Python<'_>, ticket: i64) -> PyResult<Arc<Self>> {
        // SAFETY: makes a lock, or returns null; a new lock is taken at once.
        let semaphore = unsafe {
            let semaphore = PyThread_allocate_lock();
            if semaphore.is_null() {
                return Err(PyMemoryError::new_err("no memory for a lock"));
            }
            PyThread_acquire_lock(semaphore, 0);
            semaphore
        };
        Ok(Arc::new(Self {
            semaphore,
            is_granted: AtomicBool::new(false),
            // If a coro has to block its thread, the grant is the coro's, not the thread's.
            party: Party::running(py),
            ticket,
        }))
    }

    fn is_granted(&self) -> bool {
        self.is_granted.load(Ordering::Acquire)
    }

    /// Blocks without the GIL until the semaphore is released, a signal arrives, or the time is over.
    fn block(&self, until: Option<Instant>) -> c_int {
        let microseconds = until.map_or(-1, |until| {
            let left = until.saturating_duration_since(Instant::now());
            left.as_nanos().div_ceil(1000).min(LONGEST_WAIT) as c_longlong
        });
        // SAFETY: attached; the semaphore lives as long as `self`, and no Python object is used while the thread is
        // detached.
        unsafe {
            let state = ffi::PyEval_SaveThread();
            let status = PyThread_acquire_lock_timed(self.semaphore, microseconds, 1);
            ffi::PyEval_RestoreThread(state);
            status
        }
    }
}

impl Drop for ThreadWaiter {
    fn drop(&mut self) {
        // SAFETY: no thread waits on the semaphore, because a waiting thread holds a reference to this value.
        unsafe { PyThread_free_lock(self.semaphore) };
    }
}

/// A waiter that was granted its request and has to be woken.
pub(super) enum Claimed<'py> {
    Coro(Bound<'py, PyAny>),
    Thread(Arc<ThreadWaiter>),
    Task(TaskWaiter),
}

impl Claimed<'_> {
    /// Wakes the waiter and returns it. None if it is a task whose loop is closed; the grant then goes to the next
    /// waiter. This may call Python code, to wake a task of another package's loop.
    #[inline]
    pub(super) fn wake(&self, py: Python<'_>) -> Option<Party> {
        match self {
            Self::Coro(object) => {
                let coro = scheduler::coro_of(object);
                scheduler::queue_from_anywhere(coro);
                Some(Party::of_coro(coro))
            }
            Self::Thread(waiter) => {
                // SAFETY: the semaphore is locked from the start. Only this call releases it, and it does so only once,
                // because a waiter is claimed only once.
                unsafe { PyThread_release_lock(waiter.semaphore) };
                Some(waiter.party)
            }
            Self::Task(waiter) => waiter.wake(py).then_some(Party::TASK),
        }
    }
}

/// How many waiters were granted their request and have not run yet. In the child of a fork, the count starts again at
/// 0, because the parent's waiters do not exist there. A `Grants` whose bytes are all zero is valid, and has no grants.
pub(super) struct Grants {
    count: Cell<usize>,
    /// `forks()` when the count was last used.
    forks: Cell<u32>,
}

impl Grants {
    #[inline]
    pub(super) fn get(&self) -> usize {
        let forks = forks();
        if self.forks.replace(forks) != forks {
            self.count.set(0);
        }
        self.count.get()
    }

    #[inline]
    pub(super) fn add(&self) {
        self.count.set(self.get() + 1);
    }

    #[inline]
    pub(super) fn remove(&self) {
        self.count.set(self.get().saturating_sub(1));
    }
}

/// The queue of waiters. It must not move while it contains any. It is a field of a Python object, and a frame of each
/// waiter keeps that object alive.
pub(super) struct Waiters {
    coros: WaitQueue,
    threads: RefCell<VecDeque<Arc<ThreadWaiter>>>,
    pub(super) tasks: TaskWaiters,
    next_ticket: Cell<i64>,
    /// `FORKS` when the queue was last used.
    forks: Cell<u32>,
}

/// Something to wait for: a lock, an item or a place in a queue, or the end of the work on all items.
pub(super) trait Source {
    fn waiters(&self) -> &Waiters;
    /// Takes the source, if that is possible without waiting.
    fn take(&self, py: Python<'_>) -> bool;
    /// Takes back the grant of a waiter that was interrupted. A lock or a simple queue passes the grant to the next
    /// waiter here; a shared queue does so at the end of `in_section`.
    fn give_back(&self, py: Python<'_>);
    /// The current holder. The default is for a source that is never held.
    fn holder(&self) -> Party {
        Party::NOBODY
    }
    /// Why blocking the caller's thread might never end, for the message of `cannot_wait`.
    fn what(&self) -> &'static str;
}

/// How the caller of a method can wait.
enum Way<'py> {
    /// The coro leaves its stack.
    Coro(Coro<'py>, Deadline<'py>),
    /// The thread blocks.
    Thread(Option<Instant>),
}

/// Takes `source`, waiting for it if necessary. Returns false if the limit was reached first.
#[inline]
pub(super) fn take_or_wait(py: Python<'_>, source: &impl Source, limit: Limit) -> PyResult<bool> {
    if source.take(py) {
        return Ok(true);
    }
    if limit.is_at_once() {
        return poll(py, source);
    }
    wait_for(py, source, limit)
}

/// Handles a failed attempt that must not wait. Code written for threads may repeat such attempts in a loop and rely on
/// preemption. So a failed attempt counts like an I/O operation that did not wait: after too many in a row the coro
/// yields, and then tries once more.
#[cold]
fn poll(py: Python<'_>, source: &impl Source) -> PyResult<bool> {
    match runtime::current(py) {
        Some(coro) if suspension::can_suspend(coro) => {
            suspension::act(coro)?;
            Ok(source.take(py))
        }
        _ => Ok(false),
    }
}

fn wait_for(py: Python<'_>, source: &impl Source, limit: Limit) -> PyResult<bool> {
    let is_undisturbed = runtime::current_anywhere(py).is_some_and(|coro| coro.is_undisturbed.get());
    if is_undisturbed && matches!(limit, Limit::Endless) {
        return take_undisturbed(py, source).map(|()| true);
    }
    let way = find_way(py, source, limit)?;
    // `find_way` may have run destructors that made the source available, so the source is tried again before the first
    // wait.
    while !source.take(py) {
        let wait = source.waiters().wait(py, &way);
        match wait.result {
            Ok(_) if wait.is_granted => break,
            Ok(_) if wait.is_late => return Ok(false),
            Ok(_) => {}
            Err(interruption) => {
                if wait.is_granted {
                    source.give_back(py);
                }
                return Err(interruption);
            }
        }
    }
    Ok(true)
}

/// Takes `source`, waiting for it in spite of all interruptions. A coro gets the interruptions at its next waits. In a
/// real thread, signal handlers may raise exceptions during the wait. The first of these is raised here when the wait
/// is over. Usually the thread has taken `source` by then. If it has not, because `find_way` returned an error, this
/// exception is raised instead of that error.
pub(super) fn take_undisturbed(py: Python<'_>, source: &impl Source) -> PyResult<()> {
    let mut interruptions = Vec::new();
    let taken = take_and_collect(py, source, &mut interruptions);
    match runtime::current_anywhere(py) {
        Some(coro) => interruptions
            .into_iter()
            .rev()
            .try_for_each(|error| interruption::put_back(coro, error))
            .and(taken),
        None => interruptions.into_iter().next().map_or(taken, Err),
    }
}

/// Takes `source`, and adds the exceptions that interrupted the waits to `interruptions`.
fn take_and_collect(py: Python<'_>, source: &impl Source, interruptions: &mut Vec<PyErr>) -> PyResult<()> {
    while !source.take(py) {
        let way = find_way(py, source, Limit::Endless)?;
        if source.take(py) {
            break;
        }
        let wait = source.waiters().wait(py, &way);
        if let Err(interruption) = wait.result {
            interruptions.push(interruption);
        }
        if wait.is_granted {
            break;
        }
    }
    Ok(())
}

/// Decides how the caller waits. A coro leaves its stack if it can. If no coro is running, the thread blocks. A coro
/// that cannot leave its stack blocks its thread only in the child of a fork, or if another real thread holds the lock;
/// any other holder might need this thread in order to go on. A task or callback that would wait without a time limit
/// for a coro of its own thread gets an error, because neither could ever go on.
fn find_way<'py>(py: Python<'py>, source: &impl Source, limit: Limit) -> PyResult<Way<'py>> {
    if runtime::current_anywhere(py).is_some() {
        match suspension::suspendable(py) {
            Ok(coro) => return Ok(Way::Coro(coro, Deadline::new(coro, limit)?)),
            // In the child of a fork the coro may block the thread: no loop and no other coro needs the thread there.
            Err(_) if source.holder().is_other_thread() || suspension::is_forked() => {}
            Err(error) => return Err(cannot_wait(py, source.what(), &error)),
        }
    } else if matches!(limit, Limit::Endless)
        && !suspension::is_forked()
        && let Some(holder) = source.holder().coro_of_this_thread(py)
    {
        return Err(deadlock(&holder));
    }
    Ok(Way::Thread(limit.timeout_s().and_then(|timeout_s| {
        Instant::now().checked_add(Duration::try_from_secs_f64(timeout_s).ok()?)
    })))
}

#[cold]
fn cannot_wait(py: Python<'_>, what: &str, why: &PyErr) -> PyErr {
    PyRuntimeError::new_err(format!(
        "{}; blocking the thread instead might never end, because {what}",
        why.value(py)
    ))
}

#[cold]
fn deadlock(holder: &Bound<'_, PyAny>) -> PyErr {
    let name = match holder.getattr("name") {
        Ok(name) => name,
        Err(error) => return error,
    };
    PyRuntimeError::new_err(format!(
        "deadlock: the lock is held by coro {name:?} of this thread, and the coro could not release it while this task \
        or callback blocks the thread; acquire the lock in a coro, for example with await coro.run_sync(...)"
    ))
}

impl Waiters {
    /// Fills the fields whose initial state is not zero.
    ///
    /// # Safety
    /// `place` is zeroed memory that no other code has a pointer to.
    pub(super) unsafe fn init(place: *mut Self) {
        // SAFETY: by the contract; a zeroed `WaitQueue` is an empty one.
        unsafe {
            (&raw mut (*place).threads).write(RefCell::new(VecDeque::new()));
            (&raw mut (*place).tasks).write(TaskWaiters::new());
            (*place).coros.share();
        }
    }

    pub(super) fn ticket(&self) -> i64 {
        self.forget_parents();
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        ticket
    }

    /// Removes the waiters of the parent if this is the child of a fork, where they do not exist.
    fn forget_parents(&self) {
        let forks = forks();
        if self.forks.replace(forks) != forks {
            self.clear();
        }
    }

    /// Ends the wait of a task. Returns false if the task was granted its request before; the caller then has to give
    /// the grant back.
    pub(super) fn leave(&self, future: &Bound<'_, PyAny>) -> bool {
        self.forget_parents();
        self.tasks.leave(future)
    }

    /// Removes all waiters without waking them.
    pub(super) fn clear(&self) {
        self.coros.clear();
        // This frees no semaphore on which a thread waits, because the thread has a reference of its own. In the child
        // of a fork, the threads of the parent never drop theirs.
        self.threads.borrow_mut().clear();
        self.tasks.forget();
    }

    pub(super) fn len(&self) -> usize {
        self.coros.len() + self.threads.borrow().len() + self.tasks.len()
    }

    fn wait<'py>(&self, py: Python<'py>, way: &Way<'py>) -> EndedWait<'py> {
        match way {
            Way::Coro(coro, deadline) => wait_in_queue(&self.coros, *coro, self.ticket(), deadline),
            Way::Thread(until) => self.block(py, *until),
        }
    }

    /// Blocks the thread. In the main thread, signal handlers run during the wait.
    fn block<'py>(&self, py: Python<'py>, until: Option<Instant>) -> EndedWait<'py> {
        let ticket = self.ticket();
        let waiter = match ThreadWaiter::new(py, ticket) {
            Ok(waiter) => waiter,
            Err(error) => return EndedWait::interrupted(error),
        };
        self.threads.borrow_mut().push_back(Arc::clone(&waiter));
        let ended = |result, is_late| EndedWait {
            result,
            is_granted: waiter.is_granted(),
            is_late,
        };
        loop {
            let status = waiter.block(until);
            if waiter.is_granted() {
                return ended(Ok(none(py)), false);
            }
            match status {
                TIMED_OUT if until.is_some_and(|until| Instant::now() < until) => {}
                TIMED_OUT => {
                    self.remove(ticket);
                    return ended(Ok(none(py)), true);
                }
                INTERRUPTED => {
                    if let Err(error) = py.check_signals() {
                        // The handler may have released what this thread waits for.
                        if !waiter.is_granted() {
                            self.remove(ticket);
                        }
                        return ended(Err(error), false);
                    }
                }
                _ => return ended(Ok(none(py)), false),
            }
        }
    }

    fn remove(&self, ticket: i64) {
        self.threads.borrow_mut().retain(|waiter| waiter.ticket != ticket);
    }

    /// Grants the first waiter its request and wakes it. Returns that waiter.
    #[inline]
    pub(super) fn grant_first(&self, py: Python<'_>) -> Option<Party> {
        if self.len() == 0 {
            return None;
        }
        self.grant_one(py)
    }

    #[cold]
    fn grant_one(&self, py: Python<'_>) -> Option<Party> {
        while let Some(claimed) = self.claim_first(py) {
            if let Some(party) = claimed.wake(py) {
                return Some(party);
            }
        }
        None
    }

    /// Takes the first waiter out of the queue and grants it its request. The caller then wakes it.
    pub(super) fn claim_first<'py>(&self, py: Python<'py>) -> Option<Claimed<'py>> {
        self.forget_parents();
        let first_thread = self.threads.borrow().front().map(|waiter| waiter.ticket);
        let first_task = self.tasks.first_ticket();
        let first_other = first_thread.into_iter().chain(first_task).min();
        if let Some(coro) = self.coros.exclusive(|| self.claim_first_coro(py, first_other)) {
            return Some(Claimed::Coro(coro));
        }
        if first_task.is_some() && first_task == first_other {
            return self.tasks.claim_first().map(Claimed::Task);
        }
        let waiter = self.threads.borrow_mut().pop_front()?;
        waiter.is_granted.store(true, Ordering::Release);
        Some(Claimed::Thread(waiter))
    }

    /// Grants the first coro its request, if it has waited longer than the thread or task with the ticket
    /// `first_other`. Coros that cannot run any more are removed from the queue. Called inside of `exclusive`.
    fn claim_first_coro<'py>(&self, py: Python<'py>, first_other: Option<i64>) -> Option<Bound<'py, PyAny>> {
        loop {
            let coro = self.coros.first(py)?;
            let node = &coro.wait_node;
            if first_other.is_some_and(|ticket| ticket < node.request.get()) {
                return None;
            }
            if can_run(coro) {
                node.is_granted.set(true);
                scheduler::claim(coro);
                return Some(coro.to_bound());
            }
            node.unlink_now();
        }
    }
}

/// Whether the coro's loop can still run it. A coro whose loop is closed stays suspended where it waits. Takes no
/// reference to the loop, because no reference may be dropped inside of `exclusive`.
fn can_run(coro: Coro<'_>) -> bool {
    // SAFETY: null, or the loop, which a coro keeps alive from its start to its end.
    let event_loop = unsafe { coro.event_loop.as_ptr().cast::<LoopObject>().as_ref() };
    event_loop.is_some_and(|event_loop| !event_loop.reactor().is_closed())
}
