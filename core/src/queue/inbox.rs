//! The inbox: other threads pass items to the loop, and wake it if it sleeps.
//!
//! It makes `call_soon_threadsafe` possible without a lock, and with one system call per sleep of the loop instead of
//! one per call. Producers push from any thread, and the loop pops. Before the loop blocks, it calls
//! [`Inbox::begin_sleep`]. After that, [`Inbox::push`] tells the first producer, and no other, to wake the loop.
//!
//! ```text
//!   producer (any thread)                loop
//!   P1  push the item                    L1  sleeping = true
//!       --- fence SeqCst ---                 --- fence SeqCst ---
//!   P2  if sleeping, swap it to          L2  if the queue has an item:
//!       false; if the swap returned          sleeping = false, do not block
//!       true, wake the loop
//! ```
//!
//! No item is lost, because all `SeqCst` fences are in a single order. If the producer's fence comes first, L2 sees the
//! item of P1. If the loop's fence comes first, P2 sees the flag of L1. Without the fences, each side could read before
//! the other's write arrives, and the loop would sleep although the queue has an item.
//!
//! Only the loop's thread may pop and sleep. Any thread may push. The inbox only decides which producer must wake the
//! loop; the producer decides how to wake it.

use super::parts::{AtomicBool, Ordering, SegQueue, fence};

/// A lock-free queue with one consumer, which may sleep.
pub struct Inbox<T: Send> {
    items: SegQueue<T>,
    /// The consumer sets this flag before it blocks, and clears the flag when it is awake again. If a producer clears
    /// the flag before the consumer does, that producer must wake the consumer.
    is_sleeping: AtomicBool,
}

impl<T: Send> Inbox<T> {
    /// An empty inbox, whose consumer is awake.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            items: SegQueue::new(),
            is_sleeping: AtomicBool::new(false),
        }
    }

    /// Passes an item to the consumer, from any thread. Returns true if the caller must wake the consumer. That is so
    /// if the consumer is asleep and no other producer was told to wake it.
    #[inline]
    #[must_use = "if it returns true, the caller must wake the consumer"]
    pub fn push(&self, item: T) -> bool {
        self.items.push(item);
        fence(Ordering::SeqCst);
        self.claim_wake()
    }

    /// Returns true if the caller must wake the consumer. That is so if the consumer is asleep and no other producer
    /// was told to wake it.
    ///
    /// This is for a producer that does not put its item into the inbox, but passes it by other means under a lock. The
    /// consumer must hold the same lock when it checks for such items, and must keep the lock until after the call of
    /// [`Inbox::begin_locked_sleep`].
    #[inline]
    #[must_use = "if it returns true, the caller must wake the consumer"]
    pub fn claim_wake(&self) -> bool {
        // Usually the consumer is awake, and the load alone is enough. It leaves the cache line shared between
        // processors, which a swap would not.
        self.is_sleeping.load(Ordering::Relaxed) && self.is_sleeping.swap(false, Ordering::Relaxed)
    }

    /// Takes out an item. The items of one producer come out in the order in which it pushed them. Only the consumer
    /// may call this.
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

    /// How many items are in the queue at this moment.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Announces that the consumer is about to block. Returns true if the consumer may block; the next producer is then
    /// told to wake it. Returns false if the consumer must not block, because an item has arrived. Only the consumer
    /// may call this.
    #[inline]
    #[must_use = "if it returns false, the consumer must not block"]
    pub fn begin_sleep(&self) -> bool {
        self.is_sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.items.is_empty() {
            return true;
        }
        // A producer may have cleared the flag in between. That producer wakes the consumer, although the consumer is
        // awake already. This does no harm.
        self.end_sleep();
        false
    }

    /// Announces that the consumer is about to block, for an inbox whose producers all use [`Inbox::claim_wake`]. The
    /// consumer must hold the producers' lock from the check that found no item until after this call. So no item can
    /// arrive between the two, and the lock takes the place of the fences. Only the consumer may call this.
    #[inline]
    pub fn begin_locked_sleep(&self) {
        self.is_sleeping.store(true, Ordering::Relaxed);
    }

    /// Announces that the consumer is awake again, for whatever reason. Only the consumer may call this.
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
        assert!(!inbox.begin_sleep(), "the inbox has an item");
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
    fn one_producer_claims_the_wake_after_a_locked_sleep() {
        let inbox = Inbox::<()>::new();
        assert!(!inbox.claim_wake(), "the consumer is awake");
        inbox.begin_locked_sleep();
        assert!(inbox.claim_wake(), "the consumer sleeps");
        assert!(!inbox.claim_wake(), "it has been woken");
        inbox.begin_locked_sleep();
        inbox.end_sleep();
        assert!(!inbox.claim_wake());
    }

    #[test]
    fn a_consumer_that_is_awake_again_is_not_woken() {
        let inbox = Inbox::new();
        assert!(inbox.begin_sleep());
        inbox.end_sleep();
        assert!(!inbox.push(1));
    }

    #[test]
    fn drops_items_that_were_not_taken() {
        let item = Arc::new(());
        let inbox = Inbox::new();
        for _ in 0..100 {
            let _ = inbox.push(Arc::clone(&item));
        }
        drop(inbox.pop());
        drop(inbox);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    /// Far longer than any wait on a loaded machine. If a park lasts this long, its wake was lost.
    const CAP: Duration = Duration::from_secs(60);

    /// Takes `total` items, and blocks whenever the inbox allows it. Each item is (producer, number). The numbers of
    /// each producer must come in order, without a gap.
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
                let deadline = std::time::Instant::now() + CAP;
                while wakes.load(Ordering::Acquire) == woken {
                    assert!(std::time::Instant::now() < deadline, "the consumer was not woken");
                    thread::park_timeout(CAP);
                }
                inbox.end_sleep();
            }
            woken = wakes.load(Ordering::Acquire);
        }
        assert!(inbox.is_empty());
    }

    fn run(producers: usize, each: usize, pause: impl Fn(usize) + Sync) {
        let inbox = Inbox::new();
        // Each wake increments this number, so that the test itself does not lose a wake that comes before the park.
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
        // The producer pauses for a varying number of spins, so that its pushes come at every point of the consumer's
        // transition to sleep.
        run(1, 20_000, |number| {
            for _ in 0..number % 257 {
                std::hint::spin_loop();
            }
        });
    }
}
