//! Checks a msgpack packet for keys that would make a Python dict slow, before the packet is decoded.
//!
//! Python randomizes the hashes of strings and bytes, but not those of numbers, of dates with a time zone, or of tuples
//! of these. A peer can therefore choose map keys whose hashes collide. Inserting them into a dict takes time that
//! grows with the square of their number, so a small packet can stop the process for seconds. Therefore keys of these
//! kinds have limits:
//!
//! - Python decoders turn an array that is a map key into a tuple. A packet of 240 KB whose keys are tuples with the
//!   same hash takes seconds. So a packet may have only a limited number of arrays and maps as keys.
//! - Integers as keys are inserted into a model of the dict that counts the steps: see [`probing`](crate::probing).
//! - Floats and extension values (such as dates) as keys are only counted, and their number is limited.
//!
//! Source: <https://github.com/msgpack/msgpack/blob/master/spec.md>

use crate::probing::Probing;

/// The most containers that may be nested in each other. A container without entries does not count. The number is a
/// little more than CPython's default recursion limit, which is 1,000. (From CPython 3.12 on, decoders in C may nest
/// deeper than that limit.)
const MAX_DEPTH: usize = 1024;

/// The limit for containers that are keys: how many of them a whole packet may have, counted together with the values
/// inside them. It allows a thousand keys that are pairs. If all of them have the same hash, a dict takes about 20 ms.
const MAX_KEY_VALUES: usize = 3000;

/// How many floats and extension values a whole packet may have as keys. The worst choice of them takes about 0.2 s.
const MAX_OTHER_KEYS: u32 = 20_000;

/// The integer keys of a map are probed (inserted into the model of the dict) only if the map has more keys than this.
/// The worst map with fewer keys takes half a millisecond.
const MIN_PROBED: u32 = 1000;

/// How many other keys a map may have if it has more than `MIN_PROBED` integers as keys. The hashes of strings are
/// secret, so the model of the dict cannot know which slots they take.
const MAX_MIXED: u32 = 1000;

/// How many steps all dicts of a packet together may take, for each byte of the packet. In each step, the search for a
/// free slot passes an occupied one. For a packet of one MiB, the allowed steps take 0.1 s. Integers that were not
/// chosen to collide take fewer than three steps per key, or thirty if their low bits are equal.
const STEPS_PER_BYTE: u64 = 16;

/// Why a packet must not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The packet has more than `MAX_KEY_VALUES` containers as keys, counted together with the values inside them.
    ContainersAsKeys,
    /// Keys are numbers or dates for which a dict would be very slow, or there are too many keys to rule that out.
    NumbersAsKeys,
    /// Containers are nested more than `MAX_DEPTH` deep.
    TooDeep,
}

/// The header of a value: how many bytes follow it, or how many entries the container has.
enum Value {
    Scalar { len_bytes: usize },
    Array { count: u32 },
    Map { count: u32 },
}

/// A container that the scan is in.
#[derive(Clone, Copy)]
struct Frame {
    /// How many entries the scan has not reached yet. An entry of a map is a key with its value, and counts as reached
    /// once the scan is at the value.
    left: u32,
    kind: Kind,
}

/// The role of the next object in a container: an item of an array, a key of a map, or the value of the last key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Item,
    Key,
    ValueOfKey,
}

impl Frame {
    /// Records that the scan has reached the next value of this container. Returns whether that value is a key.
    fn take(&mut self) -> bool {
        let is_key = self.kind == Kind::Key;
        if is_key {
            self.kind = Kind::ValueOfKey;
        } else {
            self.left -= 1;
            if self.kind == Kind::ValueOfKey {
                self.kind = Kind::Key;
            }
        }
        is_key
    }
}

/// The kinds of keys, which differ in the damage that a peer can do with them.
enum Key {
    /// A peer can predict the hash, so the steps that a dict takes to insert the key are counted.
    Integer { is_negative: bool, magnitude: u64 },
    /// A float, or an extension value such as a date: a peer can predict the hash. Only the number of these keys is
    /// counted.
    Number,
    /// A string or bytes, whose hash a peer cannot predict; nil, true or false, which are only three keys; or a
    /// container, whose values are counted elsewhere.
    Other,
}

/// A map with more than `MIN_PROBED` keys, and what the scan has found out about its keys so far.
struct ProbedMap {
    /// The index of the map's frame.
    depth: usize,
    probing: Probing,
    /// How many keys are not integers.
    mixed: u32,
}

/// The keys of a whole packet, except the keys of maps that are themselves part of a key.
struct Keys {
    /// The maps that the scan is in, if they are probed.
    maps: Vec<ProbedMap>,
    /// How many floats and extension values there were.
    others: u32,
    /// How many steps dicts may still take.
    steps_left: u64,
}

impl Keys {
    /// Adds a key of the map whose frame is at `depth`. Returns true if a limit is exceeded.
    fn take(&mut self, depth: usize, key: &Key) -> bool {
        if matches!(key, Key::Number) {
            self.others += 1;
        }
        let Some(map) = self.maps.last_mut().filter(|map| map.depth == depth) else {
            return self.others > MAX_OTHER_KEYS;
        };
        if let Key::Integer {
            is_negative,
            magnitude,
        } = *key
        {
            let steps = map.probing.insert(is_negative, magnitude);
            let Some(left) = self.steps_left.checked_sub(steps) else {
                return true;
            };
            self.steps_left = left;
        } else {
            map.mixed = map.mixed.saturating_add(1);
        }
        self.others > MAX_OTHER_KEYS || (map.mixed > MAX_MIXED && map.probing.len() > MIN_PROBED as usize)
    }
}

/// Returns the reason why a packet must not be decoded, or `None` if no limit is exceeded. `None` does not mean that
/// the packet is well-formed: the decoder itself rejects a packet that is truncated or has bytes after its end.
///
/// The time is at most proportional to the length of the packet; the content of strings is skipped. Memory is
/// allocated only for maps with more than a thousand keys: about 100 bytes for such a map, and about 50 bytes for each
/// integer that is a key of it.
#[must_use]
pub fn find_fault(packet: &[u8]) -> Option<Fault> {
    let mut frames = [Frame {
        left: 0,
        kind: Kind::Item,
    }; MAX_DEPTH];
    let mut depth = 0;
    let mut key_values = 0;
    // The depth of the outermost key that contains the next value, or `usize::MAX` if that value is not inside a key.
    let mut key_depth = usize::MAX;
    let mut keys = Keys {
        maps: Vec::new(),
        others: 0,
        steps_left: STEPS_PER_BYTE * packet.len() as u64,
    };
    let mut rest = packet;
    while let Some((value, behind)) = take_value(rest) {
        let is_key = depth > 0 && frames[depth - 1].take();
        if is_key && depth < key_depth && keys.take(depth - 1, &key_of(rest)) {
            return Some(Fault::NumbersAsKeys);
        }
        rest = behind;
        let (left, kind) = match value {
            Value::Scalar { .. } => (0, Kind::Item),
            Value::Array { count } => (count, Kind::Item),
            Value::Map { count } => (count, Kind::Key),
        };
        if is_key && !matches!(value, Value::Scalar { .. }) {
            key_depth = key_depth.min(depth);
        }
        if depth >= key_depth {
            key_values += 1;
            if key_values > MAX_KEY_VALUES {
                return Some(Fault::ContainersAsKeys);
            }
        }
        if left > 0 {
            if depth == MAX_DEPTH {
                return Some(Fault::TooDeep);
            }
            frames[depth] = Frame { left, kind };
            if kind == Kind::Key && left > MIN_PROBED {
                keys.maps.push(ProbedMap {
                    depth,
                    probing: Probing::default(),
                    mixed: 0,
                });
            }
            depth += 1;
        }
        while depth > 0 && frames[depth - 1].left == 0 {
            depth -= 1;
            keys.maps.pop_if(|map| map.depth == depth);
        }
        if depth == 0 {
            return None;
        }
        if depth <= key_depth {
            key_depth = usize::MAX;
        }
    }
    None
}

/// Returns the kind of the key at the start of some bytes. The key must be complete.
fn key_of(value: &[u8]) -> Key {
    let Some((&first, rest)) = value.split_first() else {
        return Key::Other;
    };
    let len_bytes = match first {
        0x00..=0x7f | 0xe0..=0xff => 0,
        0xcc | 0xd0 => 1,
        0xcd | 0xd1 => 2,
        0xce | 0xd2 => 4,
        0xcf | 0xd3 => 8,
        0xca | 0xcb | 0xc7..=0xc9 | 0xd4..=0xd8 => return Key::Number,
        _ => return Key::Other,
    };
    let is_signed = matches!(first, 0xd0..=0xd3);
    let digits = if len_bytes == 0 {
        &value[..1]
    } else {
        &rest[..len_bytes]
    };
    let is_negative = (is_signed || len_bytes == 0) && digits[0] & 0x80 != 0;
    let fill = if is_negative { u64::MAX } else { 0 };
    let bits = digits
        .iter()
        .fold(fill, |bits, &byte| bits << 8 | u64::from(byte));
    Key::Integer {
        is_negative,
        magnitude: if is_negative { bits.wrapping_neg() } else { bits },
    }
}

/// Takes one value off the front, or only the header of a container. `None` if the value is truncated, or begins with a
/// byte that msgpack does not use.
fn take_value(packet: &[u8]) -> Option<(Value, &[u8])> {
    let (&first, rest) = packet.split_first()?;
    let scalar = |len_bytes| Some((Value::Scalar { len_bytes }, rest));
    let sized = |len_bytes: usize, more: usize| {
        let (size, rest) = take_number(rest, len_bytes)?;
        let len_bytes = usize::try_from(size).ok()?.checked_add(more)?;
        Some((Value::Scalar { len_bytes }, rest))
    };
    let array = |len_bytes| take_number(rest, len_bytes).map(|(count, rest)| (Value::Array { count }, rest));
    let map = |len_bytes| take_number(rest, len_bytes).map(|(count, rest)| (Value::Map { count }, rest));
    let low = u32::from(first & 0x0f);
    let (value, rest) = match first {
        0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => scalar(0),
        0x80..=0x8f => Some((Value::Map { count: low }, rest)),
        0x90..=0x9f => Some((Value::Array { count: low }, rest)),
        0xa0..=0xbf => scalar(usize::from(first & 0x1f)),
        0xc1 => None,
        0xc4 | 0xd9 => sized(1, 0),
        0xc5 | 0xda => sized(2, 0),
        0xc6 | 0xdb => sized(4, 0),
        0xc7 => sized(1, 1),
        0xc8 => sized(2, 1),
        0xc9 => sized(4, 1),
        0xcc | 0xd0 => scalar(1),
        0xcd | 0xd1 | 0xd4 => scalar(2),
        0xca | 0xce | 0xd2 => scalar(4),
        0xcb | 0xcf | 0xd3 => scalar(8),
        0xd5 => scalar(3),
        0xd6 => scalar(5),
        0xd7 => scalar(9),
        0xd8 => scalar(17),
        0xdc => array(2),
        0xdd => array(4),
        0xde => map(2),
        0xdf => map(4),
    }?;
    let rest = match value {
        Value::Scalar { len_bytes } => rest.get(len_bytes..)?,
        _ => rest,
    };
    Some((value, rest))
}

/// Takes a big-endian number of one, two or four bytes off the front.
fn take_number(bytes: &[u8], len_bytes: usize) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_at_checked(len_bytes)?;
    let value = number.iter().fold(0, |value, &byte| value << 8 | u32::from(byte));
    Some((value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An array of two values: `packet`, and a map whose keys contain exactly as many values as are allowed, or three
    /// too many if `more` is 1.
    fn followed_by_keys(packet: &[u8], more: u8) -> Vec<u8> {
        let keys = [
            &b"\xde\x03"[..],
            &[0xe8 + more],
            &b"\x91\x91\x02\x81\x03\x04".repeat(1000 + usize::from(more)),
        ];
        [&b"\x92"[..], packet, &keys.concat()].concat()
    }

    #[test]
    fn containers_as_keys_are_counted_after_any_value() {
        let long = [&b"\xda\x01\x00"[..], &[0x90; 256]].concat();
        for value in [
            &b"\xc0"[..],
            b"\xc2",
            b"\xc3",
            b"\x7f",
            b"\xe0",
            b"\xff",
            b"\x80",
            b"\x90",
            b"\x81\x01\x90",
            b"\x92\x80\x90",
            b"\xa0",
            b"\xa3\x91\x91\x91",
            b"\xc4\x02\x81\x90",
            b"\xc5\x00\x02\x81\x90",
            b"\xc6\x00\x00\x00\x02\x81\x90",
            b"\xc7\x02\x05\x81\x90",
            b"\xc8\x00\x02\x05\x81\x90",
            b"\xc9\x00\x00\x00\x02\x05\x81\x90",
            b"\xca\x91\x91\x91\x91",
            b"\xcb\x91\x91\x91\x91\x91\x91\x91\x91",
            b"\xcc\x91",
            b"\xcd\x91\x91",
            b"\xce\x91\x91\x91\x91",
            b"\xcf\x91\x91\x91\x91\x91\x91\x91\x91",
            b"\xd0\x91",
            b"\xd1\x91\x91",
            b"\xd2\x91\x91\x91\x91",
            b"\xd3\x91\x91\x91\x91\x91\x91\x91\x91",
            b"\xd4\x05\x91",
            b"\xd5\x05\x91\x91",
            b"\xd6\x05\x91\x91\x91\x91",
            b"\xd7\x05\x91\x91\x91\x91\x91\x91\x91\x91",
            b"\xd8\x05\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91",
            b"\xd9\x02\x81\x90",
            &long,
            b"\xdb\x00\x00\x00\x02\x81\x90",
            b"\xdc\x00\x02\x80\x90",
            b"\xdd\x00\x00\x00\x02\x80\x90",
            b"\xde\x00\x01\x01\x90",
            b"\xdf\x00\x00\x00\x01\x01\x90",
        ] {
            assert_eq!(find_fault(&followed_by_keys(value, 0)), None, "{value:x?}");
            assert_eq!(
                find_fault(&followed_by_keys(value, 1)),
                Some(Fault::ContainersAsKeys),
                "{value:x?}"
            );
        }
    }

    #[test]
    fn malformed_packets_are_left_to_the_decoder() {
        let keys = followed_by_keys(b"\xc0", 1);
        for first in [
            &b""[..],
            b"\x01",
            b"\x90",
            b"\xc1",
            b"\x92\x01\xc1",
            b"\xc6\xff\xff\xff\xff",
            b"\xc9\xff\xff\xff\xff\x05",
        ] {
            assert_eq!(
                find_fault(&[first, if first.is_empty() { b"" } else { &keys[1..] }].concat()),
                None,
                "{first:x?}"
            );
        }
        for len_bytes in (0..keys.len() - 7).step_by(23) {
            assert_eq!(find_fault(&keys[..len_bytes]), None);
        }
        for packet in [&b"\xdf\xff\xff\xff\xff"[..], b"\xdd\xff\xff\xff\xff\x01", b"\x81"] {
            assert_eq!(find_fault(packet), None);
        }
    }

    #[test]
    fn values_inside_keys_count() {
        // One key that is an array of 2,999 values is just allowed. One value more is too much, whether it is in an
        // array inside that key, or is a second key.
        let long = [&b"\x81\xdc\x0b\xb7"[..], &[1; 2998]].concat();
        assert_eq!(find_fault(&[&long[..], b"\x01\xc0"].concat()), None);
        assert_eq!(
            find_fault(&[&long[..], b"\x91\x01\xc0"].concat()),
            Some(Fault::ContainersAsKeys)
        );
        let mut two = [&long[..], b"\x01\x93\x05\x05\x05\x90\xc0"].concat();
        two[0] = 0x82;
        assert_eq!(find_fault(&two), Some(Fault::ContainersAsKeys));
    }

    fn map_of(keys: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
        let keys: Vec<_> = keys.into_iter().collect();
        let count = u32::try_from(keys.len()).unwrap().to_be_bytes();
        let pairs = keys.into_iter().flat_map(|key| [key, vec![0xc0]].concat());
        [0xdf].into_iter().chain(count).chain(pairs).collect()
    }

    fn integer(value: u32) -> Vec<u8> {
        [&b"\xce"[..], &value.to_be_bytes()].concat()
    }

    /// Keys for a dict of 16,384 slots. Once all bits of a hash are shifted out, the slot that a dict probes after
    /// `slot` is 5 * slot + 1. The first 8,192 keys take half of the slots in that order. After these come `count`
    /// keys. The first probes of such a key, which depend on its hash, all hit taken slots. All further probes follow
    /// the order of the first 8,192 keys.
    fn colliding_keys(count: usize) -> impl Iterator<Item = u32> {
        let order = std::iter::successors(Some(1_u32), |at| Some((at * 5 + 1) % 16384)).take(8192);
        let mut probing = Probing::default();
        let mut taken = [false; 16384];
        for key in order.clone() {
            taken[key as usize] = true;
            probing.insert(false, u64::from(key));
        }
        let is_bad = move |key: &u32| {
            let (mut at, mut perturb) = (*key % 16384, *key);
            while taken[at as usize] && perturb > 0 {
                perturb >>= 5;
                at = (at * 5 + perturb + 1) % 16384;
            }
            taken[at as usize]
        };
        order.chain((1 << 24..).filter(is_bad).take(count))
    }

    #[test]
    fn integers_that_collide_often_are_refused() {
        assert_eq!(find_fault(&map_of(colliding_keys(10).map(integer))), None);
        let bad = map_of(colliding_keys(2000).map(integer));
        assert_eq!(find_fault(&bad), Some(Fault::NumbersAsKeys));
        // Such keys are found in other places, too: in a map that is a value, after another map, or after other keys.
        let inner = [&b"\x82\xa1a"[..], &map_of((0..2000).map(integer)), b"\xa1b", &bad].concat();
        assert_eq!(find_fault(&inner), Some(Fault::NumbersAsKeys));
        let texts = (0..900_u32).map(|text| [&b"\xa4"[..], &text.to_be_bytes()].concat());
        let mixed = map_of(texts.chain(colliding_keys(2000).map(integer)));
        assert_eq!(find_fault(&mixed), Some(Fault::NumbersAsKeys));
    }

    #[test]
    fn other_integers_are_not_refused() {
        for shift in [0, 8, 12] {
            let keys = map_of((0..100_000_u32).map(|key| integer(key << shift)));
            assert_eq!(find_fault(&keys), None, "{shift}");
        }
        let hashes = (1..100_000_u64).map(|key| key.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        assert_eq!(
            find_fault(&map_of(hashes.map(|key| [&b"\xcf"[..], &key].concat()))),
            None
        );
        let rows = (0..50_000_u32).flat_map(|key| [integer(key), integer(key % 7)].concat());
        let rows: Vec<u8> = b"\xdf\0\0\xc3\x50".iter().copied().chain(rows).collect();
        assert_eq!(find_fault(&rows), None);
    }

    #[test]
    fn floats_and_dates_as_keys_are_counted() {
        for first in [&b"\xca"[..], b"\xd6\xff"] {
            let keys = |count: u32| map_of((0..count).map(|key| [first, &key.to_be_bytes()].concat()));
            assert_eq!(find_fault(&keys(MAX_OTHER_KEYS)), None);
            assert_eq!(find_fault(&keys(MAX_OTHER_KEYS + 1)), Some(Fault::NumbersAsKeys));
        }
    }

    #[test]
    fn a_map_with_many_integers_and_many_other_keys_is_refused() {
        let mixed = |integers: u32, texts: u32| {
            let texts = (0..texts).map(|text| [&b"\xa4"[..], &text.to_be_bytes()].concat());
            find_fault(&map_of((0..integers).map(integer).chain(texts)))
        };
        assert_eq!(mixed(1000, 50_000), None);
        assert_eq!(mixed(50_000, 1000), None);
        assert_eq!(mixed(1001, 1001), Some(Fault::NumbersAsKeys));
    }

    #[test]
    fn integers_are_decoded() {
        for (packet, negative, expected) in [
            (&b"\x7f"[..], false, 127),
            (b"\xff", true, 1),
            (b"\xe0", true, 32),
            (b"\xcc\xff", false, 255),
            (b"\xd0\x80", true, 128),
            (b"\xd1\x01\x00", false, 256),
            (b"\xcd\xff\xff", false, 65535),
            (b"\xce\xff\xff\xff\xff", false, 0xffff_ffff),
            (b"\xd2\xff\xff\xff\xfe", true, 2),
            (b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", true, 1 << 63),
            (b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", false, u64::MAX),
        ] {
            let Key::Integer {
                is_negative,
                magnitude,
            } = key_of(packet)
            else {
                panic!("{packet:x?} is an integer");
            };
            assert_eq!((is_negative, magnitude), (negative, expected), "{packet:x?}");
        }
    }

    #[test]
    fn depth_is_limited() {
        let nested = |depth: usize| [vec![0x91; depth], vec![0x01]].concat();
        assert_eq!(find_fault(&nested(MAX_DEPTH)), None);
        assert_eq!(find_fault(&nested(MAX_DEPTH + 1)), Some(Fault::TooDeep));
        // Containers that have ended do not count.
        let row = [&b"\xdd\x00\x00\x10\x00"[..], &[0x91, 0x90].repeat(4096)].concat();
        assert_eq!(find_fault(&row), None);
    }
}
