//! The timers: ordered by deadline, then by the order in which they were added.
//!
//! The heap finds the next deadline in O(1), and adds and removes timers in O(log n). Timers with equal deadlines come
//! out in insertion order, because every timer gets the next sequence number. Most cancelled timers are cancelled soon
//! after they were added. Such a timer is usually still the last entry of one of the heap's two parts (the array and
//! the run, see below), and [`TimerHeap::remove_last_if`] removes it at once. The loop leaves other cancelled timers in
//! the heap. It removes them later: one by one when they come to the top, or all at once with [`TimerHeap::retain`].
//!
//! ```text
//!   array   0 | 1 2 | 3 4 5 6 | 7 ...            parent of i      (i - 1) / 2
//!           ^   children of 0                    children of i    2 i + 1, 2 i + 2
//!           the earliest                         no timer is earlier than its parent
//! ```
//!
//! Most programs set many timers with the same delay, so each new deadline is at or after the one before it. A sorted
//! deque beside the array, the *run*, holds these timers: they are appended to the run and leave from its front, both
//! in O(1). A timer whose deadline is before the last deadline in the run goes to the array.
//!
//! When many timers of the array are due at once, [`TimerHeap::sort_due`] sorts them into the front of the run. That is
//! cheaper than taking them from the array one by one, because each removal moves entries along a path through the
//! whole depth of the heap.
//!
//! The heap belongs to the loop's thread.

use std::collections::VecDeque;
use std::ptr;

/// `wake_when` examines at most this many entries of the run, and at most this many of the array.
const MAX_EXAMINED: usize = 32;

/// While timers are taken out one by one, an array or run with memory for this many timers or fewer keeps its memory.
const KEPT_CAPACITY: usize = 1024;

struct Entry<T> {
    when_ns: u64,
    seq: u64,
    item: T,
}

impl<T> Entry<T> {
    /// Deadline and sequence number in one number, so that a comparison does not need a branch.
    #[inline]
    fn key(&self) -> u128 {
        u128::from(self.when_ns) << 64 | u128::from(self.seq)
    }

    #[inline]
    fn is_before(&self, other: &Self) -> bool {
        self.key() < other.key()
    }
}

/// A heap of elements, each with a deadline.
pub struct TimerHeap<T> {
    /// The array of the heap: each entry is after its parent, see the module's documentation.
    entries: Vec<Entry<T>>,
    /// The sorted run: each entry is after the one in front of it.
    run: VecDeque<Entry<T>>,
    next_seq: u64,
}

impl<T> TimerHeap<T> {
    /// An empty heap; allocates at the first push.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            entries: Vec::new(),
            run: VecDeque::new(),
            next_seq: 0,
        }
    }

    /// How many timers the heap holds, cancelled ones included.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() + self.run.len()
    }

    /// Whether the heap is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.run.is_empty()
    }

    /// Adds a timer and returns its sequence number, which is greater than all earlier ones.
    #[inline]
    pub fn push(&mut self, when_ns: u64, item: T) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        let entry = Entry { when_ns, seq, item };
        match self.run.back() {
            Some(last) if when_ns < last.when_ns => {
                self.entries.push(entry);
                let last = self.entries.len() - 1;
                // SAFETY: the last entry exists, and `rise` follows at once.
                let (hole, entry) = unsafe { Hole::new(&mut self.entries, last) };
                hole.rise(entry);
            }
            _ => self.run.push_back(entry),
        }
        seq
    }

    /// The earliest deadline.
    #[inline]
    #[must_use]
    pub fn peek_when(&self) -> Option<u64> {
        self.earliest().map(|entry| entry.when_ns)
    }

    /// The deadline and the element of the earliest timer.
    #[inline]
    #[must_use]
    pub fn peek(&self) -> Option<(u64, &T)> {
        self.earliest().map(|entry| (entry.when_ns, &entry.item))
    }

    /// When the loop must wake up, if timers that `has_slack` accepts may fire up to `slack_ns` late and all others
    /// must fire on time. That is the earliest deadline of a timer without slack, or `slack_ns` after the earliest
    /// deadline of a timer with slack, whichever comes first. At most `MAX_EXAMINED` entries of the run, and as many of
    /// the array, are examined. Entries beyond these count as if they had no slack, so the result may be earlier than
    /// necessary but never too late.
    #[inline]
    #[must_use]
    pub fn wake_when(&self, slack_ns: u64, has_slack: impl Fn(&T) -> bool) -> Option<u64> {
        let (first_ns, first) = self.peek()?;
        if !has_slack(first) {
            return Some(first_ns);
        }
        let mut wake_ns = first_ns.saturating_add(slack_ns);
        for (examined, entry) in self.run.iter().enumerate() {
            if entry.when_ns >= wake_ns {
                break;
            }
            if examined == MAX_EXAMINED || !has_slack(&entry.item) {
                wake_ns = entry.when_ns;
                break;
            }
        }
        if self.entries.first().is_some_and(|top| top.when_ns < wake_ns) {
            wake_ns = self.wake_when_of_heap(wake_ns, has_slack);
        }
        Some(wake_ns)
    }

    /// The earliest deadline of a timer in the array that has no slack or was not examined, or `wake_ns` if that is
    /// earlier.
    fn wake_when_of_heap(&self, mut wake_ns: u64, has_slack: impl Fn(&T) -> bool) -> u64 {
        // Only entries with deadlines before `wake_ns` matter. No parent is later than its children, so the search goes
        // from the root down, level by level, and does not look below entries with later deadlines.
        let mut indices = [0_usize; 1 + 2 * MAX_EXAMINED];
        let mut len = 1;
        let mut examined = 0;
        while examined < len {
            let index = indices[examined];
            let entry = self.entries.get(index).filter(|entry| entry.when_ns < wake_ns);
            if let Some(entry) = entry {
                if examined < MAX_EXAMINED && has_slack(&entry.item) {
                    indices[len] = index * 2 + 1;
                    indices[len + 1] = index * 2 + 2;
                    len += 2;
                } else {
                    // The children of this entry are not earlier, so they need not be examined.
                    wake_ns = entry.when_ns;
                }
            }
            examined += 1;
        }
        wake_ns
    }

    #[inline]
    fn earliest(&self) -> Option<&Entry<T>> {
        match (self.run.front(), self.entries.first()) {
            (Some(first), Some(top)) => Some(if top.is_before(first) { top } else { first }),
            (first, top) => first.or(top),
        }
    }

    /// Takes out the earliest timer.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        let in_run = match (self.run.front(), self.entries.first()) {
            (Some(first), Some(top)) => first.is_before(top),
            (first, _) => first.is_some(),
        };
        if in_run {
            let first = self.run.pop_front()?;
            self.shrink_run_if_sparse();
            return Some(first.item);
        }
        let last = self.entries.pop()?;
        let item = if self.entries.is_empty() {
            last.item
        } else {
            // SAFETY: the first entry exists, and `sink` follows at once.
            let (hole, first) = unsafe { Hole::new(&mut self.entries, 0) };
            hole.sink(last);
            first.item
        };
        self.shrink_if_sparse();
        Some(item)
    }

    /// Takes out the earliest timer if its deadline is `now_ns` or before.
    #[inline]
    pub fn pop_due(&mut self, now_ns: u64) -> Option<T> {
        match self.peek_when() {
            Some(when_ns) if when_ns <= now_ns => self.pop(),
            _ => None,
        }
    }

    /// Moves the due timers, which have a deadline of `now_ns` or earlier, from the array to the run. [`Self::pop`]
    /// then takes out each of them in O(1). The order stays the same. For an array of n timers of which k are due, this
    /// takes O(n + k log k), so it pays only if many are due.
    pub fn sort_due(&mut self, now_ns: u64) {
        if self.entries.first().is_none_or(|first| first.when_ns > now_ns) {
            return;
        }
        let is_due = |entry: &mut Entry<T>| entry.when_ns <= now_ns;
        let mut due: Vec<_> = self.entries.extract_if(.., is_due).collect();
        // Due timers at the front of the run are sorted too. All timers that stay in the run are later than these.
        while self.run.front().is_some_and(|first| first.when_ns <= now_ns) {
            due.extend(self.run.pop_front());
        }
        due.sort_unstable_by_key(Entry::key);
        for entry in due.into_iter().rev() {
            self.run.push_front(entry);
        }
        self.settle();
    }

    /// The element of the run that has `offset` others in front of it.
    #[inline]
    #[must_use]
    pub fn peek_run(&self, offset: usize) -> Option<&T> {
        self.run.get(offset).map(|entry| &entry.item)
    }

    /// Takes out the last element of the run if `is_wanted` accepts it. Otherwise takes out the last element of the
    /// array if `is_wanted` accepts that one. This takes O(1). A timer that was just added is one of these two
    /// elements, unless its deadline is so early that it was moved towards the root.
    #[inline]
    pub fn remove_last_if(&mut self, is_wanted: impl Fn(&T) -> bool) -> Option<T> {
        if self.run.back().is_some_and(|last| is_wanted(&last.item)) {
            let last = self.run.pop_back()?;
            self.shrink_run_if_sparse();
            return Some(last.item);
        }
        // The last entry has no children, so the array without it is still a heap.
        let last = self.entries.pop_if(|entry| is_wanted(&entry.item))?;
        self.shrink_if_sparse();
        Some(last.item)
    }

    /// Keeps the timers for which `is_kept` returns true and appends the others to `dropped`, in O(n). If less than a
    /// quarter of the memory is used afterwards, gives some of it back.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&T) -> bool, dropped: &mut Vec<T>) {
        let removed = self.entries.extract_if(.., |entry| !is_kept(&entry.item));
        dropped.extend(removed.map(|entry| entry.item));
        // Take each entry out at the front of the run, and put the kept ones back at the end, in the same order.
        for _ in 0..self.run.len() {
            match self.run.pop_front() {
                Some(entry) if is_kept(&entry.item) => self.run.push_back(entry),
                entry => dropped.extend(entry.map(|entry| entry.item)),
            }
        }
        self.settle();
    }

    /// Restores the order of the heap after entries were taken out of the middle of the array, and gives memory back if
    /// less than a quarter of it is used.
    fn settle(&mut self) {
        // Bottom up, from the last node that has a child.
        for index in (0..self.entries.len() / 2).rev() {
            // SAFETY: the index is in range, and `sink` follows at once.
            let (hole, entry) = unsafe { Hole::new(&mut self.entries, index) };
            hole.sink(entry);
        }
        if self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to(self.entries.len() * 2);
        }
        if self.run.len() < self.run.capacity() / 4 {
            self.run.shrink_to(self.run.len() * 2);
        }
    }

    /// The elements, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().chain(&self.run).map(|entry| &entry.item)
    }

    /// How many timers the array and the run together have memory for.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.entries.capacity() + self.run.capacity()
    }

    /// Does for the run what `shrink_if_sparse` does for the array.
    #[inline]
    fn shrink_run_if_sparse(&mut self) {
        let capacity = self.run.capacity();
        if capacity > KEPT_CAPACITY && self.run.len() < capacity / 4 {
            self.run.shrink_to(capacity / 2);
        }
    }

    /// Gives half of the memory back if less than a quarter is used. The array must be halved many times to become
    /// small, so the cost is spread over the pops that empty it.
    #[inline]
    fn shrink_if_sparse(&mut self) {
        let capacity = self.entries.capacity();
        if capacity > KEPT_CAPACITY && self.entries.len() < capacity / 4 {
            self.shrink();
        }
    }

    #[cold]
    fn shrink(&mut self) {
        self.entries.shrink_to(self.entries.capacity() / 2);
    }
}

impl<T> Default for TimerHeap<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A place of the array whose entry was moved out. `rise` and `sink` get an entry, move the hole through the tree to
/// the place where that entry belongs, and put the entry there. Each entry on the way moves once, not twice as in a
/// swap. The place still has the bits of an entry that is now elsewhere, so an entry must be put into it before
/// anything else happens to the array.
struct Hole<'a, T> {
    entries: &'a mut [Entry<T>],
    index: usize,
}

impl<'a, T> Hole<'a, T> {
    /// Moves the entry at `index` out.
    ///
    /// # Safety
    /// `index` is in range. The caller calls `rise` or `sink` at once.
    #[inline]
    unsafe fn new(entries: &'a mut [Entry<T>], index: usize) -> (Self, Entry<T>) {
        // SAFETY: the index is in range (contract). `rise` or `sink` overwrites the place without dropping what was
        // there, so the entry is dropped only once.
        let entry = unsafe { ptr::read(&raw const entries[index]) };
        (Self { entries, index }, entry)
    }

    /// Puts `entry` here or nearer to the root: each parent that is later than `entry` moves down.
    #[inline]
    fn rise(mut self, entry: Entry<T>) {
        while self.index > 0 {
            let parent = (self.index - 1) / 2;
            if !entry.is_before(&self.entries[parent]) {
                break;
            }
            self.move_from(parent);
        }
        self.fill(entry);
    }

    /// Puts `entry` here or farther from the root: as long as a child is earlier than `entry`, the earlier of the two
    /// children moves up.
    #[inline]
    fn sink(mut self, entry: Entry<T>) {
        loop {
            let left = self.index * 2 + 1;
            let right = left + 1;
            let mut earliest = left;
            if right < self.entries.len() {
                // The result of the comparison is added, because a processor cannot predict a branch on it. That makes
                // a pop from 1,000 timers twice as fast. Four children per node would not make it faster.
                earliest += usize::from(self.entries[right].is_before(&self.entries[left]));
            } else if left >= self.entries.len() {
                break;
            }
            if !self.entries[earliest].is_before(&entry) {
                break;
            }
            self.move_from(earliest);
        }
        self.fill(entry);
    }

    /// Moves the entry at `from` into the hole. After that, the hole is at `from`.
    #[inline]
    fn move_from(&mut self, from: usize) {
        let (source, place) = (&raw const self.entries[from], &raw mut self.entries[self.index]);
        // SAFETY: two different places of the array, because `from` is a parent or a child of the hole. The entry whose
        // bits are in the hole is now elsewhere, so the bits are overwritten without a drop.
        unsafe { ptr::copy_nonoverlapping(source, place, 1) };
        self.index = from;
    }

    #[inline]
    fn fill(self, entry: Entry<T>) {
        // SAFETY: as in `move_from`, for the hole's place.
        unsafe { ptr::write(&raw mut self.entries[self.index], entry) };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::{KEPT_CAPACITY, MAX_EXAMINED, TimerHeap};

    /// No entry is earlier than its parent.
    fn is_heap<T>(heap: &TimerHeap<T>) -> bool {
        (1..heap.entries.len()).all(|index| !heap.entries[index].is_before(&heap.entries[(index - 1) / 2]))
    }

    #[test]
    fn equal_deadlines_come_out_in_insertion_order() {
        let mut heap = TimerHeap::new();
        for item in 0..100 {
            heap.push(7, item);
        }
        assert!(std::iter::from_fn(|| heap.pop()).eq(0..100));
    }

    #[test]
    fn only_due_timers_come_out() {
        let mut heap = TimerHeap::new();
        assert_eq!((heap.peek(), heap.peek_when()), (None, None));
        assert_eq!(heap.pop_due(u64::MAX), None);
        heap.push(20, 'b');
        heap.push(10, 'a');
        assert_eq!((heap.peek(), heap.peek_when()), (Some((10, &'a')), Some(10)));
        assert_eq!(heap.pop_due(9), None);
        assert_eq!(heap.pop_due(10), Some('a'));
        assert_eq!(heap.pop_due(10), None);
        assert_eq!(heap.pop_due(u64::MAX), Some('b'));
        assert!(heap.is_empty());
    }

    #[test]
    fn a_timer_just_added_is_last_unless_it_is_the_earliest() {
        let mut heap = TimerHeap::new();
        for item in 0..50 {
            heap.push(100 + item, item);
        }
        heap.push(1_000, 77);
        assert_eq!(heap.remove_last_if(|item| *item == 76), None);
        assert_eq!(heap.remove_last_if(|item| *item == 77), Some(77));
        heap.push(1, 78);
        assert_eq!(heap.remove_last_if(|item| *item == 78), Some(78));
        heap.push(5, 80);
        heap.push(1, 78);
        assert_eq!(heap.remove_last_if(|item| *item == 78), None);
        assert_eq!(heap.len(), 52);
        assert_eq!((heap.pop(), heap.pop()), (Some(78), Some(80)));
        assert!(std::iter::from_fn(|| heap.pop()).eq(0..50));
        assert_eq!(heap.remove_last_if(|_| true), None);
    }

    /// Items divisible by `every` have no slack.
    fn wake_when(heap: &TimerHeap<u64>, every: u64) -> Option<u64> {
        heap.wake_when(10, |item| !item.is_multiple_of(every))
    }

    #[test]
    fn timers_with_slack_fire_together() {
        let mut heap = TimerHeap::new();
        assert_eq!(wake_when(&heap, 2), None);
        heap.push(20, 1);
        assert_eq!(wake_when(&heap, 2), Some(30));
        heap.push(29, 3); // in the run
        heap.push(15, 5); // in the array
        assert_eq!(wake_when(&heap, 2), Some(25));
        heap.push(24, 2);
        assert_eq!(wake_when(&heap, 2), Some(24));
        heap.push(23, 4);
        assert_eq!(wake_when(&heap, 2), Some(23));
        heap.push(10, 6);
        assert_eq!(wake_when(&heap, 2), Some(10));
        heap.push(u64::MAX, 7);
        while heap.len() > 1 {
            heap.pop();
        }
        assert_eq!(wake_when(&heap, 2), Some(u64::MAX));
    }

    #[test]
    fn only_some_of_many_timers_are_examined() {
        for falls in [false, true] {
            let mut heap = TimerHeap::new();
            for item in 0..1_000 {
                heap.push(if falls { 2_000 - item } else { 2_000 + item }, 1);
            }
            let first_ns = heap.peek_when().unwrap();
            assert_eq!(wake_when(&heap, 2), Some(first_ns + 10));
            let wake_ns = heap.wake_when(500, |_| true).unwrap();
            assert!((first_ns + 5..=first_ns + 32).contains(&wake_ns), "{wake_ns}");
        }
    }

    #[test]
    fn owns_its_elements() {
        let item = Rc::new(0);
        let mut heap = TimerHeap::new();
        for index in 0..200_u64 {
            // Every other timer goes to the array.
            heap.push(
                if index % 2 == 0 {
                    1_000 + index
                } else {
                    1_000 - index
                },
                Rc::clone(&item),
            );
        }
        drop((heap.pop(), heap.remove_last_if(|_| true)));
        heap.sort_due(900);
        let (mut index, mut dropped) = (0, Vec::new());
        heap.retain(
            |_| {
                index += 1;
                index % 3 != 0
            },
            &mut dropped,
        );
        drop((heap.pop(), heap.pop()));
        assert_eq!(Rc::strong_count(&item), 1 + heap.len() + dropped.len());
        drop((heap, dropped));
        assert_eq!(Rc::strong_count(&item), 1);
    }

    #[test]
    fn gives_memory_back_after_a_mass_cancellation() {
        let mut heap = TimerHeap::new();
        for item in 0..100_000_u64 {
            heap.push(item, item);
        }
        let mut dropped = Vec::new();
        heap.retain(|item| item % 1_000 == 0, &mut dropped);
        assert_eq!((heap.len(), dropped.len()), (100, 99_900));
        assert!(heap.capacity() <= 200, "{}", heap.capacity());
        assert!(std::iter::from_fn(|| heap.pop()).eq((0..100_000).step_by(1_000)));
    }

    #[test]
    fn gives_memory_back_after_a_burst_fired() {
        let mut heap = TimerHeap::new();
        for item in 0..100_000_u64 {
            heap.push(item, item);
        }
        while heap.pop().is_some() {}
        assert!(heap.capacity() <= KEPT_CAPACITY * 2, "{}", heap.capacity());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(u64),
        Pop,
        PopDue(u64),
        RemoveLast(u32),
        Retain(u32),
        SortDue(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        // There are only a few different deadlines, so many are equal.
        prop_oneof![
            6 => (0_u64..20).prop_map(Step::Push),
            1 => prop_oneof![Just(0), Just(u64::MAX)].prop_map(Step::Push),
            2 => Just(Step::Pop),
            2 => (0_u64..20).prop_map(Step::PopDue),
            1 => (0_u32..3).prop_map(Step::RemoveLast),
            1 => (2_u32..5).prop_map(Step::Retain),
            1 => (0_u64..20).prop_map(Step::SortDue),
        ]
    }

    proptest! {
        /// Compares every operation with a `BTreeMap` that is ordered by (deadline, sequence number).
        #[test]
        fn behaves_like_an_ordered_map(steps in prop::collection::vec(step(), 0..300)) {
            let mut heap = TimerHeap::new();
            let mut model = BTreeMap::new();
            let mut next = 0_u32;
            let mut last_seq = None;
            for step in steps {
                match step {
                    Step::Push(when_ns) => {
                        let seq = heap.push(when_ns, next);
                        prop_assert!(last_seq < Some(seq));
                        last_seq = Some(seq);
                        model.insert((when_ns, seq), next);
                        next += 1;
                    }
                    Step::Pop => {
                        prop_assert_eq!(heap.pop(), model.pop_first().map(|(_, item)| item));
                    }
                    Step::PopDue(now_ns) => {
                        let is_due = model.keys().next().is_some_and(|&(when_ns, _)| when_ns <= now_ns);
                        let expected = if is_due { model.pop_first() } else { None };
                        prop_assert_eq!(heap.pop_due(now_ns), expected.map(|(_, item)| item));
                    }
                    Step::SortDue(now_ns) => heap.sort_due(now_ns),
                    Step::RemoveLast(remainder) => {
                        let removed = heap.remove_last_if(|item| item % 3 == remainder);
                        if let Some(removed) = removed {
                            prop_assert_eq!(removed % 3, remainder);
                            let before = model.len();
                            model.retain(|_, item| *item != removed);
                            prop_assert_eq!(model.len(), before - 1);
                        }
                    }
                    Step::Retain(modulus) => {
                        let mut dropped = Vec::new();
                        heap.retain(|item| item % modulus != 0, &mut dropped);
                        let mut expected = Vec::new();
                        model.retain(|_, item| {
                            let keep = *item % modulus != 0;
                            if !keep {
                                expected.push(*item);
                            }
                            keep
                        });
                        dropped.sort_unstable();
                        expected.sort_unstable();
                        prop_assert_eq!(dropped, expected);
                    }
                }
                prop_assert!(is_heap(&heap));
                prop_assert_eq!(heap.len(), model.len());
                let earliest = model.iter().next().map(|(&(when_ns, _), item)| (when_ns, item));
                prop_assert_eq!(heap.peek(), earliest);
                prop_assert_eq!(heap.peek_when(), earliest.map(|(when_ns, _)| when_ns));
                let has_slack = |item: &u32| !item.is_multiple_of(3);
                let latest = model.iter().map(|(&(when_ns, _), item)| {
                    when_ns.saturating_add(if has_slack(item) { 4 } else { 0 })
                });
                let wake_ns = heap.wake_when(4, has_slack);
                if model.len() <= MAX_EXAMINED {
                    prop_assert_eq!(wake_ns, latest.min());
                } else {
                    prop_assert!(heap.peek_when() <= wake_ns && wake_ns <= latest.min());
                }
            }
            let mut left: Vec<_> = heap.iter().copied().collect();
            left.sort_unstable();
            let mut expected: Vec<_> = model.values().copied().collect();
            expected.sort_unstable();
            prop_assert_eq!(left, expected);
            prop_assert!(std::iter::from_fn(|| heap.pop()).eq(model.into_values()));
        }
    }
}
