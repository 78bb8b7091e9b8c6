//! The ready queue, and the way into it for other threads.
//!
//! The queue has an entry for each handle and each deferred function that the loop runs next. In builds with a GIL,
//! other threads put their entries into the queue directly, because the loop holds the GIL whenever it looks at the
//! queue. In free-threaded builds, other threads put their entries into the inbox, and the loop moves them from there
//! into the queue. If the loop sleeps, the first thread that adds an entry must wake it.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::{Mutex, PoisonError};

use grapeshot_core::queue::inbox::Inbox;
use grapeshot_core::queue::ready::ReadyQueue;
use grapeshot_core::sys::waker::Waker;
use pyo3::ffi;
use pyo3::prelude::*;

use super::tracking;
use crate::binding::HAS_GIL;
use crate::event_loop::handle::HandleRef;
use crate::event_loop::source::{Deferred, DeferredCall};

/// An entry of the ready queue. Dropping it may run any code.
pub(super) enum Ready {
    Handle(HandleRef),
    Call(DeferredCall),
}

// The tag takes no space: a null in the place of one of `Call`'s pointers marks a `Handle`.
const _: () = assert!(size_of::<Ready>() == 2 * size_of::<usize>());

impl Ready {
    fn as_handle(&self) -> Option<&HandleRef> {
        match self {
            Self::Handle(handle) => Some(handle),
            Self::Call(_) => None,
        }
    }
}

// SAFETY: entries reach another thread through the inbox or, in builds with a GIL, through the queue. Only an attached
// thread takes an entry out: the loop's thread, or a thread that drops the entries of a closed loop.
unsafe impl Send for Ready {}

pub(crate) struct ReadyWork {
    queue: RefCell<ReadyQueue<Ready>>,
    /// Boxed, because the inbox is aligned to cache lines and Python objects are not.
    inbox: Box<Inbox<Ready>>,
    /// None once the loop is closed. Locked, because other threads write to the waker's descriptor, which `close_waker`
    /// closes. The lock is never held across a call into Python.
    waker: Mutex<Option<Waker>>,
}

impl ReadyWork {
    pub(super) fn new(waker: Waker) -> Self {
        Self {
            queue: RefCell::new(ReadyQueue::new()),
            inbox: Box::new(Inbox::new()),
            waker: Mutex::new(Some(waker)),
        }
    }

    // ---- the queue -------------------------------------------------------------------------------------------

    /// The number of queued entries. While the loop runs, an entry leaves the queue only to be run.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.queue.borrow().len()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// `push` for `call_soon`. The handle comes after everything that other threads have scheduled before, as in
    /// asyncio.
    #[inline]
    pub(crate) fn push_soon(&self, handle: HandleRef) {
        self.drain_inbox();
        self.push(handle);
    }

    /// Queues a handle.
    #[inline]
    pub(super) fn push(&self, handle: HandleRef) {
        self.queue.borrow_mut().push_back(Ready::Handle(handle));
    }

    /// Queues a call of `run(object)`, in order with the handles.
    pub(crate) fn defer(&self, object: Bound<'_, PyAny>, run: Deferred) {
        let call = DeferredCall::new(object, run);
        self.queue.borrow_mut().push_back(Ready::Call(call));
    }

    /// Takes out the first entry.
    #[inline]
    pub(super) fn pop(&self) -> Option<Ready> {
        self.queue.borrow_mut().pop_front()
    }

    /// The object of the entry at position `offset` in the queue, if that entry is a call of `run`. The pointer is
    /// borrowed, and valid until other code runs.
    #[inline]
    pub(crate) fn deferred_at(&self, offset: usize, run: Deferred) -> Option<*mut ffi::PyObject> {
        match self.queue.borrow().get(offset)? {
            Ready::Call(call) if std::ptr::fn_addr_eq(call.function(), run) => Some(call.as_ptr()),
            _ => None,
        }
    }

    /// The queued handles, in order.
    pub(crate) fn handles<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        let queue = self.queue.borrow();
        let handles = queue.iter().filter_map(Ready::as_handle);
        handles.map(|handle| handle.to_bound(py)).collect()
    }

    /// See `tracking::track_kept`.
    pub(super) fn track_kept(&self, py: Python<'_>) {
        let queue = self.queue.borrow();
        tracking::track_kept(py, queue.iter().filter_map(Ready::as_handle));
    }

    // ---- other threads ---------------------------------------------------------------------------------------

    /// `push` for a thread that does not run the loop. Returns true if the caller must wake the loop.
    #[must_use = "if it returns true, the caller must wake the loop"]
    pub(super) fn push_from_outside(&self, handle: HandleRef) -> bool {
        if HAS_GIL {
            // The GIL is the lock that `claim_wake` requires: the loop holds it from its last check of the queue until
            // after `begin_locked_sleep`.
            self.push(handle);
            self.inbox.claim_wake()
        } else {
            self.inbox.push(Ready::Handle(handle))
        }
    }

    /// `defer` for any thread. Returns true if the caller must wake the loop.
    #[must_use = "if it returns true, the caller must wake the loop"]
    pub(super) fn defer_from_anywhere(&self, object: Bound<'_, PyAny>, run: Deferred) -> bool {
        if HAS_GIL {
            // As in `push_from_outside`.
            self.defer(object, run);
            self.inbox.claim_wake()
        } else {
            self.inbox.push(Ready::Call(DeferredCall::new(object, run)))
        }
    }

    /// Moves all entries of the inbox to the queue.
    #[inline]
    pub(super) fn drain_inbox(&self) {
        if !HAS_GIL && !self.inbox.is_empty() {
            self.take_inbox();
        }
    }

    #[cold]
    fn take_inbox(&self) {
        let mut queue = self.queue.borrow_mut();
        while let Some(entry) = self.inbox.pop() {
            queue.push_back(entry);
        }
    }

    pub(super) fn is_inbox_empty(&self) -> bool {
        self.inbox.is_empty()
    }

    /// Drops the contents of the inbox for as long as `is_closed()` returns true. Any thread may call this.
    pub(super) fn empty_inbox_while(&self, is_closed: impl Fn() -> bool) {
        while is_closed()
            && let Some(entry) = self.inbox.pop()
        {
            drop(entry);
        }
    }

    /// Wakes the loop out of its poll.
    pub(super) fn wake(&self) {
        self.with_waker(Waker::wake);
    }

    /// Called when the poller has reported the waker.
    #[inline(never)]
    pub(super) fn note_woken(&self) {
        self.with_waker(Waker::drain);
    }

    /// Calls `action` with the waker, unless the loop is closed.
    fn with_waker(&self, action: impl FnOnce(&Waker)) {
        if let Some(waker) = &*self.waker.lock().unwrap_or_else(PoisonError::into_inner) {
            action(waker);
        }
    }

    /// Records that the loop is about to block. Returns false if the loop must not block, because another thread has
    /// scheduled something.
    #[inline]
    pub(super) fn begin_sleep(&self) -> bool {
        if HAS_GIL {
            // Other threads need the GIL to queue something, and this thread has held the GIL since it found the queue
            // empty. So the queue is still empty.
            self.inbox.begin_locked_sleep();
            return true;
        }
        self.inbox.begin_sleep()
    }

    #[inline]
    pub(super) fn end_sleep(&self) {
        self.inbox.end_sleep();
    }

    // ---- end -------------------------------------------------------------------------------------------------

    /// Frees the waker, with its descriptor.
    pub(super) fn close_waker(&self) {
        drop(self.waker.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Drops all entries. The queue is not borrowed while one is dropped.
    pub(super) fn drop_work(&self) {
        self.drain_inbox();
        while self.pop().is_some() {}
    }

    /// Called in the child of a fork: leaks the parent's entries, and puts a new waker in the place of the parent's.
    pub(super) fn forget_parent(&self, waker: Waker) {
        let shared = self
            .waker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(waker);
        drop(shared);
        while let Some(entry) = self.inbox.pop() {
            mem::forget(entry);
        }
        mem::forget(self.queue.replace(ReadyQueue::new()));
    }

    /// # Safety
    /// Only the collector may call this, with its own `visit` and `arg`.
    pub(super) unsafe fn traverse(&self, visit: ffi::visitproc, arg: *mut c_void) -> c_int {
        let Ok(queue) = self.queue.try_borrow() else {
            return 0;
        };
        for entry in queue.iter() {
            // SAFETY: the queue holds a reference to each object; visit and arg are the collector's.
            let result = unsafe {
                match entry {
                    Ready::Handle(handle) => handle.traverse(visit, arg),
                    Ready::Call(call) => visit(call.as_ptr(), arg),
                }
            };
            if result != 0 {
                return result;
            }
        }
        0
    }
}
