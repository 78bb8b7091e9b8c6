"""Codecs, which turn messages into bytes: msgpack, or pickle between processes of one user over a Unix socket.

A codec encodes and decodes one message at a time. Both ends compare the names of their codecs when they connect.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

from grapeshot import _core

# Msgpack checks packets of at least this length for keys that make a dict slow. A shorter packet cannot take long to
# decode.
MIN_CHECKED = 1024
# The name is part of the first packet of each side (Hello), whose length is limited.
_MAX_NAME = 100


class Codec(Protocol):
    """The interface of a codec. ``decode`` may be given any bytes, because a peer may send anything."""

    @property
    def name(self) -> str: ...
    @property
    def is_for_one_user(self) -> bool:
        """Whether decoding can run code that the sender chooses. If so, only processes of the same user may connect."""

    def encode(self, message: Any, /) -> bytes: ...
    def decode(self, packet: bytes, /) -> Any: ...


class Msgpack:
    """msgpack, encoded and decoded by msgspec.

    Decoding creates only plain objects: None, bool, int, float, str, bytes, list, dict, datetime, tuples as keys of
    dicts, and msgspec's Ext. Dataclasses, msgspec's Structs, tuples, sets, UUID, Decimal and enumerations can be
    encoded, too, and arrive as plain objects. Use ``msgspec.convert(value, type)`` to check these and convert them
    back.
    """

    name = "msgpack"
    is_for_one_user = False

    def __init__(self) -> None:
        try:
            import msgspec
        except ImportError as error:
            raise ImportError("grapeshot.rpc needs msgspec: pip install 'grapeshot[rpc]'") from error
        self.encode = msgspec.msgpack.Encoder().encode
        # For packets with fewer than MIN_CHECKED bytes. Connections call it directly for these, instead of decode().
        self.decode_short = msgspec.msgpack.Decoder().decode

    def decode(self, packet: bytes, /) -> Any:
        """Decode a packet from an untrusted peer. Raises ValueError (msgspec's DecodeError is a subclass of it).

        A peer could choose keys whose hashes collide. Building a dict with these keys could take hours. That is why a
        packet may contain at most 3,000 values in tuples that are keys of dicts (the tuples count, too), and at most
        20,000 keys that are floats or datetimes. Integer keys are refused if they were chosen to collide, or if a dict
        has more than 1,000 of them together with more than 1,000 keys of other types.
        """
        if len(packet) < MIN_CHECKED:
            return self.decode_short(packet)
        return _core._decode_msgpack(self.decode_short, packet)


class Pickle:
    """pickle, which can send any Python object. Decoding it can also run any code that the sender chooses.

    That is why it is allowed only over Unix sockets, and both ends refuse a peer of another user before reading its
    first byte.
    """

    name = "pickle"
    is_for_one_user = True

    def encode(self, message: Any, /) -> bytes:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def decode(self, packet: bytes, /) -> Any:
        return pickle.loads(packet)


def make_codec(codec: Codec | None) -> Codec:
    """Return ``codec``, or a new Msgpack if it is None.

    Raises TypeError for a class or a name instead of a codec, and ValueError for a codec whose name is too long.
    """
    if codec is None:
        return Msgpack()
    if isinstance(codec, type) or not hasattr(codec, "is_for_one_user"):
        raise TypeError(f"codec must be an object such as rpc.Pickle(), not {codec!r}")
    if len(codec.name) > _MAX_NAME:
        raise ValueError(f"the name of a codec must have at most {_MAX_NAME} characters, not {len(codec.name)}")
    return codec
