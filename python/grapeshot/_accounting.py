"""``grapeshot.accounting()``: who has used the CPU, who has opened which descriptor, and what memory is held for whom.

CPU is counted from :meth:`Loop.set_cpu_accounting` on, by ``_charges``. All else is read when it is asked for. It
belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import io
import os
import socket
import stat
import sys

from . import _core, _tree, _waits
from ._charges import Charges, Cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# The text has at most so many lines of each kind.
_SHOWN = 20


@dataclasses.dataclass
class Descriptor:
    """An open descriptor of the process."""

    fd: int
    what: str
    """The addresses of a socket, or what the system says of the file."""
    owner: str | None
    """The transport or server of this loop that has it, or the coro that waits for it."""
    opened_at: str | None
    """Where the program opened it: what the loop opens in debug mode, and with tracemalloc all sockets and files."""

    def __str__(self) -> str:
        owner = "" if self.owner is None else f": {self.owner}"
        opened = "" if self.opened_at is None else f", opened at {self.opened_at}"
        return f"fd {self.fd} {self.what}{owner}{opened}"


@dataclasses.dataclass
class Memory:
    """Memory in bytes. The objects of the program's own protocols, tasks and functions are not in it."""

    rss: int | None
    """Of the process; None where the system does not tell."""
    connections: int
    """How many stream connections of the loop are open."""
    per_connection: int
    """The transport and its protocol, on average, without what they refer to. The kernel's buffers come on top."""
    write_buffers: int
    """What connections have written and the peers have not taken."""
    coros: int
    """How many coros of the loop have not ended."""
    per_coro: int
    """The object, its Python frames, and the copy of its stack or its own stack's used part, on average."""

    def __str__(self) -> str:
        rss = "unknown" if self.rss is None else f"{self.rss / 1024:.0f} KiB"
        return (
            f"process {rss}; {_waits.count(self.connections, 'connection')} of {self.per_connection} bytes each, "
            f"{self.write_buffers} bytes to be sent; {_waits.count(self.coros, 'coro')} of {self.per_coro} bytes each"
        )


@dataclasses.dataclass
class Accounting:
    """What a loop's program uses. ``str(accounting)`` is the text."""

    cpu: list[Cpu]
    """The largest first; empty if CPU is not counted."""
    is_cpu_counted: bool
    descriptors: list[Descriptor]
    memory: Memory
    limits: dict[str, int | None]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        if self.is_cpu_counted:
            yield f"CPU: {sum(each.cpu_s for each in self.cpu):.3f} s"
            yield from _shown(self.cpu)
        else:
            yield "CPU: not counted; loop.set_cpu_accounting(True) begins"
        yield ""
        yield _waits.count(len(self.descriptors), "open descriptor")
        places = collections.Counter(each.opened_at for each in self.descriptors if each.opened_at is not None)
        yield from _shown([f"{count} opened at {place}" for place, count in places.most_common()])
        yield from _shown(self.descriptors)
        yield ""
        yield f"Memory: {self.memory}"
        limits = [f"{name} {limit}" for name, limit in self.limits.items() if limit is not None]
        yield f"Limits: {', '.join(limits) or 'none'}"


def _shown(items: list[Any]) -> Iterator[str]:
    for item in items[:_SHOWN]:
        yield f"  {item}"
    if len(items) > _SHOWN:
        yield f"  and {len(items) - _SHOWN} more"


def accounting(loop: asyncio.AbstractEventLoop | None = None) -> Accounting:
    """Return what the program on ``loop`` (default: the one that runs here) has used and holds.

    It looks at every descriptor of the process and runs no code of the program but the ``repr`` of protocols. It is
    meant for the loop's thread.

    Raises:
        RuntimeError: no loop is given and none runs.
        TypeError: it is not a loop of grapeshot.
    """
    seen: Any = _tree.running_loop() if loop is None else loop
    if seen is None:
        raise RuntimeError("no running event loop")
    if not isinstance(seen, _core.Loop):
        raise TypeError(f"accounting needs a loop of grapeshot, not {seen!r}")
    charges: Charges | None = seen._charges  # type: ignore[attr-defined]
    return Accounting(
        [] if charges is None else charges.all(),
        charges is not None,
        _descriptors(seen),
        _memory(seen),
        seen.get_limits(),  # type: ignore[attr-defined]
    )


# ---------------------------------------------------------------- descriptors


def _descriptors(loop: Any) -> list[Descriptor]:
    owners: dict[int, str] = _tree._owners(loop, _waits.Waits(loop))
    origins: dict[int, str] = {}
    for thing in list(loop._origins or ()):
        for fd in _fds_of(thing):
            origins[fd] = loop._origins.get(thing, "")
            owners.setdefault(fd, type(thing).__qualname__)
    allocated = _allocation_sites()
    found = []
    for fd in _tree._open_fds():
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
            what = _socket_words(fd) if is_socket else _file_words(fd)
        except OSError:
            continue  # the descriptor of the listing
        found.append(Descriptor(fd, what, owners.get(fd), origins.get(fd) or allocated.get(fd)))
    return found


def _fds_of(thing: Any) -> list[int]:
    """Return the open descriptors of a transport or server."""
    sockets = getattr(thing, "sockets", None)
    if sockets is not None:
        return [sock.fileno() for sock in sockets]
    found = thing.get_extra_info("socket") or thing.get_extra_info("pipe")
    try:
        return [found.fileno()] if found is not None and found.fileno() >= 0 else []
    except ValueError:
        return []  # a file that is closed


def _socket_words(fd: int) -> str:
    described = str(_tree._describe(fd, None))
    return described.partition(" ")[2].partition(" ")[2]


def _file_words(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return stat.filemode(os.fstat(fd).st_mode)


def _allocation_sites() -> dict[int, str]:
    """Return where sockets and files were made, from tracemalloc if that runs."""
    tracemalloc = sys.modules.get("tracemalloc")
    if tracemalloc is None or not tracemalloc.is_tracing():
        return {}
    found = {}
    for each in gc.get_objects():
        if not isinstance(each, (socket.socket, io.FileIO)):
            continue
        made = tracemalloc.get_object_traceback(each)
        try:
            fd = each.fileno()
        except ValueError:
            continue  # closed
        if made is not None and fd >= 0:
            found[fd] = f"{made[-1].filename}:{made[-1].lineno}"
    return found


# ---------------------------------------------------------------- memory


def _memory(loop: Any) -> Memory:
    transports = [each for each in _tree._transports(loop) if isinstance(each, _core.StreamTransport)]
    size = sum(sys.getsizeof(each) + sys.getsizeof(each.get_protocol()) for each in transports)
    buffered = sum(each.get_write_buffer_size() for each in transports)
    coros = [co for co in _core._coro_live() if co._loop is loop]
    held = sum(sys.getsizeof(co) + _stack_bytes(co) for co in coros)
    count = len(transports)
    return Memory(_rss(), loop._open_connections, size // (count or 1), buffered, len(coros), held // (len(coros) or 1))


def _stack_bytes(co: Any) -> int:
    info = _core.Coro.stack_info(co)
    return int(info["bytes_used"]) + int(info["frame_bytes"])


def _rss() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
