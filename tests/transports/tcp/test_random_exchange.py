"""Two transports of one loop exchange random data.

(tests/fuzz makes random steps on asyncio's loop and on grapeshot's, and compares the results.)
"""

from __future__ import annotations

import asyncio
import random

import pytest
from support import loop_factory, raw_pair, until


def exchange(kind, seed):
    """Return the events of both ends, and whether each has received what the other one has sent."""
    rng = random.Random(seed)
    loop = loop_factory(kind)()

    class End(asyncio.Protocol):
        def __init__(self):
            self.received = bytearray()
            self.paused = False
            self.events = []

        def connection_made(self, transport):
            self.transport = transport
            transport.set_write_buffer_limits(high=rng.choice((0, 1000, 65536)))

        def data_received(self, data):
            self.received += data

        def pause_writing(self):
            self.paused = True

        def resume_writing(self):
            self.paused = False

        def eof_received(self):
            self.events.append("eof")
            return True

        def connection_lost(self, exc):
            self.events.append(("lost", exc))

    async def main():
        left, right = raw_pair()
        ends, sent = [], [bytearray(), bytearray()]
        for sock in (left, right):
            sock.setblocking(False)
            ends.append((await loop.connect_accepted_socket(End, sock))[1])
        for _ in range(300):
            which = rng.randrange(2)
            end = ends[which]
            match rng.randrange(8):
                case 0:
                    ends[1 - which].transport.pause_reading()
                case 1:
                    ends[1 - which].transport.resume_reading()
                case 2:
                    await asyncio.sleep(0)
                case _ if not end.paused:
                    data = rng.randbytes(rng.choice((1, 100, 5000, 70_000)))
                    sent[which] += data
                    end.transport.write(data)
        for end in ends:
            end.transport.resume_reading()
            end.transport.write_eof()
        await until(lambda: all("eof" in end.events for end in ends))
        for end in ends:
            end.transport.close()
        await until(lambda: all(len(end.events) == 2 for end in ends))
        return [(end.events, end.received == data) for end, data in zip(ends, reversed(sent), strict=True)]

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(10))
def test_random_exchange(loop_kind, _audit, seed):
    assert exchange(loop_kind, seed) == [(["eof", ("lost", None)], True)] * 2
