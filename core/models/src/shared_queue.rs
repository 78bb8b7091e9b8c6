//! A copy of the protocol of `src/coro/threads/shared_queue.rs`: promised items, reserved places, and waiters that are
//! woken outside of the critical section. If a function has another name than the function that it mirrors, its comment
//! gives the original name.
//!
//! [`SharedQueue::get`] and [`SharedQueue::put`] mirror `aget` and `aput` of `python/grapeshot/threads.py`, which enter
//! the critical section several times. (`get` and `put` of coros and threads do the same inside of one critical
//! section, which they give up while they wait.) A [`Waiter`] stands for a task and its future, or for a thread and its
//! semaphore. `wait_queue` models how a coro leaves the queue without entering the critical section.

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
    /// Whether the loop of the waiting task is closed.
    is_dead: bool,
}

impl Waiter {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Self::with(false)
    }

    /// A task whose loop is closed while the task waits.
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
    /// `TaskWaiters::claimed` and `TaskWaiters::refused`.
    claimed: Vec<*const Waiter>,
    refused: Vec<*const Waiter>,
}

// SAFETY: the pointers are only compared.
unsafe impl Send for State {}

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
        let (waiter, side) = if !self.getters.is_empty() && (self.is_closed || self.available() > 0) {
            self.promised += 1;
            (self.getters.pop_front()?, Side::Getter)
        } else if !self.putters.is_empty() && (self.is_closed || self.has_place()) {
            self.reserved += 1;
            (self.putters.pop_front()?, Side::Putter)
        } else {
            return None;
        };
        self.claimed.push(Arc::as_ptr(&waiter));
        Some((waiter, side))
    }

    fn grants(&mut self, side: Side) -> &mut usize {
        match side {
            Side::Getter => &mut self.promised,
            Side::Putter => &mut self.reserved,
        }
    }

    /// `Claim::settle`.
    fn settle(&mut self, waiter: &Arc<Waiter>, side: Side, is_woken: bool) {
        if remove(&mut self.claimed, waiter) && !is_woken {
            self.refused.push(Arc::as_ptr(waiter));
            *self.grants(side) -= 1;
        }
    }

    /// `_leave`.
    fn leave(&mut self, waiter: &Arc<Waiter>, side: Side) {
        let waiting = match side {
            Side::Getter => &mut self.getters,
            Side::Putter => &mut self.putters,
        };
        let len = waiting.len();
        waiting.retain(|other| !Arc::ptr_eq(other, waiter));
        if waiting.len() == len && !remove(&mut self.refused, waiter) {
            remove(&mut self.claimed, waiter);
            *self.grants(side) -= 1;
        }
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
            state.settle(&waiter, side, is_woken);
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
            self.leave(waiter, Side::Getter);
            return Ended::Cancelled;
        }
        self.in_section(State::pop)
    }

    pub fn put(&self, item: u32, waiter: &Arc<Waiter>) -> Ended {
        if self.enter_putter(waiter) && !waiter.wait() {
            self.leave(waiter, Side::Putter);
            return Ended::Cancelled;
        }
        self.in_section(|state| state.push(item))
    }

    fn leave(&self, waiter: &Arc<Waiter>, side: Side) {
        self.in_section(|state| state.leave(waiter, side));
    }

    /// What happens when the coroutine of a waiting getter is closed.
    pub fn leave_getter(&self, waiter: &Arc<Waiter>) {
        self.leave(waiter, Side::Getter);
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
        assert!(state.claimed.is_empty(), "claimed");
        state.items.drain(..).collect()
    }
}

/// Removes the waiter. False if it is not there.
fn remove(waiters: &mut Vec<*const Waiter>, waiter: &Arc<Waiter>) -> bool {
    let place = waiters.iter().position(|other| *other == Arc::as_ptr(waiter));
    place.map(|place| waiters.swap_remove(place)).is_some()
}
