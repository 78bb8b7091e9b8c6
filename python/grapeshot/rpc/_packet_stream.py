"""Packets over a stream transport: four bytes of length, the most significant first, then so many bytes.

    data_received ----> whole packets ----> packet_received(bytes)     straight from the transport's callback, for 2 ms
                        '---> too many for one iteration of the loop: the rest waits in memory, and nothing is read
    send_packet(bytes) ----> one buffer for all of an iteration ----> one transport.write()

It knows nothing of what is in a packet. It belongs to the thread of its loop.
"""

from __future__ import annotations

import asyncio
import socket
from struct import Struct
from typing import Any

from ._errors import PacketTooLarge, ProtocolError

# By default. The worst packet of 1 MiB needs 100 MiB and 0.2 s when it is decoded and freed.
MAX_PACKET = 1024 * 1024
# What the header can say.
MAX_LENGTH = 2**32 - 1
# What is collected is written at once when it is longer than this, so that the transport can say that it is full.
_BATCH_BYTES = 64 * 1024
_HEADER_BYTES = 4
_LINGER_S = 5.0
# In one iteration of the loop, packets of a connection are taken for about this time: the clock is read each time that
# this many bytes were taken.
_TURN_S = 0.002
_CHECK_BYTES = 512
_LENGTH = Struct(">I")

# A peer whose machine is gone says nothing. The kernel asks it after 30 s without a word, and gives up 30 s later.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class PacketStream(asyncio.Protocol):
    """A protocol to derive from: implement :meth:`packet_received`, call :meth:`send_packet`.

    What is sent in one iteration of the loop, or in answer to one read, leaves in one ``write``. A packet that is
    longer than ``max_packet`` closes the connection before its content is read.
    """

    def __init__(self, max_packet: int = MAX_PACKET) -> None:
        self.max_packet = max_packet
        # What the peer accepts; a subclass that learns it sets it.
        self.max_sent_packet = max_packet
        # Whether the transport accepts more: False between pause_writing and resume_writing.
        self.can_write = True
        self.is_open = False
        # Set by each byte that comes; who wants to know of the next one clears it.
        self.was_heard = False
        self._loop: asyncio.AbstractEventLoop
        self._transport: Any = None
        self._out = bytearray()
        self._is_flush_due = False
        # Inside of data_received: what is sent is written at its end.
        self._is_batching = False
        # Bytes that were received and not taken yet: a part of a packet, or all that came since hold().
        self._received = bytearray()
        # How many there must be to go on.
        self._wanted = 0
        self._is_held = False
        # The rest of what was received is for the next iteration of the loop.
        self._is_turn_over = False
        self._lingering: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ for subclasses

    def packet_received(self, packet: bytes) -> None:
        """Take one packet. A ProtocolError that it raises closes the connection."""
        raise NotImplementedError

    def closing(self, error: ProtocolError) -> None:
        """Send a last packet, if there is something to say: the peer has broken the protocol."""

    # ------------------------------------------------------------------ sending

    def send_packet(self, packet: bytes) -> None:
        """Send a packet. Nothing happens on a connection that is closed.

        Raises:
            PacketTooLarge: it is longer than the peer accepts.
        """
        size = len(packet)
        if size > self.max_sent_packet:
            raise PacketTooLarge(f"a packet of {size} bytes: the other end's max_packet is {self.max_sent_packet}")
        if not self.is_open:
            return
        out = self._out
        out += _LENGTH.pack(size)
        out += packet
        if len(out) > _BATCH_BYTES:
            self.flush()
        elif not (self._is_batching or self._is_flush_due):
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was collected."""
        self._is_flush_due = False
        if self._out and self.is_open:
            # the transport may keep this one
            out, self._out = self._out, bytearray()
            if not self._transport.is_closing():  # else it has failed, and would warn of each write
                self._transport.write(out)

    @property
    def is_attached(self) -> bool:
        """Whether ``connection_lost`` is still to come."""
        return self._transport is not None

    def pending_bytes(self) -> int:
        """How many bytes were sent here and not yet taken by the system."""
        return len(self._out) + (self._transport.get_write_buffer_size() if self.is_open else 0)

    def close(self) -> None:
        """Write what is left, then close the connection. A peer that does not read has a few seconds for that."""
        if self.is_open:
            self.flush()
            self.is_open = False
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._lingering = self._loop.call_later(_LINGER_S, self._transport.abort)

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        self.can_write = False

    def resume_writing(self) -> None:
        self.can_write = True

    # ------------------------------------------------------------------ receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.is_open = True
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_open = False
        self._transport = None
        self._received.clear()
        if self._lingering is not None:
            self._lingering.cancel()

    def data_received(self, data: bytes) -> None:
        self.was_heard = True
        received = self._received
        if self._is_held or self._is_turn_over:
            received += data
            return
        if received:
            received += data
            if len(received) < self._wanted:
                return
            data = bytes(received)
            received.clear()
        self._take_packets(data)

    def _take_packets(self, data: bytes) -> None:
        position, size = 0, len(data)
        wanted = _HEADER_BYTES
        check_at, turn_end = _CHECK_BYTES, 0.0
        self._is_batching = True
        try:
            while self.is_open and not self._is_held:
                start = position + _HEADER_BYTES
                if start > size:
                    break
                end = start + _LENGTH.unpack_from(data, position)[0]
                if end - start > self.max_packet:
                    problem = f"a packet of {end - start} bytes: {self.max_packet} are accepted"
                    raise ProtocolError(f"{problem}; or the peer speaks another protocol")
                if end > size:
                    wanted = end - position
                    break
                position = end
                self.packet_received(data[start:end])
                if position >= check_at:
                    now = self._loop.time()
                    if turn_end and now >= turn_end:
                        if position < size and self.is_open:
                            self._end_turn()
                        break
                    check_at, turn_end = position + _CHECK_BYTES, turn_end or now + _TURN_S
        except ProtocolError as error:
            self.closing(error)
            self.close()
        finally:
            self._is_batching = False
            if position < size and self.is_open:
                self._received += data[position:]
                self._wanted = wanted
            if self._out:
                self.flush()

    def hold(self) -> None:
        """Take no more packets, not even those that have come already, until :meth:`take_again`."""
        if not self._is_held and self.is_open:
            self._is_held = True
            self._transport.pause_reading()

    def take_again(self) -> None:
        """Go on after :meth:`hold`."""
        if self._is_held:
            self._is_held = False
            self._go_on()

    def take_rest(self) -> None:
        """Take all packets that have come, however many: for a subclass whose connection was lost."""
        while self._is_turn_over and self.is_open:
            self._begin_turn()

    def _end_turn(self) -> None:
        self._is_turn_over = True
        self._transport.pause_reading()
        self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        if self._is_turn_over:
            self._is_turn_over = False
            self._go_on()

    def _go_on(self) -> None:
        if not self._has_to_wait():
            if self._received:
                data = bytes(self._received)
                self._received.clear()
                self._take_packets(data)
            if self.is_open and not self._has_to_wait():
                self._transport.resume_reading()

    def _has_to_wait(self) -> bool:
        return self._is_held or self._is_turn_over
