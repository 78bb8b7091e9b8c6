"""Which fixes the running Python's asyncio has: CPython also brings them to patch releases of older versions."""

from __future__ import annotations

import sys

_VERSION = sys.version_info[:3]
_IN_FEBRUARY_2024 = _VERSION >= (3, 12, 2) or (3, 11, 8) <= _VERSION < (3, 12)

# gh-114887: create_datagram_endpoint accepts each socket that is not a stream socket.
ACCEPTS_ALL_BUT_STREAMS = _IN_FEBRUARY_2024
# gh-75128: create_server skips an address that this machine does not have.
SKIPS_UNAVAILABLE_ADDRESSES = _IN_FEBRUARY_2024
# gh-121913: the texts of bind errors contain the whole error, not only its `strerror`.
SHOWS_WHOLE_ERROR = _VERSION >= (3, 12, 5)
