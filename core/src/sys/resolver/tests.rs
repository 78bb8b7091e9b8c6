//! Tests of the resolver with lookups that the test controls, and of the C library's lookups of names that need no
//! server.

use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{
    AddressQuestion, Answer, Failure, HAS_HOST_LOOKUPS, HostEntry, Lookups, MAX_REMEMBERED, NameQuestion,
    Outcome, Pool, Question, Resolver, calls,
};

fn question(host: &str) -> Question {
    Question::Addresses(AddressQuestion {
        host: Some(CString::new(host).unwrap()),
        service: Some(c"80".to_owned()),
        family: 0,
        kind: libc::SOCK_STREAM,
        protocol: 0,
        flags: 0,
    })
}

fn host_of(question: &Question) -> String {
    match question {
        Question::Addresses(AddressQuestion { host: Some(host), .. }) => host.to_str().unwrap().to_owned(),
        _ => String::new(),
    }
}

fn resolver(max_threads: usize, look_up: fn(&Question) -> Outcome) -> Resolver {
    let threads = Box::leak(Box::new(Pool::new("test", max_threads)));
    Resolver::of(Box::leak(Box::new(Lookups::new(threads, look_up)))).unwrap()
}

/// Waits for `count` outcomes.
fn take(resolver: &Resolver, count: usize) -> Vec<(u64, Arc<Outcome>)> {
    let mut taken = Vec::new();
    let limit = Instant::now() + Duration::from_secs(60);
    while taken.len() < count {
        assert!(Instant::now() < limit, "{} of {count} have arrived", taken.len());
        taken.extend(resolver.take());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(taken.len(), count);
    taken
}

/// A lookup that tells the test its host, and then waits for the test. Each test has its own pair of channels.
macro_rules! gated {
    ($look_up:ident, $begun:ident, $go_on:ident) => {
        static SENDER: Mutex<Option<Sender<String>>> = Mutex::new(None);
        static GATE: Mutex<Option<Receiver<()>>> = Mutex::new(None);
        fn $look_up(question: &Question) -> Outcome {
            let sender = SENDER.lock().unwrap().clone().unwrap();
            sender.send(host_of(question)).unwrap();
            GATE.lock().unwrap().as_ref().unwrap().recv().unwrap();
            Err(Failure::Lookup(libc::EAI_NONAME))
        }
        let (sender, $begun) = channel();
        let ($go_on, gate) = channel();
        *SENDER.lock().unwrap() = Some(sender);
        *GATE.lock().unwrap() = Some(gate);
    };
}

#[test]
fn equal_lookups_under_way_are_shared() {
    gated!(look_up, begun, go_on);
    let first = resolver(2, look_up);
    let second = Resolver::of(first.lookups).unwrap();
    let own = first.ask(question("a"), Duration::ZERO).unwrap();
    begun.recv().unwrap();
    let joined: Vec<u64> = (0..3)
        .map(|_| second.ask(question("a"), Duration::ZERO).unwrap())
        .collect();
    go_on.send(()).unwrap();
    assert_eq!(take(&first, 1)[0].0, own);
    let tickets: Vec<u64> = take(&second, 3).into_iter().map(|(ticket, _)| ticket).collect();
    assert_eq!(tickets, joined);
    assert!(begun.try_recv().is_err());
    // A later question causes a lookup of its own.
    first.ask(question("a"), Duration::ZERO).unwrap();
    assert_eq!(begun.recv().unwrap(), "a");
    go_on.send(()).unwrap();
    take(&first, 1);
    assert!(first.lookups.lock().tickets.is_empty() && first.lookups.lock().asked.is_empty());
}

#[test]
fn a_lookup_that_nobody_wants_any_more_is_not_begun() {
    gated!(look_up, begun, go_on);
    let resolver = resolver(1, look_up);
    let running = resolver.ask(question("running"), Duration::ZERO).unwrap();
    begun.recv().unwrap();
    let dropped = resolver.ask(question("dropped"), Duration::ZERO).unwrap();
    let shared = [0, 1].map(|_| resolver.ask(question("shared"), Duration::ZERO).unwrap());
    resolver.forget(dropped);
    resolver.forget(shared[0]);
    resolver.forget(running);
    resolver.forget(running);
    go_on.send(()).unwrap();
    assert_eq!(begun.recv().unwrap(), "shared");
    go_on.send(()).unwrap();
    assert_eq!(take(&resolver, 1)[0].0, shared[1]);
    assert!(begun.try_recv().is_err());
}

#[test]
fn a_forgotten_question_can_be_asked_again() {
    gated!(look_up, begun, go_on);
    let resolver = resolver(1, look_up);
    resolver.ask(question("first"), Duration::ZERO).unwrap();
    begun.recv().unwrap();
    for _ in 0..1000 {
        let ticket = resolver.ask(question("again"), Duration::ZERO).unwrap();
        resolver.forget(ticket);
    }
    assert!(
        resolver.lookups.lock().queue.len() < 100,
        "the queue is cleared of forgotten questions"
    );
    assert!(
        resolver.lookups.lock().jobs < 100,
        "the job of a forgotten question serves the next one"
    );
    let again = resolver.ask(question("again"), Duration::ZERO).unwrap();
    go_on.send(()).unwrap();
    go_on.send(()).unwrap();
    assert_eq!(take(&resolver, 2)[1].0, again);
    assert_eq!(begun.try_iter().collect::<Vec<_>>(), ["again"]);
}

#[test]
fn answers_are_remembered_for_those_who_accept_their_age() {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    fn look_up(question: &Question) -> Outcome {
        COUNT.fetch_add(1, Ordering::Relaxed);
        match host_of(question).as_str() {
            "bad" => Err(Failure::Lookup(libc::EAI_AGAIN)),
            _ => Ok(Answer::Addresses(Vec::new())),
        }
    }
    let resolver = resolver(1, look_up);
    let ask = |host: &str, max_age: Duration| {
        let before = COUNT.load(Ordering::Relaxed);
        let ticket = resolver.ask(question(host), max_age).unwrap();
        assert_eq!(take(&resolver, 1)[0].0, ticket);
        COUNT.load(Ordering::Relaxed) - before
    };
    let hour = Duration::from_secs(3600);
    assert_eq!(ask("a", Duration::ZERO), 1);
    assert_eq!(
        ask("a", hour),
        1,
        "the answer to a question with max_age 0 is not kept"
    );
    assert_eq!(ask("a", hour), 0);
    assert_eq!(ask("a", Duration::ZERO), 1);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(ask("a", Duration::from_millis(1)), 1);
    assert_eq!(
        [ask("bad", hour), ask("bad", hour)],
        [1, 1],
        "errors are not kept"
    );
    for number in 0..MAX_REMEMBERED + 10 {
        ask(&number.to_string(), hour);
    }
    assert_eq!(resolver.lookups.lock().remembered.len(), MAX_REMEMBERED);
    assert_eq!(ask("0", hour), 1, "the oldest answers were dropped");
}

#[test]
fn numeric_hosts() {
    let Ok(Answer::Addresses(found)) = calls::look_up(&question("192.0.2.7")) else {
        panic!("no answer");
    };
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].address, "192.0.2.7:80".parse::<SocketAddr>().unwrap());
    assert_eq!(
        (found[0].family, found[0].kind),
        (libc::AF_INET, libc::SOCK_STREAM)
    );
    let unknown = calls::look_up(&Question::Addresses(AddressQuestion {
        host: Some(c"not numeric".to_owned()),
        service: None,
        family: 0,
        kind: 0,
        protocol: 0,
        flags: libc::AI_NUMERICHOST,
    }));
    assert_eq!(unknown, Err(Failure::Lookup(libc::EAI_NONAME)));
}

#[test]
fn numeric_names() {
    let ask = |host: &std::ffi::CStr, scope_id| {
        calls::look_up(&Question::Names(NameQuestion {
            host: host.to_owned(),
            port: c"443".to_owned(),
            flow_info: 0,
            scope_id,
            flags: libc::NI_NUMERICHOST | libc::NI_NUMERICSERV,
        }))
    };
    let names = |host: &std::ffi::CStr| Ok(Answer::Names(host.to_owned(), c"443".to_owned()));
    assert_eq!(ask(c"127.1", 0), names(c"127.0.0.1"));
    assert_eq!(ask(c"::1", 0), names(c"::1"));
    assert_eq!(ask(c"fe80::1", 987_654), names(c"fe80::1%987654"));
    assert_eq!(ask(c"name", 0), Err(Failure::Lookup(libc::EAI_NONAME)));
}

#[test]
fn hosts() {
    let found = calls::look_up(&Question::HostByName(c"127.0.0.1".to_owned()));
    if !HAS_HOST_LOOKUPS {
        assert_eq!(found, Err(Failure::System(libc::ENOSYS)));
        return;
    }
    let Ok(Answer::Host(HostEntry { addresses, .. })) = found else {
        panic!("no answer");
    };
    assert_eq!(addresses, [c"127.0.0.1".to_owned()]);
}
