//! Compares the ready queue with a deque while it grows and shrinks.
#![no_main]

use std::collections::VecDeque;

use grapeshot_core::queue::ready::ReadyQueue;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Push(u16),
    PushMany(u16),
    Pop,
    PopMany(u16),
    Drains(u8),
    Get(u16),
}

fuzz_target!(|steps: Vec<Step>| {
    let mut queue = ReadyQueue::new();
    let mut model = VecDeque::new();
    for step in steps.into_iter().take(64) {
        match step {
            Step::Push(item) => {
                queue.push_back(item);
                model.push_back(item);
            }
            Step::PushMany(count) => {
                for item in 0..count {
                    queue.push_back(item);
                    model.push_back(item);
                }
            }
            Step::Pop => assert_eq!(queue.pop_front(), model.pop_front()),
            Step::PopMany(count) => {
                for _ in 0..count {
                    assert_eq!(queue.pop_front(), model.pop_front());
                }
            }
            Step::Drains(count) => {
                for item in 0..u16::from(count) {
                    queue.push_back(item);
                    model.push_back(item);
                    while let Some(expected) = model.pop_front() {
                        assert_eq!(queue.pop_front(), Some(expected));
                    }
                }
            }
            Step::Get(offset) => {
                assert_eq!(queue.get(offset.into()), model.get(usize::from(offset)))
            }
        }
        assert_eq!((queue.len(), queue.is_empty()), (model.len(), model.is_empty()));
        assert_eq!(queue.get(model.len()), None);
    }
    assert!(queue.iter().eq(model.iter()));
});
