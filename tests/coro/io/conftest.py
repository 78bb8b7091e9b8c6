"""Run each test that has the fixture `world` three times: with coros that use `coro.sock`, with threads that use
`coro.sock`, and, as the control, with threads that use plain sockets.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from socket import AF_INET, SOCK_STREAM
from typing import Any

import pytest
from support import HOST, in_thread


class World:
    """Where a test's blocking code runs, and how its sockets are made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def socket(self, family: int = AF_INET, type: int = SOCK_STREAM) -> Any:
        return self.class_()(family, type)

    def class_(self) -> type:
        if self.kind == "plain":
            return socket.socket
        from grapeshot import coro

        return coro.sock

    def pair(self, type: int = SOCK_STREAM) -> tuple[Any, Any]:
        if self.kind == "plain":
            return socket.socketpair(socket.AF_UNIX, type)
        from grapeshot import coro

        return coro.socketpair(socket.AF_UNIX, type)

    def tcp_pair(self) -> tuple[Any, Any]:
        """Return both ends of a TCP connection."""
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            near = self.socket()
            near.connect(listener.getsockname())
            far, _ = listener.accept()
        return near, self.class_()(far.family, far.type, far.proto, fileno=far.detach())

    def spawn(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function concurrently; the `join()` of the returned object returns the function's result."""
        if self.kind != "coros":
            return _Thread(function, *args)
        from grapeshot import coro

        return coro.spawn(function, *args)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.kind != "coros":
            return in_thread(function, *args)
        from grapeshot import coro

        return coro.run(function, *args)


class _Thread:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        import concurrent.futures

        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future = self._pool.submit(function, *args)

    def join(self) -> Any:
        self._pool.shutdown()
        return self._future.result()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", ["plain", "threads", "coros"], indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """`plain`: threads with Python's sockets, the control. `threads`: threads with `coro.sock`. `coros`: coros with
    `coro.sock`.
    """
    return World(request.param)
