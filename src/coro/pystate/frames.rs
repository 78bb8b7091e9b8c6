//! The Python frames of an evicted coro: their chain must not lead into its stack, which is not in memory any more.
//!
//! From 3.12 on each entry into the evaluation loop puts an entry frame on the C stack:
//!
//! ```text
//!   f (data stack) --previous--> entry frame (C stack) --previous--> g (data stack) --previous--> entry frame --> null
//! ```
//!
//! `f_back`, tracebacks and tools walk this chain at any time. Before a stack is evicted, the chain is linked past the
//! entry frames; after the stack is restored, it is linked as before. Most coros have one entry frame.

use grapeshot_core::stack::StackSlot;

use super::{field, imp};

/// The changes in the chain of one evicted coro.
pub(in crate::coro) struct Relinked {
    first: Option<Link>,
    more: Vec<Link>,
}

/// A frame, and what its `previous` was.
#[derive(Clone, Copy)]
struct Link {
    frame: *mut u8,
    previous: *mut u8,
}

impl Relinked {
    pub(in crate::coro) const fn new() -> Self {
        Self {
            first: None,
            more: Vec::new(),
        }
    }

    /// Links the chain from `innermost` past the frames that lie in `slot`.
    ///
    /// # Safety
    /// The frames are those of a coro that is suspended in place in `slot`; nothing was relinked yet.
    #[inline]
    pub(in crate::coro) unsafe fn skip(&mut self, innermost: *mut u8, slot: &StackSlot) {
        let mut frame = innermost;
        while !frame.is_null() {
            // SAFETY: a live frame; its chain is live until it ends in null.
            let place = unsafe { field::<*mut u8>(frame, imp::FRAME_PREVIOUS) };
            // SAFETY: as above.
            let previous = unsafe { *place };
            let mut next = previous;
            while slot.contains(next as usize) {
                // SAFETY: an entry frame, on the stack that is still in place.
                next = unsafe { *field::<*mut u8>(next, imp::FRAME_PREVIOUS) };
            }
            if next != previous {
                self.remember(Link { frame, previous });
                // SAFETY: as above.
                unsafe { *place = next };
            }
            frame = next;
        }
    }

    #[inline]
    fn remember(&mut self, link: Link) {
        if self.first.is_none() {
            self.first = Some(link);
        } else {
            self.more.push(link);
        }
    }

    /// Puts the chain back as it was.
    ///
    /// # Safety
    /// The coro's stack is in its place again, and its frames are those that `skip` saw.
    #[inline]
    pub(in crate::coro) unsafe fn restore(&mut self) {
        if let Some(link) = self.first.take() {
            // SAFETY: the frame is alive: its coro has not run meanwhile.
            unsafe { *field(link.frame, imp::FRAME_PREVIOUS) = link.previous };
        }
        for link in self.more.drain(..) {
            // SAFETY: as above.
            unsafe { *field(link.frame, imp::FRAME_PREVIOUS) = link.previous };
        }
    }
}
