"""A program of coros: ``spawn(main); event_loop()``, until ``set_exit(code)``.

Coros that are made while no loop runs in their thread belong to the loop that the thread's next :func:`event_loop` or
``coro.run()`` runs. That loop is made for the first of them.
"""

from __future__ import annotations

import threading

from grapeshot import _core, _run
from grapeshot._loop import Loop, new_event_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Program:
    """A loop that :func:`event_loop` runs or will run. Only its thread uses it."""

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
    """The program of this thread, from its first coro to its end."""

    program: _Program | None = None


_own = _Own()
# Programs whose event_loop() runs, of all threads. Changed by single operations.
_running: list[_Program] = []


def pending_loop() -> Loop:
    """Return the loop of coros that are made while none runs in this thread."""
    return _own_program().loop


def take_pending_loop() -> Loop | None:
    """Return that loop, which the caller then runs; None if no coro was made for it."""
    program, _own.program = _own.program, None
    return None if program is None else program.loop


def _own_program() -> _Program:
    program = _own.program
    if program is None:
        program = _own.program = _Program()
    return program


def event_loop() -> Any:
    """Run this thread's coros until :func:`set_exit` is called; return its code.

    Then it ends the remaining coros, tasks, asynchronous generators and threads of the executor as :func:`asyncio.run`
    does, and closes the loop. Ctrl-C does the same and raises KeyboardInterrupt, as in :class:`asyncio.Runner`. So does
    a SystemExit or KeyboardInterrupt that a coro raises.

    Raises:
        RuntimeError: an event loop is running in this thread.
    """
    _run.check_none_runs("coro.event_loop()")
    if _core._coro_is_hidden():
        raise RuntimeError("coro.event_loop() cannot be called from a coro")
    program = _own_program()
    _running.append(program)
    try:
        _run.run_on(program.loop, program.wait_for_exit())
    finally:
        _running.remove(program)
        _own.program = None
    return program.outcome[0]


def set_exit(code: Any = 0) -> None:
    """Make :func:`event_loop` return ``code``.

    Call it from a coro, a callback or a task of that loop, or before the loop runs.

    A thread without coros of its own ends the process's only :func:`event_loop`. A second call before the loop has
    ended replaces the code.

    Raises:
        RuntimeError: there is no such loop, or, in another thread, more than one.
    """
    program = _own.program
    if program is not None:
        program.end(code)
        return
    running = list(_running)
    if len(running) != 1:
        raise RuntimeError(f"{len(running) or 'no'} event_loop() runs: which is to end?")
    running[0].loop.call_soon_threadsafe(running[0].end, code)
