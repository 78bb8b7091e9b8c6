//! Numbered messages: the connection and the sequence number (8 bytes each, little endian), followed by a pattern. A
//! message of fewer than 16 bytes has no numbers. The reply is the message itself, or a fixed pattern of another
//! length.

use crate::engine::Exchange;
use crate::http;

pub(crate) const HEADER_LEN: usize = 16;

/// The byte at `index` of a body. The Python server of the "reply" mode builds its reply by the same rule.
#[allow(clippy::cast_possible_truncation)] // only the lowest 8 bits are wanted
pub(crate) fn pattern_byte(index: usize) -> u8 {
    (index * 31 + index / 251 + 7) as u8
}

pub(crate) struct Echo {
    size: usize,
    reply_len: usize,
    returns_message: bool,
    verify_every: u64,
    /// If set, some messages begin with another byte, which asks the server for a different kind of work.
    other: Option<Other>,
    /// `depth` messages, one behind the other; their numbers are filled in just before sending.
    messages: Vec<u8>,
    pattern: Vec<u8>,
}

#[derive(Clone, Copy)]
pub(crate) struct Other {
    pub(crate) first_byte: u8,
    pub(crate) every: u64,
}

/// The position of a connection in its stream of replies.
#[derive(Default)]
pub(crate) struct Position {
    reply: u64,
    offset: usize,
}

/// The two numbers at the start of a message.
pub(crate) fn header(connection: u64, sequence: u64) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..8].copy_from_slice(&connection.to_le_bytes());
    header[8..].copy_from_slice(&sequence.to_le_bytes());
    header
}

impl Echo {
    pub(crate) fn new(size: usize, depth: u32, verify_every: u64, reply_len: Option<usize>) -> Self {
        let length = reply_len.unwrap_or(size);
        let message: Vec<u8> = (0..size).map(pattern_byte).collect();
        Self {
            size,
            reply_len: length,
            returns_message: reply_len.is_none(),
            verify_every,
            other: None,
            messages: message.repeat(depth as usize),
            pattern: (0..length).map(pattern_byte).collect(),
        }
    }

    /// Sets the first byte of some messages. Only for messages that are too short to carry a number.
    pub(crate) fn with_other(mut self, other: Option<Other>) -> Self {
        self.other = other;
        self
    }

    /// Whether `part` is what the reply to this message must contain at `offset`.
    pub(crate) fn is_right(&self, connection: usize, reply: u64, offset: usize, part: &[u8]) -> bool {
        let end = offset + part.len();
        if offset == 0 && !self.is_counted(connection, reply) {
            let first_byte = self.other.map(|other| other.first_byte);
            return part.first().copied() == first_byte && part[1..] == self.pattern[1..end];
        }
        if !self.returns_message || self.size < HEADER_LEN || offset >= HEADER_LEN {
            return part == &self.pattern[offset..end];
        }
        let header = header(connection as u64, reply);
        let in_header = part.len().min(HEADER_LEN - offset);
        part[..in_header] == header[offset..offset + in_header]
            && part[in_header..] == self.pattern[offset + in_header..end]
    }
}

impl Exchange for Echo {
    type State = Position;

    fn is_counted(&self, connection: usize, number: u64) -> bool {
        self.other
            .is_none_or(|other| !http::is_other(connection, number, other.every))
    }

    fn request_len(&self) -> usize {
        self.size
    }

    fn requests(&mut self, connection: usize, first: u64, count: usize) -> &[u8] {
        let mut count = count.min(self.messages.len() / self.size);
        if let Some(other) = self.other {
            count = 1;
            let is_other = http::is_other(connection, first, other.every);
            self.messages[0] = if is_other {
                other.first_byte
            } else {
                pattern_byte(0)
            };
        }
        if self.size >= HEADER_LEN {
            for (message, sequence) in self.messages.chunks_exact_mut(self.size).take(count).zip(first..) {
                message[..HEADER_LEN].copy_from_slice(&header(connection as u64, sequence));
            }
        }
        &self.messages[..count * self.size]
    }

    fn replies(&mut self, state: &mut Position, connection: usize, mut input: &[u8]) -> Result<u64, String> {
        let before = state.reply;
        while !input.is_empty() {
            let (part, rest) = input.split_at(input.len().min(self.reply_len - state.offset));
            if state.reply.is_multiple_of(self.verify_every)
                && !self.is_right(connection, state.reply, state.offset, part)
            {
                return Err(format!(
                    "reply {} on connection {connection} has the wrong content",
                    state.reply
                ));
            }
            state.offset += part.len();
            if state.offset == self.reply_len {
                state.offset = 0;
                state.reply += 1;
            }
            input = rest;
        }
        Ok(state.reply - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_messages_are_accepted_in_any_pieces() {
        for piece in [1, 7, 16, 17, 100, 1000] {
            let mut echo = Echo::new(100, 4, 1, None);
            let bytes = echo.requests(3, 0, 4).to_vec();
            let mut state = Position::default();
            let complete: u64 = bytes
                .chunks(piece)
                .map(|part| echo.replies(&mut state, 3, part).expect("the right content"))
                .sum();
            assert_eq!(complete, 4);
        }
    }

    #[test]
    fn replies_for_another_connection_or_message_and_damaged_replies_are_refused() {
        let mut echo = Echo::new(100, 1, 1, None);
        let bytes = echo.requests(3, 0, 1).to_vec();
        assert!(echo.replies(&mut Position::default(), 4, &bytes).is_err());
        assert!(
            echo.replies(&mut Position { reply: 1, offset: 0 }, 3, &bytes)
                .is_err()
        );
        let mut damaged = bytes.clone();
        damaged[99] ^= 1;
        assert!(echo.replies(&mut Position::default(), 3, &damaged).is_err());
    }

    #[test]
    fn a_fixed_reply_is_compared_with_the_pattern() {
        let mut echo = Echo::new(8, 1, 1, Some(1000));
        let mut reply: Vec<u8> = (0..1000).map(pattern_byte).collect();
        assert_eq!(echo.replies(&mut Position::default(), 0, &reply), Ok(1));
        reply[500] ^= 1;
        assert!(echo.replies(&mut Position::default(), 0, &reply).is_err());
    }

    #[test]
    fn every_fifth_message_begins_with_another_byte() {
        let other = Other {
            first_byte: b'b',
            every: 5,
        };
        let mut echo = Echo::new(8, 1, 1, None).with_other(Some(other));
        let mut state = Position::default();
        let others = (0..50).filter(|&number| {
            let bytes = echo.requests(3, number, 1).to_vec();
            assert_eq!(echo.replies(&mut state, 3, &bytes), Ok(1));
            assert_eq!(echo.is_counted(3, number), bytes[0] != b'b');
            bytes[0] == b'b'
        });
        assert_eq!(others.count(), 10);
        let light = Echo::new(8, 1, 1, None).requests(3, 0, 1).to_vec();
        let burning = (50..60)
            .find(|&number| !echo.is_counted(3, number))
            .expect("one of five");
        let mut state = Position {
            reply: burning,
            offset: 0,
        };
        assert!(echo.replies(&mut state, 3, &light).is_err());
    }
}
