"""``waitpid`` for coros: waits for a descriptor that tells the end of the child, and fetches the status itself.

    Linux                          a pidfd
    BSD, macOS                     a kqueue with one EVFILT_PROC
    Linux before 5.3, sandboxes    a pipe that a thread closes, which waits for the end and leaves the status

None of them fetches the status. So a wait that is interrupted has taken nothing from the child, and the next one finds
it. Any child (``pid`` -1, 0 or below), and stopped or continued ones, have no descriptor: these are asked for again and
again.
"""

from __future__ import annotations

import errno
import os
import select
import sys

from ._patching._thread import RealThread
from ._socket import wait_for_read
from ._socket_base import Countdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The first pause before the kernel is asked again, and the longest, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# The errors of kernels and sandboxes that have no pidfds.
_NO_PIDFDS = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES))
# As it is before a program patches it.
_waitpid = os.waitpid


def waitpid(pid: int, options: int = 0, /, timeout: float | None = None) -> tuple[int, int]:
    """Wait until a child has ended; return its number and its status, as :func:`os.waitpid` does.

    The status can be read with :func:`os.waitstatus_to_exitcode`. An interrupted wait leaves the status where it is. A
    ``pid`` of -1 means any child, 0 or below the children of a process group. With ``os.WNOHANG`` it does not wait, and
    returns ``(0, 0)`` if the child runs.

    Raises:
        TimeoutError: the child has not ended after ``timeout`` seconds.
        ChildProcessError: there is no such child, or somebody else has fetched its status, also meanwhile.
    """
    found = _waitpid(pid, options | os.WNOHANG)
    if found[0] or options & os.WNOHANG:
        return found
    left_s = Countdown(timeout)
    if pid <= 0 or options:
        return _ask_repeatedly(pid, options, left_s)
    while True:
        watch = _Watch(pid)
        try:
            # The child may have ended before, and another process may have its number: ask first.
            found = _waitpid(pid, os.WNOHANG)
            if not found[0]:
                wait_for_read(watch.fd, left_s())
                found = _waitpid(pid, os.WNOHANG)
        finally:
            watch.close()
        if found[0]:
            return found


def _ask_repeatedly(pid: int, options: int, left_s: Countdown) -> tuple[int, int]:
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s.pause(pause_s)
        found = _waitpid(pid, options | os.WNOHANG)
        if found[0]:
            return found
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


class _Watch:
    """A descriptor that can be read once a child has ended. The status stays where it is."""

    def __init__(self, pid: int) -> None:
        # What has the descriptor; closed with it.
        self._queue: Any = None
        if sys.platform == "linux":
            try:
                self.fd = os.pidfd_open(pid)
            except ProcessLookupError:
                # Somebody else has fetched the status: waitpid() says so.
                self.fd = _ended()
            except OSError as exc:
                if exc.errno not in _NO_PIDFDS:
                    raise
                self.fd = _closed_by_thread(pid)
        else:
            self._queue = _queue_of(pid)
            self.fd = self._queue.fileno()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        else:
            os.close(self.fd)


def _ended() -> int:
    """Return a descriptor that can be read at once."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def _closed_by_thread(pid: int) -> int:
    """Return the end of a pipe whose other end a thread closes when the child has ended."""
    read_end, write_end = os.pipe()

    def watch() -> None:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # somebody else has fetched the status
        finally:
            os.close(write_end)

    try:
        RealThread(target=watch, name=f"coro-waitpid-{pid}", daemon=True).start()
    except BaseException:
        os.close(read_end)
        os.close(write_end)
        raise
    return read_end


def _queue_of(pid: int) -> Any:
    """Return a kqueue that can be read when the child has ended."""
    kqueue: Any = select  # its names are those of another system to type checkers
    queue = kqueue.kqueue()
    try:
        event = kqueue.kevent(pid, kqueue.KQ_FILTER_PROC, kqueue.KQ_EV_ADD, kqueue.KQ_NOTE_EXIT)
        queue.control([event], 0)
    except ProcessLookupError:
        # It has ended already: a timer that is due makes the queue readable.
        event = kqueue.kevent(0, kqueue.KQ_FILTER_TIMER, kqueue.KQ_EV_ADD | kqueue.KQ_EV_ONESHOT, 0, 0)
        queue.control([event], 0)
    except BaseException:
        queue.close()
        raise
    return queue
