"""Programs in Shrapnel's style: ``spawn(main); event_loop()``, which runs until ``set_exit(code)`` is called.

Coros can be made in a thread before its loop runs. The first one makes a loop, and the thread's next
:func:`event_loop` or ``coro.run()`` runs it.
"""

from __future__ import annotations

import threading

from grapeshot import _core
from grapeshot._loop import Loop, new_event_loop
from grapeshot._start import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Program:
    """A loop that :func:`event_loop` runs or will run. Only the loop's thread may call :meth:`end`."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        # () before set_exit, else (code,)
        self.outcome: tuple[Any, ...] = ()
        self._exit: Any = None

    async def wait_for_exit(self) -> None:
        if not self.outcome:
            self._exit = self.loop.create_future()
            await self._exit

    def end(self, code: Any) -> None:
        self.outcome = (code,)
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(None)


class _Own(threading.local):
    """The program of this thread.

    The thread's first coro, or its first call of :func:`event_loop`, makes it. It is dropped when the program ends, or
    when ``coro.run()`` takes its loop.
    """

    program: _Program | None = None


_own = _Own()
# The programs of all threads whose event_loop() is running. The list needs no lock: each change is atomic.
_running: list[_Program] = []


def pending_loop() -> Loop:
    """Return the loop for coros that are made while no loop runs in this thread. The first call makes this loop."""
    return _own_program().loop


def take_pending_loop() -> Loop | None:
    """Return the loop of :func:`pending_loop`, which the caller must then run; None if there is no such loop."""
    program, _own.program = _own.program, None
    return None if program is None else program.loop


def _own_program() -> _Program:
    program = _own.program
    if program is None:
        program = _own.program = _Program()
    return program


def event_loop() -> Any:
    """Run this thread's coros until :func:`set_exit` is called; return the code from that call.

    Before this function returns, it ends the remaining coros, tasks, asynchronous generators and executor threads as
    :func:`asyncio.run` does, and closes the loop. Ctrl-C ends it in the same way and raises KeyboardInterrupt, as in
    :class:`asyncio.Runner`. A SystemExit or KeyboardInterrupt that a coro raises ends it, too, and is raised here.

    Raises:
        RuntimeError: an event loop is already running in this thread.
    """
    run.check_none_runs("coro.event_loop()")
    if _core._coro_is_hidden():
        raise RuntimeError("coro.event_loop() cannot be called from a coro")
    program = _own_program()
    _running.append(program)
    try:
        run.run_on(program.loop, program.wait_for_exit())
    finally:
        _running.remove(program)
        _own.program = None
    return program.outcome[0]


def set_exit(code: Any = 0) -> None:
    """Make :func:`event_loop` return ``code``.

    Call it from a coro, a callback or a task of the loop, or before the loop runs (but after a coro was made for it). A
    second call before the loop has ended replaces the code. A thread that has no :func:`event_loop` of its own may call
    ``set_exit``, too, if exactly one :func:`event_loop` is running in the process. The call then ends that one.

    Raises:
        RuntimeError: this thread has no :func:`event_loop` of its own, and other threads are running none or several.
    """
    program = _own.program
    if program is not None:
        program.end(code)
        return
    running = list(_running)
    if len(running) != 1:
        raise RuntimeError(
            "set_exit() in a thread that has no event_loop() of its own needs exactly one running coro.event_loop(),"
            f" but there are {len(running) or 'none'}"
        )
    running[0].loop.call_soon_threadsafe(running[0].end, code)
