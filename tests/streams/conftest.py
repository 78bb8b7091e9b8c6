"""Close the streams that a test leaves open before their loop is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from streams import readers
from support import iterations


@pytest.fixture(autouse=True)
def _close_what_is_open(request: pytest.FixtureRequest) -> Iterator[None]:
    if "loop" not in request.fixturenames:
        yield
        return
    loop: asyncio.AbstractEventLoop = request.getfixturevalue("loop")
    yield
    for stream in readers.opened:
        stream.close()
    if readers.opened and not loop.is_closed():
        loop.run_until_complete(iterations(5))
    readers.opened.clear()
