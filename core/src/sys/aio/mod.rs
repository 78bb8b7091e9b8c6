//! Calls on files, made while the loop runs: by the kernel itself where it has io_uring, and by threads elsewhere.
//!
//! ```text
//!                                        io_uring: the kernel makes the call,
//!   start(call, memory)  --->  waiting  --->  or a thread of the pool does   --->  the fd is readable: take()
//!                              calls                                              (outcome, memory)
//! ```
//!
//! The buffer of a read and the data of a write belong to the call until it has ended: [`Queue`] keeps the owner of
//! that memory, even if the call was cancelled, because the kernel or the thread goes on using the memory. If a queue
//! is dropped while the kernel or a thread makes its calls, their memory is never freed.
//!
//! A limited number of calls is under way at a time; the others wait in the queue. A call that was cancelled before it
//! began is never made, even if it was waiting for a thread of the pool: the queue and the thread both try to claim it
//! (see [`Claim`]), and only one of them succeeds. The calls of a queue are made in any order, even if they use the
//! same file.
//!
//! In a forked child, the parent's queues do nothing, because the child shares their rings and their descriptors
//! ([`Queue::fd`]) with the parent. The child must call [`after_fork`].
//!
//! Source: `io_uring(7)`, `io_uring_enter(2)`, `pread(2)`, `open(2)`.

mod at_once;
mod calls;
#[cfg(all(
    any(target_os = "linux", target_os = "android"),
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod ring;
#[cfg(not(all(
    any(target_os = "linux", target_os = "android"),
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
#[path = "no_ring.rs"]
mod ring;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use at_once::{open_now, read_now};
pub use calls::{Call, MAX_LEN};

use super::clock::now_ns;
use super::pool::{Mailbox, SharedPool};
use super::readiness::wait_ready;
use calls::SendCall;
use ring::Ring;

/// The maximum number of calls that threads make for one queue at a time.
const MAX_IN_THREADS: usize = SharedPool::MAX_THREADS;
/// The maximum number of times that an interrupted call begins again. After that, the error is reported.
const MAX_REPETITIONS: u8 = 16;
/// If a list of waiting calls is longer than this number plus twice the number of calls that have not ended, the
/// cancelled calls are removed from the list.
const MAX_STALE: usize = 64;

static THREADS: SharedPool = SharedPool::new("files");

/// Call this before a fork. It ends the threads that wait for a call.
pub fn before_fork() {
    THREADS.end_idle();
}

/// Call this in the child of a fork: the parent's threads do not exist there.
pub fn after_fork() {
    THREADS.after_fork();
}

/// A call that has ended.
pub struct Ended<T> {
    /// The number that [`Queue::start`] returned.
    pub ticket: u64,
    /// The result of the system call: a number of bytes, a new descriptor, or 0. This is the real outcome even if the
    /// call was cancelled after it had begun, with two exceptions: the descriptor of an `open` that succeeded is
    /// closed, and a call that the cancellation has interrupted has done nothing. Both are reported as `ECANCELED`.
    pub outcome: io::Result<usize>,
    /// The memory that the caller gave to [`Queue::start`].
    pub memory: T,
}

/// The calls of one loop. `T` owns the memory that a call uses.
pub struct Queue<T> {
    ring: Option<Ring>,
    mailbox: Arc<Mailbox<io::Result<usize>>>,
    /// The calls that wait or are under way, by ticket.
    calls: HashMap<u64, Entry<T>>,
    /// Calls that the ring will make. Once the kernel has refused a call of the ring, threads make them instead.
    waiting_for_ring: VecDeque<u64>,
    /// Calls that the ring cannot make. They do not delay the calls that the ring makes.
    waiting_for_threads: VecDeque<u64>,
    in_ring: usize,
    /// How many jobs this queue has in the pool. Jobs whose calls were cancelled before they began count too, so that
    /// the pool's queue cannot grow without limit.
    in_threads: usize,
    last_ticket: u64,
    process: u32,
}

struct Entry<T> {
    call: Call,
    memory: T,
    state: State,
    /// How many times the call has begun again after an interruption.
    repetitions: u8,
}

enum State {
    Waiting,
    InRing,
    /// A job in the pool, which may have begun.
    InThread(Arc<Claim>),
    /// Cancelled after it had begun.
    Cancelled,
}

/// Decides whether a thread makes a call, or whether the call is cancelled before that.
#[derive(Default)]
struct Claim(AtomicBool);

impl Claim {
    /// Returns true to the first caller, and false to all others.
    fn claim(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

impl<T> Entry<T> {
    /// Tries to cancel the call before it begins, and returns whether that succeeded. A `close` is never cancelled.
    fn is_cancelled_before_it_begins(&self) -> bool {
        match (&self.call, &self.state) {
            (Call::Close { .. }, _) | (_, State::InRing | State::Cancelled) => false,
            (_, State::Waiting) => true,
            (_, State::InThread(claim)) => claim.claim(),
        }
    }
}

impl<T> Queue<T> {
    /// A queue without calls. With `only_threads`, it does not use io_uring.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`: the process or the system has no descriptor left.
    pub fn new(only_threads: bool) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        // Where the kernel has no io_uring, or does not allow it, threads make the calls.
        let ring = if only_threads {
            None
        } else {
            Ring::new(mailbox.fd())
        };
        Ok(Self {
            ring,
            mailbox,
            calls: HashMap::new(),
            waiting_for_ring: VecDeque::new(),
            waiting_for_threads: VecDeque::new(),
            in_ring: 0,
            in_threads: 0,
            last_ticket: 0,
            process: std::process::id(),
        })
    }

    /// Whether io_uring makes the calls.
    #[must_use]
    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// A descriptor that is readable when [`Self::take`] may have something to do. The queue owns the descriptor.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.mailbox.fd()
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        if !self.is_foreign() {
            self.mailbox.wake();
        }
    }

    /// Whether another process has made this queue. If so, the queue does nothing in this process.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// The tickets of the calls that have not ended.
    pub fn tickets(&self) -> impl Iterator<Item = u64> {
        self.calls.keys().copied()
    }

    /// The number of calls that have not ended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether all calls have ended.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Starts a call, or lets it wait until fewer calls are under way. Returns its ticket.
    ///
    /// # Errors
    /// The process can use neither io_uring nor threads, or (`EBADF`) another process has made this queue. The memory
    /// is returned.
    ///
    /// # Safety
    /// The memory to which the call's pointers refer is valid until `memory` is dropped, wherever `memory` is moved to.
    /// Nothing else writes to the buffer of a read.
    pub unsafe fn start(&mut self, call: Call, memory: T) -> Result<u64, (io::Error, T)> {
        if self.is_foreign() {
            return Err((io::Error::from_raw_os_error(libc::EBADF), memory));
        }
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let state = match self.begin(ticket, call) {
            Ok(state) => state,
            Err(error) => return Err((error, memory)),
        };
        if matches!(state, State::Waiting) {
            self.let_wait(ticket, call);
        }
        let entry = Entry {
            call,
            memory,
            state,
            repetitions: 0,
        };
        self.calls.insert(ticket, entry);
        Ok(ticket)
    }

    fn let_wait(&mut self, ticket: u64, call: Call) {
        if self.ring.as_ref().is_some_and(|ring| ring.supports(call)) {
            self.waiting_for_ring.push_back(ticket);
        } else {
            self.waiting_for_threads.push_back(ticket);
        }
    }

    /// Hands the call to the ring or to a thread, unless too many calls are under way.
    fn begin(&mut self, ticket: u64, call: Call) -> io::Result<State> {
        if let Some(ring) = &mut self.ring
            && ring.supports(call)
        {
            if self.in_ring >= Ring::MAX_CALLS {
                return Ok(State::Waiting);
            }
            if ring.begin(ticket, call) {
                self.in_ring += 1;
                return Ok(State::InRing);
            }
        }
        if self.in_threads >= MAX_IN_THREADS {
            return Ok(State::Waiting);
        }
        let claim = Arc::new(Claim::default());
        let (call, mailbox, claim_of_job) = (SendCall(call), Arc::clone(&self.mailbox), Arc::clone(&claim));
        THREADS.get().push(Box::new(move || {
            let outcome = if claim_of_job.claim() {
                // SAFETY: after the job has claimed the call, the queue keeps the memory until it has taken the
                // outcome; if the queue is dropped before that, it never frees the memory.
                unsafe { call.make() }
            } else {
                // This tells the queue only that the job is no longer in the pool.
                Err(io::Error::from_raw_os_error(libc::ECANCELED))
            };
            Box::new(move || mailbox.put(ticket, outcome))
        }))?;
        self.in_threads += 1;
        Ok(State::InThread(claim))
    }

    /// Cancels a call. If it has not begun, returns its memory: the call is never made, and [`Self::take`] does not
    /// return it. Otherwise `take` returns the call once it has ended, and [`Ended::outcome`] tells what it has done. A
    /// `close` cannot be cancelled.
    ///
    /// Does nothing if another process has made this queue.
    pub fn cancel(&mut self, ticket: u64) -> Option<T> {
        if self.is_foreign() {
            return None;
        }
        let entry = self.calls.get_mut(&ticket)?;
        if matches!(entry.call, Call::Close { .. }) {
            return None;
        }
        if entry.is_cancelled_before_it_begins() {
            let entry = self.calls.remove(&ticket);
            self.remove_stale();
            return entry.map(|entry| entry.memory);
        }
        let state = std::mem::replace(&mut entry.state, State::Cancelled);
        if let (State::InRing, Some(ring)) = (state, &mut self.ring) {
            ring.cancel(ticket);
        }
        None
    }

    /// Removes the tickets of cancelled calls from each list of waiting tickets that is too long (`MAX_STALE`).
    /// Searching for one ticket at each cancellation would take too long.
    fn remove_stale(&mut self) {
        for waiting in [&mut self.waiting_for_ring, &mut self.waiting_for_threads] {
            if waiting.len() > 2 * self.calls.len() + MAX_STALE {
                waiting.retain(|ticket| self.calls.contains_key(ticket));
            }
        }
    }

    /// Removes and returns the calls that have ended, and begins calls that wait. Returns nothing if another process
    /// has made this queue.
    #[must_use]
    pub fn take(&mut self) -> Vec<Ended<T>> {
        let mut ended = Vec::new();
        if self.is_foreign() {
            return ended;
        }
        // `Mailbox::take` drains the descriptor, so it must come before the ring is read. In the other order, the
        // signal of a call that ends between the two steps would be lost.
        for (ticket, outcome) in self.mailbox.take() {
            self.in_threads -= 1;
            self.end(ticket, outcome, &mut ended);
        }
        while let Some((ticket, outcome)) = self.ring.as_mut().and_then(Ring::take) {
            self.in_ring -= 1;
            self.end(ticket, outcome, &mut ended);
        }
        self.begin_waiting(|queue| &mut queue.waiting_for_ring, &mut ended);
        self.begin_waiting(|queue| &mut queue.waiting_for_threads, &mut ended);
        ended
    }

    /// Begins the calls in one of the two lists of waiting calls, as long as there is room for them.
    fn begin_waiting(&mut self, waiting: fn(&mut Self) -> &mut VecDeque<u64>, ended: &mut Vec<Ended<T>>) {
        while let Some(&ticket) = waiting(self).front() {
            let Some(call) = self.calls.get(&ticket).map(|entry| entry.call) else {
                waiting(self).pop_front();
                continue;
            };
            match self.begin(ticket, call) {
                Ok(State::Waiting) => break,
                Ok(state) => {
                    waiting(self).pop_front();
                    if let Some(entry) = self.calls.get_mut(&ticket) {
                        entry.state = state;
                    }
                }
                Err(error) => {
                    waiting(self).pop_front();
                    self.end(ticket, Err(error), ended);
                }
            }
        }
    }

    fn end(&mut self, ticket: u64, mut outcome: io::Result<usize>, ended: &mut Vec<Ended<T>>) {
        let Some(mut entry) = self.calls.remove(&ticket) else {
            return; // cancelled before it began
        };
        let is_interrupted = matches!(&outcome, Err(error)
            if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ECANCELED)));
        if matches!(entry.state, State::Cancelled) {
            let opened = match (entry.call, &outcome) {
                (Call::Open { .. }, Ok(fd)) => Some(*fd as RawFd),
                _ => None,
            };
            if let Some(fd) = opened {
                calls::close(fd);
            }
            if opened.is_some() || is_interrupted {
                outcome = Err(io::Error::from_raw_os_error(libc::ECANCELED));
            }
        } else if is_interrupted
            && entry.repetitions < MAX_REPETITIONS
            && !matches!(entry.call, Call::Close { .. })
        {
            // The call was interrupted by a signal, or by the end of the thread that had begun it: begin it again.
            entry.repetitions += 1;
            entry.state = State::Waiting;
            self.let_wait(ticket, entry.call);
            self.calls.insert(ticket, entry);
            return;
        }
        ended.push(Ended {
            ticket,
            outcome,
            memory: entry.memory,
        });
    }

    /// Cancels all calls and waits until they have ended, but not longer than `limit`. Returns the memory of the calls
    /// that were cancelled before they began, and of those that have ended. Use this before the queue is dropped. To
    /// wait in several steps, use it several times with short limits. Afterwards, [`Self::tickets`] returns the tickets
    /// of the calls that the kernel or threads are still making, and of each `close` that has not begun.
    #[must_use]
    pub fn stop(&mut self, limit: Duration) -> Vec<T> {
        if self.is_foreign() {
            return Vec::new();
        }
        let tickets: Vec<u64> = self.calls.keys().copied().collect();
        let mut memory: Vec<T> = tickets
            .into_iter()
            .filter_map(|ticket| self.cancel(ticket))
            .collect();
        let end_ns = now_ns().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        while !self.calls.is_empty() {
            let is_over = now_ns() >= end_ns;
            // Even if the wait fails, for example because a signal arrives, check whether calls have ended.
            let _ = wait_ready(self.fd(), false, Some(end_ns));
            memory.extend(self.take().into_iter().map(|ended| ended.memory));
            if is_over {
                break;
            }
        }
        memory
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        let is_foreign = self.is_foreign();
        for (_, entry) in self.calls.drain() {
            // A call that has not begun must not be made later, when its descriptor may belong to another file. But a
            // `close` that waits in the pool is made, because the descriptor belongs to the call.
            if is_foreign || !entry.is_cancelled_before_it_begins() {
                // The kernel or a thread may still use this memory.
                std::mem::forget(entry.memory);
            }
        }
    }
}
