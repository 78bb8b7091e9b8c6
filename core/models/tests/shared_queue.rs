//! The shared queue: no item is lost or duplicated, the capacity is not exceeded, and every call ends, even if calls
//! are cancelled or the queue is closed. If a waiter is not woken, its thread waits forever, and loom reports a
//! deadlock.

use std::sync::Arc;

use grapeshot_models::check;
use grapeshot_models::shared_queue::{Ended, SharedQueue, Waiter};
use loom::thread::{self, JoinHandle};

fn get(queue: &Arc<SharedQueue>, waiter: &Arc<Waiter>) -> JoinHandle<Ended> {
    let (queue, waiter) = (Arc::clone(queue), Arc::clone(waiter));
    thread::spawn(move || queue.get(&waiter))
}

fn put(queue: &Arc<SharedQueue>, item: u32, waiter: &Arc<Waiter>) -> JoinHandle<Ended> {
    let (queue, waiter) = (Arc::clone(queue), Arc::clone(waiter));
    thread::spawn(move || queue.put(item, &waiter))
}

#[test]
fn items_arrive_in_order() {
    check(|| {
        let queue = SharedQueue::new(1);
        let putting = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || [1, 2].map(|item| queue.put(item, &Waiter::new())))
        };
        assert_eq!(
            [queue.get(&Waiter::new()), queue.get(&Waiter::new())],
            [Ended::Got(1), Ended::Got(2)]
        );
        assert_eq!(putting.join().unwrap(), [Ended::Put, Ended::Put]);
        assert!(queue.end().is_empty());
    });
}

#[test]
fn two_putters_and_two_getters_wait_for_one_place() {
    check(|| {
        let queue = SharedQueue::new(1);
        let putting = [1, 2].map(|item| put(&queue, item, &Waiter::new()));
        let mut got = [queue.get(&Waiter::new()), queue.get(&Waiter::new())];
        got.sort_unstable_by_key(|ended| *ended == Ended::Got(2));
        assert_eq!(got, [Ended::Got(1), Ended::Got(2)]);
        assert_eq!(
            putting.map(|thread| thread.join().unwrap()),
            [Ended::Put, Ended::Put]
        );
        assert!(queue.end().is_empty());
    });
}

#[test]
fn the_item_of_a_cancelled_getter_goes_to_the_next_one() {
    check(|| {
        let (queue, waiter) = (SharedQueue::new(1), Waiter::new());
        let first = get(&queue, &waiter);
        let second = get(&queue, &Waiter::new());
        waiter.cancel();
        assert_eq!(queue.put(1, &Waiter::new()), Ended::Put);
        // If the first getter has got the item, the second one waits for another item.
        match first.join().unwrap() {
            Ended::Got(1) => assert_eq!(queue.put(1, &Waiter::new()), Ended::Put),
            ended => assert_eq!(ended, Ended::Cancelled),
        }
        assert_eq!(second.join().unwrap(), Ended::Got(1));
        assert!(queue.end().is_empty());
    });
}

#[test]
fn the_place_of_a_cancelled_putter_goes_to_the_next_one() {
    check(|| {
        let (queue, waiter) = (SharedQueue::new(1), Waiter::new());
        assert_eq!(queue.put(1, &Waiter::new()), Ended::Put);
        let first = put(&queue, 2, &waiter);
        let second = put(&queue, 3, &Waiter::new());
        waiter.cancel();
        assert_eq!(queue.get(&Waiter::new()), Ended::Got(1));
        let mut got = vec![queue.get(&Waiter::new())];
        if first.join().unwrap() == Ended::Put {
            got.push(queue.get(&Waiter::new()));
            assert!(got.contains(&Ended::Got(2)), "{got:?}");
        }
        assert!(got.contains(&Ended::Got(3)), "{got:?}");
        assert_eq!(second.join().unwrap(), Ended::Put);
        assert!(queue.end().is_empty());
    });
}

#[test]
fn a_waiter_of_a_closed_loop_is_passed_over() {
    check(|| {
        let queue = SharedQueue::new(1);
        assert!(queue.enter_getter(&Waiter::dead()));
        let getting = get(&queue, &Waiter::new());
        assert_eq!(queue.put(1, &Waiter::new()), Ended::Put);
        assert_eq!(getting.join().unwrap(), Ended::Got(1));
        assert!(queue.end().is_empty());
    });
}

#[test]
fn a_waiter_of_a_closed_loop_leaves_while_it_is_passed_over() {
    check(|| {
        let (queue, waiter) = (SharedQueue::new(1), Waiter::dead());
        assert!(queue.enter_getter(&waiter));
        let getting = get(&queue, &Waiter::new());
        let leaving = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.leave_getter(&waiter))
        };
        assert_eq!(queue.put(1, &Waiter::new()), Ended::Put);
        leaving.join().unwrap();
        assert_eq!(getting.join().unwrap(), Ended::Got(1));
        assert!(queue.end().is_empty());
    });
}

#[test]
fn all_getters_end_when_the_queue_is_closed() {
    check(|| {
        let queue = SharedQueue::new(1);
        let getting = [(); 2].map(|()| get(&queue, &Waiter::new()));
        let put = queue.put(1, &Waiter::new());
        queue.close();
        assert_eq!(put, Ended::Put);
        let mut ended = getting.map(|thread| thread.join().unwrap());
        ended.sort_unstable_by_key(|ended| *ended == Ended::Closed);
        assert_eq!(ended, [Ended::Got(1), Ended::Closed]);
        assert!(queue.end().is_empty());
    });
}

#[test]
fn all_putters_end_when_the_queue_is_closed() {
    check(|| {
        let queue = SharedQueue::new(1);
        let putting = [1, 2].map(|item| put(&queue, item, &Waiter::new()));
        queue.close();
        let ended = putting.map(|thread| thread.join().unwrap());
        let expected = [1, 2].into_iter().zip(ended);
        let expected: Vec<_> = expected
            .filter_map(|(item, ended)| (ended == Ended::Put).then_some(item))
            .collect();
        assert!(
            ended
                .iter()
                .all(|ended| matches!(ended, Ended::Put | Ended::Closed))
        );
        assert!(expected.len() <= 1, "more items than fit");
        assert_eq!(queue.end(), expected);
    });
}

#[test]
fn a_cancelled_getter_and_a_putter_while_the_queue_is_closed() {
    check(|| {
        let (queue, waiter) = (SharedQueue::new(1), Waiter::new());
        let getting = get(&queue, &waiter);
        let putting = put(&queue, 1, &Waiter::new());
        waiter.cancel();
        queue.close();
        let (got, put) = (getting.join().unwrap(), putting.join().unwrap());
        let left = queue.end();
        match (got, put) {
            (Ended::Got(1), Ended::Put) | (Ended::Closed | Ended::Cancelled, Ended::Closed) => {
                assert!(left.is_empty());
            }
            (Ended::Cancelled, Ended::Put) => assert_eq!(left, [1]),
            other => panic!("{other:?}"),
        }
    });
}
