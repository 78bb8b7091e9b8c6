"""Before a loop is closed, close the endpoints that a failed test left open: uvloop would wait for them forever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support import iterations
from transports.udp import endpoints


@pytest.fixture(autouse=True)
def _close_what_is_open(request: pytest.FixtureRequest) -> Iterator[None]:
    if "loop" not in request.fixturenames:
        yield
        return
    loop: asyncio.AbstractEventLoop = request.getfixturevalue("loop")
    yield
    left = [transport for transport in endpoints.opened if not transport.is_closing()]
    endpoints.opened.clear()
    for transport in left:
        transport.abort()
    if left and not loop.is_closed():
        loop.run_until_complete(iterations(5))
