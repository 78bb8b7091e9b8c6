//! HTTP/1.1 keep-alive GET requests. A reply must have a Content-Length. Chunked replies are refused: the servers that
//! are compared here do not send any.

use crate::engine::Exchange;
use crate::target::Target;

/// The properties that every reply must have.
#[derive(Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) status: u16,
    pub(crate) length: Option<usize>,
}

pub(crate) struct Http {
    requests: Vec<u8>,
    request_len: usize,
    /// The request for the path of `--other-path`, and a number `n`: one in `n` requests is for that path. Both kinds
    /// of request have the same length.
    other: Option<(Vec<u8>, u64)>,
    expected: Expected,
}

/// Whether this request of the connection is of the other kind (`--other-path`, `--other-byte`). One in `every`
/// requests is of that kind.
pub(crate) fn is_other(connection: usize, number: u64, every: u64) -> bool {
    (number + connection as u64) % every == every - 1
}

/// The state of a reply between two reads.
#[derive(Default)]
pub(crate) struct Partial {
    head: Vec<u8>,
    body_left: usize,
}

impl Http {
    /// `other` is another path and a number `n`: one in `n` requests asks for that path.
    pub(crate) fn new(
        address: &Target,
        path: &str,
        other: Option<(&str, u64)>,
        depth: u32,
        expected: Expected,
    ) -> Self {
        let host = match address {
            Target::Inet(address) => address.to_string(),
            Target::Unix(_) => "localhost".into(),
        };
        // Requests must have the same length, so a header that servers ignore makes up for the shorter path.
        let request = |path: &str, agent_len: usize| {
            let agent = "loadgen".repeat(agent_len.div_ceil(7));
            format!(
                "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {}\r\nAccept: */*\r\n\r\n",
                &agent[..agent_len]
            )
        };
        let longest = path.len().max(other.map_or(0, |(path, _)| path.len()));
        let own = request(path, 7 + longest - path.len());
        Self {
            requests: own.repeat(depth as usize).into(),
            request_len: own.len(),
            other: other.map(|(path, every)| (request(path, 7 + longest - path.len()).into(), every)),
            expected,
        }
    }

    /// Parses a head. Returns its length and that of the body, or `None` while it is incomplete.
    fn parse_head(&self, bytes: &[u8]) -> Result<Option<(usize, usize)>, String> {
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut response = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(head_len) =
            response.parse(bytes).map_err(|error| format!("reply: {error}"))?
        else {
            return Ok(None);
        };
        let status = response.code.unwrap_or_default();
        if status != self.expected.status {
            return Err(format!("status {status}, expected {}", self.expected.status));
        }
        let mut length = None;
        for header in response.headers {
            if header.name.eq_ignore_ascii_case("content-length") {
                length = std::str::from_utf8(header.value)
                    .ok()
                    .and_then(|text| text.trim().parse::<usize>().ok());
            } else if header.name.eq_ignore_ascii_case("connection")
                && header.value.eq_ignore_ascii_case(b"close")
            {
                return Err("the server does not keep the connection alive".into());
            }
        }
        let length = length.ok_or("a reply without a Content-Length")?;
        match self.expected.length {
            Some(expected) if expected != length => {
                Err(format!("a body of {length} bytes, expected {expected}"))
            }
            _ => Ok(Some((head_len, length))),
        }
    }
}

impl Exchange for Http {
    type State = Partial;

    fn is_counted(&self, connection: usize, number: u64) -> bool {
        self.other
            .as_ref()
            .is_none_or(|(_, every)| !is_other(connection, number, *every))
    }

    fn request_len(&self) -> usize {
        self.request_len
    }

    fn requests(&mut self, connection: usize, first: u64, count: usize) -> &[u8] {
        let Some((other, every)) = &self.other else {
            return &self.requests[..(count * self.request_len).min(self.requests.len())];
        };
        // Return one request at a time. The engine asks again for a request that was sent only in part, so the same
        // connection and number must always give the same request.
        if is_other(connection, first, *every) {
            other
        } else {
            &self.requests[..self.request_len]
        }
    }

    fn replies(&mut self, state: &mut Partial, _connection: usize, mut input: &[u8]) -> Result<u64, String> {
        let mut complete = 0;
        while !input.is_empty() {
            if state.body_left > 0 {
                let taken = state.body_left.min(input.len());
                state.body_left -= taken;
                input = &input[taken..];
                complete += u64::from(state.body_left == 0);
                continue;
            }
            let kept_len = state.head.len();
            let parsed = if kept_len == 0 {
                self.parse_head(input)?
            } else {
                state.head.extend_from_slice(input);
                self.parse_head(&state.head)?
            };
            let Some((head_len, body_len)) = parsed else {
                if kept_len == 0 {
                    state.head.extend_from_slice(input);
                }
                break;
            };
            state.head.clear();
            input = &input[head_len - kept_len..];
            state.body_left = body_len;
            complete += u64::from(body_len == 0);
        }
        Ok(complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Expected = Expected {
        status: 200,
        length: Some(5),
    };

    fn http() -> Http {
        let address = "127.0.0.1:80".parse().expect("an address");
        Http::new(&address, "/", None, 2, EXPECTED)
    }

    #[test]
    fn one_request_in_several_asks_for_the_other_path() {
        let address = "127.0.0.1:80".parse().expect("an address");
        let mut http = Http::new(&address, "/", Some(("/other", 5)), 1, EXPECTED);
        let length = http.request_len();
        let found = (0..100).filter(|&number| {
            let request = http.requests(3, number, 1);
            assert_eq!(request.len(), length);
            let is_other = request.starts_with(b"GET /other HTTP/1.1\r\n");
            assert_eq!(http.is_counted(3, number), !is_other);
            is_other
        });
        assert_eq!(found.count(), 20);
    }

    #[test]
    fn replies_are_found_in_any_pieces() {
        let stream = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".repeat(3);
        for piece in 1..stream.len() {
            let mut state = Partial::default();
            let mut http = http();
            let complete: u64 = stream
                .chunks(piece)
                .map(|part| http.replies(&mut state, 0, part).expect("a good reply"))
                .sum();
            assert_eq!(complete, 3, "pieces of {piece}");
        }
    }

    #[test]
    fn wrong_replies_are_refused() {
        for reply in [
            "HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n",
            "nonsense\r\n\r\n",
        ] {
            assert!(
                http()
                    .replies(&mut Partial::default(), 0, reply.as_bytes())
                    .is_err(),
                "{reply:?}"
            );
        }
    }
}
