//! Threads for calls that block: name lookups, and calls on files where there is no io_uring. The threads know nothing
//! of Python, so they run without the GIL, and nobody waits for them at exit.
//!
//! ```text
//!   loop's thread              pool (one per process and purpose)        loop's thread
//!   push(job)  --->  queue  --->  an idle thread, or a new one
//!                                 runs the job, then delivers
//!                                 the outcome: Mailbox::put()    --->    the mailbox's fd is readable: take()
//! ```
//!
//! If a job arrives while all threads are busy, a new thread starts, up to a fixed number. An idle thread ends after
//! some seconds.
//!
//! A forked child has none of these threads, and its copy of the pool's lock may stay locked forever. So
//! [`SharedPool::after_fork`] gives it a new pool. [`SharedPool::end_idle`] ends the idle threads before a fork, so
//! that tools that count a process's threads, CPython among them, do not warn about threads that do nothing.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::thread::{self, HelperThread};
use super::waker::Waker;

/// The length of a thread's stack. Modules of the C library's name service run on it. Memory is used only for the part
/// of the stack that they touch.
const STACK_LEN: usize = 1024 * 1024;
/// How long a thread waits for another job before it ends.
const IDLE: Duration = Duration::from_secs(5);

/// The function that a thread runs. It must not panic. It returns the function that delivers its outcome.
pub type Job = Box<dyn FnOnce() -> Delivery + Send>;
/// Delivers the outcome of a job, in the same thread. It must not panic, and must be quick.
pub type Delivery = Box<dyn FnOnce()>;

/// A queue of jobs, and the threads that run them.
pub struct Pool {
    name: &'static str,
    max_threads: usize,
    state: Mutex<State>,
    /// Notified when a job is put into the queue, and when idle threads are to end.
    changed: Condvar,
    /// Notified when a thread has taken a job or has ended, but only while a caller of [`Pool::end_idle`] waits.
    left: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// The threads by their numbers.
    threads: HashMap<u64, HelperThread>,
    last_number: u64,
    idle: usize,
    /// How many threads run a job. The others are idle, are about to begin, or deliver an outcome.
    busy: usize,
    /// How many callers of [`Pool::end_idle`] wait. While there are any, no thread becomes idle.
    enders: usize,
    /// The threads that have ended because a caller of [`Pool::end_idle`] waits. That caller joins them.
    ended: Vec<HelperThread>,
}

impl Pool {
    /// A pool without threads. `name` is the name of its threads.
    #[must_use]
    pub fn new(name: &'static str, max_threads: usize) -> Self {
        Self {
            name,
            max_threads,
            state: Mutex::default(),
            changed: Condvar::new(),
            left: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the job in a thread, after all jobs that were pushed before it have begun.
    ///
    /// # Errors
    /// The pool has no thread, and the process cannot start one. The job is dropped.
    pub fn push(&'static self, job: Job) -> io::Result<()> {
        let mut state = self.lock();
        if state.queue.len() >= state.idle && state.threads.len() < self.max_threads {
            state.last_number += 1;
            let number = state.last_number;
            match thread::spawn(self.name.to_owned(), STACK_LEN, move || self.work(number)) {
                Err(error) if state.threads.is_empty() => return Err(error),
                Err(_) => {} // the threads that exist will run the job
                Ok(thread) => drop(state.threads.insert(number, thread)),
            }
        }
        state.queue.push_back(job);
        drop(state); // the thread that is woken needs the lock
        self.changed.notify_one();
        Ok(())
    }

    /// The number of threads, and how many of them wait for a job.
    #[must_use]
    pub fn threads(&self) -> (usize, usize) {
        let state = self.lock();
        (state.threads.len(), state.idle)
    }

    /// Ends the threads that wait for a job, and also every thread whose last outcome was already taken from the
    /// mailbox, even if that thread is not waiting yet. Returns when the system no longer counts these threads.
    pub fn end_idle(&self) {
        let mut state = self.lock();
        state.enders += 1;
        self.changed.notify_all();
        while state.threads.len() > state.busy {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.enders -= 1;
        let ended = std::mem::take(&mut state.ended);
        drop(state);
        for thread in ended {
            thread.join();
        }
    }

    /// The body of a thread.
    fn work(&self, number: u64) {
        let mut state = self.lock();
        loop {
            while let Some(job) = state.queue.pop_front() {
                state.busy += 1;
                if state.enders > 0 {
                    self.left.notify_all();
                }
                drop(state);
                let deliver = job();
                self.lock().busy -= 1;
                deliver();
                state = self.lock();
            }
            let mut is_over = false;
            if state.enders == 0 {
                state.idle += 1;
                let (woken, timeout) = self
                    .changed
                    .wait_timeout(state, IDLE)
                    .unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                is_over = timeout.timed_out();
            }
            let has_ender = state.enders > 0;
            if (is_over || has_ender) && state.queue.is_empty() {
                let thread = state.threads.remove(&number);
                if has_ender {
                    state.ended.extend(thread);
                    self.left.notify_all();
                }
                return;
            }
        }
    }
}

/// A pool of the process, made when it is first used. A forked child makes its own.
pub struct SharedPool {
    name: &'static str,
    /// Null, or the pool, which is never freed.
    pool: AtomicPtr<Pool>,
}

impl SharedPool {
    /// The maximum number of threads. They spend their time waiting for servers and disks, so the number of processors
    /// does not matter. Python's default executor has the same maximum, and a lower one if there are few processors.
    pub const MAX_THREADS: usize = 32;

    /// The initial value of a `static`. [`Self::get`] makes the pool.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            pool: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The pool of this process.
    #[must_use]
    pub fn get(&self) -> &'static Pool {
        leaked_once(&self.pool, || Pool::new(self.name, Self::MAX_THREADS))
    }

    /// Ends the threads that wait for a job, and returns when the system no longer counts them. Call this before a
    /// fork.
    pub fn end_idle(&self) {
        // SAFETY: null, or leaked by `get`.
        if let Some(pool) = unsafe { self.pool.load(Ordering::Acquire).as_ref() } {
            pool.end_idle();
        }
    }

    /// Call this in the child of a fork. It leaks the parent's pool.
    pub fn after_fork(&self) {
        self.pool.store(ptr::null_mut(), Ordering::Release);
    }
}

/// The object to which the pointer refers. If the pointer is null, makes the object, which is never freed.
pub(super) fn leaked_once<T>(pointer: &AtomicPtr<T>, make: impl FnOnce() -> T) -> &'static T {
    let existing = pointer.load(Ordering::Acquire);
    // SAFETY: null, or leaked below.
    if let Some(existing) = unsafe { existing.as_ref() } {
        return existing;
    }
    let new = Box::into_raw(Box::new(make()));
    match pointer.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked just now.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: another thread has made its object at the same time; nothing refers to this one.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: leaked by that thread.
            unsafe { &*other }
        }
    }
}

/// Receives the outcomes of the jobs of one loop.
pub struct Mailbox<T> {
    waker: Waker,
    arrived: Mutex<Vec<(u64, T)>>,
}

impl<T> Mailbox<T> {
    /// An empty mailbox.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: the process or the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            waker: Waker::new()?,
            arrived: Mutex::new(Vec::new()),
        })
    }

    /// A descriptor that is readable while there may be outcomes to [`Self::take`]. The mailbox owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.waker.fd()
    }

    /// Removes and returns the outcomes that have arrived, in the order of arrival. Each comes with its ticket, the
    /// number that was passed to [`Self::put`].
    #[must_use]
    pub fn take(&self) -> Vec<(u64, T)> {
        self.waker.drain();
        std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the descriptor readable, even if no outcome has arrived. Any thread may call this.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Delivers an outcome. Any thread may call this.
    pub fn put(&self, ticket: u64, outcome: T) {
        self.arrived
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((ticket, outcome));
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::{Mailbox, Pool, SharedPool};

    #[test]
    fn threads_start_only_while_all_others_are_busy() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new("test", 3)));
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let (go_on, gate) = channel::<()>();
        let gate = Arc::new(std::sync::Mutex::new(gate));
        let push = |ticket| {
            let (mailbox, gate) = (Arc::clone(&mailbox), Arc::clone(&gate));
            pool.push(Box::new(move || {
                gate.lock().unwrap().recv().unwrap();
                Box::new(move || mailbox.put(ticket, ()))
            }))
            .unwrap();
        };
        let limit = Instant::now() + Duration::from_secs(60);
        let wait_for = |count: usize| {
            let mut taken = Vec::new();
            while taken.len() < count {
                assert!(Instant::now() < limit);
                taken.extend(mailbox.take());
                std::thread::sleep(Duration::from_millis(1));
            }
            taken
        };
        (0..5).for_each(push);
        assert_eq!(pool.threads().0, 3);
        (0..5).for_each(|_| go_on.send(()).unwrap());
        let mut tickets: Vec<u64> = wait_for(5).into_iter().map(|(ticket, ())| ticket).collect();
        tickets.sort_unstable();
        assert_eq!(tickets, [0, 1, 2, 3, 4]);
        while pool.threads().1 != 3 {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
        go_on.send(()).unwrap();
        push(5);
        wait_for(1);
        assert_eq!(pool.threads().0, 3);
    }

    #[test]
    fn idle_threads_end_on_demand_and_busy_ones_go_on() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new("test", 8)));
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let limit = Instant::now() + Duration::from_secs(60);
        let (go_on, gate) = channel::<()>();
        let busy = Arc::clone(&mailbox);
        pool.push(Box::new(move || {
            gate.recv().unwrap();
            Box::new(move || busy.put(0, ()))
        }))
        .unwrap();
        let wait_for = |count: u64| {
            let mut taken = 0;
            while taken < count {
                assert!(Instant::now() < limit);
                taken += mailbox.take().len() as u64;
            }
        };
        for round in 1..200 {
            let count = round % 4;
            for ticket in 0..count {
                let mailbox = Arc::clone(&mailbox);
                pool.push(Box::new(move || Box::new(move || mailbox.put(ticket, ()))))
                    .unwrap();
            }
            if round % 3 == 0 {
                pool.end_idle(); // while threads begin
            }
            wait_for(count);
            pool.end_idle();
            assert_eq!(pool.threads(), (1, 0));
        }
        go_on.send(()).unwrap();
        wait_for(1);
        pool.end_idle();
        assert_eq!(pool.threads(), (0, 0));
    }

    #[test]
    fn a_child_gets_a_pool_of_its_own() {
        static SHARED: SharedPool = SharedPool::new("test");
        let first = SHARED.get();
        assert!(std::ptr::eq(first, SHARED.get()));
        SHARED.after_fork();
        assert!(!std::ptr::eq(first, SHARED.get()));
    }
}
