//! The fd table: the registration of each fd, with a generation.
//!
//! With one indexed load, the table finds the registration that belongs to an event's token. It finds nothing if the fd
//! was closed and reused since the event. The kernel assigns the lowest free number to a new fd, so the length of the
//! table is about the number of open fds. A caller may still pass a much larger number that is not an open fd. The
//! registration of such a number goes to a sparse map, so that the table does not allocate gigabytes.
//!
//! ```text
//!   token   63 ........ 32 31 ......... 0       generation: a number that increases with each new token,
//!           generation     fd                   from 1 on; 0 is never used
//! ```
//!
//! Since an fd is never negative, a token of this table never has bit 31 set. So `Token(u64::MAX)`, other tokens with
//! that bit, and all tokens of generation 0 can be used for fds that are not in the table.
//!
//! The table belongs to the loop's thread.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use crate::sys::poller::Token;

/// Registrations of this fd and above are in the sparse map. The limit is the usual maximum of open fds (`fs.nr_open`).
/// A number below the limit that is not an open fd costs some tens of megabytes at worst.
const DENSE_LIMIT: usize = 1 << 20;
/// How many fds the dense table has space for at first.
const FIRST_LEN: usize = 64;

struct FdEntry<T> {
    generation: u32,
    value: T,
}

/// A table of registrations by fd.
pub struct FdTable<T> {
    dense: Vec<Option<FdEntry<T>>>,
    sparse: BTreeMap<usize, FdEntry<T>>,
    len: usize,
    /// The generation of the newest token. There is one counter for all fds, so a token can equal an older one only
    /// after 2^32 tokens. That is safe, because an event is handled within one iteration of the loop.
    generation: u32,
}

impl<T> FdTable<T> {
    /// An empty table; allocates at the first insertion.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            dense: Vec::new(),
            sparse: BTreeMap::new(),
            len: 0,
            generation: 0,
        }
    }

    /// How many fds are registered.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no fd is registered.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Registers `value` for `fd` under a new token. An earlier registration of `fd` ends, and is returned.
    ///
    /// # Panics
    /// If `fd` is negative.
    pub fn insert(&mut self, fd: RawFd, value: T) -> (Token, Option<T>) {
        assert!(fd >= 0, "a negative fd cannot be registered");
        let index = fd.unsigned_abs() as usize;
        let generation = self.next_generation();
        let entry = FdEntry { generation, value };
        let earlier = if index < DENSE_LIMIT {
            if index >= self.dense.len() {
                let len = (index + 1).next_power_of_two().max(FIRST_LEN);
                self.dense.resize_with(len, || None);
            }
            self.dense[index].replace(entry)
        } else {
            self.sparse.insert(index, entry)
        };
        self.len += usize::from(earlier.is_none());
        (token(index, generation), earlier.map(|entry| entry.value))
    }

    /// Gives the registration of `fd` a new token. The earlier token finds nothing from now on. Returns the new token,
    /// or `None` if `fd` is not registered.
    pub fn renew(&mut self, fd: RawFd) -> Option<Token> {
        let index = usize::try_from(fd).ok()?;
        let generation = self.next_generation();
        let entry = match self.dense.get_mut(index) {
            Some(entry) => entry.as_mut(),
            None => self.sparse.get_mut(&index),
        };
        entry?.generation = generation;
        Some(token(index, generation))
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.checked_add(1).unwrap_or(1);
        self.generation
    }

    /// The registration with this token, or `None` if it has ended.
    #[inline]
    #[must_use]
    pub fn get(&self, token: Token) -> Option<&T> {
        let (index, generation) = parts(token);
        let entry = self.entry(index)?;
        (entry.generation == generation).then_some(&entry.value)
    }

    /// The registration of `fd`.
    #[inline]
    #[must_use]
    pub fn get_fd(&self, fd: RawFd) -> Option<&T> {
        self.entry(usize::try_from(fd).ok()?).map(|entry| &entry.value)
    }

    /// The token of the registration of `fd`.
    #[inline]
    #[must_use]
    pub fn token_of(&self, fd: RawFd) -> Option<Token> {
        let index = usize::try_from(fd).ok()?;
        self.entry(index).map(|entry| token(index, entry.generation))
    }

    /// Ends the registration of `fd` and returns it. Its token finds nothing from now on, even if `fd` is registered
    /// again.
    #[inline]
    pub fn remove(&mut self, fd: RawFd) -> Option<T> {
        let index = usize::try_from(fd).ok()?;
        let entry = if index < DENSE_LIMIT {
            self.dense.get_mut(index)?.take()?
        } else {
            self.sparse.remove(&index)?
        };
        self.len -= 1;
        Some(entry.value)
    }

    /// Ends the registration with this token and returns it with its fd. Does nothing if the registration has ended.
    pub fn remove_token(&mut self, token: Token) -> Option<(RawFd, T)> {
        self.get(token)?;
        let fd = fd_of(parts(token).0);
        self.remove(fd).map(|value| (fd, value))
    }

    /// The registrations, in the order of their fds.
    pub fn iter(&self) -> impl Iterator<Item = (RawFd, &T)> {
        let dense = self.dense.iter().enumerate();
        dense
            .filter_map(|(index, entry)| entry.as_ref().map(|entry| (index, entry)))
            .chain(self.sparse.iter().map(|(&index, entry)| (index, entry)))
            .map(|(index, entry)| (fd_of(index), &entry.value))
    }

    #[inline]
    fn entry(&self, index: usize) -> Option<&FdEntry<T>> {
        match self.dense.get(index) {
            Some(entry) => entry.as_ref(),
            None => self.sparse_entry(index),
        }
    }

    #[cold]
    fn sparse_entry(&self, index: usize) -> Option<&FdEntry<T>> {
        self.sparse.get(&index)
    }
}

impl<T> Default for FdTable<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[inline]
fn token(index: usize, generation: u32) -> Token {
    Token(u64::from(generation) << 32 | index as u64)
}

/// The index and the generation of a token. If the token is not from this table, the index might not be a valid fd.
#[inline]
fn parts(token: Token) -> (usize, u32) {
    (token.0 as u32 as usize, (token.0 >> 32) as u32)
}

/// The fd of an index in the table. Every index was made from an fd, so it fits.
#[inline]
fn fd_of(index: usize) -> RawFd {
    index as RawFd
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::{DENSE_LIMIT, FIRST_LEN, FdTable};
    use crate::sys::poller::Token;

    #[test]
    fn a_token_leads_to_its_own_registration_only() {
        let mut table = FdTable::new();
        let (first, _) = table.insert(5, 'a');
        assert_eq!(first.0 & 0xffff_ffff, 5);
        assert_eq!(
            (table.get(first), table.get_fd(5), table.token_of(5)),
            (Some(&'a'), Some(&'a'), Some(first))
        );
        assert_eq!(table.remove(5), Some('a'));
        assert_eq!(
            (table.get(first), table.get_fd(5), table.token_of(5)),
            (None, None, None)
        );
        let (second, _) = table.insert(5, 'b');
        assert_ne!(first, second);
        assert_eq!((table.remove_token(first), table.len()), (None, 1));
        assert_eq!((table.remove_token(second), table.len()), (Some((5, 'b')), 0));
        let (second, _) = table.insert(5, 'b');
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        // Inserting over a registration also ends it.
        let (third, earlier) = table.insert(5, 'c');
        assert_eq!(earlier, Some('b'));
        assert_eq!(
            (table.get(second), table.get(third), table.len()),
            (None, Some(&'c'), 1)
        );
    }

    #[test]
    fn tokens_from_elsewhere_find_nothing() {
        let mut table = FdTable::new();
        assert_eq!((table.get(Token(0)), table.get(Token(u64::MAX))), (None, None));
        for fd in 0..10 {
            table.insert(fd, fd);
        }
        assert_eq!((table.get(Token(0)), table.get(Token(u64::MAX))), (None, None));
        assert_eq!((table.get_fd(-1), table.token_of(-1)), (None, None));
        assert_eq!(table.remove(-1), None);
    }

    #[test]
    #[should_panic(expected = "negative")]
    fn a_negative_fd_is_refused() {
        FdTable::new().insert(-1, ());
    }

    #[test]
    fn a_huge_fd_does_not_enlarge_the_table() {
        let mut table = FdTable::new();
        let (near, _) = table.insert(1, 'n');
        let (far, _) = table.insert(i32::MAX, 'f');
        assert_eq!(table.dense.len(), FIRST_LEN);
        assert_eq!(
            (table.get(near), table.get(far), table.get_fd(i32::MAX)),
            (Some(&'n'), Some(&'f'), Some(&'f'))
        );
        assert!(table.iter().eq([(1, &'n'), (i32::MAX, &'f')]));
        assert_eq!(
            (table.remove(i32::MAX), table.get(far), table.len()),
            (Some('f'), None, 1)
        );
    }

    #[test]
    fn generations_skip_zero_when_they_wrap() {
        let mut table = FdTable::new();
        table.generation = u32::MAX - 1;
        assert_eq!(table.insert(0, 'a').0, Token(0xffff_ffff_0000_0000));
        assert_eq!(table.insert(0, 'b').0, Token(0x1_0000_0000));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(i32),
        Renew(i32),
        Remove(i32),
    }

    fn fd() -> impl Strategy<Value = i32> {
        let limit = i32::try_from(DENSE_LIMIT).unwrap();
        prop_oneof![8 => 0..12, 1 => 60..70, 1 => limit..limit + 3]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => fd().prop_map(Step::Insert),
            1 => fd().prop_map(Step::Renew),
            2 => fd().prop_map(Step::Remove),
        ]
    }

    proptest! {
        /// Compares the table with an ordered map, and checks that no token of an ended registration finds anything.
        #[test]
        fn behaves_like_a_map_with_generations(steps in prop::collection::vec(step(), 0..120)) {
            let mut table = FdTable::new();
            let mut model: BTreeMap<i32, (Token, usize)> = BTreeMap::new();
            let mut ended = Vec::new();
            for (value, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(fd) => {
                        let (token, earlier) = table.insert(fd, value);
                        prop_assert!(!ended.contains(&token));
                        let expected = model.insert(fd, (token, value));
                        prop_assert_eq!(earlier, expected.map(|(_, value)| value));
                        ended.extend(expected.map(|(token, _)| token));
                    }
                    Step::Renew(fd) => {
                        let token = table.renew(fd);
                        prop_assert_eq!(token.is_some(), model.contains_key(&fd));
                        if let (Some(token), Some(entry)) = (token, model.get_mut(&fd)) {
                            prop_assert!(!ended.contains(&token));
                            ended.push(entry.0);
                            entry.0 = token;
                        }
                    }
                    Step::Remove(fd) => {
                        let expected = model.remove(&fd);
                        prop_assert_eq!(table.remove(fd), expected.map(|(_, value)| value));
                        ended.extend(expected.map(|(token, _)| token));
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(table.is_empty(), model.is_empty());
                for (&fd, &(token, value)) in &model {
                    prop_assert_eq!(table.get(token), Some(&value));
                    prop_assert_eq!(table.get_fd(fd), Some(&value));
                    prop_assert_eq!(table.token_of(fd), Some(token));
                }
                prop_assert!(ended.iter().all(|&token| table.get(token).is_none()));
                prop_assert!(table.iter().eq(model.iter().map(|(&fd, (_, value))| (fd, value))));
            }
        }
    }
}
