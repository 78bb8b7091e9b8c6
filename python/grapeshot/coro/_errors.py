"""The exceptions of the coro mode. The names are Shrapnel's."""

from __future__ import annotations

import asyncio
import builtins
import errno
import queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# asyncio's classes, for the modules that do not import asyncio.
CancelledError = asyncio.CancelledError
InvalidStateError = asyncio.InvalidStateError
LimitOverrunError = asyncio.LimitOverrunError


class Interrupted(asyncio.CancelledError):
    """A coro was interrupted where it waited; ``value`` is what :meth:`Coro.interrupt` was given.

    A subclass of :class:`asyncio.CancelledError`, so that ``except Exception`` lets it pass.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__(*(() if value is None else (value,)))
        self.value = value


class Shutdown(Interrupted):
    """Raised in a coro that must end: :meth:`Coro.shutdown` was called, or its loop is being closed."""


class CoroCancelled(Exception):  # noqa: N818  # named like what it stands for
    """A coro has no result, because it was shut down, interrupted or cancelled; its own exception is the cause.

    :meth:`Coro.result` raises this in another coro. The caller was not cancelled itself, so this is an ordinary error:
    ``except Exception`` catches it, and it is reported if nobody does.
    """


class TimeoutError(builtins.TimeoutError):  # noqa: A001  # Shrapnel's name, and a subclass of the builtin
    """The timeout of a block, a function or a wait is over."""


class Empty(queue.Empty, TimeoutError):  # noqa: N818  # queue's names
    """No item came before the timeout of ``pop``. It is a :class:`queue.Empty` and a :class:`TimeoutError`."""


class Full(queue.Full, TimeoutError):  # noqa: N818
    """There was no space before the timeout of ``push``. It is a :class:`queue.Full` and a :class:`TimeoutError`."""


class ScheduleError(Exception):
    """A coro cannot be scheduled in its state, or from this thread."""


class DeadCoroutine(ScheduleError):  # noqa: N818  # Shrapnel's name
    """The coro has ended."""


class NotStartedError(ScheduleError):
    """The coro was not started."""


class SimultaneousError(Exception):
    """Two coros wait on one descriptor for the same thing."""


class ClosedError(OSError):
    """A descriptor was closed while a coro waited on it, or a channel is closed. The errno is ``EBADF``."""

    def __init__(self, message: str = "it was closed") -> None:
        super().__init__(errno.EBADF, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.strerror,)


class YieldFromMain(RuntimeError):  # noqa: N818  # Shrapnel's name
    """A function that waits was called outside of a coro."""


class LockError(RuntimeError):
    """The coro has released a lock that it does not hold, or would wait for itself."""


class InParallelError(Exception):
    """At least one function of ``in_parallel`` has raised.

    ``result_list`` has one entry per function, in order: ``(True, result)`` or ``(False, exception)``. The cause is the
    exception, or the group of them if there are several.
    """

    def __init__(self, result_list: list[tuple[bool, Any]]) -> None:
        super().__init__(result_list)
        self.result_list = result_list
        raised = [exc for is_result, exc in result_list if not is_result]
        if len(raised) == 1:
            self.__cause__ = raised[0]
        elif raised:
            self.__cause__ = BaseExceptionGroup("the functions have raised", raised)

    def __str__(self) -> str:
        raised = [repr(exc) for is_result, exc in self.result_list if not is_result]
        return f"{len(raised)} of {len(self.result_list)} functions have raised: {', '.join(raised)}"


class WakeUp(Exception):  # noqa: N818  # Shrapnel's name
    """For programs: wakes a coro with an exception that has no other meaning."""
