"""The messages of the protocol. docs/rpc.md shows when each end sends them.

A message is a sequence: its kind, the number of the call, and the fields of that kind. On a connection, the numbers of
requests increase. The server answers each request exactly once, by RESULT, ERROR or END, even if it was cancelled. So
the client knows how many calls the server has under way. (Only requests that arrive after the server has sent GOODBYE
get no answer.)
"""

from __future__ import annotations

import json
import reprlib
from typing import Any, NamedTuple

from ._errors import (
    BadArguments,
    BadResult,
    DeadlineExceeded,
    ProtocolError,
    RemoteCancelled,
    RemoteError,
    RpcError,
    UnknownMethod,
)

# client to server
REQUEST = 1  # method, args[, kwargs, seconds left]
STREAM = 2  # method, args, kwargs, seconds left, how many items the client takes
CANCEL = 3
CREDIT = 4  # how many more items
# server to client
RESULT = 5  # value
ERROR = 6  # code, type name, message, traceback or None
ITEM = 7  # value
END = 8
GOODBYE = 9  # reason or None; the number is that of the last accepted request: the server has run no later one
# both ways; the number has no meaning
PING = 10  # answered by PONG, unless the answering end cannot write because its peer is not reading
PONG = 11

# The codes of ERROR.
RAISED = 0
UNKNOWN_METHOD = 1
BAD_ARGUMENTS = 2
BAD_RESULT = 3
DEADLINE = 4
CANCELLED = 5

_REMOTE_ERRORS = {
    RAISED: RemoteError,
    UNKNOWN_METHOD: UnknownMethod,
    BAD_ARGUMENTS: BadArguments,
    BAD_RESULT: BadResult,
    CANCELLED: RemoteCancelled,
}

_VERSION = 2
# The smallest max_packet that a side may have. Errors and goodbyes fit into packets of this length.
MIN_PACKET = 512
# The length of the longest hello that each side accepts.
MAX_HELLO = 4096
# A request shorter than this does not count towards max_call_bytes, so the sizes of most requests need not be stored.
# The total size of such requests is limited by max_calls.
MIN_COUNTED = 1024
# The longest time that is sent with a request. It is far more than any useful deadline, and timers can handle it.
MAX_LEFT_S = 1e8
# How many items of a stream a client may let the server send ahead. A client that asks for more is probably an
# attacker.
MAX_CREDIT = 2**20


# The largest limit that a program can set. The limits are sent in the hello, whose length is limited, too.
MAX_LIMIT = 2**63


def check_limit(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check a limit set by the program. (Otherwise a peer would refuse it later.) Raises TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


_QUOTES = reprlib.Repr()
_QUOTES.maxlevel = 2
_QUOTES.maxstring = _QUOTES.maxother = _QUOTES.maxlong = 100
_MAX_QUOTE = 200


def quoted(value: object) -> str:
    """Return data from a peer as text for a log or an error: its repr, on one line and of limited length."""
    text = _QUOTES.repr(value)
    return text if len(text) <= _MAX_QUOTE else f"{text[:_MAX_QUOTE]}..."


class Hello(NamedTuple):
    """The first packet of each side. It is JSON, whatever the codec, because it contains the name of the codec."""

    codec: str
    # The length of the longest packet that the sender accepts.
    max_packet: int
    # How many calls the sender accepts at the same time; 0 from a client.
    max_calls: int
    # Once the requests of the calls under way have this many bytes together, the sender accepts only requests shorter
    # than MIN_COUNTED; 0 from a client.
    max_call_bytes: int

    def encode(self) -> bytes:
        return json.dumps({"grapeshot.rpc": _VERSION, **self._asdict()}).encode()


def decode_hello(packet: bytes, codec: str) -> Hello:
    """Decode the peer's hello. Raises ProtocolError if it is not a hello, or does not fit this side."""
    try:
        fields = json.loads(packet)
        version = fields.pop("grapeshot.rpc")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ProtocolError(f"the peer does not use the grapeshot.rpc protocol: it has sent {packet[:40]!r}") from None
    if version != _VERSION:
        raise ProtocolError(f"the peer uses version {quoted(version)} of the protocol, but this side uses {_VERSION}")
    try:
        hello = Hello(**fields)
    except TypeError:
        raise ProtocolError(
            f"the peer's hello does not have the fields of version {_VERSION}: {quoted(fields)}"
        ) from None
    if hello.codec != codec:
        raise ProtocolError(f"the peer uses the codec {quoted(hello.codec)}, but this side uses {codec!r}")
    if any(type(limit) is not int for limit in hello[1:]) or hello.max_packet < MIN_PACKET:
        raise ProtocolError(f"the limits in the peer's hello are not valid: {quoted(tuple(hello))}")
    return hello


def error_of(fields: Any) -> RpcError:
    """Return the exception that an ERROR message represents."""
    try:
        code, type_name, message, traceback = fields
        if not (isinstance(type_name, str) and isinstance(message, str) and isinstance(traceback, str | None)):
            raise TypeError("type name and message must be strings, and the traceback a string or None")
        if code == DEADLINE:
            return DeadlineExceeded(message)
        return _REMOTE_ERRORS[code](type_name, message, traceback)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the peer has sent a malformed error message {quoted(fields)}: {quoted(error)}") from error
