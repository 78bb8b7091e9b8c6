"""TLS on one kind of loop, fed by a misbehaving peer, and the log of what the protocol sees.

The peer is an `ssl.SSLObject`. The bytes that it wants to send are held in `pending`, where a step may change them: cut
records anywhere, corrupt, repeat or drop bytes, or insert other records. Two models that take the same steps, on
asyncio's loop and on grapeshot's, must have the same log.
"""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import ctypes
import functools
import socket
import ssl
from typing import Any

from support import loop_factory
from tls.contexts import HOSTNAME, client_context, server_context

ROUNDS = 12
# Python's `_ssl` module. It also gives access to OpenSSL's functions if Python uses OpenSSL as a shared library.
LIBRARY = ctypes.CDLL(getattr(_ssl, "__file__", None))
HAS_LIBRARY = hasattr(LIBRARY, "SSL_key_update")
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@functools.cache
def contexts(side: str, version: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the loop's side and of the peer."""
    server, client = server_context(version=VERSIONS[version]), client_context(VERSIONS[version])
    return (server, client) if side == "server" else (client, server)


class Openssl:
    """Functions of OpenSSL that Python's ssl module does not offer, applied to a connection."""

    def __init__(self, tls: ssl.SSLObject) -> None:
        # PySSLSocket begins with the object header and a pointer to a weak reference. OpenSSL's `SSL *` follows.
        place = id(tls._sslobj) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)  # type: ignore[attr-defined]
        self.ssl = ctypes.c_void_p.from_address(place)
        version = LIBRARY.SSL_get_version
        version.restype = ctypes.c_char_p
        assert version(self.ssl).decode() == tls.version()

    def key_update(self, is_requested: bool) -> None:
        LIBRARY.SSL_key_update(self.ssl, int(is_requested))

    def renegotiate(self) -> None:
        LIBRARY.SSL_renegotiate(self.ssl)

    def new_ticket(self) -> None:
        LIBRARY.SSL_new_session_ticket(self.ssl)


class Seen(asyncio.Protocol):
    """Logs its callbacks."""

    def __init__(self, model: TlsModel) -> None:
        self.model = model

    def connection_made(self, transport: Any) -> None:
        self.model.transport = transport
        self.model.note("made")

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.model.data += data
        if not self.model.log or self.model.log[-1] != ("data",):
            self.model.note("data")
        self.model.react()

    def eof_received(self) -> None:
        self.model.note("eof")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.model.note("lost", type(exc).__name__, getattr(exc, "reason", None))
        self.model.lost += 1


class TlsModel:
    """A loop, its TLS transport, and the peer."""

    def __init__(self, loop_kind: str, side: str, version: str) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.data = bytearray()
        self.reactions: list[str] = []
        self.lost = 0
        self.transport: Any = None
        self.pending = bytearray()
        self.is_held = self.has_spoiled = self.has_closed = self.has_paused = False
        self.side = side
        ours, theirs = contexts(side, version)
        self.loop = loop_factory(loop_kind)()
        self.loop.set_exception_handler(self.report)
        mine, self.raw = socket.socketpair()
        mine.setblocking(False)
        self.raw.setblocking(False)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if side == "server":
            self.peer = theirs.wrap_bio(self.incoming, self.outgoing, server_hostname=HOSTNAME)
            making = self.loop.connect_accepted_socket(lambda: Seen(self), mine, ssl=ours)
        else:
            self.peer = theirs.wrap_bio(self.incoming, self.outgoing, server_side=True)
            making = self.loop.create_connection(lambda: Seen(self), sock=mine, ssl=ours, server_hostname=HOSTNAME)
        self.is_shaken = self.is_broken = False
        self.making = self.loop.create_task(making)
        self.making.add_done_callback(self.made)

    def made(self, making: asyncio.Task[Any]) -> None:
        if making.cancelled():
            self.note("not made", "cancelled")
        elif (error := making.exception()) is not None:
            self.note("not made", type(error).__name__, getattr(error, "reason", None))

    def note(self, *entry: Any) -> None:
        self.log.append(entry)

    def report(self, _loop: Any, context: dict[str, Any]) -> None:
        self.note("reported", type(context.get("exception")).__name__)

    # ---------------------------------------------------------------- the peer

    def advance_peer(self) -> bool:
        """Let the peer consume what has arrived, and collect what it wants to send; return whether data moved."""
        moved = False
        with contextlib.suppress(OSError):
            while data := self.raw.recv(65_536):
                self.incoming.write(data)
                moved = True
        if not self.is_broken:
            try:
                if not self.is_shaken:
                    self.peer.do_handshake()
                    self.is_shaken = moved = True
                while self.peer.read(65_536):
                    moved = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLError, OSError, ValueError):
                self.is_broken = True
        if data := self.outgoing.read():
            self.pending += data
            moved = True
        return moved

    def run_loop(self, count: int = 3) -> None:
        for _ in range(count):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def settle(self) -> None:
        quiet = 0
        while quiet < 3:
            before = len(self.log), len(self.data)
            self.run_loop()
            moved = self.advance_peer()
            quiet = 0 if moved or before != (len(self.log), len(self.data)) else quiet + 1

    def send(self, cuts: list[int]) -> None:
        """Send the bytes in `pending`, cut in pieces, unless they are held back."""
        if self.is_held:
            return
        data, self.pending = bytes(self.pending), bytearray()
        for cut in [*cuts, len(data)]:
            piece, data = data[:cut], data[cut:]
            if not piece:
                continue
            with contextlib.suppress(OSError):
                self.raw.sendall(piece)
            self.run_loop()
        self.settle()

    # ---------------------------------------------------------------- steps

    def shake_hands(self, cuts: list[int], spoiled_round: int, spoil: tuple[Any, ...]) -> None:
        """Do the handshake. Each round sends the peer's data in pieces; round `spoiled_round` spoils the data first."""
        self.settle()
        for number in range(ROUNDS):
            if number == spoiled_round:
                self.change(*spoil)
            if not self.pending:
                break
            self.send(cuts)
        self.note("handshake", self.is_shaken and self.transport is not None)

    def step(self, name: str, *arguments: Any, spoil: tuple[Any, ...] = (), cuts: list[int]) -> None:
        """Do a step of the peer or of the application; then spoil and cut what the peer sends."""
        self.note("step", name)
        with contextlib.suppress(ssl.SSLError, OSError, ValueError):  # the peer's connection may have ended
            getattr(self, f"do_{name}")(*arguments)
        self.advance_peer()
        if spoil:
            self.change(*spoil)
        self.send(cuts)
        self.settle()
        if self.transport is not None and self.lost == 0:
            self.note("state", self.transport.is_closing())

    def change(self, name: str, *arguments: Any) -> None:
        """Change the bytes in `pending`."""
        self.has_spoiled = True
        where = arguments[0] % (len(self.pending) + 1) if arguments else 0
        if name == "corrupt" and where < len(self.pending):
            self.pending[where] ^= arguments[1]
        elif name == "insert":
            self.pending[where:where] = arguments[1]
        elif name == "drop":
            del self.pending[where : where + arguments[1]]
        elif name == "repeat":
            self.pending += self.pending[where:]
        elif name == "replace":
            self.pending[:] = arguments[1]

    def react(self) -> None:
        if self.reactions and self.transport is not None and not self.has_closed:
            action = self.reactions.pop(0)
            self.note_action(action)
            if action == "raise":
                raise RuntimeError("a fault of the protocol")
            if action == "write":
                self.transport.write(b"an answer")
            else:
                getattr(self.transport, action)()

    def note_action(self, action: str) -> None:
        self.has_closed = action in {"close", "abort"}
        self.has_paused = self.has_paused or action == "pause_reading"

    def do_nothing(self) -> None:
        pass

    def do_plan(self, action: str) -> None:
        self.reactions.append(action)

    def do_hold(self) -> None:
        self.is_held = True

    def do_release(self) -> None:
        self.is_held = False

    def do_peer_writes(self, length: int) -> None:
        self.peer.write(bytes(length))

    def do_peer_closes_tls(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.peer.unwrap()

    def do_peer_fails(self) -> None:
        """Give the peer a record that it cannot decrypt, so that it sends a fatal alert."""
        self.incoming.write(b"\x17\x03\x03\x00\x20" + bytes(32))

    def can_ask(self, version: str) -> bool:
        return HAS_LIBRARY and self.is_shaken and not self.is_broken and self.peer.version() == version

    def do_key_update(self, is_requested: bool) -> None:
        if self.can_ask("TLSv1.3"):
            Openssl(self.peer).key_update(is_requested)
            self.peer.do_handshake()

    def do_renegotiate(self) -> None:
        if self.can_ask("TLSv1.2"):
            Openssl(self.peer).renegotiate()
            self.peer.do_handshake()

    def do_new_ticket(self) -> None:
        if self.side == "client" and self.can_ask("TLSv1.3"):
            Openssl(self.peer).new_ticket()
            self.peer.write(b"t")

    def do_peer_ends(self) -> None:
        self.raw.shutdown(socket.SHUT_WR)

    def do_peer_closes(self) -> None:
        self.raw.close()

    def do_own(self, action: str) -> None:
        """Call a method of the transport, as an application does."""
        if self.transport is None or self.lost or self.has_closed:  # a second close() breaks asyncio's transport
            return
        self.note_action(action)
        if action == "write":
            self.transport.write(b"from here")
        elif action == "write much":
            self.transport.write(bytes(100_000))
        else:
            getattr(self.transport, action)()

    def finish(self) -> None:
        if self.transport is not None:
            self.reactions.clear()
            self.transport.abort()
        self.making.cancel()
        self.run_loop(6)
        self.raw.close()
        self.run_loop(6)
        self.loop.close()
