"""The base class of both ends' connections. It notices when a peer has vanished without closing the connection.

    bytes ---> was_heard              every `keepalive` seconds: heard? ---> go on
                                                                  | no
                                                 not asked yet? ------> PING; the peer's loop answers PONG
                                                                  | asked
                          fewer bytes are on their way than before, or
                          this end itself was busy? ---------------> go on
                                                                  | no
                                                                silent()

Each connection has one timer for these checks, and no call has a timer for them. Only the loop's thread may use a
connection.
"""

from __future__ import annotations

import asyncio
import sys
from fcntl import ioctl
from termios import TIOCOUTQ

from ._codecs import Codec, Msgpack
from ._messages import MAX_HELLO, MIN_COUNTED, PING, PONG, Hello, decode_hello
from ._packet_stream import MAX_LENGTH, PacketStream

# A peer has this many seconds to answer a PING, so a computation or a debugger may stop the peer's loop for a minute. A
# peer is regarded as dead after two to three times this many seconds without data.
KEEPALIVE_S = 60.0


def check_keepalive(keepalive: float | None) -> None:
    """Check the option ``keepalive``. Raises TypeError or ValueError."""
    if keepalive is None:
        return
    if isinstance(keepalive, bool) or not isinstance(keepalive, int | float):
        raise TypeError(f"keepalive must be a number of seconds or None, not {keepalive!r}")
    if not 0 < keepalive < float("inf"):
        raise ValueError(f"keepalive must be a positive number of seconds or None, not {keepalive}")


class Connection(PacketStream):
    """A packet stream with PING and PONG. A subclass implements :meth:`silent`, which is called for a dead peer."""

    def __init__(self, codec: Codec, max_packet: int, keepalive: float | None) -> None:
        super().__init__(MAX_HELLO)
        # The longest packet to accept after the peer's hello.
        self._max_packet = max_packet
        self._codec = codec
        self._encode, self._decode = codec.encode, codec.decode
        # Use decode_short() only if the codec is exactly Msgpack: a subclass may have a decode() of its own.
        self._decode_short = codec.decode_short if type(codec) is Msgpack else codec.decode
        self._keepalive_s = keepalive
        self._keepalive_timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        self._unsent = 0
        # Request number -> length, for the requests that are long enough to count and whose calls are under way.
        # `call_bytes` is the sum of these lengths.
        self._request_sizes: dict[int, int] = {}
        self.call_bytes = 0

    def send_hello(self, max_calls: int, max_call_bytes: int) -> None:
        self.send_packet(Hello(self._codec.name, self._max_packet, max_calls, max_call_bytes).encode())

    def take_hello(self, packet: bytes) -> Hello:
        """Decode the peer's hello, and accept packets up to ``max_packet`` from now on. Raises ProtocolError."""
        hello = decode_hello(packet, self._codec.name)
        self.max_packet = self._max_packet
        self.max_sent_packet = min(hello.max_packet, MAX_LENGTH)
        return hello

    def add_request(self, number: int, size: int) -> None:
        """Count a request of ``size`` bytes until :meth:`remove_request`."""
        if size >= MIN_COUNTED:
            self._request_sizes[number] = size
            self.call_bytes += size

    def remove_request(self, number: int) -> None:
        if self.call_bytes:
            self.call_bytes -= self._request_sizes.pop(number, 0)

    def silent(self, error: TimeoutError) -> None:
        """Close the connection, because the peer has not answered."""
        raise NotImplementedError

    def start_keepalive(self) -> None:
        if self._keepalive_s is not None:
            self._keepalive_timer = self._loop.call_later(self._keepalive_s, self._check_peer)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._keepalive_timer is not None:
            self._keepalive_timer.cancel()
            self._keepalive_timer = None

    def take_ping(self) -> None:
        """Answer a PING, unless the peer is not reading.

        A peer that does not read still has data from this end to read. That data tells the peer that this end is alive,
        so a PONG is not needed. If each PING were answered, the unread PONGs would use more and more memory.
        """
        if self.can_write:
            self.send_packet(self._encode((PONG, 0)))

    def _check_peer(self) -> None:
        timer, self._keepalive_timer = self._keepalive_timer, None
        if not self.is_open or self._keepalive_s is None or timer is None:
            return
        # If the timer is late, this process was stopped or busy, and data from the peer may be unread.
        is_late = self._loop.time() - timer.when() > self._keepalive_s / 10
        unsent = self._count_unsent()
        if self.was_heard:
            self.was_heard = self._is_asked = False
        elif not self._is_asked:
            self._is_asked = True
            self.send_packet(self._encode((PING, 0)))
            self.flush()  # now, because the time for the answer begins now
        elif unsent >= self._unsent and not is_late:
            self.silent(TimeoutError(f"the peer has sent nothing for more than {2 * self._keepalive_s:g} s"))
            return
        self._unsent = unsent
        self.start_keepalive()

    def _count_unsent(self) -> int:
        """Return how many bytes are on their way. The peer has to receive all of them before it can see a PING."""
        count = self.pending_bytes()
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            try:
                count += int.from_bytes(ioctl(sock.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
            except OSError:
                pass  # this system does not support TIOCOUTQ for sockets
        return count
