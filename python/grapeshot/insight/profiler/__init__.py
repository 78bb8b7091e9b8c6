"""A profiler for programs of coros and tasks: CPU, wall and waiting time of each function, and of each coro and task.

::

    from grapeshot.insight import profiler

    with profiler.profile("app.profile") as found:   # or profiler.run(main(), "app.profile")
        ...
    print(found.table())

``python -m grapeshot profile show app.profile`` prints the same table, and ``profile html`` makes a page of it. From
Python 3.12 on, all threads of the process are profiled. On 3.11, only the thread that starts the profile and threads
that are started during the profile are profiled. The profiler has no cost when it is not in use.
"""

from __future__ import annotations

import os
import sys
import types

from grapeshot import _core
from grapeshot._loop.locks import real_rlock
from grapeshot._start import run as _run

from . import _cost, _events
from ._collector import Collector
from ._profile import FunctionRow, OwnerRow, Profile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

__all__ = ["FunctionRow", "OwnerRow", "Profile", "profile", "run"]

# The profile that is being taken, and where it was started.
_taken: profile | None = None
_begun: str | None = None
# Held while a profile begins.
_beginning = real_rlock()


class profile:  # noqa: N801  # used like a function
    """Profile the process during a ``with`` block. The variable after ``as`` is the :class:`Profile`.

    With ``path``, the profile is saved there at the end of the block. The block may be in a coro, in a task or
    elsewhere, and may wait. Only one profile can be taken at a time. The child of a fork is not profiled: its profile
    is empty and is not saved.

    Raises:
        RuntimeError: a profile is already being taken, or another profiler is active (PROFILER_ID of
            ``sys.monitoring``; on 3.11 ``sys.setprofile``).
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._profile = Profile()
        self._collector: Collector | None = None

    def __enter__(self) -> Profile:
        self._begin(sys._getframe(1))
        return self._profile

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._end()

    def _begin(self, frame: types.FrameType | None) -> None:
        global _taken, _begun
        with _beginning:
            if _begun is not None:
                raise RuntimeError(f"a profile is already being taken; it was started at {_begun}")
            if self._collector is not None:
                raise RuntimeError("a profile() object works for one block only: call profile() again for another one")
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
            cost_ns = _cost.measure()
            self._collector = collector = Collector(cost_ns=cost_ns)
            _taken, _begun = self, where
        try:
            collector.begin_here(frame)
            _core._coro_set_switch_stamps(True)
            _events.install(collector)
        except BaseException:
            _forget()
            raise

    def _end(self) -> None:
        if _taken is not self:
            return  # this is the child of a fork
        assert self._collector is not None
        _events.uninstall()
        _forget()
        self._profile._fill(self._collector.end(), _events.THREADS)
        if self._path is not None:
            self._profile.save(self._path)


def _forget() -> None:
    global _taken, _begun
    _core._coro_set_switch_stamps(False)
    _taken = _begun = None


def _in_child() -> None:
    if _taken is not None:
        _events.uninstall()
        _forget()


os.register_at_fork(after_in_child=_in_child)


def run(main: Awaitable[Any] | Callable[[], Any], path: str | os.PathLike[str] | None = None) -> Any:
    """Run a program under the profiler until it ends, and return its result.

    ``main`` is a coroutine, as for :func:`grapeshot.run`, or a function, which ``coro.run`` runs as a coro. With
    ``path``, the profile is saved there; otherwise its table is printed to stderr. This also happens if the program
    raises.
    """
    block = profile(path)
    found = block.__enter__()
    try:
        if callable(main):
            from grapeshot.coro._bridge import run

            return run(main)
        return _run.run(main)
    finally:
        block.__exit__(None, None, None)
        if path is None:
            print(found.table(), file=sys.stderr)  # noqa: T201  # as documented
