"""The callbacks of each server connection run in a copy of the contextvars context in which the server began to
listen, with and without TLS, no matter which task resumes reading or ends the connection.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import sys

import pytest
from support import HOST, Peer, Recorder, until
from tls.contexts import server_context
from tls.endpoints import client_of

variable = contextvars.ContextVar("variable", default="unset")


async def plain_client(server):
    return Peer(socket.create_connection(server.sockets[0].getsockname()))


@pytest.mark.skip_on(asyncio="runs callbacks in the context of resume_reading()", when=sys.version_info < (3, 15))
@pytest.mark.skip_on(uvloop="all connections share one context")
@pytest.mark.parametrize("uses_tls", [False, True])
async def test_reading_is_resumed_in_another_context(loop, serve, uses_tls):
    """data_received() pauses reading and starts a task. That task resumes reading (gh-140947)."""
    seen, tasks = [], []

    class Pausing(Recorder):
        def _note(self, event):
            super()._note(event)
            seen.append((event, variable.get()))
            variable.set(f"after {event}")

        def data_received(self, data):
            super().data_received(data)
            self.transport.pause_reading()
            tasks.append(asyncio.ensure_future(self.work(self.transport)))

        async def work(self, transport):
            variable.set("work")
            transport.resume_reading()

    def factory():
        seen.append(("factory", variable.get()))
        variable.set("after factory")
        made.append(Pausing())
        return made[-1]

    made = []
    variable.set("server")
    server = await serve(factory, HOST, 0, ssl=server_context() if uses_tls else None)
    variable.set("after the server")
    for count in (1, 2):
        peer = await (client_of(server) if uses_tls else plain_client(server))
        await until(lambda count=count: len(made) == count and made[-1].transport, "connection_made")
        send = peer.write if uses_tls else peer.send
        for number in (1, 2):
            await send(b"x")
            await until(lambda number=number: len(made[-1].data) == number, "the data")
            await asyncio.wait(tasks)
        (peer.peer if uses_tls else peer).shutdown()
        await until(lambda: made[-1].is_lost, "connection_lost")
        assert [value for _, value in seen] == [
            "server",
            "after factory",
            "after made",
            "after data",
            "after data",
            "after eof",
        ]
        peer.close()
        seen.clear()
        tasks.clear()
    assert variable.get() == "after the server"
    made.clear()


@pytest.mark.skip_on(asyncio="runs callbacks in the context of close()", when=sys.version_info < (3, 15))
@pytest.mark.skip_on(uvloop="all connections share one context")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("uses_tls", [False, True])
async def test_a_connection_is_ended_in_another_context(loop, serve, uses_tls, end):
    seen, made = [], []

    class Noting(Recorder):
        def connection_lost(self, exc):
            super().connection_lost(exc)
            seen.append(variable.get())

    variable.set("server")
    server = await serve(lambda: made.append(Noting()) or made[-1], HOST, 0, ssl=server_context() if uses_tls else None)
    variable.set("elsewhere")
    peer = await (client_of(server) if uses_tls else plain_client(server))
    await until(lambda: made and made[0].transport, "connection_made")
    getattr(made[0].transport, end)()
    if uses_tls and end == "close":
        assert await peer.read() == b""
        await peer.unwrap()
    await until(lambda: made[0].is_lost, "connection_lost")
    assert seen == ["server"]
    peer.close()
    made.clear()
