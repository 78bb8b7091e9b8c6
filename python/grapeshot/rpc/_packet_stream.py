"""Packets over a stream transport. A packet is its length (four bytes, big endian) and then that many bytes.

    data_received ----> whole packets ----> packet_received(bytes)     straight from the transport's callback, for 2 ms
                        '---> too many for one iteration of the loop: the rest waits in memory, and nothing is read
    send_packet(bytes) ----> one buffer for all of an iteration ----> one transport.write()

The contents of packets do not matter here. Only the loop's thread may use a packet stream.
"""

from __future__ import annotations

import asyncio
import socket
from struct import Struct
from typing import Any

from ._errors import PacketTooLarge, ProtocolError

# The default for the longest packet. In the worst case, decoding and freeing 1 MiB takes 100 MiB of memory and 0.2 s.
MAX_PACKET = 1024 * 1024
# The largest length that fits into the header.
MAX_LENGTH = 2**32 - 1
# When more bytes than this have been collected, they are written at once, so that the transport can report that it is
# full.
_BATCH_BYTES = 64 * 1024
_HEADER_BYTES = 4
_LINGER_S = 5.0
# In one iteration of the loop, a connection handles packets for about this long.
_TURN_S = 0.002
# After about this many bytes, the connection reads the clock again, to find out whether _TURN_S is over.
_CHECK_BYTES = 512
_LENGTH = Struct(">I")

# If the peer's machine has gone down, nothing arrives from it. With these options, the kernel probes it after 30 s of
# silence, and gives up 30 s later.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class PacketStream(asyncio.Protocol):
    """A base class for protocols. A subclass implements :meth:`packet_received` and calls :meth:`send_packet`.

    All packets sent in one iteration of the loop, or while handling one read, are written together. If a packet is
    longer than ``max_packet``, the connection is closed before the packet's content is read.
    """

    def __init__(self, max_packet: int = MAX_PACKET) -> None:
        self.max_packet = max_packet
        # The longest packet that the peer accepts. A subclass sets it when it learns the peer's limit.
        self.max_sent_packet = max_packet
        # Whether the transport accepts more: False between pause_writing and resume_writing.
        self.can_write = True
        self.is_open = False
        # Set whenever data arrives. A subclass clears it to find out whether more arrives.
        self.was_heard = False
        self._loop: asyncio.AbstractEventLoop
        self._transport: Any = None
        self._out = bytearray()
        self._is_flush_due = False
        # True while received packets are handled. After that, all packets that were sent meanwhile are written.
        self._is_batching = False
        # Received bytes that have not been handled: a part of a packet, or everything since hold() or since the end of
        # a turn (_TURN_S).
        self._received = bytearray()
        # How long `_received` must be before data_received() looks for packets in it again.
        self._wanted = 0
        self._is_held = False
        # Whether the rest of the received data is left for the next iteration of the loop.
        self._is_turn_over = False
        self._lingering: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ for subclasses

    def packet_received(self, packet: bytes) -> None:
        """Handle a packet. If this raises ProtocolError, the connection is closed."""
        raise NotImplementedError

    def closing(self, error: ProtocolError) -> None:
        """Called before the connection is closed because of a protocol error. May send a last packet."""

    # ------------------------------------------------------------------ sending

    def send_packet(self, packet: bytes) -> None:
        """Send a packet. Does nothing if the connection is closed.

        Raises:
            PacketTooLarge: the packet is longer than the peer accepts.
        """
        size = len(packet)
        if size > self.max_sent_packet:
            raise PacketTooLarge(f"a packet has {size} bytes, but the peer's max_packet is {self.max_sent_packet}")
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
        """Write the collected packets to the transport."""
        self._is_flush_due = False
        if self._out and self.is_open:
            # use a new buffer from now on, because the transport may keep this one
            out, self._out = self._out, bytearray()
            if not self._transport.is_closing():  # a transport that has failed logs a warning for each write
                self._transport.write(out)

    @property
    def is_attached(self) -> bool:
        """Whether ``connection_lost`` is still to come."""
        return self._transport is not None

    def pending_bytes(self) -> int:
        """Return how many bytes of sent packets the system has not accepted yet."""
        return len(self._out) + (self._transport.get_write_buffer_size() if self.is_open else 0)

    def close(self) -> None:
        """Write what is left, then close the connection. If the peer does not read, abort after a few seconds."""
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
                    problem = f"a packet has {end - start} bytes, but max_packet is {self.max_packet}"
                    raise ProtocolError(f"{problem} (or the peer uses another protocol)")
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
        """Handle no more packets until :meth:`take_again`, not even packets that were already received."""
        if not self._is_held and self.is_open:
            self._is_held = True
            self._transport.pause_reading()

    def take_again(self) -> None:
        """Continue after :meth:`hold`."""
        if self._is_held:
            self._is_held = False
            self._go_on()

    def take_rest(self) -> None:
        """Handle all packets received so far, regardless of the time. A subclass may call this in connection_lost()."""
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
