//! Compares the fd table with a map, and checks that tokens of ended registrations find nothing.
#![no_main]

use std::collections::BTreeMap;

use grapeshot_core::queue::fd_table::FdTable;
use grapeshot_core::sys::poller::Token;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Insert(u8),
    InsertFar(i32),
    Remove(u8),
    RemoveFar(i32),
    RemoveOld(u8),
    Renew(u8),
    Get(u64),
}

fuzz_target!(|steps: Vec<Step>| {
    let mut table = FdTable::new();
    let mut model: BTreeMap<i32, (Token, u32)> = BTreeMap::new();
    let mut tokens = Vec::new();
    for (value, step) in (0u32..).zip(steps) {
        match step {
            Step::Insert(_) | Step::InsertFar(_) => {
                let fd = match step {
                    Step::InsertFar(fd) if fd >= 1 << 20 => fd,
                    Step::InsertFar(fd) => fd & 0xfff,
                    Step::Insert(fd) => fd.into(),
                    _ => 0,
                };
                let (token, earlier) = table.insert(fd, value);
                assert!(!tokens.contains(&(token, fd)), "the token was used before");
                assert_eq!(token.0 & 1 << 31, 0);
                tokens.push((token, fd));
                let expected = model.insert(fd, (token, value));
                assert_eq!(earlier, expected.map(|(_, value)| value));
            }
            Step::Renew(fd) => {
                let fd = fd.into();
                let token = table.renew(fd);
                assert_eq!(token.is_some(), model.contains_key(&fd));
                if let (Some(token), Some(entry)) = (token, model.get_mut(&fd)) {
                    assert!(!tokens.contains(&(token, fd)), "the token was used before");
                    tokens.push((token, fd));
                    entry.0 = token;
                }
            }
            Step::Remove(fd) => {
                let expected = model.remove(&fd.into()).map(|(_, value)| value);
                assert_eq!(table.remove(fd.into()), expected);
            }
            Step::RemoveFar(fd) => {
                assert_eq!(table.remove(fd), model.remove(&fd).map(|(_, value)| value));
            }
            Step::RemoveOld(index) => {
                let Some(&(token, fd)) = tokens.get(usize::from(index)) else {
                    continue;
                };
                let current = model.get(&fd).filter(|(each, _)| *each == token).copied();
                if current.is_some() {
                    model.remove(&fd);
                }
                assert_eq!(table.remove_token(token), current.map(|(_, value)| (fd, value)));
            }
            Step::Get(number) => {
                let expected = model.values().find(|(token, _)| token.0 == number);
                assert_eq!(table.get(Token(number)), expected.map(|(_, value)| value));
            }
        }
        assert_eq!(table.len(), model.len());
        assert_eq!(table.is_empty(), model.is_empty());
    }
    for (token, fd) in tokens {
        let current = model.get(&fd);
        assert_eq!(table.get_fd(fd), current.map(|(_, value)| value));
        assert_eq!(table.token_of(fd), current.map(|(token, _)| *token));
        let own = current.filter(|(each, _)| *each == token);
        assert_eq!(table.get(token), own.map(|(_, value)| value));
    }
    assert_eq!(table.get_fd(-1), None);
    let all: Vec<_> = model.iter().map(|(&fd, (_, value))| (fd, value)).collect();
    assert_eq!(table.iter().collect::<Vec<_>>(), all);
});
