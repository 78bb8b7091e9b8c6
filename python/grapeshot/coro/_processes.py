"""``waitpid`` for coros: waits until a descriptor reports the end of the child, then fetches the status.

The descriptor is usually a pidfd (core/src/sys/child lists the others). A wait on it does not fetch the child's status.
So if a wait is interrupted, the status is still there for the next one. No descriptor can report that any one of
several children has ended (``pid`` 0 or below), or that a child was stopped or continued. In these cases ``waitpid``
polls the kernel, with pauses in between.
"""

from __future__ import annotations

import os

from grapeshot import _core

from ._countdown import Countdown
from ._socket import wait_for_read

# The first and the longest pause between two polls, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
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
        try:
            fd = _core._open_child_watch(pid)
        except ProcessLookupError:
            found = _waitpid(pid, os.WNOHANG)  # other code has fetched the status: this raises ChildProcessError
        else:
            try:
                # Check again. If other code has fetched the status meanwhile, the process id may now belong to another
                # process, and the descriptor would be for that process. The next line raises ChildProcessError then.
                found = _waitpid(pid, os.WNOHANG)
                if not found[0]:
                    wait_for_read(fd, left_s())
                    found = _waitpid(pid, os.WNOHANG)
            finally:
                os.close(fd)
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
