//! A copy of the protocol of `src/coro/threads/shared_queue.rs`: promised items, reserved places, and waiters that are
//! woken outside of the critical section. The functions have the names that they have there.
//!
//! [`SharedQueue::get`] and [`SharedQueue::put`] mirror `aget` and `aput` of `python/grapeshot/threads.py`, which enter
//! the critical section several times. (`get` and `put` of coros and threads do the same inside of one critical
//! section, which they give up while they wait.) A [`Waiter`] stands for a task and its future, or for a thread and its
//! semaphore. How a coro leaves the queue without the critical section is modelled in `wait_queue`.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::sync::{Condvar, Mutex};

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Got(u32),
    Put,
    /// The queue is closed (`ShutDown`, `ClosedError`).
    Closed,
    Cancelled,
}

/// One call that may wait.
pub struct Waiter {
    woken_and_cancelled: Mutex<(bool, bool)>,
    changed: Condvar,
    /// The loop of the task is closed.
    is_dead: bool,
}

impl Waiter {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Self::with(false)
    }

    /// A task whose loop is closed while it waits.
    #[must_use]
    pub fn dead() -> Arc<Self> {
        Self::with(true)
    }

    fn with(is_dead: bool) -> Arc<Self> {
        Arc::new(Self {
            woken_and_cancelled: Mutex::new((false, false)),
            changed: Condvar::new(),
            is_dead,
        })
    }

    /// `Claimed::wake`.
    fn wake(&self) -> bool {
        if self.is_dead {
            return false;
        }
        self.woken_and_cancelled.lock().unwrap().0 = true;
        self.changed.notify_one();
        true
    }

    pub fn cancel(&self) {
        self.woken_and_cancelled.lock().unwrap().1 = true;
        self.changed.notify_one();
    }

    /// Returns false if the wait was cancelled, even if the waiter was woken, too.
    fn wait(&self) -> bool {
        let mut state = self.woken_and_cancelled.lock().unwrap();
        while *state == (false, false) {
            state = self.changed.wait(state).unwrap();
        }
        !state.1
    }
}

#[derive(Clone, Copy)]
enum Side {
    Getter,
    Putter,
}

#[derive(Default)]
struct State {
    items: VecDeque<u32>,
    promised: usize,
    reserved: usize,
    /// 0: no limit.
    capacity: usize,
    is_closed: bool,
    getters: VecDeque<Arc<Waiter>>,
    putters: VecDeque<Arc<Waiter>>,
}

impl State {
    fn available(&self) -> usize {
        self.items.len().saturating_sub(self.promised)
    }

    fn has_place(&self) -> bool {
        self.capacity == 0 || self.items.len() + self.reserved < self.capacity
    }

    /// `Item::take`.
    fn take_item(&mut self) -> bool {
        let is_there = self.available() > 0 || self.is_closed;
        self.promised += usize::from(is_there);
        is_there
    }

    /// `Place::take`.
    fn take_place(&mut self) -> bool {
        let is_there = self.has_place() || self.is_closed;
        self.reserved += usize::from(is_there);
        is_there
    }

    fn claim(&mut self) -> Option<(Arc<Waiter>, Side)> {
        self.check();
        if !self.getters.is_empty() && (self.is_closed || self.available() > 0) {
            self.promised += 1;
            return Some((self.getters.pop_front()?, Side::Getter));
        }
        if !self.putters.is_empty() && (self.is_closed || self.has_place()) {
            self.reserved += 1;
            return Some((self.putters.pop_front()?, Side::Putter));
        }
        None
    }

    fn push(&mut self, item: u32) -> Ended {
        self.reserved -= 1;
        if self.is_closed {
            return Ended::Closed;
        }
        self.items.push_back(item);
        Ended::Put
    }

    fn pop(&mut self) -> Ended {
        self.promised -= 1;
        let item = self.items.pop_front();
        assert!(item.is_some() || self.is_closed, "the promised item is not there");
        item.map_or(Ended::Closed, Ended::Got)
    }

    /// What holds at the end of each critical section.
    fn check(&self) {
        if !self.is_closed {
            assert!(self.promised <= self.items.len(), "an item was promised twice");
            let taken = self.items.len() + self.reserved;
            assert!(
                self.capacity == 0 || taken <= self.capacity,
                "more items than fit"
            );
        }
    }
}

pub struct SharedQueue(Mutex<State>);

impl SharedQueue {
    #[must_use]
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            capacity,
            ..State::default()
        })))
    }

    fn in_section<R>(&self, body: impl FnOnce(&mut State) -> R) -> R {
        let (result, mut claimed) = {
            let mut state = self.0.lock().unwrap();
            (body(&mut state), state.claim())
        };
        while let Some((waiter, side)) = claimed {
            let is_woken = waiter.wake();
            let mut state = self.0.lock().unwrap();
            if !is_woken {
                match side {
                    Side::Getter => state.promised -= 1,
                    Side::Putter => state.reserved -= 1,
                }
            }
            claimed = state.claim();
        }
        result
    }

    /// `_enter` for a getter: false if the caller need not wait.
    pub fn enter_getter(&self, waiter: &Arc<Waiter>) -> bool {
        self.in_section(|state| {
            let must_wait = !state.take_item();
            if must_wait {
                state.getters.push_back(Arc::clone(waiter));
            }
            must_wait
        })
    }

    /// `_enter` for a putter.
    pub fn enter_putter(&self, waiter: &Arc<Waiter>) -> bool {
        self.in_section(|state| {
            let must_wait = !state.take_place();
            if must_wait {
                state.putters.push_back(Arc::clone(waiter));
            }
            must_wait
        })
    }

    pub fn get(&self, waiter: &Arc<Waiter>) -> Ended {
        if self.enter_getter(waiter) && !waiter.wait() {
            // `_leave`
            self.in_section(|state| {
                if !remove(&mut state.getters, waiter) {
                    state.promised -= 1;
                }
            });
            return Ended::Cancelled;
        }
        self.in_section(State::pop)
    }

    pub fn put(&self, item: u32, waiter: &Arc<Waiter>) -> Ended {
        if self.enter_putter(waiter) && !waiter.wait() {
            // `_leave`
            self.in_section(|state| {
                if !remove(&mut state.putters, waiter) {
                    state.reserved -= 1;
                }
            });
            return Ended::Cancelled;
        }
        self.in_section(|state| state.push(item))
    }

    /// `close` and `shutdown`.
    pub fn close(&self) {
        self.in_section(|state| state.is_closed = true);
    }

    /// Checks that nothing is promised, reserved or waited for any more. Returns the items that are left.
    pub fn end(&self) -> Vec<u32> {
        let mut state = self.0.lock().unwrap();
        assert_eq!((state.promised, state.reserved), (0, 0), "promised, reserved");
        assert!(state.getters.is_empty() && state.putters.is_empty(), "waiters");
        state.items.drain(..).collect()
    }
}

/// Whether the waiter was still in the queue: it was not claimed.
fn remove(waiters: &mut VecDeque<Arc<Waiter>>, waiter: &Arc<Waiter>) -> bool {
    let len = waiters.len();
    waiters.retain(|other| !Arc::ptr_eq(other, waiter));
    waiters.len() < len
}
