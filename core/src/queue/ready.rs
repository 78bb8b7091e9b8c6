//! The queue of callbacks that are ready to run: first in, first out.
//!
//! It is a ring whose push and pop take a few instructions. Its capacity is a power of two. Its two positions, `head`
//! and `tail`, only increase, until they wrap around at the end of the integer's range, or until a new capacity sets
//! them back. A position is reduced to an index only when an element is accessed. So the positions tell an empty ring
//! from a full one:
//!
//! ```text
//!   position   head            tail                  head == tail               empty
//!               v               v                    tail - head                length
//!    . . . . .  a  b  c  d  e   .  .  .  .           tail - head == capacity    full
//!    index = position & (capacity - 1)
//! ```
//!
//! The queue is not synchronized: the GIL protects it or, in free-threaded builds, only the loop's thread uses it.
//! Dropping the queue drops the elements that are left in it.

use std::mem::MaybeUninit;

/// The capacity of the first allocation.
const FIRST_CAPACITY: usize = 64;
/// A ring up to this capacity is never shrunk.
const KEPT_CAPACITY: usize = 4096;
/// A ring larger than `KEPT_CAPACITY` shrinks after it has become empty this many times in a row with less than a
/// quarter of it used. If once were enough, the ring would shrink and grow again with every burst of a program that
/// schedules in bursts.
const QUIET_DRAINS: u32 = 64;

/// A growing ring.
pub struct ReadyQueue<T> {
    /// Its length is zero or a power of two. Exactly the elements at positions from `head` up to `tail` are
    /// initialised.
    ring: Box<[MaybeUninit<T>]>,
    /// The position of the oldest element.
    head: usize,
    /// The position after the newest element.
    tail: usize,
    /// Where `tail` was at the last call of [`Self::note_drained`]; 0 if the ring was resized since.
    drained_at: usize,
    /// How many times in a row the ring has become empty with less than a quarter of it used.
    quiet_drains: u32,
}

impl<T> ReadyQueue<T> {
    /// An empty queue; allocates at the first push.
    #[must_use]
    pub fn new() -> Self {
        Self {
            ring: Box::new([]),
            head: 0,
            tail: 0,
            drained_at: 0,
            quiet_drains: 0,
        }
    }

    /// How many elements are queued.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    /// Whether the queue is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Appends an element.
    #[inline]
    pub fn push_back(&mut self, item: T) {
        if self.len() == self.ring.len() {
            self.grow();
        }
        let index = self.index(self.tail);
        // SAFETY: `index` masks with the length of the ring, which is not zero after the check above.
        unsafe { self.ring.get_unchecked_mut(index) }.write(item);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Takes out the oldest element.
    #[inline]
    pub fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let index = self.index(self.head);
        // SAFETY: the ring is not empty, so `index` (masked with its length) is inside it. The element at `head` is
        // before `tail`, so `push_back` has written it. It is read once, because `head` moves on.
        let item = unsafe { self.ring.get_unchecked(index).assume_init_read() };
        self.head = self.head.wrapping_add(1);
        if self.ring.len() > KEPT_CAPACITY && self.is_empty() {
            self.note_drained();
        }
        Some(item)
    }

    /// The element that has `offset` others in front of it.
    #[inline]
    #[must_use]
    pub fn get(&self, offset: usize) -> Option<&T> {
        if offset >= self.len() {
            return None;
        }
        let index = self.index(self.head.wrapping_add(offset));
        // SAFETY: positions from `head` up to `tail` are initialised, and `index` masks with the length of the ring.
        Some(unsafe { self.ring.get_unchecked(index).assume_init_ref() })
    }

    /// The elements from the oldest to the newest.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len()).map(|offset| {
            let index = self.index(self.head.wrapping_add(offset));
            // SAFETY: positions from `head` up to `tail` are initialised.
            unsafe { self.ring[index].assume_init_ref() }
        })
    }

    /// How many elements the ring can hold before it grows.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.ring.len()
    }

    /// The index of a position in the ring. Meaningless while no ring is allocated.
    #[inline]
    fn index(&self, position: usize) -> usize {
        position & self.ring.len().wrapping_sub(1)
    }

    #[cold]
    fn grow(&mut self) {
        self.resize((self.ring.len() * 2).max(FIRST_CAPACITY));
    }

    /// Called when a large ring becomes empty. Gives memory back some time after the end of a burst.
    #[cold]
    fn note_drained(&mut self) {
        // `used` is how many elements were pushed since the ring was last empty. If the ring has grown since then,
        // `used` is how many elements the ring had when it last grew, plus how many were pushed after that. In both
        // cases, `used` is at least the largest number of elements that the ring has had since it was last empty.
        let used = self.tail.wrapping_sub(self.drained_at);
        self.drained_at = self.tail;
        if used >= self.ring.len() / 4 {
            self.quiet_drains = 0;
            return;
        }
        self.quiet_drains += 1;
        if self.quiet_drains >= QUIET_DRAINS {
            self.quiet_drains = 0;
            self.resize((self.ring.len() / 4).max(KEPT_CAPACITY));
        }
    }

    /// Moves the elements to the front of a new ring. `capacity` is a power of two and large enough for them.
    fn resize(&mut self, capacity: usize) {
        let mut ring = Box::new_uninit_slice(capacity);
        let len = self.len();
        for (offset, slot) in ring[..len].iter_mut().enumerate() {
            let index = self.index(self.head.wrapping_add(offset));
            // SAFETY: positions from `head` up to `tail` are initialised. Each element is read once: the old ring is
            // freed below, which drops no elements.
            slot.write(unsafe { self.ring[index].assume_init_read() });
        }
        self.ring = ring;
        self.head = 0;
        self.tail = len;
        self.drained_at = 0;
    }
}

impl<T> Drop for ReadyQueue<T> {
    fn drop(&mut self) {
        while self.pop_front().is_some() {}
    }
}

impl<T> Default for ReadyQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::{FIRST_CAPACITY, KEPT_CAPACITY, QUIET_DRAINS, ReadyQueue};

    fn fill_and_drain(queue: &mut ReadyQueue<usize>, count: usize) {
        for item in 0..count {
            queue.push_back(item);
        }
        for item in 0..count {
            assert_eq!(queue.pop_front(), Some(item));
        }
        assert!(queue.is_empty());
    }

    #[test]
    fn allocates_at_the_first_push() {
        let mut queue = ReadyQueue::new();
        assert_eq!((queue.len(), queue.capacity(), queue.pop_front()), (0, 0, None));
        queue.push_back(1);
        assert_eq!((queue.len(), queue.capacity()), (1, FIRST_CAPACITY));
    }

    #[test]
    fn keeps_order_while_growing_with_a_wrapped_ring() {
        let mut queue = ReadyQueue::new();
        // This moves both positions to the middle of the ring, so that the elements wrap around before it grows.
        fill_and_drain(&mut queue, FIRST_CAPACITY / 2);
        for item in 0..FIRST_CAPACITY * 3 {
            queue.push_back(item);
        }
        assert_eq!(queue.capacity(), FIRST_CAPACITY * 4);
        assert!(queue.iter().copied().eq(0..FIRST_CAPACITY * 3));
        assert!((0..).map_while(|offset| queue.get(offset)).eq(queue.iter()));
        assert!(std::iter::from_fn(|| queue.pop_front()).eq(0..FIRST_CAPACITY * 3));
    }

    #[test]
    fn owns_its_elements() {
        let item = Rc::new(());
        let mut queue = ReadyQueue::new();
        for _ in 0..FIRST_CAPACITY * 3 {
            queue.push_back(Rc::clone(&item));
            queue.push_back(Rc::clone(&item));
            drop(queue.pop_front());
        }
        assert_eq!(Rc::strong_count(&item), 1 + queue.len());
        drop(queue);
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn positions_may_wrap_around_the_integer() {
        let mut queue = ReadyQueue::new();
        fill_and_drain(&mut queue, 1);
        (queue.head, queue.tail) = (usize::MAX - 2, usize::MAX - 2);
        fill_and_drain(&mut queue, FIRST_CAPACITY * 2);
    }

    #[test]
    fn shrinks_some_time_after_a_burst() {
        let mut queue = ReadyQueue::new();
        fill_and_drain(&mut queue, KEPT_CAPACITY * 8);
        let burst = queue.capacity();
        assert_eq!(burst, KEPT_CAPACITY * 8);
        for _ in 1..QUIET_DRAINS {
            fill_and_drain(&mut queue, 1);
        }
        assert_eq!(queue.capacity(), burst);
        fill_and_drain(&mut queue, 1);
        assert_eq!(queue.capacity(), burst / 4);
        for _ in 0..QUIET_DRAINS * 4 {
            fill_and_drain(&mut queue, 1);
        }
        assert_eq!(queue.capacity(), KEPT_CAPACITY);
        fill_and_drain(&mut queue, KEPT_CAPACITY * 2);
    }

    #[test]
    fn keeps_its_memory_under_repeated_bursts() {
        let mut queue = ReadyQueue::new();
        for _ in 0..8 {
            fill_and_drain(&mut queue, KEPT_CAPACITY * 2);
            for _ in 0..QUIET_DRAINS / 2 {
                fill_and_drain(&mut queue, 1);
            }
            assert_eq!(queue.capacity(), KEPT_CAPACITY * 2);
        }
    }

    proptest! {
        /// Compares the queue with a `VecDeque` over runs of pushes and pops.
        #[test]
        fn behaves_like_a_deque(runs in prop::collection::vec((0_usize..300, 0_usize..300), 0..40)) {
            let mut queue = ReadyQueue::new();
            let mut model = VecDeque::new();
            let mut next = 0_u32;
            for (pushes, pops) in runs {
                for _ in 0..pushes {
                    queue.push_back(next);
                    model.push_back(next);
                    next += 1;
                }
                prop_assert!(queue.iter().eq(model.iter()));
                for _ in 0..pops {
                    prop_assert_eq!(queue.pop_front(), model.pop_front());
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.is_empty(), model.is_empty());
            }
        }
    }
}
