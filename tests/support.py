"""Helpers for the behaviour tests: kinds of loop, waits for conditions, recording protocols, raw peers, scripts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tty
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def coro_is_available() -> bool:
    """Return whether this interpreter and processor can run coros."""
    import grapeshot  # if this fails, so must the tests

    try:
        import grapeshot.coro  # noqa: F401
    except ImportError:
        return False
    return True


def together(function: Callable[[int], Any], count: int = 10, **options: Any) -> list[Any]:
    """Run function(number) in `count` concurrent coros and return their results. The options go to `coro.spawn`."""
    from grapeshot import coro

    def main() -> list[Any]:
        threads = [coro.spawn(function, number, **options) for number in range(count)]
        return [thread.join() for thread in threads]

    return coro.run(main)


def spawn_blocked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Spawn a coro and let it run to its first wait."""
    from grapeshot import coro

    co = coro.spawn(function, *args, **kwargs)
    coro.yield_slice()
    return co


def until_waiting(*coros: Any) -> None:
    """Let coros run until all of the given ones wait."""
    from grapeshot import coro

    while not all(co._status == "waiting" for co in coros):
        coro.yield_slice()


def until_in_coro(condition: Callable[[], Any]) -> None:
    """Let other coros run until the condition holds."""
    from grapeshot import coro

    with coro.timeout(CAP_S):
        while not condition():
            coro.sleep_relative(0.001)


def gil_is_enabled() -> bool:
    """Return whether the GIL is enabled. A free-threaded build can run with the GIL, too."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Record the texts of all warnings. The list is complete when the block has ended. In free-threaded builds, where
    filters belong to a context, ``warnings.catch_warnings(record=True)`` does not record the warnings of other threads.
    So this function also replaces ``warnings.showwarning``, unless other code has replaced it already. In that
    case only ``catch_warnings`` records.
    """
    texts: list[str] = []
    shown = warnings.showwarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_global = warnings.showwarning is shown
        if is_global:
            warnings.showwarning = lambda message, *_args, **_kwargs: texts.append(str(message))
        try:
            yield texts
        finally:
            if is_global:
                warnings.showwarning = shown
            texts += [str(entry.message) for entry in caught]
            caught.clear()


# The longest wait for a condition, in seconds.
CAP_S = float(os.environ.get("TEST_CAP_S", "10"))
# The longest run of a script in a new interpreter.
PROCESS_CAP_S = 3 * CAP_S
HOST = "127.0.0.1"


def has_uvloop() -> bool:
    return importlib.util.find_spec("uvloop") is not None


def loop_factory(kind: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if kind == "asyncio":
        return asyncio.SelectorEventLoop
    if kind == "uvloop":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import uvloop
        return uvloop.new_event_loop
    import grapeshot

    return grapeshot.new_event_loop


_SCRIPT_HEAD = {
    "asyncio": "from asyncio import SelectorEventLoop as new_event_loop\n",
    "uvloop": (
        "import warnings\nwith warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n    from uvloop import new_event_loop\n"
    ),
    "grapeshot": "from grapeshot import new_event_loop\n",
}


def run_script(kind: str | None, code: str, *, flags: tuple[str, ...] = ("-W", "error")) -> str:
    """Run `code` in a new interpreter and return its output. Fails if the script fails. If `kind` is given, the script
    can use `new_event_loop`, which makes a loop of that kind and is imported before the script runs.
    """
    head = _SCRIPT_HEAD[kind] if kind is not None else ""
    done = subprocess.run(
        [sys.executable, *flags, "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PROCESS_CAP_S,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_blocked(pid: int) -> None:
    """Wait until the main thread of a process sleeps in a system call (on Linux; elsewhere this does not wait)."""
    path = f"/proc/{pid}/stat"
    if not os.path.exists(path):
        return

    def is_sleeping() -> bool:
        with open(path) as file:
            return file.read().rpartition(")")[2].split()[0] == "S"

    wait_until(is_sleeping, "the process to sleep")


class Script:
    """A script that runs in a new interpreter while the test communicates with it."""

    def __init__(self, kind: str, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-u", "-c", _SCRIPT_HEAD[kind] + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        self.process.wait()

    def line(self) -> str:
        """Return the next line of the script's output."""
        return self.process.stdout.readline().strip()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_blocked(self) -> None:
        """Wait until the process sleeps in a system call (only on Linux)."""
        wait_blocked(self.process.pid)

    def finish(self) -> str:
        """Wait until the script has ended, and return the rest of its output. Fails if the script failed."""
        out, err = self.process.communicate(timeout=PROCESS_CAP_S)
        assert self.process.returncode == 0, f"exit status {self.process.returncode}\n{out}\n{err}"
        return out


_ROUNDS = """
import asyncio, faulthandler, random, signal, socket

def rounds(count, run):
    for number in range(count):
        # faulthandler's thread blocks signals only some time after its start. If it got a signal before that, CPython
        # 3.11's main thread would not notice the signal. A thread inherits the signal mask, so block the signal here.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        faulthandler.dump_traceback_later({cap_s}, exit=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            run(number, lambda: print("running"))
        except KeyboardInterrupt:
            print("interrupted")
        else:
            print("returned")
    run(count, lambda: print("running"))
"""


def interrupt_at_random(kind: str, code: str, rounds: int = 30) -> None:
    """Send SIGINT to a script at random moments.

    The script defines `run(number, began)`, which calls `began()` and then works for ever. `run` is called again and
    again, and each call must end with KeyboardInterrupt. The KeyboardInterrupt of the last call ends the process.
    `code` can use the name `SEED`; the environment variable `STORM_SEED` sets it.
    """
    seed = int(os.environ.get("STORM_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"STORM_SEED={seed}")
    chance = random.Random(seed)
    head = f"SEED = {seed}\n{_ROUNDS.format(cap_s=CAP_S)}"
    with Script(kind, f"{head}\n{textwrap.dedent(code)}\nrounds({rounds}, run)") as script:
        lines = []
        while line := script.line():
            lines.append(line)
            if line == "running":
                time.sleep(chance.choice((0, 0.001, 0.02)) * chance.random())  # a random moment
                script.interrupt()
        _, err = script.process.communicate(timeout=PROCESS_CAP_S)
    assert lines == ["running", "interrupted"] * rounds + ["running"], err
    assert script.process.returncode == -signal.SIGINT, err
    assert err.endswith("\nKeyboardInterrupt\n")
    assert err.count("Traceback") <= 2, err  # those of the KeyboardInterrupt and of its context


def wait_until(condition: Callable[[], Any], what: str = "a condition", cap_s: float = CAP_S) -> None:
    """Block this thread until the condition holds."""
    give_up = time.monotonic() + cap_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {cap_s} s for {what}"
        time.sleep(0.001)


_default_cap_s = CAP_S


def expect_failure(expected: bool) -> None:
    """Shorten the waits of `until` while the test is expected to fail, because waits of such tests often time out."""
    global _default_cap_s
    _default_cap_s = min(1.0, CAP_S) if expected else CAP_S


async def until(condition: Callable[[], Any], what: str = "a condition", cap_s: float | None = None) -> None:
    """Run iterations of the loop until the condition holds."""
    cap_s = cap_s or _default_cap_s
    give_up = time.monotonic() + cap_s
    count = 0
    while not condition():
        assert time.monotonic() < give_up, f"waited {cap_s} s for {what}"
        count += 1
        await asyncio.sleep(0 if count < 20 else 0.001)


def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function in a new thread and wait until the thread has ended. Returns or raises what the function
    returns or raises.
    """
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, function(*args)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    is_result, value = outcome.pop()
    if is_result:
        return value
    try:
        raise value
    finally:
        del value  # its traceback refers to this frame, which would make a reference cycle


async def blocked_task(loop: asyncio.AbstractEventLoop, coroutine: Any, count: int = 3) -> asyncio.Task[Any]:
    """Start the coroutine as a task, run it for `count` iterations, and check that it then waits."""
    task = loop.create_task(coroutine)
    await iterations(count)
    assert not task.done()
    return task


async def sleep_zero(count: int) -> None:
    """Await `asyncio.sleep(0)` `count` times. Unlike `iterations`, this works with a clock that stands still."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_iterations(loop: asyncio.AbstractEventLoop, count: int = 1) -> None:
    """Run `count` iterations of a loop that is not running."""
    for _ in range(count):
        loop.call_soon(loop.stop)
        loop.run_forever()


async def iterations(count: int) -> None:
    """Run iterations of the loop, to show that something does *not* happen. The last one always polls the sockets."""
    for _ in range(count):
        await asyncio.sleep(0)
    await asyncio.sleep(0.0002)


# ---------------------------------------------------------------- protocols


class Recorder(asyncio.Protocol):
    """Records its callbacks in order. Consecutive calls of data_received count as one."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.events: list[str] = []
        self.data = bytearray()
        self.lost_with: list[BaseException | None] = []
        self.keep_open = False

    def _note(self, event: str) -> None:
        if event != "data" or not self.events or self.events[-1] != "data":
            self.events.append(event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._note("made")

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.data += data
        self._note("data")

    def eof_received(self) -> bool:
        self._note("eof")
        return self.keep_open

    def connection_lost(self, exc: BaseException | None) -> None:
        self._note("lost")
        self.lost_with.append(exc)
        self.transport = None

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    @property
    def is_lost(self) -> bool:
        return bool(self.lost_with)


class BufferedRecorder(asyncio.BufferedProtocol):
    """Records its callbacks as `Recorder` does, but receives into a buffer of its own."""

    def __init__(self, size: int = 4096) -> None:
        self.transport: Any = None
        self.events: list[str] = []
        self.data = bytearray()
        self.lost_with: list[BaseException | None] = []
        self.buffer = bytearray(size)
        self.hints: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.events.append("made")

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        self.hints.append(sizehint)
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        if self.events[-1] != "data":
            self.events.append("data")

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.events.append("lost")
        self.lost_with.append(exc)
        self.transport = None

    @property
    def is_lost(self) -> bool:
        return bool(self.lost_with)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None


# ---------------------------------------------------------------- raw sockets


class Peer:
    """The other end of a connection: a plain non-blocking socket that the loop does not drive."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # so that its data arrives at once

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await asyncio.sleep(0.0005)

    async def recv(self, limit: int = 65536) -> bytes:
        give_up = time.monotonic() + CAP_S
        while True:
            try:
                return self.sock.recv(limit)
            except BlockingIOError:
                assert time.monotonic() < give_up, "the peer waited for data"
                await asyncio.sleep(0.0005)

    async def read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = await self.recv(min(1 << 20, count - len(data)))
            assert more, f"end of stream after {len(data)} of {count} bytes"
            data += more
        return bytes(data)

    async def read_to_end(self) -> bytes:
        data = bytearray()
        while more := await self.recv(1 << 20):
            data += more
        return bytes(data)

    async def is_ended(self) -> bool:
        """Wait for the end of the stream, by EOF or by a reset."""
        try:
            while await self.recv():
                pass
        except ConnectionResetError:
            pass
        return True

    def is_silent(self) -> bool:
        """Return whether there is neither data nor the end of the stream."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False

    def shutdown(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close the connection with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.sock.close()


class ForeignSocket:
    """A socket with the descriptor `fd` that belongs to other code. On exit, check that the loop has not touched it."""

    def __init__(self, fd: int, kind: int = socket.SOCK_STREAM) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        if self.theirs.fileno() == fd:
            ours, self.theirs = self.theirs, ours
        if ours.fileno() != fd:
            os.dup2(ours.fileno(), fd, inheritable=False)
            ours.close()
            ours = socket.socket(fileno=fd)
        self.ours = ours
        self.theirs.setblocking(False)
        self.ours.setblocking(False)

    def __enter__(self) -> ForeignSocket:
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self.check()
        finally:
            self.ours.close()
            self.theirs.close()

    def check(self) -> None:
        """Fail if anything was written to the socket, or if it was shut down or closed."""
        try:
            data = self.theirs.recv(100)
        except BlockingIOError:
            pass
        else:
            raise AssertionError(f"the foreign socket received {data!r}")
        self.theirs.send(b"for the foreign socket")
        assert self.ours.recv(100) == b"for the foreign socket"


def is_closed_error(error: BaseException | None) -> bool:
    """Return whether the error means that the descriptor is closed."""
    return isinstance(error, OSError) and error.errno == errno.EBADF


def listening(family: int = socket.AF_INET, host: str = HOST) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(CAP_S)  # for accept(); accepted sockets are blocking
    sock.bind((host, 0))
    sock.listen(128)
    return sock


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no socket listens."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


def raw_pair(small: bool = False) -> tuple[socket.socket, socket.socket]:
    """Return two TCP sockets that are connected over the loopback interface. `small` shrinks the kernel's buffers."""
    with listening() as listener:
        client = socket.socket()
        if small:
            for sock in (listener, client):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
    for sock in (client, accepted):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # so that data arrives at once
    return client, accepted


async def connected(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], Any] = Recorder, how: str = "accepted", small: bool = False
) -> tuple[Any, Any, Peer]:
    """Return a transport and its protocol, made in one of the three `WAYS`, and the other end as a raw peer."""
    if how == "accepted":
        sock, other = raw_pair(small)
        sock.setblocking(False)
        transport, protocol = await loop.connect_accepted_socket(factory, sock)
        return transport, protocol, Peer(other)
    if how == "client":
        with listening() as listener:
            transport, protocol = await loop.create_connection(factory, *listener.getsockname())
            other, _ = listener.accept()
        return transport, protocol, Peer(other)
    made: list[Any] = []

    def remember() -> Any:
        made.append(factory())
        return made[-1]

    server = await loop.create_server(remember, HOST, 0)
    other = socket.create_connection(server.sockets[0].getsockname())
    await until(lambda: made and made[0].transport is not None, "the server to accept")
    server.close()
    return made[0].transport, made[0], Peer(other)


WAYS = ("accepted", "client", "server")


def address_of(server: Any) -> tuple[Any, ...]:
    return server.sockets[0].getsockname()


def has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def link_local_address() -> tuple[str, int] | None:
    """Return a link-local IPv6 address of this machine and the index of its interface, or None if there is none."""
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    for digits, index, _length, scope, flags, _name in rows:
        if scope == "20" and not int(flags, 16) & 0x40:  # link-local, and not tentative
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), int(index, 16)
    return None


# ---------------------------------------------------------------- raw pipes


class Ends:
    """A pipe: one end is a file object for the loop, the other a non-blocking descriptor for the test."""

    def __init__(self, file: Any, other: int) -> None:
        self.file = file
        self.other = other
        self.number = file.fileno()
        os.set_blocking(other, False)

    def send(self, data: bytes) -> None:
        assert os.write(self.other, data) == len(data)

    async def recv(self, limit: int = 1 << 20) -> bytes:
        """Return the data that can be read, after a wait if necessary; b"" at the end of the stream."""
        got: list[bytes] = []

        def has_data() -> bool:
            try:
                got.append(os.read(self.other, limit))
            except BlockingIOError:
                return False
            return True

        await until(has_data, "data in the pipe")
        return got[0]

    async def read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = await self.recv(count - len(data))
            assert more, f"end of the pipe after {len(data)} of {count} bytes"
            data += more
        return bytes(data)

    async def read_to_end(self) -> bytes:
        data = bytearray()
        while more := await self.recv():
            data += more
        return bytes(data)

    def is_silent(self) -> bool:
        try:
            return not os.read(self.other, 1)
        except BlockingIOError:
            return True

    def close_other(self) -> None:
        if self.other >= 0:
            os.close(self.other)
            self.other = -1

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close_other()
        self.file.close()


def pipe_ends(kind: str, direction: str) -> Ends:
    """Return the ends for a test of `connect_read_pipe` or `connect_write_pipe`. Kinds: pipe, fifo, socket, tty."""
    mode = "rb" if direction == "read" else "wb"
    if kind == "pipe":
        reader, writer = os.pipe()
    elif kind == "fifo":
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "fifo")
            os.mkfifo(path)
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            writer = os.open(path, os.O_WRONLY)
    elif kind == "socket":
        reader, writer = (sock.detach() for sock in socket.socketpair())
    else:
        # If the loop reads, it gets the master, whose reads fail with EIO when the slave is closed. If the loop writes,
        # it gets the slave.
        reader, writer = pty.openpty()
        tty.setraw(writer)
    mine, other = (reader, writer) if direction == "read" else (writer, reader)
    return Ends(open(mine, mode, buffering=0), other)


PIPE_KINDS = ("pipe", "fifo", "socket", "tty")


def lowest_free_descriptor() -> int:
    number = os.dup(0)
    os.close(number)
    return number


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
