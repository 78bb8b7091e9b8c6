"""``insight.accounting()``: the owners of CPU time and of open descriptors, and how much memory is in use.

CPU time is counted by ``_charges``, from the call of :meth:`Loop.set_cpu_accounting` on. Everything else is read when
``accounting()`` is called, which must happen in the loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys

from grapeshot import _core

from . import _tree, _waits
from ._charges import Charges, Cpu, CpuTally, tally_cpu
from ._descriptors import Descriptor, descriptors, tally_descriptors
from ._tally import Tally, grown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# The text shows at most this many rows of each kind, unless each item has a row of its own.
_SHOWN = 20


@dataclasses.dataclass
class Memory:
    """Sizes in bytes, and numbers of connections and coros.

    Only ``rss`` includes the objects that the program's protocols, tasks and functions refer to.
    """

    rss: int | None
    """The resident memory of the process, or None where the system does not report it."""
    connections: int
    """The number of open stream connections of the loop."""
    per_connection: int
    """The average size of a transport and its protocol, without the objects they refer to and the kernel's buffers."""
    write_buffers: int
    """The bytes that were written to connections and not sent yet, usually because the peers do not read them."""
    coros: int
    """The number of coros of the loop that have not ended."""
    per_coro: int
    """The average size of a coro: the object, its Python frames, and the used part of its stack, whether that is in
    place or was copied away."""

    def __str__(self) -> str:
        rss = "unknown" if self.rss is None else f"{self.rss / 1024:.0f} KiB"
        return (
            f"process {rss}; {_waits.count(self.connections, 'connection')} of {self.per_connection} bytes each, "
            f"{self.write_buffers} bytes to be sent; {_waits.count(self.coros, 'coro')} of {self.per_coro} bytes each"
        )


@dataclasses.dataclass
class Accounting:
    """The resources that the program on a loop uses. ``str(accounting)`` is a text for people."""

    cpu: list[Cpu]
    """CPU time by owner, the largest first; empty if CPU time is not counted."""
    is_cpu_counted: bool
    descriptors: list[Descriptor]
    memory: Memory
    limits: dict[str, int | None]
    since: Accounting | None = dataclasses.field(default=None, repr=False)
    """The earlier result with which the text compares this one."""

    def __str__(self) -> str:
        return self.text()

    def cpu_tallies(self) -> list[CpuTally]:
        """Return a row for each group of owners that are alike: their CPU time, and its growth after ``since``."""
        return tally_cpu(self.cpu, None if self.since is None else self.since.cpu)

    def descriptor_tallies(self) -> list[Tally]:
        """Return a row for each group of descriptors that are alike: their number, and its growth after ``since``."""
        before = None if self.since is None else tally_descriptors(self.since.descriptors)
        return tally_descriptors(self.descriptors, before)

    def text(self, each: bool = False) -> str:
        """Return the text. It has one row for all items that are alike, or with ``each`` one row for each item."""
        return "\n".join(self._lines(each))

    def _lines(self, each: bool) -> Iterator[str]:
        if self.is_cpu_counted:
            yield f"CPU: {sum(account.cpu_s for account in self.cpu):.3f} s"
            yield from _shown(self.cpu if each else self.cpu_tallies(), each)
        else:
            yield "CPU: not counted; call loop.set_cpu_accounting(True) to start counting"
        yield ""
        count = len(self.descriptors)
        growth = "" if self.since is None else f" {grown(count - len(self.since.descriptors))}"
        yield f"{_waits.count(count, 'open descriptor')}{growth}".rstrip()
        yield from _shown(self.descriptors if each else self.descriptor_tallies(), each)
        yield ""
        yield f"Memory: {self.memory}"
        limits = [f"{name} {limit}" for name, limit in self.limits.items() if limit is not None]
        yield f"Limits: {', '.join(limits) or 'none'}"


def _shown(items: list[Any], is_whole: bool) -> Iterator[str]:
    most = len(items) if is_whole else _SHOWN
    for item in items[:most]:
        yield f"  {item}"
    if len(items) > most:
        yield f"  and {len(items) - most} more rows"


def accounting(loop: asyncio.AbstractEventLoop | None = None, *, since: Accounting | None = None) -> Accounting:
    """Return the CPU time, descriptors and memory that the program on ``loop`` uses. The default is the running loop.

    The text of the result has one row for all items that are alike, such as the connections of one server. With
    ``since``, an earlier result, it also shows by how much each row has grown. ``accounting().text(each=True)`` has one
    row for each item. The function examines every descriptor of the process. The only code of the program that it runs
    is the ``repr`` of protocols. Call it in the loop's thread.

    Raises:
        RuntimeError: no loop is given, and no loop is running.
        TypeError: the loop is not a grapeshot loop.
    """
    seen: Any = _tree.running_loop() if loop is None else loop
    if seen is None:
        raise RuntimeError("no running event loop")
    if not isinstance(seen, _core.Loop):
        raise TypeError(f"accounting() needs a grapeshot loop, got {seen!r}")
    charges: Charges | None = seen._charges  # type: ignore[attr-defined]
    return Accounting(
        [] if charges is None else charges.all(),
        charges is not None,
        descriptors(seen),
        _memory(seen),
        seen.get_limits(),  # type: ignore[attr-defined]
        since,
    )


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
