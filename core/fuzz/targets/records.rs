//! Checks the counter of TLS records. If all headers are valid, the result must not depend on where the bytes are cut,
//! and must equal the result of a simple parser that has all bytes at once.
#![no_main]

use grapeshot_core::queue::records::{Counted, Framing};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    pieces: Vec<Piece>,
    cuts: Vec<u16>,
    overhead_len: u8,
}

#[derive(Arbitrary, Debug)]
enum Piece {
    Record { kind: u8, len: u16 },
    Bytes(Vec<u8>),
}

fn stream(pieces: &[Piece]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces.iter().take(16) {
        match piece {
            Piece::Record { kind, len } => {
                bytes.extend([20 + kind % 5, 3, 3]);
                bytes.extend(len.to_be_bytes());
                bytes.resize(bytes.len() + usize::from(*len), *kind);
            }
            Piece::Bytes(more) => bytes.extend(more),
        }
    }
    bytes
}

/// The result of a simple parser that has all bytes at once: the records, and the number of bytes of the last,
/// incomplete one. `None` if there is a header that is not valid.
fn expected(mut bytes: &[u8], overhead_len: usize) -> Option<(Counted, usize)> {
    let mut counted = Counted::default();
    while let Some((header, rest)) = bytes.split_first_chunk::<5>() {
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if !(20..=24).contains(&header[0]) || header[1] != 3 || len > (1 << 14) + 2048 {
            return None;
        }
        let Some(next) = rest.get(len..) else {
            return Some((counted, bytes.len()));
        };
        counted.records += 1;
        counted.capacity += len.saturating_sub(overhead_len);
        bytes = next;
    }
    Some((counted, bytes.len()))
}

fuzz_target!(|input: Input| {
    let bytes = stream(&input.pieces);
    let overhead_len = input.overhead_len.into();
    let mut framing = Framing::default();
    let mut counted = Counted::default();
    let mut rest = &bytes[..];
    for cut in &input.cuts {
        let (part, later) = rest.split_at(rest.len().min((*cut).into()));
        let more = framing.advance(part, overhead_len);
        counted.records += more.records;
        counted.capacity += more.capacity;
        assert!(more.capacity <= part.len() + (1 << 14) + 2048 + 5);
        rest = later;
    }
    let more = framing.advance(rest, overhead_len);
    counted.records += more.records;
    counted.capacity += more.capacity;
    match expected(&bytes, overhead_len) {
        Some((whole, partial_len)) => {
            assert_eq!(counted, whole);
            assert_eq!(framing.partial_len(), partial_len);
        }
        None => assert_eq!(framing.partial_len(), 0),
    }
});
