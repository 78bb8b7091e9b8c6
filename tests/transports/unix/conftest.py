"""Addresses that are short enough for Unix sockets (on Linux, at most 107 bytes), and servers that are closed after the
test.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        yield Path(folder)


@pytest.fixture
def address_of(folder: Path) -> Callable[[str], Any]:
    """Return a function that makes an address of the named form."""

    def make(form: str) -> Any:
        path = folder / "sock"
        if "abstract" in form and not sys.platform.startswith("linux"):
            pytest.skip("only Linux has abstract names")
        return {
            "str": str(path),
            "bytes": os.fsencode(path),
            "pathlike": path,
            "abstract str": f"\0grapeshot test {os.getpid()}",
            "abstract bytes": b"\0grapeshot\xff\0test %d" % os.getpid(),
        }[form]

    return make


@pytest.fixture
def serve_unix(loop: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function like `loop.create_unix_server`. After the test, close the servers, even if the test failed."""
    servers: list[Any] = []

    async def create(*args: Any, **kwargs: Any) -> Any:
        servers.append(await loop.create_unix_server(*args, **kwargs))
        return servers[-1]

    yield create
    while servers:
        servers.pop().close()
