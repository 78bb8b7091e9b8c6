"""The exceptions of the coro mode. Most names come from Shrapnel."""

from __future__ import annotations

import asyncio
import builtins
import queue

from grapeshot.threads import ClosedError as ClosedError  # noqa: PLC0414  # one of this module's names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# asyncio's classes, for modules of this package that do not import asyncio themselves.
CancelledError = asyncio.CancelledError
InvalidStateError = asyncio.InvalidStateError
LimitOverrunError = asyncio.LimitOverrunError


class Interrupted(asyncio.CancelledError):
    """Raised in a coro that was interrupted while it waited. ``value`` is the argument of :meth:`Coro.interrupt`.

    If a :class:`timeout` or a :class:`Group` has interrupted its own block, ``value`` is that object.

    This is a subclass of :class:`asyncio.CancelledError`, so ``except Exception`` does not catch it.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__(*(() if value is None else (value,)))
        self.value = value


class Shutdown(Interrupted):
    """Raised in a coro that must end: :meth:`Coro.shutdown` was called, or its loop or its thread is ending."""


class CoroCancelled(Exception):  # noqa: N818  # named after the state that it reports
    """A coro has no result, because it was shut down, interrupted or cancelled. ``__cause__`` is the coro's exception.

    :meth:`Coro.result` raises this in another coro. The caller itself was not cancelled, so this is an ordinary error:
    ``except Exception`` catches it, and if no code catches it, it is reported.
    """


class TimeoutError(builtins.TimeoutError):  # noqa: A001  # Shrapnel's name, and a subclass of the builtin
    """A block, a function or a wait took longer than its timeout."""


class Empty(queue.Empty, TimeoutError):  # noqa: N818  # queue's names
    """``pop`` got no item in time. It is both a :class:`queue.Empty` and a :class:`TimeoutError`."""


class Full(queue.Full, TimeoutError):  # noqa: N818
    """``push`` found no space in time. It is both a :class:`queue.Full` and a :class:`TimeoutError`."""


class ScheduleError(Exception):
    """A coro cannot be scheduled in its present state, or a coro, lock or queue of another thread was used."""


class DeadCoroutine(ScheduleError):  # noqa: N818  # Shrapnel's name
    """The coro has ended."""


class NotStartedError(ScheduleError):
    """The coro was not started."""


class SimultaneousError(Exception):
    """A coro tried to wait for an event of a descriptor, or to use a file_sock, while another coro was doing so."""


class YieldFromMain(RuntimeError):  # noqa: N818  # Shrapnel's name
    """A function that waits was called outside of a coro."""


class LockError(RuntimeError):
    """A lock was released by code that does not hold it, or a coro would wait for a lock that only it could release."""


class InParallelError(Exception):
    """At least one function of ``in_parallel`` has raised an exception.

    ``result_list`` has one entry per function, in order: ``(True, result)`` or ``(False, exception)``. The
    ``__cause__`` is the exception, or an exception group if there are several.
    """

    def __init__(self, result_list: list[tuple[bool, Any]]) -> None:
        super().__init__(result_list)
        self.result_list = result_list
        raised = [exc for is_result, exc in result_list if not is_result]
        if len(raised) == 1:
            self.__cause__ = raised[0]
        elif raised:
            self.__cause__ = BaseExceptionGroup("several functions have raised", raised)

    def __str__(self) -> str:
        raised = [repr(exc) for is_result, exc in self.result_list if not is_result]
        return f"{len(raised)} of {len(self.result_list)} functions have raised: {', '.join(raised)}"


class WakeUp(Exception):  # noqa: N818  # Shrapnel's name
    """For use by programs, with :meth:`Coro.raise_exception`. grapeshot itself never raises or catches it."""
