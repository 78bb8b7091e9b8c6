//! The inbox: no item is lost, the loop is always woken, and nothing is left behind in the inbox of a closed loop.
//!
//! `Inbox` is the real one. The rest mirrors `Reactor::{push_from_outside, empty_closed_inbox, close}` and
//! `ReadyWork::{empty_inbox_while, drain_inbox, begin_sleep, end_sleep, wake, note_woken}`.

use std::sync::atomic::{AtomicUsize as Count, Ordering::Relaxed};

use grapeshot_models::check;
use grapeshot_models::inbox::Inbox;
use loom::sync::atomic::{AtomicBool, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// Stands for the eventfd: `wait` blocks until another thread has written to it, and then reads it.
struct Waker {
    is_written: Mutex<bool>,
    changed: Condvar,
}

impl Waker {
    fn wake(&self) {
        *self.is_written.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut is_written = self.is_written.lock().unwrap();
        while !*is_written {
            is_written = self.changed.wait(is_written).unwrap();
        }
        *is_written = false;
    }
}

struct Loop<T: Send> {
    inbox: Inbox<T>,
    waker: Waker,
    is_closed: AtomicBool,
}

impl<T: Send> Loop<T> {
    fn new() -> Arc<Self> {
        let inbox = Inbox::new();
        // Use the inbox once before other threads see it: loom creates the objects inside it at their first use (see
        // `parts`).
        assert!(inbox.is_empty() && !inbox.claim_wake());
        Arc::new(Self {
            inbox,
            waker: Waker {
                is_written: Mutex::new(false),
                changed: Condvar::new(),
            },
            is_closed: AtomicBool::new(false),
        })
    }

    fn push_from_outside(&self, item: T) {
        if self.inbox.push(item) {
            self.waker.wake();
        }
        fence(Ordering::SeqCst);
        while self.is_closed.load(Ordering::Relaxed)
            && let Some(item) = self.inbox.pop()
        {
            drop(item);
        }
    }

    /// Runs until `count` items have come. If a wake is lost, this sleeps forever, and loom reports a deadlock.
    fn run(&self, count: usize) -> Vec<T> {
        let mut items = Vec::new();
        loop {
            while let Some(item) = self.inbox.pop() {
                items.push(item);
            }
            if items.len() == count {
                return items;
            }
            if self.inbox.begin_sleep() {
                self.waker.wait();
                self.inbox.end_sleep();
            }
        }
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.inbox.is_empty() {
            while let Some(item) = self.inbox.pop() {
                drop(item);
            }
        }
    }
}

#[test]
fn the_loop_is_woken_for_every_item_of_one_thread() {
    check(|| {
        let event_loop = Loop::new();
        let producer = {
            let event_loop = Arc::clone(&event_loop);
            thread::spawn(move || {
                event_loop.push_from_outside(1);
                event_loop.push_from_outside(2);
            })
        };
        assert_eq!(
            event_loop.run(2),
            [1, 2],
            "in the order in which they were pushed"
        );
        producer.join().unwrap();
    });
}

#[test]
fn the_loop_is_woken_for_every_item_of_several_threads() {
    check(|| {
        let event_loop = Loop::new();
        let producers: Vec<_> = (0..2)
            .map(|number| {
                let event_loop = Arc::clone(&event_loop);
                thread::spawn(move || event_loop.push_from_outside(number))
            })
            .collect();
        let mut items = event_loop.run(2);
        items.sort_unstable();
        assert_eq!(items, [0, 1]);
        for producer in producers {
            producer.join().unwrap();
        }
    });
}

/// An item that increases a counter when it is dropped. The counter is an atomic of `std`, which loom does not know, so
/// counting does not order the threads in the model.
struct Counted(std::sync::Arc<Count>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_closed_loop_keeps_nothing() {
    check(|| {
        let event_loop = Loop::new();
        let dropped = std::sync::Arc::new(Count::new(0));
        let producers: Vec<_> = (0..2)
            .map(|_| {
                let (event_loop, item) = (Arc::clone(&event_loop), Counted(std::sync::Arc::clone(&dropped)));
                thread::spawn(move || event_loop.push_from_outside(item))
            })
            .collect();
        event_loop.close();
        for producer in producers {
            producer.join().unwrap();
        }
        assert!(event_loop.inbox.is_empty(), "an item was left behind");
        assert_eq!(dropped.load(Relaxed), 2, "each item is dropped once");
    });
}
