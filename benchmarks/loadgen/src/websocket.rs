//! Binary websocket messages, each in one frame. The opening handshake is done before the load begins.
//!
//! Source: RFC 6455.

use crate::echo::pattern_byte;
use crate::engine::Exchange;
use crate::target::Target;

const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
const FINAL_BINARY: u8 = 0x82;
const MASKED: u8 = 0x80;

pub(crate) struct WebSocket {
    upgrade: Vec<u8>,
    frames: Vec<u8>,
    frame_len: usize,
    /// The frame that the server sends back, which is not masked.
    reply: Vec<u8>,
    reply_head_len: usize,
    verify_every: u64,
}

/// The position of a connection in its stream of replies.
#[derive(Default)]
pub(crate) struct Position {
    reply: u64,
    offset: usize,
}

/// The head of a final binary frame, with the shortest encoding of the length, as the protocol requires.
fn head(length: usize, mask_bit: u8) -> Vec<u8> {
    let mut head = vec![FINAL_BINARY];
    match (u8::try_from(length), u16::try_from(length)) {
        (Ok(short @ 0..=125), _) => head.push(mask_bit | short),
        (_, Ok(medium)) => {
            head.push(mask_bit | 0x7e);
            head.extend(medium.to_be_bytes());
        }
        _ => {
            head.push(mask_bit | 0x7f);
            head.extend((length as u64).to_be_bytes());
        }
    }
    head
}

impl WebSocket {
    pub(crate) fn new(address: &Target, size: usize, depth: u32, verify_every: u64) -> Self {
        let payload: Vec<u8> = (0..size).map(pattern_byte).collect();
        let mut frame = head(size, MASKED);
        frame.extend(MASK);
        frame.extend(
            payload
                .iter()
                .zip(MASK.iter().cycle())
                .map(|(byte, key)| byte ^ key),
        );
        let mut reply = head(size, 0);
        let reply_head_len = reply.len();
        reply.extend(payload);
        let upgrade = format!(
            "GET / HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        );
        Self {
            upgrade: upgrade.into(),
            frame_len: frame.len(),
            frames: frame.repeat(depth as usize),
            reply,
            reply_head_len,
            verify_every,
        }
    }
}

impl Exchange for WebSocket {
    type State = Position;

    fn upgrade(&self) -> Option<&[u8]> {
        Some(&self.upgrade)
    }

    fn request_len(&self) -> usize {
        self.frame_len
    }

    fn requests(&mut self, _connection: usize, _first: u64, count: usize) -> &[u8] {
        &self.frames[..(count * self.frame_len).min(self.frames.len())]
    }

    fn replies(&mut self, state: &mut Position, connection: usize, mut input: &[u8]) -> Result<u64, String> {
        let before = state.reply;
        while !input.is_empty() {
            let (part, rest) = input.split_at(input.len().min(self.reply.len() - state.offset));
            let expected = &self.reply[state.offset..state.offset + part.len()];
            // Always compare the head: a frame of another length or kind would shift everything after it.
            let is_compared =
                state.offset < self.reply_head_len || state.reply.is_multiple_of(self.verify_every);
            if is_compared && part != expected {
                return Err(format!(
                    "reply {} on websocket {connection} is not the message",
                    state.reply
                ));
            }
            state.offset += part.len();
            if state.offset == self.reply.len() {
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

    fn made(size: usize) -> WebSocket {
        WebSocket::new(&"127.0.0.1:80".parse().expect("an address"), size, 2, 1)
    }

    #[test]
    fn frames_are_as_the_protocol_says() {
        for (size, head_len) in [(125, 2), (126, 4), (65_535, 4), (65_536, 10)] {
            let mut socket = made(size);
            assert_eq!(socket.request_len(), head_len + 4 + size);
            assert_eq!(socket.reply.len(), head_len + size);
            let frame = socket.requests(0, 0, 1);
            assert_eq!((frame[0], frame[1] & MASKED), (FINAL_BINARY, MASKED));
            assert_eq!(frame[head_len + 4 + 7] ^ MASK[3], pattern_byte(7));
        }
    }

    #[test]
    fn replies_are_found_in_any_pieces_and_wrong_ones_refused() {
        for piece in [1, 3, 100, 1000] {
            let mut socket = made(200);
            let stream = socket.reply.repeat(3);
            let mut state = Position::default();
            let complete: u64 = stream
                .chunks(piece)
                .map(|part| socket.replies(&mut state, 0, part).expect("the message"))
                .sum();
            assert_eq!(complete, 3, "pieces of {piece}");
        }
        let mut socket = made(200);
        let mut close = socket.reply.clone();
        close[0] = 0x88;
        assert!(socket.replies(&mut Position::default(), 0, &close).is_err());
    }
}
