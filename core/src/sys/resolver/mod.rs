//! Name resolution in threads of its own. The C library's lookups block, so a pool of native threads makes them. The
//! threads know nothing of Python: they run without the GIL, and nobody waits for them at exit.
//!
//! ```text
//!   loop's thread                        pool (one per process)                  loop's thread
//!   ask(question, mailbox)  --->  the same question is under way: join it
//!                                 else queue -> thread -> C library
//!                                 the outcome goes to the mailbox of    --->  the mailbox's fd is readable:
//!                                 each asker                                  take()
//! ```
//!
//! Lookups that are under way are shared by everybody who asks the same. An asker that no longer wants the answer says
//! [`Mailbox::forget`]; a lookup that nobody wants and that has not begun is not made. Threads start when all others
//! are busy, up to the number that Python's default executor would start, and end after some idle seconds.
//!
//! A forked child has none of these threads, and the parent's lock may be locked in it: [`after_fork`] gives it a new
//! pool. The child must not use the parent's mailboxes.

mod calls;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

pub use calls::{
    AddressInfo, AddressQuestion, Answer, Failure, HostEntry, NameQuestion, Outcome, Question, host_message,
    lookup_message,
};

use crate::sys::thread;
use crate::sys::waker::Waker;

/// Whether [`Question::HostByName`] and [`Question::HostByAddress`] can be asked. Only Linux has these functions in a
/// form that is safe in several threads.
pub const HAS_HOST_LOOKUPS: bool = cfg!(any(target_os = "linux", target_os = "android"));

/// Modules of the C library's name service run on this stack. Memory is used only for the part that they touch.
const STACK_LEN: usize = 1024 * 1024;
/// How long a thread waits for another lookup before it ends.
const IDLE: Duration = Duration::from_secs(5);
/// The maximum number of remembered answers.
const MAX_REMEMBERED: usize = 1024;

type LookUp = fn(&Question) -> Outcome;

/// Receives the outcomes of the lookups of one loop.
pub struct Mailbox {
    waker: Waker,
    arrived: Mutex<Vec<(u64, Arc<Outcome>)>>,
    pool: &'static Pool,
}

impl Mailbox {
    /// An empty mailbox for lookups by this process's pool.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: the process or the system has no descriptor left.
    pub fn new() -> io::Result<Arc<Self>> {
        Self::of(pool())
    }

    fn of(pool: &'static Pool) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            waker: Waker::new()?,
            arrived: Mutex::default(),
            pool,
        }))
    }

    /// A descriptor that is readable while there may be outcomes to [`Self::take`]. The mailbox owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.waker.fd()
    }

    /// False in a child of the process that made the mailbox. Its other methods must not be called then.
    #[must_use]
    pub fn is_of_this_process(&self) -> bool {
        ptr::eq(self.pool, POOL.load(Ordering::Acquire))
    }

    /// Asks, and returns a ticket at once; the outcome will arrive with this ticket. An outcome that is at most
    /// `max_age` old may be used again.
    ///
    /// # Errors
    /// The process cannot start a thread, and there is none yet.
    pub fn ask(self: &Arc<Self>, question: Question, max_age: Duration) -> io::Result<u64> {
        self.pool.ask(question, self, max_age)
    }

    /// Drops interest in an outcome that has not arrived.
    pub fn forget(&self, ticket: u64) {
        self.pool.lock().forget(ticket);
    }

    /// Removes and returns what has arrived, in the order of arrival, each with its ticket.
    pub fn take(&self) -> Vec<(u64, Arc<Outcome>)> {
        self.waker.drain();
        std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, ticket: u64, outcome: Arc<Outcome>) {
        self.arrived
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((ticket, outcome));
        self.waker.wake();
    }
}

struct Pool {
    state: Mutex<State>,
    /// Notified when a question is put into the queue.
    changed: Condvar,
    max_threads: usize,
    look_up: LookUp,
}

#[derive(Default)]
struct State {
    /// Questions that no thread has begun. May contain questions that nobody asks any longer, and repetitions.
    queue: VecDeque<Arc<Question>>,
    asked: HashMap<Arc<Question>, Lookup>,
    tickets: HashMap<u64, Arc<Question>>,
    last_ticket: u64,
    remembered: HashMap<Arc<Question>, (Instant, Arc<Outcome>)>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Lookup {
    /// By ticket, so in the order in which they have asked.
    askers: BTreeMap<u64, Arc<Mailbox>>,
    has_begun: bool,
    is_remembered: bool,
}

/// Made once and never freed. A forked child makes its own.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

fn pool() -> &'static Pool {
    let existing = POOL.load(Ordering::Acquire);
    // SAFETY: null, or leaked below.
    if let Some(existing) = unsafe { existing.as_ref() } {
        return existing;
    }
    // As many as `concurrent.futures.ThreadPoolExecutor` starts by default.
    let max_threads = available_parallelism()
        .map_or(1, usize::from)
        .saturating_add(4)
        .min(32);
    let made = Box::into_raw(Box::new(Pool::new(max_threads, calls::look_up)));
    match POOL.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: leaked just now.
        Ok(_) => unsafe { &*made },
        Err(other) => {
            // SAFETY: another thread has made the pool at the same time; nothing refers to this one.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: leaked by that thread.
            unsafe { &*other }
        }
    }
}

/// Called in the child of a fork: leaks the parent's pool.
pub fn after_fork() {
    POOL.store(ptr::null_mut(), Ordering::Release);
}

impl Pool {
    fn new(max_threads: usize, look_up: LookUp) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            max_threads,
            look_up,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&'static self, question: Question, mailbox: &Arc<Mailbox>, max_age: Duration) -> io::Result<u64> {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        if let Some(outcome) = state.recall(&question, max_age) {
            drop(state);
            mailbox.put(ticket, outcome);
            return Ok(ticket);
        }
        let question = Arc::new(question);
        let is_new = state.join(&question, ticket, mailbox, max_age);
        if is_new {
            state.queue.push_back(question);
            self.start_thread_if_needed(&mut state)
                .inspect_err(|_| state.forget(ticket))?;
            self.changed.notify_one();
        }
        Ok(ticket)
    }

    /// Err only if there is no thread at all, which could make the lookups later.
    fn start_thread_if_needed(&'static self, state: &mut State) -> io::Result<()> {
        if state.queue.len() <= state.idle || state.threads == self.max_threads {
            return Ok(());
        }
        match thread::spawn("resolver".to_owned(), STACK_LEN, || self.work()) {
            Err(error) if state.threads == 0 => return Err(error),
            Err(_) => {}
            Ok(_) => state.threads += 1,
        }
        Ok(())
    }

    /// The body of a thread.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            while let Some(question) = state.begin_next() {
                drop(state);
                let outcome = Arc::new((self.look_up)(&question));
                state = self.lock();
                let askers = state.finish(&question, &outcome);
                drop(state);
                for (ticket, mailbox) in askers {
                    mailbox.put(ticket, Arc::clone(&outcome));
                }
                state = self.lock();
            }
            state.idle += 1;
            let (woken, timeout) = self
                .changed
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl State {
    /// Adds an asker. Returns true if nobody was asking this.
    fn join(
        &mut self,
        question: &Arc<Question>,
        ticket: u64,
        mailbox: &Arc<Mailbox>,
        max_age: Duration,
    ) -> bool {
        let is_new = !self.asked.contains_key(question);
        let lookup = self.asked.entry(Arc::clone(question)).or_default();
        lookup.askers.insert(ticket, Arc::clone(mailbox));
        lookup.is_remembered |= !max_age.is_zero();
        self.tickets.insert(ticket, Arc::clone(question));
        is_new
    }

    fn forget(&mut self, ticket: u64) {
        let Some(question) = self.tickets.remove(&ticket) else {
            return;
        };
        let Some(lookup) = self.asked.get_mut(&question) else {
            return;
        };
        lookup.askers.remove(&ticket);
        if lookup.askers.is_empty() && !lookup.has_begun {
            self.asked.remove(&question);
            if self.queue.len() > 64 + 2 * self.asked.len() {
                let Self { queue, asked, .. } = self;
                queue.retain(|question| asked.contains_key(question));
            }
        }
    }

    /// Takes the next question that somebody asks and that no thread has begun.
    fn begin_next(&mut self) -> Option<Arc<Question>> {
        while let Some(question) = self.queue.pop_front() {
            if let Some(lookup) = self.asked.get_mut(&question)
                && !lookup.has_begun
            {
                lookup.has_begun = true;
                return Some(question);
            }
        }
        None
    }

    /// Returns who has asked.
    fn finish(&mut self, question: &Arc<Question>, outcome: &Arc<Outcome>) -> BTreeMap<u64, Arc<Mailbox>> {
        let Some(lookup) = self.asked.remove(question) else {
            return BTreeMap::new();
        };
        for ticket in lookup.askers.keys() {
            self.tickets.remove(ticket);
        }
        if lookup.is_remembered && outcome.is_ok() {
            self.remember(question, outcome);
        }
        lookup.askers
    }

    fn remember(&mut self, question: &Arc<Question>, outcome: &Arc<Outcome>) {
        if self.remembered.len() >= MAX_REMEMBERED && !self.remembered.contains_key(question) {
            let oldest = self.remembered.iter().min_by_key(|(_, (when, _))| *when);
            if let Some(oldest) = oldest.map(|(question, _)| Arc::clone(question)) {
                self.remembered.remove(&oldest);
            }
        }
        self.remembered
            .insert(Arc::clone(question), (Instant::now(), Arc::clone(outcome)));
    }

    fn recall(&self, question: &Question, max_age: Duration) -> Option<Arc<Outcome>> {
        if max_age.is_zero() {
            return None;
        }
        let (when, outcome) = self.remembered.get(question)?;
        (when.elapsed() <= max_age).then(|| Arc::clone(outcome))
    }
}
