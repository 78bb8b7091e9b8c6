"""Makes calls on files without blocking the loop: with io_uring or, on systems without it, in native threads.

If a file can be read or opened without waiting for a disk, the call is made at once, in the loop's thread. This is
possible because a flag (``RWF_NOWAIT``, ``RESOLVE_CACHED``) makes the kernel refuse the call if it needs data that is
not in memory. All other calls are made by an :class:`AioQueue` (native part: ``src/aio.rs``), of which each loop has
one. A future gets the outcome of each call.

Tasks use this through :mod:`grapeshot.files`, coros through ``coro.aio_read``, ``coro.aio_write`` and
``coro.file_sock``.
"""

from __future__ import annotations

import asyncio
import os
import time
import types

from grapeshot import _core

from .answers import Answers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

# The offset that stands for the file's own position.
OWN_POSITION = -1
# The largest read that is tried at once: copying more would hold up the loop.
_MAX_AT_ONCE = 1024 * 1024
# The most bytes that one call of the system's sendfile() sends. A part of the file that is not in memory is read first
# (`Prefetch`).
PART_LEN = 1024 * 1024
# After a loop's tasks have read _TURN bytes without waiting, the task that read last lets others run. Each read counts
# as at least _MIN_COST bytes.
_TURN, _MIN_COST = 4 * 1024 * 1024, 16 * 1024
# How long the close of a loop waits for calls that have begun (their memory cannot be freed before they end). The
# close waits in steps, and holds the GIL for at most _STOP_STEP_S in each step.
_STOP_S, _STOP_STEP_S = 1.0, 0.01

os.register_at_fork(before=_core._aio_before_fork, after_in_child=_core._aio_after_fork)


class AioQueue(Answers):
    """Keeps the calls of a loop that are under way, and gives each outcome to the future that waits for it."""

    _kind = _core._AioQueue

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._read_at_once = 0
        self._open()

    @property
    def loop(self) -> Any:
        """The loop to which these calls belong."""
        return self._loop

    def start(self, name: str, *args: Any, on_end: Callable[[Any], object] | None = None) -> asyncio.Future[Any]:
        """Start a call with the method ``name`` of ``_core._AioQueue``; return a future of its result.

        Cancelling the future ends the wait, but the call may go on; a write always goes on. ``on_end`` is called once,
        when the call no longer uses its descriptor. It gets the result or the exception, or None if the call was not
        made or the loop was closed. (Closing the loop waits up to a second for the call. If the call has not ended by
        then, ``on_end`` is never called.)

        Raises:
            OSError: the process cannot start a thread.
            RuntimeError: the loop is closed.
        """
        try:
            ticket = getattr(self._open(), name)(*args)
        except BaseException:
            if on_end is not None:
                on_end(None)
            raise
        return self._future_of(ticket, on_end, can_be_withdrawn=name != "write")

    def is_turn_over(self, length: int) -> bool:
        """Count ``length`` bytes that a task has read without waiting. Return True if the task must let others run."""
        self._read_at_once += max(length, _MIN_COST)
        if self._read_at_once < _TURN:
            return False
        self._read_at_once = 0
        return True

    def stop(self) -> None:
        """Cancel all calls except those that close a file, then wait briefly for the calls that are left.

        The futures of all calls stay pending, like the futures of an executor when a loop is closed.
        """
        native = self._release()
        calls, self._waiting = self._waiting, {}
        if native is None:
            return
        left = native.stop(0.0)
        end_s = time.monotonic() + _STOP_S
        while left and time.monotonic() < end_s:
            time.sleep(0)  # lets other threads run
            left = native.stop(_STOP_STEP_S)
        for ticket, (_, on_end) in calls.items():
            # A call that goes on may still use its descriptor.
            if on_end is not None and ticket not in left:
                on_end(None)

    def _withdraw(self, native: Any, ticket: int) -> bool:
        return native.cancel(ticket)  # type: ignore[no-any-return]


def queue_of(loop: Any) -> AioQueue:
    """Return a loop's queue of calls on files; make the queue if there is none yet.

    Raises:
        RuntimeError: the loop is closed.
        OSError: the process has no descriptor left.
    """
    queue: AioQueue | None = getattr(loop, "_grapeshot_aio", None)
    if queue is None:
        queue = loop._grapeshot_aio = AioQueue(loop)
    return queue


def octets(data: Any) -> bytes:
    """Return an immutable copy of bytes-like data. An object whose type is ``bytes`` is returned as it is.

    Raises:
        TypeError: the object is not bytes-like.
        BufferError: its memory is not contiguous.
    """
    if type(data) is bytes:
        return data
    with memoryview(data) as view:
        if not view.c_contiguous:
            raise BufferError("memoryview: underlying buffer is not C-contiguous")
        return view.tobytes()


def read_now(fd: int, size: int, offset: int) -> bytes | None:
    """Read up to ``size`` bytes if the kernel has them in memory, otherwise return None.

    At the end of the file, this returns b"". If only the beginning of the requested part is in memory, this returns
    None, too. But a read at the file's own position (``OWN_POSITION``) returns this beginning, because the position has
    already moved past it. If ``size`` is more than 1 MiB, this always returns None.

    Raises:
        OSError: as :func:`os.pread`.
    """
    if size > _MAX_AT_ONCE:
        return None
    data = _core._aio_read_now(fd, size, offset)
    if data and len(data) < size and offset != OWN_POSITION and os.fstat(fd).st_size > offset + len(data):
        return None
    return data


class Prefetch:
    """Tells which parts of a file must be read into memory before ``sendfile`` sends them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 0  # the end of the part that was checked last

    def limited(self, offset: int, length: int) -> int:
        """Return how many of the ``length`` bytes at ``offset`` to send next.

        If ``offset`` is in the part that was checked last, this is at most the rest of that part.
        """
        return min(length, self._end - offset) if offset < self._end else length

    def is_needed(self, offset: int, length: int) -> bool:
        """Whether the part must be read first. False if it was checked before, or if it cannot be checked."""
        if offset < self._end:
            return False
        self._end = offset + length
        try:
            return any(_core._aio_read_now(self._fd, 1, at) is None for at in (offset, offset + length - 1))
        except (OSError, OverflowError):
            return False


@types.coroutine
def others_run() -> Generator[None, None, None]:
    """Let other callbacks run once, like ``asyncio.sleep(0)``."""
    yield


async def open_file(queue: AioQueue, path: bytes, flags: int, mode: int) -> int:
    """Open ``path``; return the descriptor, which is not inheritable.

    Raises:
        OSError: as :func:`os.open`, but without the path.
    """
    fd = _core._aio_open_now(path, flags)
    if fd is not None:
        return fd

    def on_end(outcome: Any) -> None:
        if isinstance(outcome, int) and opening.cancelled():
            os.close(outcome)

    opening = queue.start("open", path, flags, mode, on_end=on_end)
    try:
        return await opening  # type: ignore[no-any-return]
    except BaseException:
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            os.close(opening.result())  # the task was cancelled after the file had been opened
        raise
