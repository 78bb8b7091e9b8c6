"""The messages. docs/rpc.md draws who sends which when.

Each is a sequence: its kind, the number of the call, and what the kind needs. The numbers of a connection rise. A
request is answered exactly once, by RESULT, ERROR or END, also if it was cancelled: the client counts by it how many
calls the server has under way.
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
CREDIT = 4  # how many items more
# server to client
RESULT = 5  # value
ERROR = 6  # code, type name, message, traceback or None
ITEM = 7  # value
END = 8
GOODBYE = 9  # the number is the last that the server has taken; what came later has not run
# both ways; the number means nothing
PING = 10  # answered by PONG, unless the sender of the answer has much to write already
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
# What each side has to accept at least, so that errors and goodbyes can be sent.
MIN_PACKET = 512
# What each side accepts before it knows whom it talks to.
MAX_HELLO = 4096
# A deadline beyond this is none that a timer knows.
MAX_LEFT_S = 1e8
# How many items of a stream a client may take ahead. More is a client that wants to keep the server busy.
MAX_CREDIT = 2**20


def check_limit(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check a limit that a program sets, before a peer refuses it. Raises TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, not {value}")


_QUOTES = reprlib.Repr()
_QUOTES.maxlevel = 2
_QUOTES.maxstring = _QUOTES.maxother = _QUOTES.maxlong = 100
_MAX_QUOTE = 200


def quoted(value: object) -> str:
    """What a peer has sent, for a line of a log or an error: its repr, on one line and cut."""
    text = _QUOTES.repr(value)
    return text if len(text) <= _MAX_QUOTE else f"{text[:_MAX_QUOTE]}..."


class Hello(NamedTuple):
    """The first packet of each side. It is JSON whatever the codec, since the codec is one of the things it tells."""

    codec: str
    # The longest packet that the sender accepts.
    max_packet: int
    # How many calls it accepts at one time; 0 from a client.
    max_calls: int

    def encode(self) -> bytes:
        return json.dumps({"grapeshot.rpc": _VERSION, **self._asdict()}).encode()


def decode_hello(packet: bytes, codec: str) -> Hello:
    """Return what the peer says. Raises ProtocolError if this is no hello, or the two cannot talk."""
    try:
        fields = json.loads(packet)
        version = fields.pop("grapeshot.rpc")
        hello = Hello(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ProtocolError(f"the peer does not speak this protocol: it has sent {packet[:40]!r}") from None
    if version != _VERSION:
        raise ProtocolError(f"the peer speaks version {quoted(version)} of the protocol, and this side {_VERSION}")
    if hello.codec != codec:
        raise ProtocolError(f"the peer's codec is {quoted(hello.codec)}, and this side's {codec!r}")
    if type(hello.max_packet) is not int or type(hello.max_calls) is not int or hello.max_packet < MIN_PACKET:
        raise ProtocolError(f"the peer's limits make no sense: {quoted(tuple(hello))}")
    return hello


def error_of(fields: Any) -> RpcError:
    """Return the exception that an ERROR message stands for."""
    try:
        code, type_name, message, traceback = fields
        if not (isinstance(type_name, str) and isinstance(message, str) and isinstance(traceback, str | None)):
            raise TypeError("its texts must be strings")
        if code == DEADLINE:
            return DeadlineExceeded(message)
        return _REMOTE_ERRORS[code](type_name, message, traceback)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the peer has sent a wrong error, {quoted(fields)}: {quoted(error)}") from error
