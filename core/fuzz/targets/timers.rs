//! Compares the timers with a map that is ordered by deadline and sequence number.
#![no_main]

use std::collections::BTreeMap;

use grapeshot_core::queue::timers::TimerHeap;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    /// The range is small, so many deadlines are equal.
    Push(u8),
    PushFar(u64),
    /// Pushes several timers whose deadlines rise or fall in equal steps. A negative deadline loses its sign.
    PushMany(u8, i8),
    Pop,
    PopDue(u8),
    SortDue(u8),
    RemoveLast,
    Retain(u8),
}

fuzz_target!(|steps: Vec<Step>| {
    let mut heap = TimerHeap::new();
    let mut model = BTreeMap::new();
    let mut next = 0u64;
    for step in steps {
        let mut push = |heap: &mut TimerHeap<u64>, model: &mut BTreeMap<(u64, u64), u64>, when: u64| {
            assert_eq!(heap.push(when, next), next);
            model.insert((when, next), next);
            next += 1;
        };
        match step {
            Step::Push(when) => push(&mut heap, &mut model, when.into()),
            Step::PushFar(when) => push(&mut heap, &mut model, when),
            Step::PushMany(count, by) => {
                for index in 0..i64::from(count) {
                    let when = (20_000 + index * i64::from(by)).unsigned_abs();
                    push(&mut heap, &mut model, when);
                }
            }
            Step::Pop => assert_eq!(heap.pop(), model.pop_first().map(|(_, item)| item)),
            Step::PopDue(now) => {
                let first = model.first_key_value().map(|(key, _)| key.0);
                let due = first.is_some_and(|when| when <= now.into());
                let expected = if due { model.pop_first() } else { None };
                assert_eq!(heap.pop_due(now.into()), expected.map(|(_, item)| item));
            }
            Step::SortDue(now) => {
                heap.sort_due(now.into());
                for (offset, (_, item)) in model.range(..=(now.into(), u64::MAX)).enumerate() {
                    if let Some(found) = heap.peek_run(offset) {
                        assert_eq!(found, item);
                    }
                }
            }
            Step::RemoveLast => {
                if let Some(item) = next.checked_sub(1)
                    && let Some(removed) = heap.remove_last_if(|each| *each == item)
                {
                    assert_eq!(removed, item);
                    model.retain(|_, each| *each != item);
                }
            }
            Step::Retain(divisor) => {
                let keep = |item: u64| !item.is_multiple_of(u64::from(divisor) + 1);
                let mut dropped = Vec::new();
                heap.retain(|item| keep(*item), &mut dropped);
                dropped.sort_unstable();
                let mut expected: Vec<_> = model.values().copied().filter(|item| !keep(*item)).collect();
                expected.sort_unstable();
                model.retain(|_, item| keep(*item));
                assert_eq!(dropped, expected);
            }
        }
        assert_eq!(heap.len(), model.len());
        assert_eq!(heap.is_empty(), model.is_empty());
        let earliest = model.first_key_value().map(|(key, item)| (key.0, item));
        assert_eq!(heap.peek(), earliest);
        assert_eq!(heap.peek_when(), earliest.map(|(when, _)| when));
        let has_slack = |item: &u64| !item.is_multiple_of(3);
        let latest = model
            .iter()
            .map(|(key, item)| key.0.saturating_add(if has_slack(item) { 9 } else { 0 }));
        let wake = heap.wake_when(9, has_slack);
        if model.len() <= 32 {
            assert_eq!(wake, latest.min());
        } else {
            assert!(heap.peek_when() <= wake && wake <= latest.min());
        }
    }
    let mut left: Vec<_> = heap.iter().copied().collect();
    left.sort_unstable();
    let mut expected: Vec<_> = model.values().copied().collect();
    expected.sort_unstable();
    assert_eq!(left, expected);
    while let Some((_, item)) = model.pop_first() {
        assert_eq!(heap.pop(), Some(item));
    }
});
