//! Compares the inbox with a deque and a flag: exactly one push or claim wakes a sleeping consumer, and `begin_sleep`
//! refuses to sleep while there is an item. All steps run in one thread; the unit tests use several.
#![no_main]

use std::collections::VecDeque;

use grapeshot_core::queue::inbox::Inbox;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Push(u32),
    Pop,
    ClaimWake,
    BeginSleep,
    BeginLockedSleep,
    EndSleep,
}

fuzz_target!(|steps: Vec<Step>| {
    let inbox = Inbox::new();
    let mut items = VecDeque::new();
    let mut sleeps = false;
    for step in steps {
        match step {
            Step::Push(item) => {
                items.push_back(item);
                assert_eq!(inbox.push(item), std::mem::take(&mut sleeps));
            }
            Step::Pop => assert_eq!(inbox.pop(), items.pop_front()),
            Step::ClaimWake => assert_eq!(inbox.claim_wake(), std::mem::take(&mut sleeps)),
            Step::BeginSleep => {
                sleeps = items.is_empty();
                assert_eq!(inbox.begin_sleep(), sleeps);
            }
            Step::BeginLockedSleep => {
                inbox.begin_locked_sleep();
                sleeps = true;
            }
            Step::EndSleep => {
                inbox.end_sleep();
                sleeps = false;
            }
        }
        assert_eq!(inbox.is_empty(), items.is_empty());
    }
});
