"""Streams that have become garbage: one thread runs their finalizers, while another runs their loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import pytest
from support import HOST, gil_is_enabled
from tls.contexts import HOSTNAME, client_context, server_context

import grapeshot

COUNT = 10


@pytest.mark.parametrize("is_secure", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize(
    "factory",
    # Without a GIL, asyncio's transports are not safe here.
    [asyncio.SelectorEventLoop, grapeshot.new_event_loop] if gil_is_enabled() else [grapeshot.new_event_loop],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_collection_in_another_thread_closes_streams(factory, is_secure):
    """Without a GIL, the collecting thread must not touch the transport. The loop's thread closes the transport."""
    if is_secure and factory is asyncio.SelectorEventLoop:
        pytest.skip("asyncio's own TLS transports are not safe here, not even with a GIL")
    serving, connecting = (server_context(), client_context()) if is_secure else (None, None)
    ends, unraisable, has_ended = [], [], threading.Event()

    async def answer(reader, writer):
        ends.append(await reader.read())
        writer.close()

    async def main():
        server = await asyncio.start_server(answer, HOST, 0, ssl=serving)
        address = server.sockets[0].getsockname()[:2]
        for is_closed in [False, True] * COUNT:
            reader, writer = await asyncio.open_connection(
                *address, ssl=connecting, server_hostname=HOSTNAME if is_secure else None
            )
            writer.write(b"data")
            if is_closed:
                writer.close()
                await writer.wait_closed()
            cycle = [reader, writer]
            cycle.append(cycle)
            del reader, writer, cycle
        while len(ends) < 2 * COUNT:
            await asyncio.sleep(0.001)
        server.close()

    def work():
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main())
        finally:
            has_ended.set()

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("sys.unraisablehook", lambda raised: unraisable.append(raised.exc_value))
        thread = threading.Thread(target=work)
        thread.start()
        while not has_ended.wait(0.001):
            gc.collect()
        thread.join()
    assert ends == [b"data"] * 2 * COUNT
    assert unraisable == []
