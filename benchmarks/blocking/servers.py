"""The blocking-style server that is put under load: `python -m benchmarks.blocking.servers KIND --style STYLE`.

Each connection has a cooperative thread, which receives and sends in a loop. The program is the same for all styles.
It prints `{"address": ...}` when it listens, or `{"unsupported": why}`. It ends when its stdin is closed. With
`--burn-ms`, a real thread burns that much CPU time before each message that begins with `b` is answered.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from typing import NoReturn

from benchmarks._load import UnsupportedError
from benchmarks._machine import raise_descriptor_limit
from benchmarks._serving import burn
from benchmarks.blocking.styles import STYLES, Style

BACKLOG = 4096
STDIN = 0


def echo(connection: socket.socket, read_len: int) -> None:
    try:
        while data := connection.recv(read_len):
            connection.sendall(data)
    finally:
        connection.close()


def echo_or_burn(connection: socket.socket, read_len: int, style: Style, cpu_s: float) -> None:
    try:
        while data := connection.recv(read_len):
            if data.startswith(b"b"):
                style.run_in_thread(burn, cpu_s)
            connection.sendall(data)
    finally:
        connection.close()


def accept(listener: socket.socket, style: Style, handler: Callable[..., None], *arguments: object) -> NoReturn:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        style.spawn(handler, connection, *arguments)


def serve(style: Style, read_len: int, burn_ms: float | None) -> NoReturn:
    """Serve until stdin is closed, then end the process, because the waiting threads never return."""
    listener = style.make_socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(BACKLOG)
    if burn_ms is None:
        style.spawn(accept, listener, style, echo, read_len)
    else:
        style.spawn(accept, listener, style, echo_or_burn, read_len, style, burn_ms / 1e3)
    host, port = listener.getsockname()
    print(json.dumps({"address": f"{host}:{port}"}), flush=True)
    style.wait_readable(STDIN)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=STYLES)
    parser.add_argument("--style", required=True, help="grapeshot, gevent or runloom")
    parser.add_argument("--read-len", type=int, default=65536, help="bytes that are asked for at once (65536)")
    parser.add_argument("--burn-ms", type=float, help="CPU time that a message beginning with b burns in a thread")
    args = parser.parse_args()
    raise_descriptor_limit()
    try:
        style = STYLES[args.kind][args.style]()
    except UnsupportedError as error:
        print(json.dumps({"unsupported": str(error)}), flush=True)
        return
    style.run(serve, style, args.read_len, args.burn_ms)


if __name__ == "__main__":
    main()
