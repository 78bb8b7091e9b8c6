"""``HelperThread``: a real thread that can be told to end, and whose end can be waited for."""

from __future__ import annotations

import _thread
import os
import signal


class HelperThread:
    """A real thread that calls the method :meth:`run`. A subclass implements this method.

    It is started with the original ``_thread.start_new_thread``, which grapeshot's own modules keep even after
    :func:`grapeshot.coro.patch`. A ``threading.Thread`` started after ``patch()`` would be a coro, which could not run
    while other code blocks the loop.
    """

    def __init__(self) -> None:
        # `_stop` is locked until the thread is told to end, and `_end` until it has ended.
        self._stop, self._end = _thread.allocate_lock(), _thread.allocate_lock()
        self._stop.acquire()
        self._pid = os.getpid()
        self._ident: int | None = None

    def start(self) -> None:
        """Start the thread. Call this only once. Raises RuntimeError if the system has no thread left."""
        self._end.acquire()
        try:
            self._ident = _thread.start_new_thread(self._run, ())
        except BaseException:
            self._end.release()
            raise

    def has_ended(self) -> bool:
        return not self._end.locked()

    def stop(self, timeout_s: float) -> None:
        """Tell the thread to end, and wait until it has ended, for at most ``timeout_s``. Call this only once.

        The time limit is needed because a thread that the exiting interpreter has frozen never ends.
        """
        self._stop.release()
        # The child of a fork does not have this thread, and the thread cannot wait for itself.
        if self._pid == os.getpid() and self._ident != _thread.get_ident():
            self._end.acquire(timeout=timeout_s)

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Wait in the thread until it is told to end; return False if that has not happened after ``timeout_s``."""
        return self._stop.acquire(timeout=timeout_s)

    def run(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        # On CPython 3.11, if the system delivered a signal to this thread, the main thread would not notice the signal
        # before it next takes the GIL.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.run()
        finally:
            self._end.release()
