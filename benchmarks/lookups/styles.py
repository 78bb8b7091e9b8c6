"""Ways to look up names: by the loop's `getaddrinfo`, by gevent's resolvers, and in coros. They all have the same
methods, so that one program measures them all.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from benchmarks import _loops
from benchmarks._loops import LOOPS

OURS, CACHE, COROS = "grapeshot", "with cache", "coros"
GEVENT_THREADS, GEVENT_ARES = "gevent threads", "gevent ares"
PORT = 443
CACHE_S = 60.0
Answer = list[Any]


class Style(Protocol):
    def run(self, program: Callable[[], None]) -> None:
        """Run a program that calls the other methods."""

    def one_by_one(self, names: Sequence[str]) -> list[Answer]:
        """Look up names, one after the other."""

    def all_at_once(self, names: Sequence[str]) -> list[Answer]:
        """Look up names at the same time."""


class OnLoop:
    """`loop.getaddrinfo`, in tasks."""

    def __init__(self, loop: str, cache_s: float | None = None) -> None:
        self._loop: Any = _loops.loop_factory(loop)()
        if cache_s is not None:
            self._loop.set_dns_cache(cache_s)

    def run(self, program: Callable[[], None]) -> None:
        try:
            program()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def one_by_one(self, names: Sequence[str]) -> list[Answer]:
        async def work() -> list[Answer]:
            return [await self._loop.getaddrinfo(name, PORT, type=socket.SOCK_STREAM) for name in names]

        answers: list[Answer] = self._loop.run_until_complete(work())
        return answers

    def all_at_once(self, names: Sequence[str]) -> list[Answer]:
        async def work() -> list[Answer]:
            lookups = (self._loop.getaddrinfo(name, PORT, type=socket.SOCK_STREAM) for name in names)
            return list(await asyncio.gather(*lookups))

        answers: list[Answer] = self._loop.run_until_complete(work())
        return answers


class Gevent:
    """`gevent.socket.getaddrinfo`, in greenlets."""

    def __init__(self, resolver: str) -> None:
        os.environ["GEVENT_RESOLVER"] = resolver
        import gevent
        import gevent.socket

        self._gevent = gevent

    def run(self, program: Callable[[], None]) -> None:
        program()

    def _lookup(self, name: str) -> Answer:
        answer: Answer = self._gevent.socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)
        return answer

    def one_by_one(self, names: Sequence[str]) -> list[Answer]:
        return [self._lookup(name) for name in names]

    def all_at_once(self, names: Sequence[str]) -> list[Answer]:
        lookups = [self._gevent.spawn(self._lookup, name) for name in names]
        self._gevent.joinall(lookups, raise_error=True)
        return [lookup.value for lookup in lookups]


class Coros:
    """`socket.getaddrinfo` as grapeshot.coro patches it, in coros."""

    def __init__(self) -> None:
        from grapeshot import coro

        coro.patch()
        self._coro = coro

    def run(self, program: Callable[[], None]) -> None:
        self._coro.run(program)

    def _lookup(self, name: str) -> Answer:
        return socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)

    def one_by_one(self, names: Sequence[str]) -> list[Answer]:
        return [self._lookup(name) for name in names]

    def all_at_once(self, names: Sequence[str]) -> list[Answer]:
        return self._coro.in_parallel([(self._lookup, (name,)) for name in names])


STYLES: dict[str, Callable[[], Style]] = {
    OURS: lambda: OnLoop(OURS),
    CACHE: lambda: OnLoop(OURS, CACHE_S),
    COROS: Coros,
    **{loop: lambda loop=loop: OnLoop(loop) for loop in LOOPS if loop != OURS},  # type: ignore[misc]
    GEVENT_THREADS: lambda: Gevent("thread"),
    GEVENT_ARES: lambda: Gevent("ares"),
}


def why_missing(name: str) -> str | None:
    """Return why this style cannot take part here, or None. A new process tries to create the style."""
    return _loops.why_it_fails("import sys; from benchmarks.lookups.styles import STYLES; STYLES[sys.argv[1]]()", name)


def available(names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that can take part, and the reasons why the others cannot. The reasons are also printed."""
    return _loops.available(names, why_missing)
