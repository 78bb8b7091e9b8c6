//! Compares the out-buffer, and the slices that it offers to `writev`, with a list of chunks.
#![no_main]

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;

use grapeshot_core::queue::outbuf::{OutBuf, join};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Push(Vec<u8>),
    PushMany(u8, u8),
    /// A chunk, and how many of its bytes count as written. Skipped if the present front chunk is partly written or the
    /// new chunk has no unwritten bytes, because `push_front` must not be called then.
    PushFront(Vec<u8>, u8),
    Advance(u16),
    AdvanceAll,
    Pop,
    Offer(u8, u8),
}

/// The chunks, and how many bytes of the first one are written.
struct Model(VecDeque<Vec<u8>>, usize);

impl Model {
    fn unsent(&self) -> Vec<u8> {
        self.0.iter().flatten().copied().skip(self.1).collect()
    }

    /// Removes and returns the chunks that are completely written after `count` more bytes. If no bytes are left,
    /// empty chunks at the end are removed too.
    fn advance(&mut self, mut count: usize) -> Vec<Vec<u8>> {
        let all = count >= self.unsent().len();
        let mut dropped = Vec::new();
        while let Some(front) = self.0.front() {
            let unsent = front.len() - self.1;
            if !all && count < unsent {
                self.1 += count;
                break;
            }
            count -= unsent;
            dropped.extend(self.0.pop_front());
            self.1 = 0;
        }
        dropped
    }
}

fn offered(buffer: &OutBuf<Vec<u8>>, slots: u8, space: u8) -> (usize, Vec<u8>) {
    let mut slots = vec![MaybeUninit::<IoSlice<'_>>::uninit(); slots.into()];
    let slices = buffer.slices(&mut slots);
    let whole: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
    let mut place = vec![MaybeUninit::uninit(); space.into()];
    assert_eq!(join(slices, &mut place), &whole[..whole.len().min(space.into())]);
    (slices.len(), whole)
}

fuzz_target!(|steps: Vec<Step>| {
    let mut buffer = OutBuf::new();
    let mut model = Model(VecDeque::new(), 0);
    for step in steps {
        match step {
            Step::Push(chunk) => {
                buffer.push(chunk.clone());
                model.0.push_back(chunk);
            }
            Step::PushMany(count, len) => {
                for index in 0..count {
                    let chunk = vec![index; len.into()];
                    buffer.push(chunk.clone());
                    model.0.push_back(chunk);
                }
            }
            Step::PushFront(chunk, sent) => {
                if model.1 == 0 && usize::from(sent) < chunk.len() {
                    buffer.push_front(chunk.clone(), sent.into());
                    model.0.push_front(chunk);
                    model.1 = sent.into();
                }
            }
            Step::Advance(_) | Step::AdvanceAll => {
                let len = model.unsent().len();
                let count = match step {
                    Step::Advance(count) => len.min(count.into()),
                    _ => len,
                };
                let mut dropped = Vec::new();
                buffer.advance(count, &mut |chunk| dropped.push(chunk));
                assert_eq!(dropped, model.advance(count));
            }
            Step::Pop => {
                assert_eq!(buffer.pop(), model.0.pop_front());
                model.1 = 0;
            }
            Step::Offer(slots, space) => {
                let (count, bytes) = offered(&buffer, slots, space);
                assert!(model.unsent().starts_with(&bytes));
                assert!(count <= slots.into());
            }
        }
        let unsent = model.unsent();
        assert_eq!(buffer.len_bytes(), unsent.len());
        assert_eq!(buffer.is_empty(), model.0.is_empty());
        assert!(buffer.iter().eq(&model.0));
        let (count, bytes) = offered(&buffer, 255, 9);
        assert!(count == 255 || bytes == unsent);
    }
});
