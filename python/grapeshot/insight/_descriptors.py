"""The open descriptors of the process: what each one is, who owns it, where it was opened, and which are alike.

For the loop's own Internet connections, the addresses come from their transports. Every other descriptor is examined
with system calls, which takes about 30 us per descriptor.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import re
import socket
import stat
import sys
from collections import Counter

from . import _tree
from ._subjects import subject_of
from ._tally import Tally, printable, tally

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_TRANSPORTS = {"tcp": "TCP", "udp": "UDP"}
_NUMBERED = re.compile(r":\[\d+\]$")  # pipe:[4711]
_ANYWHERE = ("0.0.0.0", "[::]")


@dataclasses.dataclass
class Descriptor:
    """An open descriptor of the process."""

    fd: int
    what: str
    """The addresses of a socket, or the system's description of the file."""
    owner: str | None
    """The transport of this loop that owns it, or the coro that waits for it; in debug mode, also a server."""
    opened_at: str | None
    """Where the program opened it. Known in debug mode for the loop's transports and servers, and for all sockets and
    files while tracemalloc is tracing."""
    alike: str = ""
    """Its kind, its server or peer, and the function or protocol that uses it. The text is the same for all descriptors
    that are alike."""

    def __str__(self) -> str:
        owner = "" if self.owner is None else f": {self.owner}"
        opened = "" if self.opened_at is None else f", opened at {self.opened_at}"
        return printable(f"fd {self.fd} {self.what}{owner}{opened}")


def tally_descriptors(found: Iterable[Descriptor], before: Iterable[Tally] | None = None) -> list[Tally]:
    """Count the descriptors that are alike, the most frequent first. ``before`` are the rows of an earlier result."""
    places = (
        (each.alike, each.alike, None if each.opened_at is None else f"opened at {each.opened_at}") for each in found
    )
    return tally(places, before)


def descriptors(loop: Any, has_owners: bool = True) -> list[Descriptor]:
    """Return all descriptors. If ``has_owners`` is false, omit the owners, and call no ``__repr__``."""
    known = _known_to(loop)
    origins: dict[int, str] = {}
    for thing in list(loop._origins or ()):
        for fd in _fds_of(thing):
            origins[fd] = loop._origins.get(thing, "")
            known.setdefault(fd, (None, type(thing).__qualname__, thing))
    allocated = _allocation_sites()
    sockets: dict[int, _tree.Socket] = {}
    found: list[Descriptor] = []
    for fd in _tree._open_fds():
        sock, has, owner = known.get(fd, (None, "", None))
        try:
            if sock is None and stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = _tree._describe(fd, None)
            what = _file_words(fd) if sock is None else sock.words()
        except OSError:
            continue  # another thread has just closed it, or it was open only while `_open_fds` read the list
        if sock is not None:
            sockets[fd] = sock
        text = None if owner is None or not has_owners else _tree._owner_words(owner)
        found.append(Descriptor(fd, what, text, origins.get(fd) or allocated.get(fd), has))
    local = Counter(sock.local for sock in sockets.values() if sock.peer is not None)
    listening = {sock.local for sock in sockets.values() if sock.is_listening}
    for each in found:
        sock = sockets.get(each.fd)
        kind = _file_kind(each.what) if sock is None else _socket_kind(sock, listening, local)
        each.alike = f"{kind}: {each.alike}" if each.alike else kind
    return found


def _known_to(loop: Any) -> dict[int, tuple[_tree.Socket | None, str, Any]]:
    """Return what the loop knows about its descriptors.

    For each descriptor, this is the socket's addresses (or None), a description shared by all owners that are alike,
    and the owner.
    """
    known: dict[int, tuple[_tree.Socket | None, str, Any]] = {}
    for co, fd in _tree._coros_at_descriptors(loop):
        subject = subject_of(co)
        known[fd] = (None, f"coro {subject.alike}", co)
    for transport in _tree._transports(loop):
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            described = _tree._of_transport(transport, sock)
            known[sock.fileno()] = (described, subject_of(transport).function, transport)
    return known


def _fds_of(thing: Any) -> list[int]:
    """Return the open descriptors of a transport or server."""
    sockets = getattr(thing, "sockets", None)
    if sockets is not None:
        return [sock.fileno() for sock in sockets]
    found = thing.get_extra_info("socket") or thing.get_extra_info("pipe")
    try:
        return [found.fileno()] if found is not None and found.fileno() >= 0 else []
    except ValueError:
        return []  # the file is closed


# ---------------------------------------------------------------- in words


def _socket_kind(sock: _tree.Socket, listening: set[str], local: Counter[str]) -> str:
    """Describe a socket. All connections that one server has accepted, or that go to one peer, get the same words."""
    kind = _TRANSPORTS.get(sock.kind, sock.kind)
    if sock.is_listening:
        return f"{kind} server at {sock.local}"
    if sock.peer is None:
        return f"{kind} socket" if sock.kind == "tcp" or not sock.local else f"{kind} socket at {sock.local}"
    if not sock.local and not sock.peer:
        return f"{kind} pair"
    server = next((each for each in _servers_of(sock.local) if each in listening), None)
    if server is not None:
        return f"{kind} connection accepted by the server at {server}"
    if sock.local and local[sock.local] > 1:
        # Normally only accepted connections share a local address. This one was accepted by a server that no longer
        # listens, or that is in another process.
        return f"{kind} connection accepted at {sock.local}"
    return f"{kind} connection to {sock.peer or 'an unnamed socket'}"


def _servers_of(local: str) -> Iterator[str]:
    """Yield the addresses at which the server of a connection with this local address may be listening."""
    yield local
    host, colon, port = local.rpartition(":")
    if host and colon:
        yield from (f"{anywhere}:{port}" for anywhere in _ANYWHERE)


def _file_words(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return stat.filemode(os.fstat(fd).st_mode)


def _file_kind(words: str) -> str:
    return f"file {words}" if words.startswith("/") else _NUMBERED.sub("", words).removeprefix("anon_inode:")


def _allocation_sites() -> dict[int, str]:
    """Return where sockets and files were created, as recorded by tracemalloc. Empty if tracemalloc is not tracing."""
    tracemalloc = sys.modules.get("tracemalloc")
    if tracemalloc is None or not tracemalloc.is_tracing():
        return {}
    found = {}
    for each in gc.get_objects():
        # isinstance() would also read `each.__class__`, for which a dead weakref.proxy raises ReferenceError.
        if not issubclass(type(each), (socket.socket, io.FileIO)):
            continue
        made = tracemalloc.get_object_traceback(each)
        try:
            fd = each.fileno()
        except ValueError:
            continue  # closed
        if made is not None and fd >= 0:
            found[fd] = f"{made[-1].filename}:{made[-1].lineno}"
    return found
