"""Certificates and contexts of the TLS tests, and a peer whose TLS the test drives by hand."""

from __future__ import annotations

import functools
import ssl
from typing import Any

import trustme
from support import Peer

HOSTNAME = "grapeshot.test"


@functools.cache
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@functools.cache
def certificate(*names: str) -> trustme.LeafCert:
    return authority().issue_cert(*names, key_type=trustme.KeyType.ECDSA)


def server_context(*names: str, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return a context with a certificate for `names`. It speaks only `version`, if one is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate(*(names or (HOSTNAME,))).configure_cert(context)
    return limited(context, version)


def client_context(version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Return a context that trusts the test authority and checks host names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority().configure_trust(context)
    return limited(context, version)


def limited(context: ssl.SSLContext, version: ssl.TLSVersion | None) -> ssl.SSLContext:
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


class TlsPeer:
    """TLS over a raw peer, independent of any loop's TLS: the test drives an `ssl.SSLObject`."""

    def __init__(self, peer: Peer, context: ssl.SSLContext, **options: Any) -> None:
        self.peer = peer
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if not options.get("server_side"):
            options.setdefault("server_hostname", HOSTNAME)
        self.object = context.wrap_bio(self.incoming, self.outgoing, **options)

    async def _step(self, operation: Any, *args: Any) -> Any:
        while True:
            try:
                result = operation(*args)
            except ssl.SSLWantReadError:
                await self.flush()
                data = await self.peer.recv()
                if data:
                    self.incoming.write(data)
                else:
                    self.incoming.write_eof()
            except ssl.SSLError:
                await self.flush()
                raise
            else:
                await self.flush()
                return result

    async def flush(self) -> None:
        if data := self.outgoing.read():
            await self.peer.send(data)

    async def handshake(self) -> TlsPeer:
        await self._step(self.object.do_handshake)
        return self

    def seal(self, data: bytes) -> bytes:
        """Encrypt without sending."""
        assert self.object.write(data) == len(data)
        return self.outgoing.read()

    async def write(self, data: bytes) -> None:
        await self.peer.send(self.seal(data))

    async def read(self, limit: int = 65536) -> bytes:
        """Return up to `limit` bytes; b"" after the other side's close_notify. Raises SSLEOFError if the stream ends
        without one.
        """
        try:
            return await self._step(self.object.read, limit)
        except ssl.SSLZeroReturnError:  # the close_notify came after our own
            return b""

    async def read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = await self.read(count - len(data))
            assert more, f"close_notify after {len(data)} of {count} bytes"
            data += more
        return bytes(data)

    async def read_to_end(self) -> bytes:
        data = bytearray()
        while more := await self.read():
            data += more
        return bytes(data)

    async def unwrap(self) -> None:
        """Exchange close_notify."""
        await self._step(self.object.unwrap)

    async def send_close_notify(self) -> None:
        """Send close_notify without waiting for the answer."""
        try:
            self.object.unwrap()
        except ssl.SSLWantReadError:
            pass
        await self.flush()

    def close(self) -> None:
        self.peer.close()

    def __enter__(self) -> TlsPeer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.peer.close()
