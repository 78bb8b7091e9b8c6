"""Occupies the threads that make calls on files, so that a test can look at a call that is still pending."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support import CAP_S

from grapeshot import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self


class BusyFileThreads:
    """Occupies all threads that make calls on files. Other calls on files begin only after :meth:`release`.

    Each thread opens a FIFO, and ``open`` waits until the other end is opened, too. Calls that io_uring makes are not
    affected.
    """

    def __init__(self, folder: Path) -> None:
        self._path = os.fsencode(folder / f"fifo-{time.monotonic_ns()}")
        folder.mkdir(exist_ok=True)
        os.mkfifo(self._path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPESHOT_FILE_THREADS", "1")
            self._queue = _core._AioQueue()
        self._left = 32
        for _ in range(self._left):
            self._queue.open(self._path, os.O_RDONLY, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Open the other end of the FIFO, and wait until all calls that open the FIFO have ended."""
        if not self._left:
            return
        writer = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        end_s = time.monotonic() + CAP_S
        while self._left:
            assert time.monotonic() < end_s
            opened: list[tuple[int, int]] = []
            self._queue.take(opened)
            for _, fd in opened:
                os.close(fd)
                self._left -= 1
            time.sleep(0.001)
        os.close(writer)
