"""``Coro``: a function that runs on a stack of its own. To asyncio it is a task.

Stacks, switches and waits are native code (``grapeshot._core``). This module has the parts that need not be fast:
Shrapnel's methods that interrupt a coro, and the interface of :class:`asyncio.Task`, which a coro needs because asyncio
sees a running coro as the current task.

An interruption is raised where the coro waits. If the coro was already woken but has not run yet, it gets the
interruption instead of the value that it was woken with, and the primitives in :mod:`grapeshot.coro` take back the lock
or the item that they had granted.
"""

from __future__ import annotations

import _asyncio  # not asyncio's names, because programs may replace these
import asyncio
import contextvars
import reprlib
import sys
import traceback
import weakref

from grapeshot import _core
from grapeshot._loop import origins

from . import _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any, TextIO, TypeVar

    _T_co = TypeVar("_T_co", covariant=True)

# Whether uncancel() also removes a CancelledError that was requested but not raised yet. Tasks do so from 3.13 on.
_TAKES_BACK = sys.version_info >= (3, 13)


class Coro(_core.Coro["_T_co"]):
    """A function that runs as a cooperative thread. It belongs to the thread of its loop.

    :func:`grapeshot.coro.spawn` and :func:`grapeshot.coro.new` make coros. ``await co`` in asyncio code and
    :meth:`join` in another coro wait for the end, and return the result or raise the exception.
    """

    def __repr__(self) -> str:
        state = self._status
        exception = self._exception if self.done() else None
        if exception is not None:
            state = "cancelled" if self.cancelled() else f"done exception={exception!r}"
        elif self._awaited is not None:
            state += f" wait_for={self._awaited!r}"
        if self._source_traceback:
            state += f" created at {self._source_traceback[-1].filename}:{self._source_traceback[-1].lineno}"
        return f"<{type(self).__name__} {self.name!r} {state}>"

    __repr__ = reprlib.recursive_repr()(__repr__)

    # ------------------------------------------------------------------ interruption

    def raise_exception(self, exc: BaseException | type[BaseException]) -> None:
        """Raise ``exc`` where the coro waits, or here and now if it is the running coro.

        Raises:
            DeadCoroutine: the coro has ended.
            NotStartedError: the coro was not started.
            ScheduleError: the coro belongs to another thread.
        """
        self._throw(exc() if isinstance(exc, type) else exc)

    def interrupt(self, value: Any = None) -> None:
        """Raise ``Interrupted(value)`` where the coro waits.

        Raises the same exceptions as :meth:`raise_exception`.
        """
        self._throw(_errors.Interrupted(value))

    def shutdown(self) -> None:
        """Raise ``Shutdown`` where the coro waits, so that it ends. Does not wait for the end.

        Raises the same exceptions as :meth:`raise_exception`.
        """
        self._throw(_errors.Shutdown())

    # ------------------------------------------------------------------ the outcome

    def join(self, timeout: float | None = None) -> _T_co:
        """Let the calling coro wait until this coro has ended; return the result or raise the exception of this coro.

        Returns None if the coro was shut down, interrupted or cancelled. (:meth:`result` raises CoroCancelled then.)

        Raises:
            TimeoutError: the coro has not ended after ``timeout`` seconds. If :meth:`done` is true, the coro itself has
                raised the error.
            NotStartedError: the coro was not started.
            RuntimeError: a coro joins itself.
            YieldFromMain: not called in a coro.
        """
        if not self.done():
            wait_for_end(self, timeout)
        try:
            return self._outcome()
        finally:
            del self  # break the cycle: the coro keeps its exception, whose traceback keeps this frame

    # ------------------------------------------------------------------ asyncio.Task's interface

    def cancel(self, msg: Any = None) -> bool:
        """Raise :class:`asyncio.CancelledError` where the coro waits, as :meth:`asyncio.Task.cancel` does for a task.

        If the coro waits for a future with ``await_``, the future is cancelled instead, and its CancelledError is
        raised in the coro. If this is called several times before the coro runs, the coro gets one error, with the
        first ``msg``.

        Returns False if the coro has ended, else True.
        """
        if self.done():
            return False
        self._check_thread()
        self._cancel_count += 1
        awaited = self._awaited
        if awaited is not None and (awaited.cancel(msg=msg) or awaited.cancelled()):
            return True
        self._throw_later(asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg))
        return True

    def cancelling(self) -> int:
        """Return the number of :meth:`cancel` calls that :meth:`uncancel` has not undone."""
        return self._cancel_count

    def uncancel(self) -> int:
        """Undo one :meth:`cancel`; return the number of :meth:`cancel` calls that are left.

        On Python 3.13 and later, if the coro itself undoes its last :meth:`cancel`, this also removes a CancelledError
        that was not raised yet, as :meth:`asyncio.Task.uncancel` does.
        """
        if self._cancel_count:
            self._cancel_count -= 1
            if not self._cancel_count and _TAKES_BACK and self._status == "running" and self._must_cancel:
                self._throw_later(None)
        return self._cancel_count

    def cancelled(self) -> bool:
        """Return True if the coro has ended because it was cancelled, shut down or interrupted."""
        return self.done() and isinstance(self._exception, asyncio.CancelledError)

    def get_name(self) -> str:
        """Return the name, like :meth:`asyncio.Task.get_name`."""
        return self.name

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that runs the coro."""
        loop: asyncio.AbstractEventLoop = self._loop
        return loop

    def get_context(self) -> contextvars.Context | None:
        """Return the context that the coro runs in, or None once it has ended."""
        return self._context

    def get_coro(self) -> None:
        """Return None: there is no coroutine object behind a coro."""
        return

    def get_stack(self, *, limit: int | None = None) -> list[FrameType]:
        """Return the coro's stack frames, the outermost first. With ``limit``, only that many innermost frames.

        For a coro that ended with an exception, these are the frames of the traceback; ``limit`` then keeps the
        outermost frames. For a coro that has not begun, or has returned, the list is empty.
        """
        frames: list[FrameType] = []
        exception = self._exception if self.done() else None
        entry = None if exception is None else exception.__traceback__
        while entry is not None and (limit is None or len(frames) < limit):
            frames.append(entry.tb_frame)
            entry = entry.tb_next
        frame = sys._getframe(1) if self._status == "running" else self.get_frame()
        innermost_first: list[FrameType] = []
        while frame is not None and (limit is None or len(innermost_first) < limit):
            innermost_first.append(frame)
            frame = frame.f_back
        return frames + innermost_first[::-1]

    def stack_info(self) -> dict[str, Any]:
        """Return a dict that says where the coro's stack is and how large it is.

        - ``kind``: ``shared`` or ``own``
        - ``where``: ``in place`` or ``evicted`` (copied away); ``none`` before the first run and after the end
        - ``slot``: the number of the shared stack that it uses, None if no other coro may use its stack
        - ``bytes_used``: how many bytes of C stack it uses
        - ``frame_bytes``: how many bytes its Python frames take
        - ``cpu_s``, ``steps``: its CPU time in seconds, and how often it ran. Both count from the moment when
          accounting began and leave out the current run. They exist only with ``loop.set_cpu_accounting(True)``

        Raises:
            ScheduleError: called in another thread.
        """
        info = super().stack_info()
        charges = getattr(self._loop, "_charges", None)
        if charges is not None:
            info["cpu_s"], info["steps"] = charges.of(self)
        return info

    def print_stack(self, *, limit: int | None = None, file: TextIO | None = None) -> None:
        """Print the frames of :meth:`get_stack` like a traceback, to ``sys.stderr`` unless a file is given."""
        exc = self._exception
        entries = [(frame, frame.f_lineno) for frame in self.get_stack(limit=limit)]
        if not entries:
            print(f"No stack for {self!r}", file=file or sys.stderr)
        else:
            title = "Stack" if exc is None else "Traceback"
            print(f"{title} for {self!r} (most recent call last):", file=file or sys.stderr)
        traceback.print_list(traceback.StackSummary.extract(iter(entries)), file=file)
        if exc is not None:
            print("".join(traceback.format_exception_only(exc)), file=file or sys.stderr, end="")

    def set_result(self, result: object) -> None:
        """Raise RuntimeError, like :meth:`asyncio.Task.set_result`: only the coro's function sets the result."""
        raise RuntimeError("Task does not support set_result operation")

    def set_exception(self, exception: object) -> None:
        """Raise RuntimeError, like :meth:`asyncio.Task.set_exception`."""
        raise RuntimeError("Task does not support set_exception operation")

    # Private attributes of asyncio.Task that asyncio itself (gather) and libraries read.

    _log_destroy_pending = False
    # the traceback of the call that started the coro; only in debug mode
    _source_traceback: Any = None

    def _note_origin(self) -> None:
        """Record where the coro was started. Native code calls this in debug mode."""
        origins.note_coro(self)

    @property
    def _state(self) -> str:
        return "PENDING" if not self.done() else "CANCELLED" if self.cancelled() else "FINISHED"

    @property
    def _cancel_message(self) -> Any:
        exc = self._exception
        return exc.args[0] if isinstance(exc, asyncio.CancelledError) and exc.args else None

    def _make_cancelled_error(self) -> BaseException:
        exc = self._exception
        return exc if isinstance(exc, asyncio.CancelledError) else asyncio.CancelledError()

    @property
    def _fut_waiter(self) -> Any:
        return self._awaited

    def _report_unseen(self) -> None:
        """Report the coro's exception to the loop if no code has retrieved it. Called when the coro is freed."""
        exc = self._failure_unseen()
        if exc is None or self.cancelled() or self._loop is None or self._loop.is_closed():
            return
        message = f"{type(self).__name__} exception was never retrieved"
        self._loop.call_exception_handler({"message": message, "exception": exc, "coro": self})


def check_started(coro: Coro[Any]) -> None:
    """Raise NotStartedError if ``coro`` was not started, because a wait for its end would never return."""
    if coro._status == "new":
        raise _errors.NotStartedError("the coro was not started, so waiting for it would never end")


def shut_down(coro: Coro[Any]) -> None:
    """Shut ``coro`` down if it was started and has not ended."""
    if not coro.done() and coro._status != "new":
        try:
            coro.shutdown()
        except _errors.DeadCoroutine:
            # It has ended since the check. That can happen if the calling coro has its own stack: the garbage collector
            # may run a finalizer here that lets other coros run.
            pass


def wait_for_end(coro: Coro[Any], timeout_s: float | None = None) -> None:
    """Wait in the running coro until ``coro`` has ended.

    Raises the same exceptions as :meth:`Coro.join`, except for the exception of ``coro`` itself.
    """
    waiter = _core._coro_current()
    if waiter is coro:
        raise RuntimeError("a coro cannot wait for itself")
    check_started(coro)
    wakeup = _core.wakeup()
    coro.add_done_callback(wakeup)
    timer = None
    try:
        if timeout_s is not None:
            timer = coro._loop.call_later(timeout_s, wakeup)
        while not wakeup.has_come:  # schedule() may wake the waiter earlier
            wakeup.wait()
    finally:
        if timer is not None:
            timer.cancel()
        if not coro.done():
            coro.remove_done_callback(wakeup)
    if not coro.done():
        raise _errors.TimeoutError(f"coro {coro.name!r} has not ended after {timeout_s:g} seconds")


class _TasksAndCoros(weakref.WeakSet["Any"]):
    """The class that :func:`_add_coros_to_tasks` gives to asyncio's set of tasks.

    Besides its own items, the set then yields the live coros of all threads, except daemons. (From Python 3.14 on, its
    own items are only tasks whose class does not derive from :class:`asyncio.Task`. asyncio keeps all other tasks
    elsewhere.) The coros are not added one by one. That would take time for each of them, and loops in different
    threads would wait for each other whenever they change the set.
    """

    # Kept here, because `all_tasks()` may be called at exit, when the names of this module are gone.
    _live, _kind = staticmethod(_core._coro_live_tasks), _core.Coro

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        yield from self._live()

    def __len__(self) -> int:
        return super().__len__() + len(self._live())

    def __contains__(self, item: object) -> bool:
        if isinstance(item, self._kind) and not item._is_unlisted:
            return item._status not in ("new", "done")
        return super().__contains__(item)

    # `add` is not overridden, because that would make it slower: before 3.14, asyncio calls it for each task. So if a
    # program adds a coro, the coro becomes one of the set's own items.

    def discard(self, item: Any) -> None:
        if isinstance(item, self._kind):
            item._is_unlisted = True
        super().discard(item)

    def remove(self, item: Any) -> None:
        if item not in self:
            raise KeyError(item)
        self.discard(item)

    def copy(self) -> Any:
        return weakref.WeakSet(self)


def _by_copy(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: getattr(self.copy(), name)(other)


for _name in ("eq", "le", "lt", "ge", "gt", "and", "or", "sub", "xor"):
    setattr(_TasksAndCoros, f"__{_name}__", _by_copy(f"__{_name}__"))
for _name in ("difference", "intersection", "symmetric_difference", "union", "isdisjoint", "issubset", "issuperset"):
    setattr(_TasksAndCoros, _name, _by_copy(_name))


def _add_coros_to_tasks() -> None:
    """Let ``asyncio.all_tasks()`` find all live coros.

    asyncio offers no public way to get its set of tasks. So register a probe, and find the set that then contains the
    probe.
    """

    class Probe:
        pass

    probe: Any = Probe()
    _asyncio._register_task(probe)
    try:
        for reference in weakref.getweakrefs(probe):
            # The callback of a WeakSet's references has, as a default argument, a reference to the WeakSet.
            for default in getattr(reference.__callback__, "__defaults__", None) or ():
                weak_set: Any = default() if isinstance(default, weakref.ref) else None
                if isinstance(weak_set, weakref.WeakSet) and probe in weak_set:
                    weak_set.__class__ = _TasksAndCoros
                    return
    finally:
        _asyncio._unregister_task(probe)
    raise ImportError("asyncio does not keep its tasks in a WeakSet, so coros cannot be in asyncio.all_tasks()")


_add_coros_to_tasks()
