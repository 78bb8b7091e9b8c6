"""A chat server on plain TCP, in blocking style: every line that a client sends goes to all other clients.

    python examples/chat_server.py --port 8888          # then, in several terminals: nc 127.0.0.1 8888

Each client has two coros. One reads the client's lines. The other sends the client what all other clients write, so
that a client that reads slowly does not hold up the others.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket

from grapeshot import coro


class Client:
    """One client in the room."""

    def __init__(self, sock: coro.sock, name: str) -> None:
        self.sock = sock
        self.name = name
        self.lines: coro.fifo[str] = coro.fifo(100)

    def tell(self, line: str) -> None:
        """Queue a line for this client, without waiting. A client that is 100 lines behind is disconnected."""
        try:
            self.lines.push(line, block=False)
        except coro.Full:
            with contextlib.suppress(OSError):  # it may have disconnected
                self.sock.shutdown(socket.SHUT_RDWR)

    def send_lines(self) -> None:
        """Send the queued lines. Runs in a coro of its own."""
        try:
            while True:
                self.sock.sendall(f"{self.lines.pop()}\n".encode())
        except OSError:
            pass  # the client has disconnected; the other coro notices that, too


class Room:
    """All clients that have given their name."""

    def __init__(self) -> None:
        self.clients: set[Client] = set()

    def say(self, line: str, speaker: Client) -> None:
        for client in self.clients - {speaker}:
            client.tell(line)

    def serve(self, sock: coro.sock, address: tuple[str, int]) -> None:
        """Serve one connection. Runs in a coro of its own."""
        lines = coro.read_stream(sock)
        sock.sendall(b"What is your name?\n")
        client = Client(sock, lines.read_line().decode(errors="replace").strip())
        sending = coro.spawn(client.send_lines)
        self.clients.add(client)
        self.say(f"* {client.name} is here", client)
        try:
            for line in lines:
                self.say(f"{client.name}: {line.decode(errors='replace').rstrip()}", client)
        except ConnectionError:
            pass  # treat it like a normal disconnect
        finally:
            self.clients.remove(client)
            self.say(f"* {client.name} has left", client)
            sending.cancel()


def main(host: str, port: int) -> None:
    stopped = coro.event()
    for number in (signal.SIGINT, signal.SIGTERM):
        coro.signal_handler.register(number, lambda _: stopped.set())
    with coro.serve(Room().serve, host, port) as server:
        name, bound = server.sockets[0].getsockname()[:2]
        print(f"listening on {name}:{bound}", flush=True)
        stopped.wait()
        server.stop(1)  # connected clients have one more second
    print("stopped", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A chat server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888, help="0 for any free port")
    options = parser.parse_args()
    coro.run(main, options.host, options.port)
