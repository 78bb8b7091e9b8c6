//! Name resolution. The C library's lookups block, so they are made in the threads of a pool.
//!
//! ```text
//!   loop's thread                                a thread of the pool             loop's thread
//!   ask(question)  --->  the same question is under way: join it
//!                        else queue  ----------> C library
//!                                                the outcome goes to the    --->  the fd is readable: take()
//!                                                mailbox of each asker
//! ```
//!
//! All askers of the same question share a lookup that is under way. An asker that no longer wants the answer calls
//! [`Resolver::forget`]. If a lookup has no asker left when its turn comes, it is not made.
//!
//! A forked child must not use the parent's resolvers, and must call [`after_fork`].

mod calls;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use calls::{
    AddressInfo, AddressQuestion, Answer, Failure, HostEntry, NameQuestion, Outcome, Question, host_message,
    look_up, lookup_message,
};

use super::pool::{Delivery, Mailbox, Pool, SharedPool, leaked_once};

/// Whether [`Question::HostByName`] and [`Question::HostByAddress`] can be asked. They need
/// thread-safe functions (`gethostbyname_r` ...), of which only the variants of Linux and Android are implemented here.
pub const HAS_HOST_LOOKUPS: bool = cfg!(any(target_os = "linux", target_os = "android"));

/// The maximum number of remembered answers.
const MAX_REMEMBERED: usize = 1024;

type LookUp = fn(&Question) -> Outcome;

/// Asks the questions of one loop, and receives the outcomes.
pub struct Resolver {
    mailbox: Arc<Mailbox<Arc<Outcome>>>,
    lookups: &'static Lookups,
}

impl Resolver {
    /// A resolver that has asked nothing.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: the process or the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Self::of(leaked_once(&LOOKUPS, || {
            Lookups::new(THREADS.get(), calls::look_up)
        }))
    }

    fn of(lookups: &'static Lookups) -> io::Result<Self> {
        Ok(Self {
            mailbox: Arc::new(Mailbox::new()?),
            lookups,
        })
    }

    /// A descriptor that is readable while there may be outcomes to [`Self::take`]. The resolver owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.mailbox.fd()
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        self.mailbox.wake();
    }

    /// Asks, and returns a ticket at once; the outcome will arrive with this ticket. An answer that is at most
    /// `max_age` old may be used again.
    ///
    /// # Errors
    /// The pool has no thread at the moment, and the process cannot start one.
    pub fn ask(&self, question: Question, max_age: Duration) -> io::Result<u64> {
        self.lookups.ask(question, &self.mailbox, max_age)
    }

    /// Drops interest in an outcome that has not arrived.
    pub fn forget(&self, ticket: u64) {
        self.lookups.lock().forget(ticket);
    }

    /// Removes and returns the outcomes that have arrived, in the order of arrival, each with its ticket.
    #[must_use]
    pub fn take(&self) -> Vec<(u64, Arc<Outcome>)> {
        self.mailbox.take()
    }
}

/// The lookups of all loops of the process.
struct Lookups {
    state: Mutex<State>,
    threads: &'static Pool,
    look_up: LookUp,
}

#[derive(Default)]
struct State {
    /// The questions to look up. The queue may contain a question more than once, and questions that nobody asks any
    /// longer.
    queue: VecDeque<Arc<Question>>,
    /// The number of jobs that no thread has begun. Each job takes questions from the queue until one has to
    /// be looked up.
    jobs: usize,
    asked: HashMap<Arc<Question>, Lookup>,
    tickets: HashMap<u64, Arc<Question>>,
    last_ticket: u64,
    remembered: HashMap<Arc<Question>, (Instant, Arc<Outcome>)>,
}

#[derive(Default)]
struct Lookup {
    /// The askers by ticket, which is the order in which they have asked.
    askers: Askers,
    has_begun: bool,
    is_remembered: bool,
}

type Askers = BTreeMap<u64, Arc<Mailbox<Arc<Outcome>>>>;

static THREADS: SharedPool = SharedPool::new("resolver");
/// Made once and never freed. A forked child makes its own.
static LOOKUPS: AtomicPtr<Lookups> = AtomicPtr::new(ptr::null_mut());

/// Call this before a fork. It ends the idle threads of the pool.
pub fn before_fork() {
    THREADS.end_idle();
}

/// Call this in the child of a fork: the parent's threads do not exist here, and its locks may stay locked forever.
pub fn after_fork() {
    THREADS.after_fork();
    LOOKUPS.store(ptr::null_mut(), Ordering::Release);
}

impl Lookups {
    fn new(threads: &'static Pool, look_up: LookUp) -> Self {
        Self {
            state: Mutex::default(),
            threads,
            look_up,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(
        &'static self,
        question: Question,
        mailbox: &Arc<Mailbox<Arc<Outcome>>>,
        max_age: Duration,
    ) -> io::Result<u64> {
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
            // When forgotten questions are removed from the queue, their jobs stay. If there is such a job, it takes
            // this question, and no new job is needed.
            if state.jobs < state.queue.len() {
                self.threads
                    .push(Box::new(|| self.answer_next()))
                    .inspect_err(|_| state.forget(ticket))?;
                state.jobs += 1;
            }
        }
        Ok(ticket)
    }

    /// Looks up the next question, if there is one. The returned function delivers the outcome to all askers.
    fn answer_next(&'static self) -> Delivery {
        let mut state = self.lock();
        state.jobs -= 1;
        let Some(question) = state.begin_next() else {
            return Box::new(|| ());
        };
        drop(state);
        let outcome = Arc::new((self.look_up)(&question));
        Box::new(move || {
            let askers = self.lock().finish(&question, &outcome);
            for (ticket, mailbox) in askers {
                mailbox.put(ticket, Arc::clone(&outcome));
            }
        })
    }
}

impl State {
    /// Adds an asker. Returns true if this question was not under way before.
    fn join(
        &mut self,
        question: &Arc<Question>,
        ticket: u64,
        mailbox: &Arc<Mailbox<Arc<Outcome>>>,
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

    /// Takes the next question that somebody still asks and that no thread looks up yet.
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

    /// Ends the lookup of this question and returns the askers. Remembers an answer if an asker wants that.
    fn finish(&mut self, question: &Arc<Question>, outcome: &Arc<Outcome>) -> Askers {
        let Some(lookup) = self.asked.remove(question) else {
            return Askers::new();
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
