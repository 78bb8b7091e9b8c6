"""How messages become bytes: msgpack, or, between processes of one user over a unix socket, pickle.

A codec has a name, which both ends compare when they connect, and encodes and decodes one message.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

from grapeshot import _core

# In fewer bytes there is nothing that takes long.
MIN_CHECKED = 1024
# It is a part of the hello, which is short.
_MAX_NAME = 100


class Codec(Protocol):
    """What a codec has. ``decode`` gets exactly what ``encode`` has made, or anything that a peer invents."""

    @property
    def name(self) -> str: ...
    @property
    def is_for_one_user(self) -> bool:
        """Whether decoding may do whatever the sender wants, so that only processes of the same user are let in."""

    def encode(self, message: Any, /) -> bytes: ...
    def decode(self, packet: bytes, /) -> Any: ...


class Msgpack:
    """msgpack by msgspec. Decoding makes plain objects only: None, bool, int, float, str, bytes, list, dict, datetime.

    It encodes dataclasses, msgspec's Structs, tuples, sets, UUID, Decimal and enumerations, too; they arrive as plain
    objects, and ``msgspec.convert(value, type)`` checks and makes what is wanted of them.
    """

    name = "msgpack"
    is_for_one_user = False

    def __init__(self) -> None:
        try:
            import msgspec
        except ImportError as error:
            raise ImportError("grapeshot.rpc needs msgspec: pip install 'grapeshot[rpc]'") from error
        self.encode = msgspec.msgpack.Encoder().encode
        # Of packets with fewer than MIN_CHECKED bytes, which connections decode without the detour of decode().
        self.decode_short = msgspec.msgpack.Decoder().decode

    def decode(self, packet: bytes, /) -> Any:
        """Decode a packet, whoever has made it. Raises ValueError, of which msgspec's DecodeError is a kind.

        Tuples that are keys of dicts may have 3,000 values in a packet, themselves included, and 20,000 keys may be
        floats or datetimes: a peer can choose such keys so that a dict takes hours. Integers that are keys are refused
        if they were chosen for that, or if a dict has more than 1,000 of them and of other keys.
        """
        if len(packet) < MIN_CHECKED:
            return self.decode_short(packet)
        return _core._decode_msgpack(self.decode_short, packet)


class Pickle:
    """pickle: any Python object, and whatever code the sender wants to run when it is decoded.

    So it is allowed over unix sockets only, and both ends refuse a peer of another user before they read its first
    byte.
    """

    name = "pickle"
    is_for_one_user = True

    def encode(self, message: Any, /) -> bytes:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def decode(self, packet: bytes, /) -> Any:
        return pickle.loads(packet)


def make_codec(codec: Codec | None) -> Codec:
    """Return the codec that is asked for, Msgpack by default.

    Raises TypeError for a class or a name of one, and ValueError for a codec whose name is too long.
    """
    if codec is None:
        return Msgpack()
    if isinstance(codec, type) or not hasattr(codec, "is_for_one_user"):
        raise TypeError(f"codec must be an object such as rpc.Pickle(), not {codec!r}")
    if len(codec.name) > _MAX_NAME:
        raise ValueError(f"the name of a codec must have at most {_MAX_NAME} characters, not {len(codec.name)}")
    return codec
