"""Ways for a task to read and write files, each on an event loop. aiofiles is measured on every loop, because it is
what users of asyncio's loop and uvloop have.
"""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import _loops
from benchmarks._loops import LOOPS, RAW

OURS, THREADS = "grapeshot", "threads"
AIOFILES = tuple(f"aiofiles+{loop}" for loop in LOOPS)
ALL = (OURS, THREADS, *AIOFILES, RAW)

# Takes the arguments of the built-in `open`, and returns an asynchronous context manager for a file whose methods are
# coroutines.
Open = Callable[..., Any]


class BlockingFile:
    """A file of the built-in `open`, whose coroutines block the loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = builtins.open(*args, **options)  # noqa: SIM115

    async def __aenter__(self) -> BlockingFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.close()

    async def read(self, size: int = -1) -> Any:
        return self._file.read(size)

    async def write(self, data: Any) -> Any:
        return self._file.write(data)

    def __aiter__(self) -> BlockingFile:
        return self

    async def __anext__(self) -> Any:
        line = self._file.readline()
        if not line:
            raise StopAsyncIteration
        return line


def choose(name: str) -> tuple[asyncio.AbstractEventLoop, Open]:
    """Return a new loop and the function that opens files, for one of the names in `ALL`.

    Raises ImportError if a package is missing.
    """
    if name == RAW:
        return asyncio.SelectorEventLoop(), BlockingFile
    if name in (OURS, THREADS):
        if name == THREADS:
            os.environ["GRAPESHOT_FILE_THREADS"] = "1"
        import grapeshot.files

        return _loops.loop_factory(OURS)(), grapeshot.files.open
    import aiofiles

    library, _, loop = name.partition("+")
    if library != "aiofiles":
        raise ValueError(f"no library is called {name!r}; there are {', '.join(ALL)}")
    return _loops.loop_factory(loop)(), aiofiles.open


def why_missing(name: str) -> str | None:
    """Return why the library of this name cannot take part here, or None if it can. A new process tries it."""
    code = "import sys; from benchmarks.files.libraries import choose; choose(sys.argv[1])[0].close()"
    return _loops.why_it_fails(code, name)


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that can take part, and why each of the others cannot. The reasons are also printed."""
    return _loops.available(names, why_missing)
