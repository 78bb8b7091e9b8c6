"""``waitpid`` for coros: waits until a descriptor reports the end of the child, then fetches the status.

    Linux                          a pidfd
    BSD, macOS                     a kqueue with one EVFILT_PROC
    Linux before 5.3, sandboxes    a pipe that a thread closes; the thread waits for the child with ``waitid(WNOWAIT)``

A wait on these descriptors does not fetch the child's status. So if a wait is interrupted, the status is still there
for the next one. No descriptor can report that any one of several children has ended (``pid`` 0 or below), or that a
child was stopped or continued. In these cases ``waitpid`` polls the kernel, with pauses in between.
"""

from __future__ import annotations

import errno
import os
import select
import sys

from ._countdown import Countdown
from ._patching._thread import RealThread
from ._socket import wait_for_read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The first and the longest pause between two polls, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# The errors of pidfd_open() on kernels and in sandboxes that do not have pidfds.
_NO_PIDFDS = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES))
# Keep the original, because a program may patch os.waitpid later.
_waitpid = os.waitpid


def waitpid(pid: int, options: int = 0, /, timeout: float | None = None) -> tuple[int, int]:
    """Wait until a child process has ended; return its process id and its status, like :func:`os.waitpid`.

    :func:`os.waitstatus_to_exitcode` turns the status into an exit code. An interrupted wait does not fetch the status,
    so a later call gets it. A ``pid`` of -1 means any child; 0, or a number below -1, means any child of a process
    group. With ``os.WNOHANG`` this function does not wait: it returns ``(0, 0)`` if the child is still running.

    Raises:
        TimeoutError: the child has not ended after ``timeout`` seconds.
        ChildProcessError: there is no such child, or other code has fetched its status, before or during the wait.
    """
    found = _waitpid(pid, options | os.WNOHANG)
    if found[0] or options & os.WNOHANG:
        return found
    left_s = Countdown(timeout)
    if pid <= 0 or options:
        return _poll_repeatedly(pid, options, left_s)
    while True:
        watch = _Watch(pid)
        try:
            # Check again. If other code has fetched the status meanwhile, the process id may now belong to another
            # process, and the watch would be for that process. The next line raises ChildProcessError in this case.
            found = _waitpid(pid, os.WNOHANG)
            if not found[0]:
                wait_for_read(watch.fd, left_s())
                found = _waitpid(pid, os.WNOHANG)
        finally:
            watch.close()
        if found[0]:
            return found


def _poll_repeatedly(pid: int, options: int, left_s: Countdown) -> tuple[int, int]:
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s.pause(pause_s)
        found = _waitpid(pid, options | os.WNOHANG)
        if found[0]:
            return found
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


class _Watch:
    """A descriptor that becomes readable when a child has ended."""

    def __init__(self, pid: int) -> None:
        # on BSD and macOS: the kqueue whose descriptor is `fd`
        self._queue: Any = None
        if sys.platform == "linux":
            try:
                self.fd = os.pidfd_open(pid)
            except ProcessLookupError:
                # Other code has fetched the status. The next waitpid() raises ChildProcessError.
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
    """Return a descriptor that is readable at once."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def _closed_by_thread(pid: int) -> int:
    """Return the read end of a pipe. A thread closes the other end when the child has ended."""
    read_end, write_end = os.pipe()

    def watch() -> None:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # other code has fetched the status
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
    """Return a kqueue that becomes readable when the child has ended."""
    kqueue: Any = select  # type checkers on other systems do not know its kqueue names
    queue = kqueue.kqueue()
    try:
        event = kqueue.kevent(pid, kqueue.KQ_FILTER_PROC, kqueue.KQ_EV_ADD, kqueue.KQ_NOTE_EXIT)
        queue.control([event], 0)
    except ProcessLookupError:
        # The child has ended already: make the kqueue readable with a timer that is due at once.
        event = kqueue.kevent(0, kqueue.KQ_FILTER_TIMER, kqueue.KQ_EV_ADD | kqueue.KQ_EV_ONESHOT, 0, 0)
        queue.control([event], 0)
    except BaseException:
        queue.close()
        raise
    return queue
