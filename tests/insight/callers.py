"""Clients of a back door: raw sockets in the test's loop, and processes of other users."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import warnings
from typing import Any

import pytest
from support import Peer

PROMPTS = (">>> ", "... ")
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can become another user")


class Caller(Peer):
    """A client that speaks plain text, like `nc -U`."""

    def __init__(self, path: Any) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(os.fspath(path))
        except OSError:
            sock.close()
            raise
        super().__init__(sock)

    async def read_until(self, end: str) -> str:
        text = ""
        while not text.endswith(end):
            data = await self.recv()
            assert data, f"the connection has ended after {text!r}"
            text += data.decode()
        return text.removesuffix(end)

    async def greeted(self) -> Caller:
        await self.read_until(">>> ")
        return self

    async def ask(self, *lines: str) -> str:
        """Send a command of one or more lines, and return its output."""
        await self.send("".join(f"{line}\n" for line in lines).encode())
        return (await self.read_until(">>> ")).replace("... ", "")


async def call(path: Any) -> Caller:
    return await Caller(path).greeted()


async def connected_as_nobody(path: Any) -> tuple[int, int]:
    """Start a process that becomes another user, connects and sends a command. Return the id of the process, and the
    reading end of a pipe into which the process writes what happened.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(10)
                sock.connect(os.fspath(path))
                got = b""
                try:
                    sock.sendall(b"import os; open(os.devnull)\n")
                    while data := sock.recv(1000):
                        got += data
                except ConnectionError:
                    pass
                os.write(writer, b"got " + got)
        except BaseException as exc:
            os.write(writer, repr(exc).encode())
        finally:
            os._exit(0)
    os.close(writer)
    return pid, reader


async def output_of(pid: int, reader: int) -> bytes:
    os.set_blocking(reader, False)
    try:
        while True:
            try:
                data = os.read(reader, 10_000)
            except BlockingIOError:
                await asyncio.sleep(0.001)
            else:
                return data
    finally:
        os.close(reader)
        os.waitpid(pid, 0)


def without_coros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make back doors believe that the program has no coros, so that they serve each client in a task."""
    monkeypatch.delitem(sys.modules, "grapeshot.coro", raising=False)
