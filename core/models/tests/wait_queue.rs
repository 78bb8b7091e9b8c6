//! A coro leaves a shared `WaitQueue` in its own thread, while another thread grants the coro's request: exactly one of
//! the two threads wakes the coro, and no grant is lost.

use std::sync::Arc;

use grapeshot_models::exclusive::Exclusive;
use grapeshot_models::wait_queue::{Coro, WaitQueue};
use loom::cell::Cell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Stands for a lock or a queue: it has units to give away, and coros wait for them.
struct Source {
    waiters: WaitQueue,
    /// The number of free units. The mutex stands for the critical section of the lock or the queue.
    free: Mutex<usize>,
    /// How many waits were successful.
    taken: AtomicUsize,
}

impl Source {
    /// A source without free units. The coros wait for it.
    fn awaited_by(coros: &[&Arc<Coro>]) -> Arc<Self> {
        let source = Self {
            waiters: WaitQueue::new(),
            free: Mutex::new(0),
            taken: AtomicUsize::new(0),
        };
        for coro in coros {
            source.waiters.push(coro);
        }
        Arc::new(source)
    }

    /// Gives a unit to the first waiter, if there is one.
    fn give(&self) {
        let mut free = self.free.lock().unwrap();
        if !self.waiters.claim_first() {
            *free += 1;
        }
    }

    /// Waits for the coro's entry in the ready queue, and runs the coro.
    fn run(&self, coro: &Coro, is_interrupted: bool) {
        while coro.entries() == 0 {
            thread::yield_now();
        }
        self.end_wait(coro, is_interrupted);
    }

    /// What the coro does when it runs again. If it was interrupted, it passes its grant on.
    fn end_wait(&self, coro: &Coro, is_interrupted: bool) {
        if !coro.resume().expect("the coro is ready") {
            return;
        }
        if is_interrupted {
            self.give();
        } else {
            self.taken.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn total(&self) -> usize {
        *self.free.lock().unwrap() + self.taken.load(Ordering::Relaxed)
    }
}

/// Runs a model twice, because loom does not find all orders by itself. If a thread loads a variable, and then another
/// thread loads it and stores into it, loom does not try the order in which the first load comes after the store. The
/// model passes its argument on to `race`, so the second run starts the two threads in the opposite order.
fn check(model: impl Fn(bool) + Copy + Sync + Send + 'static) {
    for swaps in [false, true] {
        grapeshot_models::check(move || model(swaps));
    }
}

/// Runs two threads, and waits for both. `swaps` says whether `other` starts first.
fn race(swaps: bool, one: impl FnOnce() + 'static, other: impl FnOnce() + 'static) {
    let threads = if swaps {
        [thread::spawn(other), thread::spawn(one)]
    } else {
        [thread::spawn(one), thread::spawn(other)]
    };
    for thread in threads {
        thread.join().unwrap();
    }
}

/// A clone for a closure.
fn share<T>(shared: &Arc<T>) -> Arc<T> {
    Arc::clone(shared)
}

#[test]
fn a_coro_is_woken_once_by_its_timeout_or_by_another_thread() {
    check(|swaps| {
        let coro = Coro::new();
        let source = Source::awaited_by(&[&coro]);
        let own = {
            let (source, coro) = (share(&source), share(&coro));
            move || {
                coro.make_ready(&source.waiters);
                source.run(&coro, false);
            }
        };
        let granting = {
            let source = share(&source);
            move || source.give()
        };
        race(swaps, own, granting);
        assert_eq!(coro.entries(), 1);
        assert_eq!(coro.resume(), None, "the coro is not made ready again");
        assert_eq!(source.total(), 1);
    });
}

/// When a thread ends, `coro/ending.rs::end` resumes the thread's coros without waiting for their entries in the ready
/// queue. These entries later have no effect.
#[test]
fn a_coro_whose_thread_ends_passes_its_grant_on() {
    check(|swaps| {
        let coro = Coro::new();
        let source = Source::awaited_by(&[&coro]);
        let own = {
            let (source, coro) = (share(&source), share(&coro));
            move || {
                coro.make_ready(&source.waiters);
                source.end_wait(&coro, true);
            }
        };
        let granting = {
            let source = share(&source);
            move || source.give()
        };
        race(swaps, own, granting);
        assert_eq!(coro.resume(), None, "the coro is not made ready again");
        assert_eq!(*source.free.lock().unwrap(), 1);
    });
}

#[test]
fn a_coro_that_waits_again_gets_the_grant_of_the_second_wait() {
    check(|swaps| {
        let coro = Coro::new();
        let source = Source::awaited_by(&[&coro]);
        let own = {
            let (source, coro) = (share(&source), share(&coro));
            move || {
                coro.make_ready(&source.waiters);
                source.run(&coro, false);
                let free = source.free.lock().unwrap();
                if *free == 0 {
                    source.waiters.push(&coro);
                }
            }
        };
        let granting = {
            let source = share(&source);
            move || {
                source.give();
                source.give();
            }
        };
        race(swaps, own, granting);
        if coro.entries() == 2 {
            source.end_wait(&coro, false);
        }
        assert_eq!(source.total(), 2);
    });
}

#[test]
fn the_grant_of_an_interrupted_coro_goes_to_the_next_one() {
    check(|swaps| {
        let (first, second) = (Coro::new(), Coro::new());
        let source = Source::awaited_by(&[&first, &second]);
        let own = {
            let (source, first) = (share(&source), share(&first));
            move || {
                first.make_ready(&source.waiters);
                source.run(&first, true);
            }
        };
        let granting = {
            let (source, second) = (share(&source), share(&second));
            move || {
                source.give();
                source.run(&second, false);
            }
        };
        race(swaps, own, granting);
        assert_eq!((first.entries(), second.entries()), (1, 1));
        assert_eq!(
            source.taken.load(Ordering::Relaxed),
            1,
            "the second coro has the unit"
        );
    });
}

#[test]
fn neighbours_leave_the_queue_at_the_same_time() {
    check(|swaps| {
        let (first, second) = (Coro::new(), Coro::new());
        let source = Source::awaited_by(&[&first, &second]);
        let own = {
            let (source, first) = (share(&source), share(&first));
            move || {
                first.make_ready(&source.waiters);
                source.run(&first, false);
            }
        };
        let other = {
            let (source, second) = (share(&source), share(&second));
            move || {
                source.give();
                second.make_ready(&source.waiters);
                source.run(&second, false);
            }
        };
        race(swaps, own, other);
        assert_eq!((first.entries(), second.entries()), (1, 1));
        assert_eq!(source.total(), 1);
    });
}

/// loom reports an error if two threads could use the cell at the same time.
struct Guarded(Exclusive, Cell<usize>);

// SAFETY: the cell is used only inside of the lock.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

#[test]
fn one_thread_at_a_time_is_inside_of_the_spin_lock() {
    check(|swaps| {
        let guarded = Arc::new(Guarded(Exclusive::new(), Cell::new(0)));
        let increase = || {
            let guarded = share(&guarded);
            move || guarded.0.with(|| guarded.1.set(guarded.1.get() + 1))
        };
        race(swaps, increase(), increase());
        assert_eq!(guarded.1.get(), 2);
    });
}
