"""Parts that several measured servers share: options, the listening socket, and the line that announces a server."""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path

BACKLOG = 4096


class Options(argparse.Namespace):
    """The command line of `benchmarks.servers`. `main` of that module fills it in."""

    kind: str
    loop: str
    certificate: Path
    read_len: int
    body_len: int


options = Options()


def listen() -> socket.socket:
    # Name the protocol, because asyncio sets TCP_NODELAY only on a socket that names TCP. Without TCP_NODELAY, a reply
    # that is written in several pieces waits 40 ms for the client's delayed ACK.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def say(**ready: str) -> None:
    print(json.dumps(ready), flush=True)


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


def burn(cpu_s: float) -> None:
    """Compute until this thread has used `cpu_s` of CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        sum(range(1000))
