"""``grapeshot.insight.tree()``: what a loop and its process are doing at this moment, as text and as objects.

The coros and tasks come from ``_waits``. Timers, sockets and threads are read from the loop, from ``/dev/fd`` and from
the interpreter. Nothing is recorded while the program runs, so the tree cannot tell how long a coro or task has waited.
"""

from __future__ import annotations

import _socket
import asyncio
import dataclasses
import errno
import gc
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator

from grapeshot import _core
from grapeshot._loop import hooks

from . import _waits
from ._subjects import application_protocol
from ._tally import printable
from ._waits import Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The text shows at most this many items of each kind: timers, sockets and threads.
_SHOWN = 100
_KINDS = {_socket.SOCK_STREAM: "tcp", _socket.SOCK_DGRAM: "udp"}
# The name of the private directory in which a back door's socket is created, before it is linked into the directory
# above (backdoor/_path.py).
_PRIVATE = re.compile(r"/\.bd[a-z0-9_]{8}/")
_WORKER = ("thread.py", "_worker")


@dataclasses.dataclass
class Timer:
    """A callback that is scheduled for later."""

    due_s: float
    """Seconds until it is due."""
    callback: str
    """The handle as text."""

    def __str__(self) -> str:
        return f"due in {self.due_s:.3f} s: {self.callback}"


@dataclasses.dataclass
class Socket:
    """An open socket of the process, no matter which part of the program uses it."""

    fd: int
    kind: str
    """``"tcp"``, ``"udp"``, ``"unix"``, or ``"unix datagram"`` for any Unix socket that is not a stream. For any other
    Internet socket, the number of its type. For a socket of another family, the numbers of its family and type."""
    local: str
    peer: str | None
    """The address of the peer, or None if the socket is not connected."""
    is_listening: bool
    owner: str | None
    """The transport of this loop that owns the socket, with its protocol; or the coro that waits for the socket."""

    def __str__(self) -> str:
        return printable(f"fd {self.fd} {self.words()}{'' if self.owner is None else f': {self.owner}'}")

    def words(self) -> str:
        """Return its kind and addresses."""
        way = f"listens on {self.local}" if self.is_listening else self.local or "unnamed"
        peer = "" if self.peer is None else f" -> {self.peer or 'unnamed'}"
        return f"{self.kind} {way}{peer}"


@dataclasses.dataclass
class Thread:
    """A thread of the interpreter, other than the one that called ``tree()``."""

    name: str
    is_executor: bool
    """Whether it belongs to the loop's default executor."""
    is_idle: bool
    """Whether it is a thread of an executor and has no work."""
    stack: list[str]

    def __str__(self) -> str:
        kind = "executor thread" if self.is_executor else "thread"
        return f"{kind} {self.name!r} {'is idle' if self.is_idle else 'runs'}"


@dataclasses.dataclass
class Tree:
    """A description of a loop and its process at one moment. ``str(tree)`` is a text for people."""

    heading: str
    """The number of coros and tasks, and the loop."""
    nodes: list[Node]
    """All coros and tasks."""
    roots: list[Node]
    """The coros and tasks that no other one waits for. All others are below these, in a circle, or below a circle."""
    circles: list[list[Node]]
    """The circles that no root leads to: coros and tasks that wait for each other. In each list, every member waits for
    the next one, and the first one is repeated at the end."""
    timers: list[Timer]
    sockets: list[Socket]
    threads: list[Thread]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        yield self.heading
        yield from _waits.tree_lines(self.roots, self.circles)
        yield from _section("timer", self.timers)
        yield from _section("socket", self.sockets)
        yield from _section("other thread", self.threads)


def tree(loop: asyncio.AbstractEventLoop | None = None) -> Tree:
    """Return what is going on in ``loop`` and in the process. The default is the running loop.

    The result contains the coros and tasks with their stacks, each above what it waits for; the timers that are set;
    the sockets of the process, with both addresses and their owners; and the other threads. Timers are available only
    for loops of grapeshot and of asyncio itself. The only code of the program that this function runs is the ``repr``
    of the objects it shows. Call it in the loop's thread: in another thread it sees no coros and no timers.

    Raises:
        TypeError: ``loop`` is not an event loop.
    """
    if loop is not None and not isinstance(loop, asyncio.AbstractEventLoop):
        raise TypeError(f"tree() needs an event loop, got {loop!r}")
    seen = running_loop() if loop is None else loop
    waits = _waits.Waits(seen)
    roots, circles = waits.roots()
    return Tree(waits.heading(), waits.nodes(), roots, circles, _timers(seen), _sockets(seen), _threads(seen))


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return this thread's running loop, or None. A loop that the running coro hides from asyncio is returned, too."""
    loop: asyncio.AbstractEventLoop | None = _core._coro_running_loop()
    return asyncio._get_running_loop() if loop is None else loop


def _section(what: str, items: list[Any]) -> Iterator[str]:
    if items:
        yield ""
        yield _waits.count(len(items), what)
    for item in items[:_SHOWN]:
        yield f"  {item}"
        for line in getattr(item, "stack", ()):
            yield f"    {line}"
    if len(items) > _SHOWN:
        yield f"  and {len(items) - _SHOWN} more"


def _timers(loop: Any) -> list[Timer]:
    pending = _waits.timers_of(loop)
    now = loop.time() if pending else 0.0
    return [Timer(timer.when() - now, repr(timer)) for timer in sorted(pending, key=lambda timer: timer.when())]


# ---------------------------------------------------------------- sockets


def _sockets(loop: Any) -> list[Socket]:
    owners = _owners(loop)
    found: list[Socket] = []
    for fd in _open_fds():
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            found.append(_describe(fd, owners.get(fd)))
        except OSError:
            continue  # another thread has just closed it, or it was open only while `_open_fds` read the list
    return found


def _open_fds() -> list[int]:
    try:
        return sorted(map(int, os.listdir("/dev/fd")))
    except OSError:
        return []


def _describe(fd: int, owner: str | None) -> Socket:
    is_blocking = os.get_blocking(fd)
    # Use the base class, because the program may have patched socket.socket. The object owns a duplicate, so closing it
    # leaves the original descriptor open.
    sock = _socket.socket(fileno=os.dup(fd))
    try:
        kind = _KINDS.get(sock.type, f"type {sock.type}")
        if sock.family == _socket.AF_UNIX:
            kind = "unix" if sock.type == _socket.SOCK_STREAM else "unix datagram"
        elif sock.family not in (_socket.AF_INET, _socket.AF_INET6):
            kind = f"family {sock.family} type {sock.type}"
        try:
            is_listening = bool(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN))
        except OSError:
            is_listening = False
        try:
            peer = _address(sock.getpeername())
        except OSError as exc:
            if exc.errno not in (errno.ENOTCONN, errno.EINVAL):
                raise
            peer = None
        return Socket(fd, kind, _address(sock.getsockname()), peer, is_listening, owner)
    finally:
        sock.close()
        if os.get_blocking(fd) != is_blocking:  # with socket.setdefaulttimeout(), making the object changes the mode
            os.set_blocking(fd, is_blocking)


def _address(address: Any) -> str:
    if isinstance(address, tuple) and len(address) >= 2 and isinstance(address[0], str):
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
    if not isinstance(address, (bytes, str)):
        return str(address)
    return _PRIVATE.sub("/", os.fsdecode(address))


def _owners(loop: Any) -> dict[int, str]:
    """Return the owners of descriptors, as far as the loop and its coros know them."""
    owners = {fd: _owner_words(co) for co, fd in _coros_at_descriptors(loop)}
    for transport in _transports(loop):
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            owners[sock.fileno()] = _owner_words(transport)
    return owners


def _coros_at_descriptors(loop: Any) -> Iterator[tuple[Any, int]]:
    """Yield each coro that waits for a descriptor, with the descriptor."""
    for co in () if hooks.coros_of is None else _core._coro_live():
        wait = _core._coro_wait_info(co) if loop is None or co._loop is loop else None
        if wait is not None and wait[0] != "queue":
            yield co, wait[1]


def _owner_words(owner: Any) -> str:
    """Describe a coro, a transport or a server in words."""
    if _waits.is_coro(owner):
        return _waits.name_of(owner)
    if not isinstance(owner, asyncio.BaseTransport):
        return type(owner).__qualname__
    return f"{type(owner).__name__} of {application_protocol(owner)!r}"


def _of_transport(transport: Any, sock: Any) -> Socket | None:
    """Describe a connection's socket with its transport's addresses. None if these are not Internet addresses."""
    local, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    if not (isinstance(local, tuple) and isinstance(peer, tuple)):
        return None
    return Socket(
        sock.fileno(), _KINDS.get(sock.type, f"type {sock.type}"), _address(local), _address(peer), False, None
    )


def _transports(loop: Any) -> Iterator[Any]:
    if _waits.is_elsewhere(loop):
        return
    if isinstance(loop, _core.Loop):
        # The objects that the loop keeps alive, as it reports them to the garbage collector: transports are among them.
        known: Any = gc.get_referents(loop)
    else:
        known = list(getattr(loop, "_transports", {}).values())
    for each in known:
        if isinstance(each, asyncio.BaseTransport) and not each.is_closing():
            yield each


# ---------------------------------------------------------------- threads


def _threads(loop: Any) -> list[Thread]:
    workers = getattr(getattr(loop, "_default_executor", None), "_threads", ())
    frames = sys._current_frames()
    found: list[Thread] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread.ident == threading.get_ident():
            continue
        is_idle = (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) == _WORKER
        is_shown = not is_idle and _waits.threads_are_readable()
        stack = _waits.stack_lines(_waits.thread_frames(frame)) if is_shown else []
        found.append(Thread(thread.name, thread in workers, is_idle, stack))
    return found


_waits.HIDDEN_FILES.add(__file__)
