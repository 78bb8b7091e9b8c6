//! The inbox: what other threads hand over to the loop, and which of them must wake it.
//!
//! Purpose: `call_soon_threadsafe` without a lock, and with one system call per sleep of the loop instead
//! of one per call. Producers push from any thread; the loop pops. Before it blocks, the loop says so
//! with [`Inbox::begin_sleep`]; exactly one producer per sleep is then told to wake it.
//!
//! ```text
//!   producer (any thread)                loop
//!   P1  push the item                    L1  sleeping = true
//!       --- fence SeqCst ---                 --- fence SeqCst ---
//!   P2  sleeping? then swap it to        L2  anything in the queue?
//!       false; who got true wakes            then sleeping = false, do not block
//! ```
//!
//! No item is lost: all `SeqCst` fences have a single order, so one of the two comes first. If it is the producer's, L2
//! sees the item of P1; if it is the loop's, P2 sees the flag of L1. Without the fences a processor may let both sides
//! read before the other's write arrives, and the loop would sleep although the queue has an item.
//!
//! Owner: the loop's thread pops and sleeps, every thread pushes. It must not know how the loop is woken.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::SegQueue;

/// A lock-free queue into one sleeping consumer.
pub struct Inbox<T: Send> {
    items: SegQueue<T>,
    /// Set by the consumer before it blocks; cleared by the one producer that will wake it.
    is_sleeping: AtomicBool,
}

impl<T: Send> Inbox<T> {
    /// An empty inbox of a consumer that is awake.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            items: SegQueue::new(),
            is_sleeping: AtomicBool::new(false),
        }
    }

    /// Hands an item over, from any thread. Returns true if the consumer sleeps and nobody has woken it yet: then the
    /// caller must wake it.
    #[inline]
    #[must_use = "if it returns true, the consumer has to be woken"]
    pub fn push(&self, item: T) -> bool {
        self.items.push(item);
        fence(Ordering::SeqCst);
        self.claim_wake()
    }

    /// True if the consumer sleeps and nobody woke it yet: then the caller must wake it. For a producer that hands its
    /// item over without the inbox: under a lock that the consumer holds whenever it checks its work, and releases only
    /// after [`Inbox::begin_sleep`].
    #[inline]
    #[must_use = "if it returns true, the consumer has to be woken"]
    pub fn claim_wake(&self) -> bool {
        // The load keeps the cache line shared while the consumer is awake, which is the common case.
        self.is_sleeping.load(Ordering::Relaxed) && self.is_sleeping.swap(false, Ordering::Relaxed)
    }

    /// Takes out an item; items of one producer come in the order it pushed them. For the consumer.
    #[inline]
    pub fn pop(&self) -> Option<T> {
        self.items.pop()
    }

    /// Whether the inbox is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// How many items wait, a snapshot.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Says that the consumer is about to block. Returns false if it must not block, because an item has arrived; true
    /// if it may block, and the next push will wake it. For the consumer.
    #[inline]
    #[must_use = "if it returns false, the consumer must not block"]
    pub fn begin_sleep(&self) -> bool {
        self.is_sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.items.is_empty() {
            return true;
        }
        // A producer may have taken the flag in between. It will wake a consumer that is awake, which does no harm.
        self.end_sleep();
        false
    }

    /// Says that the consumer is awake again, for whatever reason. For the consumer.
    #[inline]
    pub fn end_sleep(&self) {
        self.is_sleeping.store(false, Ordering::Relaxed);
    }
}

impl<T: Send> Default for Inbox<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::Inbox;

    #[test]
    fn tells_exactly_one_producer_per_sleep() {
        let inbox = Inbox::new();
        assert!(!inbox.push(1), "the consumer is awake");
        assert!(!inbox.begin_sleep(), "something is there");
        assert!(!inbox.push(2), "the consumer did not sleep");
        assert_eq!(
            (inbox.len(), inbox.pop(), inbox.pop(), inbox.pop()),
            (2, Some(1), Some(2), None)
        );
        assert!(inbox.is_empty());
        assert!(inbox.begin_sleep());
        assert!(inbox.push(3), "the consumer sleeps");
        assert!(!inbox.push(4), "it has been woken");
        inbox.end_sleep();
        assert!(!inbox.push(5));
    }

    #[test]
    fn a_consumer_that_woke_by_itself_is_not_woken() {
        let inbox = Inbox::new();
        assert!(inbox.begin_sleep());
        inbox.end_sleep();
        assert!(!inbox.push(1));
    }

    #[test]
    fn drops_what_nobody_took() {
        let item = Arc::new(());
        let inbox = Inbox::new();
        for _ in 0..100 {
            let _ = inbox.push(Arc::clone(&item));
        }
        drop(inbox.pop());
        drop(inbox);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    /// Far beyond any wait on a loaded machine: a park that lasts so long has lost its wake.
    const LOST: Duration = Duration::from_secs(60);

    /// Takes items until `total` have come, blocking whenever the inbox allows it. Each item is (producer,
    /// number), and each producer's numbers must come in order, without a gap.
    fn consume(inbox: &Inbox<(usize, usize)>, wakes: &AtomicUsize, producers: usize, total: usize) {
        let mut next = vec![0; producers];
        let mut taken = 0;
        let mut woken = 0;
        while taken < total {
            while let Some((producer, number)) = inbox.pop() {
                assert_eq!(number, next[producer], "of producer {producer}");
                next[producer] += 1;
                taken += 1;
            }
            if taken < total && inbox.begin_sleep() {
                let deadline = std::time::Instant::now() + LOST;
                while wakes.load(Ordering::Acquire) == woken {
                    assert!(std::time::Instant::now() < deadline, "nobody woke the consumer");
                    thread::park_timeout(LOST);
                }
                inbox.end_sleep();
            }
            woken = wakes.load(Ordering::Acquire);
        }
        assert!(inbox.is_empty());
    }

    fn run(producers: usize, each: usize, pause: impl Fn(usize) + Sync) {
        let inbox = Inbox::new();
        // A wake is a number that grows, so that a wake before the park is not lost by the test itself.
        let wakes = AtomicUsize::new(0);
        let consumer = thread::current();
        thread::scope(|scope| {
            for producer in 0..producers {
                let (inbox, wakes, consumer, pause) = (&inbox, &wakes, &consumer, &pause);
                scope.spawn(move || {
                    for number in 0..each {
                        if inbox.push((producer, number)) {
                            wakes.fetch_add(1, Ordering::Release);
                            consumer.unpark();
                        }
                        pause(number);
                    }
                });
            }
            consume(&inbox, &wakes, producers, producers * each);
        });
    }

    #[test]
    fn loses_nothing_from_many_threads() {
        run(4, 20_000, |_| {});
    }

    #[test]
    fn loses_nothing_around_the_moment_of_falling_asleep() {
        // One producer that pauses for a varying number of spins meets the consumer at every point of its
        // way to sleep.
        run(1, 20_000, |number| {
            for _ in 0..number % 257 {
                std::hint::spin_loop();
            }
        });
    }
}
