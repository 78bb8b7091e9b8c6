//! The chunks of a stream that are still to be written.
//!
//! An `OutBuf` holds the data that a transport could not send at once, or that the transport holds back to send it with
//! later data. The buffer offers this data to `writev`. It keeps the chunks that it was given and does not copy bytes.
//! The first chunk is stored inline, so the usual single write does not allocate. An `OutBuf` itself takes three words
//! and the size of one optional chunk.
//!
//! ```text
//!   front [ sent | to be sent ]   then   rest [ chunk ] [ chunk ] ...
//!         '-----' sent_bytes             boxed, allocated for the second chunk
//! ```
//!
//! An `OutBuf` belongs to the loop's thread. Dropping a chunk may run foreign code, such as a Python destructor, so the
//! buffer does not drop chunks while it is borrowed. It passes written chunks to the caller, who drops them at a point
//! where foreign code may run.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ptr;

/// An empty buffer keeps its deque for later use if the capacity is at most this.
const KEPT_CAPACITY: usize = 8;

/// Chunks of bytes in the order in which they are to be written.
pub struct OutBuf<C: AsRef<[u8]>> {
    /// The oldest chunk. If it is `None`, `rest` is empty too.
    front: Option<C>,
    #[expect(
        clippy::box_collection,
        reason = "keeps idle connections small: one word instead of four"
    )]
    rest: Option<Box<VecDeque<C>>>,
    /// How many bytes of `front` are already written.
    sent_bytes: usize,
    /// How many bytes of all chunks are still to be written.
    len_bytes: usize,
}

impl<C: AsRef<[u8]>> OutBuf<C> {
    /// An empty buffer. Allocates nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            front: None,
            rest: None,
            sent_bytes: 0,
            len_bytes: 0,
        }
    }

    /// How many bytes are still to be written.
    #[inline]
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether there is no chunk. A chunk of zero bytes counts as a chunk until [`Self::advance`] removes it.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.front.is_none()
    }

    /// How many chunks there are.
    #[cfg(test)]
    pub fn chunks(&self) -> usize {
        usize::from(self.front.is_some()) + self.rest.as_ref().map_or(0, |rest| rest.len())
    }

    /// Appends a chunk.
    #[inline]
    pub fn push(&mut self, chunk: C) {
        self.len_bytes += chunk.as_ref().len();
        if self.front.is_none() {
            self.front = Some(chunk);
        } else {
            self.rest.get_or_insert_default().push_back(chunk);
        }
    }

    /// Inserts a chunk before all others. Its first `sent_bytes` bytes are already written, and at least one byte is
    /// not. The chunks that are already in the buffer must be completely unwritten.
    pub fn push_front(&mut self, chunk: C, sent_bytes: usize) {
        debug_assert!(self.sent_bytes == 0, "the front chunk is partly written");
        debug_assert!(sent_bytes < chunk.as_ref().len(), "the chunk is written");
        self.len_bytes += chunk.as_ref().len() - sent_bytes;
        self.sent_bytes = sent_bytes;
        if let Some(front) = self.front.replace(chunk) {
            self.rest.get_or_insert_default().push_front(front);
        }
    }

    /// Fills `out` like [`Self::slices`], and returns how many elements it has initialised.
    #[cfg(test)]
    pub fn fill_slices<'a>(&'a self, out: &mut [MaybeUninit<IoSlice<'a>>]) -> usize {
        self.slices(out).len()
    }

    /// The bytes that are to be written, oldest first: one slice per chunk, and at most as many slices as `out` can
    /// hold. Empty chunks are left out.
    #[inline]
    pub fn slices<'a, 'b>(&'a self, out: &'b mut [MaybeUninit<IoSlice<'a>>]) -> &'b [IoSlice<'a>] {
        let mut filled = 0;
        // Returns false if `out` is full.
        let mut offer = |bytes: &'a [u8]| {
            if bytes.is_empty() {
                return true;
            }
            let Some(slot) = out.get_mut(filled) else {
                return false;
            };
            slot.write(IoSlice::new(bytes));
            filled += 1;
            true
        };
        if let Some(front) = &self.front {
            offer(&front.as_ref()[self.sent_bytes..]);
        }
        if let Some(rest) = &self.rest {
            // One loop for each half of the deque, because an iterator over both takes twice the instructions.
            let (first, second) = rest.as_slices();
            for part in [first, second] {
                for chunk in part {
                    if !offer(chunk.as_ref()) {
                        break;
                    }
                }
            }
        }
        // SAFETY: `offer` has initialised the first `filled` elements of `out`, and the result borrows `out`.
        unsafe { std::slice::from_raw_parts(out.as_ptr().cast(), filled) }
    }

    /// Records that the first `n_bytes` bytes are written; `n_bytes` is at most [`Self::len_bytes`]. Calls `dropped`
    /// with each chunk that is completely written. The buffer is borrowed during these calls, so `dropped` may drop the
    /// chunk only if that cannot run foreign code; otherwise it must store the chunk.
    #[inline]
    pub fn advance(&mut self, n_bytes: usize, dropped: &mut impl FnMut(C)) {
        debug_assert!(n_bytes <= self.len_bytes, "more was written than there is");
        if n_bytes >= self.len_bytes {
            self.take_all(dropped);
            return;
        }
        let mut n_bytes = n_bytes;
        self.len_bytes -= n_bytes;
        while let Some(front) = &self.front {
            let unsent_bytes = front.as_ref().len() - self.sent_bytes;
            if n_bytes < unsent_bytes {
                self.sent_bytes += n_bytes;
                return;
            }
            n_bytes -= unsent_bytes;
            if let Some(chunk) = self.take_front() {
                dropped(chunk);
            }
        }
    }

    /// Takes out the oldest chunk, whether a part of it is written or not. A closing transport uses this to discard its
    /// unwritten data.
    #[inline]
    pub fn pop(&mut self) -> Option<C> {
        let unsent_bytes = self.front.as_ref()?.as_ref().len() - self.sent_bytes;
        self.len_bytes -= unsent_bytes;
        self.take_front()
    }

    /// The whole chunks, from the oldest to the newest. The oldest one includes its bytes that are already written.
    pub fn iter(&self) -> impl Iterator<Item = &C> + '_ {
        self.front
            .iter()
            .chain(self.rest.iter().flat_map(|rest| rest.iter()))
    }

    /// Empties the buffer. `advance` calls this when everything is written.
    #[inline]
    fn take_all(&mut self, dropped: &mut impl FnMut(C)) {
        self.sent_bytes = 0;
        self.len_bytes = 0;
        self.front.take().into_iter().for_each(&mut *dropped);
        if let Some(rest) = &mut self.rest
            && !rest.is_empty()
        {
            rest.drain(..).for_each(dropped);
            if rest.capacity() > KEPT_CAPACITY {
                self.rest = None;
            }
        }
    }

    /// Takes out the front chunk and moves the next one into its place.
    #[inline]
    fn take_front(&mut self) -> Option<C> {
        self.sent_bytes = 0;
        let next = match &mut self.rest {
            None => None,
            Some(rest) => {
                let next = rest.pop_front();
                if rest.is_empty() && rest.capacity() > KEPT_CAPACITY {
                    self.rest = None;
                }
                next
            }
        };
        std::mem::replace(&mut self.front, next)
    }
}

impl<C: AsRef<[u8]>> Default for OutBuf<C> {
    fn default() -> Self {
        Self::new()
    }
}

/// Copies the slices one after another into `place`, as far as they fit, and returns the bytes that were copied.
#[inline]
pub fn join<'a>(slices: &[IoSlice<'_>], place: &'a mut [MaybeUninit<u8>]) -> &'a [u8] {
    let mut filled = 0;
    for slice in slices {
        let target = &mut place[filled..];
        let count = slice.len().min(target.len());
        // SAFETY: both have at least `count` bytes, and they cannot overlap, because `target` is a mutable slice.
        unsafe { ptr::copy_nonoverlapping(slice.as_ptr(), target.as_mut_ptr().cast(), count) };
        filled += count;
    }
    // SAFETY: the loop has initialised the first `filled` bytes of `place`, and the result borrows `place`.
    unsafe { std::slice::from_raw_parts(place.as_ptr().cast(), filled) }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::mem::{MaybeUninit, size_of};

    use proptest::prelude::*;

    use super::{KEPT_CAPACITY, OutBuf, join};

    #[expect(clippy::needless_pass_by_value, reason = "`advance` passes chunks by value")]
    fn nothing_dropped(chunk: Vec<u8>) {
        panic!("dropped {chunk:?}");
    }

    /// The slices that a `writev` of at most `slots` slices would get.
    fn offered(buffer: &OutBuf<Vec<u8>>, slots: usize) -> Vec<Vec<u8>> {
        let mut out = vec![MaybeUninit::<IoSlice<'_>>::uninit(); slots];
        buffer
            .slices(&mut out)
            .iter()
            .map(|slice| slice.to_vec())
            .collect()
    }

    #[test]
    fn joins_as_much_as_fits() {
        let slices = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")];
        for space in 0..8 {
            let mut place = vec![MaybeUninit::uninit(); space];
            assert_eq!(join(&slices, &mut place), &b"abcde"[..space.min(5)]);
        }
        assert_eq!(join(&[], &mut [MaybeUninit::uninit(); 3]), b"");
    }

    #[test]
    fn is_small() {
        // An optional `Vec` takes three words, because a `Vec` has a niche for `None`. The chunks that transports use
        // have no niche. But each of them is a single pointer, so an optional one takes only two words.
        assert!(size_of::<OutBuf<Box<[u8]>>>() <= 48);
        assert!(size_of::<OutBuf<Vec<u8>>>() <= 48);
    }

    #[test]
    fn a_partly_written_chunk_is_inserted_before_newer_chunks() {
        let mut buffer = OutBuf::new();
        buffer.push_front(b"hello".to_vec(), 2);
        assert_eq!(
            (buffer.len_bytes(), offered(&buffer, 4)),
            (3, vec![b"llo".to_vec()])
        );
        buffer.advance(3, &mut drop);
        buffer.push(b"second".to_vec());
        buffer.push(b"third".to_vec());
        buffer.push_front(b"first".to_vec(), 4);
        assert_eq!((buffer.len_bytes(), buffer.chunks()), (12, 3));
        let expected = [&b"t"[..], b"second", b"third"].map(<[u8]>::to_vec);
        assert_eq!(offered(&buffer, 4), expected);
        buffer.advance(3, &mut drop);
        assert_eq!(offered(&buffer, 4), [b"cond".to_vec(), b"third".to_vec()]);
    }

    #[test]
    fn a_single_chunk_stays_inline() {
        let mut buffer = OutBuf::new();
        assert!(buffer.is_empty());
        buffer.push(b"hello".to_vec());
        assert!(buffer.rest.is_none());
        assert_eq!(
            (buffer.len_bytes(), buffer.chunks(), buffer.is_empty()),
            (5, 1, false)
        );
        buffer.advance(2, &mut nothing_dropped);
        assert_eq!(offered(&buffer, 4), [b"llo"]);
        let mut dropped = Vec::new();
        buffer.advance(3, &mut |chunk| dropped.push(chunk));
        assert_eq!(dropped, [b"hello"]);
        assert_eq!(
            (buffer.len_bytes(), buffer.chunks(), buffer.is_empty()),
            (0, 0, true)
        );
    }

    #[test]
    fn counts_the_slices_it_fills() {
        let mut buffer = OutBuf::new();
        for chunk in ["a", "", "bc", "d"] {
            buffer.push(chunk.as_bytes().to_vec());
        }
        let mut out = [MaybeUninit::uninit(); 8];
        assert_eq!(buffer.fill_slices(&mut out), 3);
        assert_eq!(buffer.fill_slices(&mut out[..2]), 2);
        assert_eq!(buffer.fill_slices(&mut []), 0);
        assert_eq!(offered(&buffer, 2), [b"a".to_vec(), b"bc".to_vec()]);
    }

    #[test]
    fn an_advance_by_zero_bytes_removes_empty_chunks() {
        let mut buffer = OutBuf::new();
        buffer.push(Vec::new());
        buffer.push(Vec::new());
        assert_eq!(
            (buffer.chunks(), buffer.len_bytes(), buffer.is_empty()),
            (2, 0, false)
        );
        let mut dropped = 0;
        buffer.advance(0, &mut |_| dropped += 1);
        assert_eq!((dropped, buffer.is_empty()), (2, true));
    }

    #[test]
    fn pop_takes_out_a_partly_written_chunk() {
        let mut buffer = OutBuf::new();
        buffer.push(b"abc".to_vec());
        buffer.push(b"de".to_vec());
        buffer.advance(1, &mut nothing_dropped);
        assert_eq!((buffer.pop(), buffer.len_bytes()), (Some(b"abc".to_vec()), 2));
        assert_eq!(offered(&buffer, 4), [b"de"]);
        assert_eq!((buffer.pop(), buffer.len_bytes()), (Some(b"de".to_vec()), 0));
        assert_eq!(buffer.pop(), None);
    }

    #[test]
    fn keeps_a_small_deque_and_gives_a_large_one_back() {
        let mut buffer = OutBuf::new();
        for (count, is_kept) in [(4, true), (KEPT_CAPACITY * 4, false)] {
            for _ in 0..count {
                buffer.push(vec![1]);
            }
            let mut dropped = 0;
            buffer.advance(count, &mut |_| dropped += 1);
            assert_eq!((dropped, buffer.rest.is_some()), (count, is_kept));
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(Vec<u8>),
        /// Writes this percentage of the data.
        Advance(usize),
        Pop,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::collection::vec(any::<u8>(), 0..12).prop_map(Step::Push),
            3 => (0_usize..=100).prop_map(Step::Advance),
            1 => Just(Step::Pop),
        ]
    }

    proptest! {
        /// Compares the bytes with one flat vector, and checks that every chunk that was pushed comes out once, in
        /// order.
        #[test]
        fn behaves_like_flat_bytes(steps in prop::collection::vec(step(), 0..80), slots in 0_usize..6) {
            let mut buffer = OutBuf::new();
            let mut flat: Vec<u8> = Vec::new();
            let mut pushed: Vec<Vec<u8>> = Vec::new();
            let mut left: Vec<Vec<u8>> = Vec::new();
            for step in steps {
                match step {
                    Step::Push(chunk) => {
                        flat.extend_from_slice(&chunk);
                        pushed.push(chunk.clone());
                        buffer.push(chunk);
                    }
                    Step::Advance(percent) => {
                        let n_bytes = flat.len() * percent / 100;
                        buffer.advance(n_bytes, &mut |chunk| left.push(chunk));
                        flat.drain(..n_bytes);
                    }
                    Step::Pop => {
                        let sent_bytes = buffer.sent_bytes;
                        if let Some(chunk) = buffer.pop() {
                            flat.drain(..chunk.len() - sent_bytes);
                            left.push(chunk);
                        }
                    }
                }
                prop_assert_eq!(buffer.len_bytes(), flat.len());
                prop_assert_eq!(buffer.chunks(), pushed.len() - left.len());
                prop_assert_eq!(buffer.is_empty(), pushed.len() == left.len());
                prop_assert!(buffer.iter().eq(&pushed[left.len()..]));
                let all = offered(&buffer, buffer.chunks());
                prop_assert_eq!(&all.concat(), &flat);
                prop_assert!(all.iter().all(|bytes| !bytes.is_empty()));
                prop_assert_eq!(offered(&buffer, slots), &all[..slots.min(all.len())]);
            }
            prop_assert_eq!(&left[..], &pushed[..left.len()]);
        }
    }
}
