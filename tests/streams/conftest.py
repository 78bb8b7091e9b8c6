"""Fixtures: the module whose streams a test uses, and the closing of streams that a test leaves open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType

import pytest
from streams import readers
from support import iterations

import grapeshot.streams


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


@pytest.fixture(params=["asyncio", "native"])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """asyncio or grapeshot.streams."""
    module = asyncio if request.param == "asyncio" else grapeshot.streams
    monkeypatch.setattr(readers, "usual", module)
    return module
