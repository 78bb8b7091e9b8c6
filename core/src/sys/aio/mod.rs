//! Calls on files, made while the loop goes on: by the kernel itself where it has io_uring, and by threads elsewhere.
//!
//! ```text
//!                                        io_uring: the kernel makes the call,
//!   start(call, memory)  --->  waiting  --->  or a thread of the pool does   --->  the fd is readable: take()
//!                              calls                                              (outcome, memory)
//! ```
//!
//! The buffer of a read and the data of a write belong to the call until it has ended: [`Queue`] keeps the owner of that
//! memory, even if the call was cancelled, because the kernel or the thread goes on using the memory. If a queue is
//! dropped before its calls have ended, their memory is never freed.
//!
//! A limited number of calls is under way at a time; the others wait in the queue. A call that was cancelled while it
//! waited is never made. The calls of a queue are made in any order, also if they use the same file.
//!
//! A forked child must not use the parent's queues, and must call [`after_fork`].
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
use std::time::Duration;

pub use at_once::{open_now, read_now};
pub use calls::Call;

use super::clock::now_ns;
use super::pool::{Mailbox, SharedPool};
use super::readiness::wait_ready;
use calls::SendCall;
use ring::Ring;

/// The maximum number of calls that threads make for one queue at a time.
const MAX_IN_THREADS: usize = SharedPool::MAX_THREADS;

static THREADS: SharedPool = SharedPool::new("files");

/// Call this before a fork. It ends the threads that wait for a call.
pub fn before_fork() {
    THREADS.end_idle();
}

/// Call this in the child of a fork: the parent's threads do not exist here.
pub fn after_fork() {
    THREADS.after_fork();
}

/// A call that has ended.
pub struct Ended<T> {
    /// The number that [`Queue::start`] returned.
    pub ticket: u64,
    /// What the system call returned: a number of bytes, a new descriptor, or 0. `ECANCELED` if it was cancelled.
    pub outcome: io::Result<usize>,
    /// What the caller gave to [`Queue::start`].
    pub memory: T,
}

/// The calls of one loop. `T` owns the memory that a call uses.
pub struct Queue<T> {
    ring: Option<Ring>,
    mailbox: Arc<Mailbox<io::Result<usize>>>,
    /// By ticket. Contains waiting calls and calls that are under way.
    calls: HashMap<u64, Entry<T>>,
    waiting: VecDeque<u64>,
    in_ring: usize,
    in_threads: usize,
    last_ticket: u64,
    process: u32,
}

struct Entry<T> {
    call: Call,
    memory: T,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    InRing,
    InThread,
    /// Cancelled while it was in the ring or, if the field is false, in a thread.
    Cancelled {
        in_ring: bool,
    },
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
            waiting: VecDeque::new(),
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

    /// A descriptor that is readable while calls may have ended. The queue owns it.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.mailbox.fd()
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        self.mailbox.wake();
    }

    /// Whether another process has made this queue, which this one must not use.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.process != std::process::id()
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
    /// The process can use neither io_uring nor threads. The memory is returned.
    ///
    /// # Safety
    /// The memory to which the call's pointers refer is valid until `memory` is dropped, wherever `memory` is moved to.
    /// Nothing else writes to the buffer of a read.
    pub unsafe fn start(&mut self, call: Call, memory: T) -> Result<u64, (io::Error, T)> {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let state = match self.begin(ticket, call) {
            Ok(state) => state,
            Err(error) => return Err((error, memory)),
        };
        if state == State::Waiting {
            self.waiting.push_back(ticket);
        }
        self.calls.insert(ticket, Entry { call, memory, state });
        Ok(ticket)
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
        let (call, mailbox) = (SendCall(call), Arc::clone(&self.mailbox));
        THREADS.get().push(Box::new(move || {
            // SAFETY: the queue keeps the memory until it has taken the outcome; if the queue is dropped before that, it
            // never frees the memory.
            let outcome = unsafe { call.make() };
            Box::new(move || mailbox.put(ticket, outcome))
        }))?;
        self.in_threads += 1;
        Ok(State::InThread)
    }

    /// Cancels a call. If it has not begun, returns its memory, and the call never ends. Otherwise the call ends at some
    /// time, with any outcome; the descriptor of an `open` that succeeded nevertheless is closed. A `close` cannot be
    /// cancelled.
    pub fn cancel(&mut self, ticket: u64) -> Option<T> {
        let entry = self.calls.get_mut(&ticket)?;
        if matches!(entry.call, Call::Close { .. }) {
            return None;
        }
        match entry.state {
            State::Waiting => {
                self.waiting.retain(|waiting| *waiting != ticket);
                return self.calls.remove(&ticket).map(|entry| entry.memory);
            }
            State::InRing => {
                entry.state = State::Cancelled { in_ring: true };
                if let Some(ring) = &mut self.ring {
                    ring.cancel(ticket);
                }
            }
            State::InThread => entry.state = State::Cancelled { in_ring: false },
            State::Cancelled { .. } => {}
        }
        None
    }

    /// Removes and returns the calls that have ended, and begins calls that wait.
    #[must_use]
    pub fn take(&mut self) -> Vec<Ended<T>> {
        let mut ended = Vec::new();
        // This drains the descriptor, so it comes before the look into the ring.
        for (ticket, outcome) in self.mailbox.take() {
            self.in_threads -= 1;
            self.end(ticket, outcome, &mut ended);
        }
        while let Some((ticket, outcome)) = self.ring.as_mut().and_then(Ring::take) {
            self.in_ring -= 1;
            self.end(ticket, outcome, &mut ended);
        }
        while let Some(&ticket) = self.waiting.front() {
            let Some(call) = self.calls.get(&ticket).map(|entry| entry.call) else {
                self.waiting.pop_front();
                continue;
            };
            match self.begin(ticket, call) {
                Ok(State::Waiting) => break,
                Ok(state) => {
                    self.waiting.pop_front();
                    if let Some(entry) = self.calls.get_mut(&ticket) {
                        entry.state = state;
                    }
                }
                Err(error) => {
                    self.waiting.pop_front();
                    self.end(ticket, Err(error), &mut ended);
                }
            }
        }
        ended
    }

    fn end(&mut self, ticket: u64, mut outcome: io::Result<usize>, ended: &mut Vec<Ended<T>>) {
        let Some(Entry { call, memory, state }) = self.calls.remove(&ticket) else {
            return;
        };
        if matches!(state, State::Cancelled { .. }) {
            if let (Call::Open { .. }, Ok(fd)) = (call, &outcome) {
                calls::close(*fd as RawFd);
            }
            outcome = Err(io::Error::from_raw_os_error(libc::ECANCELED));
        } else if let Err(error) = &outcome
            && matches!(error.raw_os_error(), Some(libc::EINTR | libc::ECANCELED))
            && !matches!(call, Call::Close { .. })
        {
            // A signal, or the end of the thread that had begun it, has interrupted the call: begin it again.
            self.waiting.push_back(ticket);
            let state = State::Waiting;
            self.calls.insert(ticket, Entry { call, memory, state });
            return;
        }
        ended.push(Ended {
            ticket,
            outcome,
            memory,
        });
    }

    /// Cancels all calls and waits until they have ended, but not longer than `limit`. Returns the memory of the calls
    /// that have not begun or have ended. Call this before the queue is dropped.
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
            // Look whether calls have ended even if the wait fails, for example because a signal arrives.
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
        // The kernel or a thread may still use this memory.
        for (_, entry) in self.calls.drain() {
            std::mem::forget(entry.memory);
        }
    }
}
