"""``HubExecutor``: the default executor of the loop of gevent's hub."""

from __future__ import annotations

import collections
import concurrent.futures
import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _T = TypeVar("_T")


class HubExecutor(concurrent.futures.Executor):
    """Calls functions in real threads, which come from a ``ThreadPool`` of gevent.

    Tasks run in the hub, which cannot wait, so they cannot use a ThreadPoolExecutor: in a patched program its threads
    are greenlets, and ``Thread.start()`` waits until the new greenlet has begun to run. Only the hub's thread may use
    this executor.
    """

    MAX_THREADS = 32

    def __init__(self) -> None:
        self._is_shut_down = False
        self._pool: Any = None
        self._running = 0
        self._jobs: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = collections.deque()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Call ``fn(*args, **kwargs)`` in a thread; return a future of the result.

        Raises:
            RuntimeError: the executor was shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._jobs.append((future, functools.partial(fn, *args, **kwargs)))
        self._start_jobs()
        return future

    def _start_jobs(self) -> None:
        while self._jobs and self._running < self.MAX_THREADS:
            future, call = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            if self._pool is None:
                # Not imported earlier, because gevent imports this package while gevent itself is being imported.
                from gevent.threadpool import ThreadPool  # type: ignore[import-untyped]

                self._pool = ThreadPool(self.MAX_THREADS)
            try:
                result = self._pool.spawn(_outcome, call)
            except BaseException as exc:  # for instance, no thread can be started
                future.set_exception(exc)
                continue
            self._running += 1
            result.rawlink(functools.partial(self._ended, future))

    def _ended(self, future: concurrent.futures.Future[Any], outcome: Any) -> None:
        self._running -= 1
        is_result, value = outcome.value
        if is_result:
            future.set_result(value)
        else:
            future.set_exception(value)
        self._start_jobs()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work. This does not wait: the hub must not block."""
        self._is_shut_down = True
        if cancel_futures:
            for future, _ in self._jobs:
                future.cancel()


def _outcome(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Call a function in a pool thread; return its result or exception. The pool would print a raised exception."""
    try:
        return True, call()
    except BaseException as exc:
        return False, exc
