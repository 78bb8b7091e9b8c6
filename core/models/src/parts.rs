//! loom's types, and types made of them, which the real files use here instead of the types of `std` and crossbeam.
//!
//! loom's types have no `const fn new`, so an object of the types below creates the loom objects inside it at its first
//! use. That use must happen in the thread that made the object, before other threads have access to the object.

use std::sync::OnceLock;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool as LoomBool, AtomicUsize};
pub use loom::sync::atomic::{Ordering, fence};
pub use loom::thread::yield_now;

/// `AtomicBool` with a `const fn new`.
pub struct AtomicBool {
    initial: bool,
    inner: OnceLock<LoomBool>,
}

impl AtomicBool {
    #[must_use]
    pub const fn new(initial: bool) -> Self {
        Self {
            initial,
            inner: OnceLock::new(),
        }
    }

    fn inner(&self) -> &LoomBool {
        self.inner.get_or_init(|| LoomBool::new(self.initial))
    }

    pub fn load(&self, order: Ordering) -> bool {
        self.inner().load(order)
    }

    /// Stores the value by a swap, because loom gets plain stores wrong. For example, thread A swaps in a value, and a
    /// store of thread B overwrites this value. Then loom lets A load A's value again, even after a fence. No processor
    /// does so.
    pub fn store(&self, value: bool, order: Ordering) {
        self.inner().swap(value, order);
    }

    pub fn swap(&self, value: bool, order: Ordering) -> bool {
        self.inner().swap(value, order)
    }

    /// # Errors
    /// Returns the actual value if the exchange failed, for example because the value is not `current`.
    pub fn compare_exchange_weak(
        &self,
        current: bool,
        new: bool,
        success: Ordering,
        failure: Ordering,
    ) -> Result<bool, bool> {
        self.inner().compare_exchange_weak(current, new, success, failure)
    }
}

/// The most items that a model pushes into a queue.
const MOST: usize = 4;

struct Slot<T> {
    item: UnsafeCell<Option<T>>,
    is_written: LoomBool,
}

struct Slots<T> {
    all: [Slot<T>; MOST],
    head: AtomicUsize,
    tail: AtomicUsize,
}

/// Stands in for crossbeam's `SegQueue`, which cannot be compiled with loom's types. It works like crossbeam's: a
/// producer reserves a slot and then writes into it, and a consumer that takes this slot waits until it is written. But
/// crossbeam's queue orders some accesses more strictly than necessary, which could hide that a fence is missing in the
/// inbox. This queue does not, so a missing fence makes a test fail.
pub struct SegQueue<T>(OnceLock<Slots<T>>);

// SAFETY: a slot's item is used only by the producer that has reserved it, and then, once it is written, by the one
// consumer that has taken it.
unsafe impl<T: Send> Send for SegQueue<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SegQueue<T> {}

impl<T> SegQueue<T> {
    #[must_use]
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn inner(&self) -> &Slots<T> {
        self.0.get_or_init(|| Slots {
            all: std::array::from_fn(|_| Slot {
                item: UnsafeCell::new(None),
                is_written: LoomBool::new(false),
            }),
            head: AtomicUsize::new(0),
            tail: AtomicUsize::new(0),
        })
    }

    pub fn push(&self, item: T) {
        let inner = self.inner();
        let slot = &inner.all[inner.tail.fetch_add(1, Ordering::Relaxed)];
        // SAFETY: only this thread has reserved the slot.
        slot.item.with_mut(|place| unsafe { *place = Some(item) });
        slot.is_written.store(true, Ordering::Release);
    }

    pub fn pop(&self) -> Option<T> {
        let inner = self.inner();
        let mut head = inner.head.load(Ordering::Acquire);
        while head != inner.tail.load(Ordering::Relaxed) {
            let taken = inner
                .head
                .compare_exchange(head, head + 1, Ordering::AcqRel, Ordering::Acquire);
            match taken {
                Ok(_) => return Some(Self::take(&inner.all[head])),
                Err(other) => head = other,
            }
        }
        None
    }

    fn take(slot: &Slot<T>) -> T {
        while !slot.is_written.load(Ordering::Acquire) {
            yield_now();
        }
        // SAFETY: this thread has taken the slot, and the producer does not use it any more.
        let item = slot.item.with_mut(|place| unsafe { (*place).take() });
        item.expect("a slot is taken once")
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn len(&self) -> usize {
        let inner = self.inner();
        let head = inner.head.load(Ordering::Acquire);
        inner.tail.load(Ordering::Relaxed) - head
    }
}

impl<T> Default for SegQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}
