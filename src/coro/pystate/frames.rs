//! Links the Python frames of an evicted coro so that their chain does not lead through the slot that the coro's stack
//! has left, because another coro's stack may be there.
//!
//! From 3.12 on, each entry into the evaluation loop puts an entry frame on the C stack:
//!
//! ```text
//!   f (data stack) --previous--> entry frame (C stack) --previous--> g (data stack) --previous--> entry frame --> null
//! ```
//!
//! `f_back`, tracebacks and tools may walk this chain at any time. So before a stack is evicted, the chain is linked
//! past the entry frames; after the stack is restored, it is linked as before. Most coros have one entry frame.
//!
//! Walking a long chain loads each frame into the cache. Usually only the link of the outermost frame has to change. If
//! the last walk changed only this link, the next walk is skipped when it would certainly do the same: the outermost
//! frame is alive and leads to the same entry frame as before, and there is no space for another evaluation between
//! that entry frame and the stack pointer.

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use grapeshot_core::stack::StackSlot;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};

use super::{field, imp};

/// Chains shorter than this are always walked, because that is just as quick.
const MIN_LEN: usize = 4;

/// The smallest distance on the C stack between the entry frames of two nested evaluations, measured on the call that
/// needs the least C stack in between: resuming a generator. If a suspended stack has fewer bytes than this below its
/// outermost entry frame, there is no room for a second entry frame. 0: unknown.
static NESTED_LEN: AtomicUsize = AtomicUsize::new(0);

const RESUME: &CStr = c"
def resumed(distance):
    yield distance()
distance = next(resumed(distance))
";

/// Measures `NESTED_LEN`. Called once.
pub(super) fn measure(py: Python<'_>) -> PyResult<()> {
    if !imp::HAS_ENTRY_FRAMES {
        return Ok(());
    }
    let globals = PyDict::new(py);
    // SAFETY: called attached, and only by the Python code of `RESUME`.
    let distance = PyCFunction::new_closure(py, None, None, |args, _| unsafe { entry_distance(args.py()) })?;
    globals.set_item("distance", distance)?;
    py.run(RESUME, Some(&globals), None)?;
    if let Some(distance) = globals.get_item("distance")? {
        NESTED_LEN.store(distance.extract()?, Ordering::Relaxed);
    }
    Ok(())
}

/// The distance between the entry frames of a generator and of its caller; 0 if the chain of frames is not as expected.
///
/// # Safety
/// Attached, and called by a generator, which Python code has resumed through a C function.
unsafe fn entry_distance(_: Python<'_>) -> usize {
    /// An entry frame is at most this far above this function on the stack.
    const STACK_LEN: usize = 64 * 1024;
    let mut chain = [std::ptr::null_mut::<u8>(); 4];
    let here = (&raw const chain).addr();
    // SAFETY: attached, so the frames of the thread's chain are alive. A chain of fewer than four frames ends in null.
    unsafe {
        let mut frame = imp::innermost(*field(ffi::PyThreadState_Get().cast(), imp::FRAME));
        for place in &mut chain {
            *place = frame;
            if frame.is_null() {
                return 0;
            }
            frame = *field(frame, imp::FRAME_PREVIOUS);
        }
    }
    let (inner, outer) = (chain[1].addr(), chain[3].addr());
    if here < inner && inner < outer && outer < here + STACK_LEN {
        outer - inner
    } else {
        0
    }
}

/// The changes to the frame chain of one evicted coro.
pub(in crate::coro) struct Relinked {
    /// The first changed link. It is kept after `restore`, for the next `skip`.
    first: Option<Link>,
    more: Vec<Link>,
    /// Whether the last walk followed a chain of at least `MIN_LEN` frames, and changed only the link of the frame at
    /// the start of the data stack.
    is_outermost: bool,
}

/// A frame, and the original value of its `previous`.
#[derive(Clone, Copy)]
struct Link {
    frame: *mut u8,
    previous: *mut u8,
}

/// A suspended stack that is in place.
pub(in crate::coro) struct Suspended<'a> {
    pub(in crate::coro) slot: &'a StackSlot,
    pub(in crate::coro) sp: usize,
    /// The innermost Python frame.
    pub(in crate::coro) innermost: *mut u8,
    /// The start and the top of the data stack.
    pub(in crate::coro) data: (*mut u8, *mut u8),
}

impl Relinked {
    pub(in crate::coro) const fn new() -> Self {
        Self {
            first: None,
            more: Vec::new(),
            is_outermost: false,
        }
    }

    /// Links the chain of frames past the entry frames on the stack.
    ///
    /// # Safety
    /// The stack is suspended in place; nothing is relinked.
    #[inline]
    pub(in crate::coro) unsafe fn skip(&mut self, stack: &Suspended<'_>) {
        if !imp::HAS_ENTRY_FRAMES {
            return; // there are no frames on the C stack
        }
        // SAFETY: by the contract.
        unsafe {
            if !self.is_outermost || !self.skip_outermost(stack) {
                self.walk(stack);
            }
        }
    }

    /// Does the work of `skip` without a walk, if it is certain that only the link of the outermost frame has to
    /// change. Returns whether it has done the work.
    ///
    /// # Safety
    /// As for `skip`, and `first` is the link of a frame that was at the start of the data stack.
    unsafe fn skip_outermost(&self, stack: &Suspended<'_>) -> bool {
        let Some(link) = self.first else {
            return false;
        };
        let entry = link.previous.addr();
        // SAFETY: `link.frame` is the start of the data stack, which is the coro's memory. A frame is there unless the
        // data stack is empty. The entry frame is on the used part of the stack.
        unsafe {
            let is_same = stack.data.1 != link.frame
                && *field::<*mut u8>(link.frame, imp::FRAME_PREVIOUS) == link.previous
                && stack.sp <= entry
                && entry - stack.sp < NESTED_LEN.load(Ordering::Relaxed)
                && entry < stack.slot.top();
            if !is_same {
                return false;
            }
            let next = *field::<*mut u8>(link.previous, imp::FRAME_PREVIOUS);
            // From 3.15 on the chain ends in the thread's base frame.
            if !next.is_null() && !(*field::<*mut u8>(next, imp::FRAME_PREVIOUS)).is_null() {
                return false;
            }
            *field(link.frame, imp::FRAME_PREVIOUS) = next;
        }
        // SAFETY: as above.
        debug_assert!(!unsafe { leads_into(stack) }, "there is another entry frame");
        true
    }

    /// Does the work of `skip` by following the whole chain.
    ///
    /// # Safety
    /// As for `skip`.
    #[inline]
    unsafe fn walk(&mut self, stack: &Suspended<'_>) {
        let (mut frame, mut len) = (stack.innermost, 0);
        self.first = None;
        while !frame.is_null() {
            // SAFETY: a live frame; its chain is live until it ends in null.
            let place = unsafe { field::<*mut u8>(frame, imp::FRAME_PREVIOUS) };
            // SAFETY: as above.
            let previous = unsafe { *place };
            let mut next = previous;
            while stack.slot.contains(next as usize) {
                // SAFETY: an entry frame, on the stack that is still in place.
                next = unsafe { *field::<*mut u8>(next, imp::FRAME_PREVIOUS) };
            }
            if next != previous {
                self.remember(Link { frame, previous });
                // SAFETY: as above.
                unsafe { *place = next };
            }
            frame = next;
            len += 1;
        }
        self.is_outermost = len >= MIN_LEN
            && self.more.is_empty()
            && self.first.is_some_and(|link| link.frame == stack.data.0);
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
    /// The coro's stack is in its place again, and its frames are the ones that `skip` saw.
    #[inline]
    pub(in crate::coro) unsafe fn restore(&mut self) {
        if let Some(link) = self.first {
            // SAFETY: the frame is alive, because its coro has not run since `skip`.
            unsafe { *field(link.frame, imp::FRAME_PREVIOUS) = link.previous };
        }
        for link in self.more.drain(..) {
            // SAFETY: as above.
            unsafe { *field(link.frame, imp::FRAME_PREVIOUS) = link.previous };
        }
    }
}

/// Whether the chain still leads to a frame on the stack.
///
/// # Safety
/// As for `skip`.
unsafe fn leads_into(stack: &Suspended<'_>) -> bool {
    let mut frame = stack.innermost;
    while !frame.is_null() {
        if stack.slot.contains(frame as usize) {
            return true;
        }
        // SAFETY: a live frame.
        frame = unsafe { *field(frame, imp::FRAME_PREVIOUS) };
    }
    false
}
