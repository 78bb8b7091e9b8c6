"""How messages become bytes: msgpack, or, between processes of one user over a unix socket, pickle.

A codec has a name, which both ends compare when they connect, and encodes and decodes one message.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol


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
        self.decode = msgspec.msgpack.Decoder().decode


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
    """Return the codec that is asked for, Msgpack by default. Raises TypeError for a class or a name of one."""
    if codec is None:
        return Msgpack()
    if isinstance(codec, type) or not hasattr(codec, "is_for_one_user"):
        raise TypeError(f"codec must be an object such as rpc.Pickle(), not {codec!r}")
    return codec
