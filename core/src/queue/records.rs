//! Finds where TLS records begin and end in the received bytes. A record is a header of five bytes and a body, whose
//! length is in the header (RFC 8446, section 5.1).
//!
//! Before a whole record has arrived, a call of `SSL_read` is wasted. If it is made through `ssl.SSLObject`, it even
//! raises `SSLWantReadError`, which costs more than decrypting a small record. So the TLS code of the extension counts
//! the whole records, and usually calls `SSL_read` exactly once for each.
//!
//! ```text
//!   type  version   length        body
//!   [ 1 ] [ 1 | 1 ] [ 1 | 1 ]     [ length bytes ]
//! ```

const HEADER_LEN: usize = 5;
/// The valid content types: `change_cipher_spec` to `heartbeat`.
const CONTENT_TYPES: std::ops::RangeInclusive<u8> = 20..=24;
/// The longest plaintext of a record, plus the most bytes that any version of TLS may add to it.
const MAX_BODY_LEN: usize = (1 << 14) + 2048;

/// The result of [`Framing::advance`].
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counted {
    /// How many records the data has completed. If the stream has had bytes that are not a TLS record, this is only an
    /// upper bound.
    pub records: usize,
    /// An upper bound of the number of bytes of plaintext in these records.
    pub capacity: usize,
}

/// The position in the stream of records.
#[derive(Clone, Copy, Default)]
pub struct Framing {
    header: [u8; HEADER_LEN],
    header_len: u8,
    body_len: u16,
    /// How many bytes of the body have not arrived yet.
    missing_len: u16,
    /// Whether the stream has had bytes that are not a TLS record. All bytes from there on go to OpenSSL at once, and
    /// OpenSSL reports the error.
    is_broken: bool,
}

impl Framing {
    /// Processes `data`, the next bytes of the stream, and counts the records that `data` completes. The body of each
    /// record has at least `overhead_len` bytes in addition to its plaintext.
    #[inline]
    pub fn advance(&mut self, mut data: &[u8], overhead_len: usize) -> Counted {
        let mut counted = Counted::default();
        while !data.is_empty() {
            if self.header_len < HEADER_LEN as u8 && !self.is_broken {
                data = self.take_header(data);
                if self.header_len < HEADER_LEN as u8 {
                    break;
                }
            }
            if self.is_broken {
                // An upper bound of the records and the plaintext that OpenSSL may find in these bytes.
                counted.records += 1 + data.len() / HEADER_LEN;
                counted.capacity += HEADER_LEN + data.len();
                break;
            }
            let taken = data.len().min(self.missing_len as usize);
            self.missing_len -= taken as u16;
            data = &data[taken..];
            if self.missing_len == 0 {
                counted.records += 1;
                counted.capacity += (self.body_len as usize).saturating_sub(overhead_len);
                self.header_len = 0;
            }
        }
        counted
    }

    #[inline]
    fn take_header<'a>(&mut self, data: &'a [u8]) -> &'a [u8] {
        let had = self.header_len as usize;
        let taken = data.len().min(HEADER_LEN - had);
        self.header[had..had + taken].copy_from_slice(&data[..taken]);
        self.header_len += taken as u8;
        if self.header_len == HEADER_LEN as u8 {
            let [kind, major, _, high, low] = self.header;
            self.body_len = u16::from_be_bytes([high, low]);
            self.missing_len = self.body_len;
            self.is_broken =
                !CONTENT_TYPES.contains(&kind) || major != 3 || self.body_len as usize > MAX_BODY_LEN;
        }
        &data[taken..]
    }

    /// How many bytes of the incomplete record have arrived. 0 if there is no incomplete record, or after bytes that
    /// are not a TLS record.
    #[must_use]
    pub fn partial_len(&self) -> usize {
        if self.is_broken {
            0
        } else if self.header_len < HEADER_LEN as u8 {
            self.header_len as usize
        } else {
            HEADER_LEN + (self.body_len - self.missing_len) as usize
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Counted, Framing};

    fn record(kind: u8, body_len: usize) -> Vec<u8> {
        let mut bytes = vec![kind, 3, 3, (body_len >> 8) as u8, body_len as u8];
        bytes.resize(5 + body_len, 0xAA);
        bytes
    }

    #[test]
    fn one_whole_record_is_counted() {
        let mut framing = Framing::default();
        let counted = framing.advance(&record(23, 100), 17);
        assert_eq!(
            counted,
            Counted {
                records: 1,
                capacity: 83
            }
        );
        assert_eq!(framing.partial_len(), 0);
    }

    #[test]
    fn a_record_without_a_body_is_complete_with_its_header() {
        let mut framing = Framing::default();
        let bytes = record(23, 0);
        assert_eq!(framing.advance(&bytes[..4], 17).records, 0);
        assert_eq!(
            framing.advance(&bytes[4..], 17),
            Counted {
                records: 1,
                capacity: 0
            }
        );
        assert_eq!(framing.partial_len(), 0);
    }

    #[test]
    fn bytes_that_are_not_a_record_count_at_once() {
        for garbage in [b"GET / HTTP/1.1\r\n".to_vec(), record(19, 4), record(23, 20_000)] {
            let mut framing = Framing::default();
            assert!(framing.advance(&garbage, 17).records >= 1);
            assert_eq!(framing.advance(b"x", 17).records, 1);
            assert_eq!(framing.partial_len(), 0);
        }
    }

    proptest! {
        #[test]
        fn the_count_does_not_depend_on_how_the_stream_is_cut(
            bodies in prop::collection::vec(1_usize..400, 1..12),
            cuts in prop::collection::vec(1_usize..50, 1..400),
        ) {
            let stream: Vec<u8> = bodies.iter().flat_map(|len| record(23, *len)).collect();
            let mut framing = Framing::default();
            let mut total = Counted::default();
            let mut rest = stream.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                let counted = framing.advance(now, 0);
                total.records += counted.records;
                total.capacity += counted.capacity;
                rest = later;
                prop_assert!(framing.partial_len() <= stream.len() - rest.len());
            }
            prop_assert_eq!(total, Counted { records: bodies.len(), capacity: bodies.iter().sum() });
            prop_assert_eq!(framing.partial_len(), 0);
        }
    }
}
