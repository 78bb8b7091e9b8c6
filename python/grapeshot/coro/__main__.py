"""``python -m grapeshot.coro script.py``: run an ordinary program in a coro, after ``coro.patch()``.

The program runs as ``__main__`` in the first coro. Arguments, exit status, tracebacks and Ctrl-C behave as with
``python script.py``. At the end, the command waits for all threads that are not daemons.
"""

from __future__ import annotations

import signal
import sys

from grapeshot import coro
from grapeshot._start import program as _program
from grapeshot.coro import _command, _latency
from grapeshot.coro._patching import _thread

_OPTION = "--latency-warning="
_USAGE = f"""\
usage: python -m grapeshot.coro [option] script.py [argument ...]
       python -m grapeshot.coro [option] -m module [argument ...]
       python -m grapeshot.coro [option] -c code [argument ...]
       python -m grapeshot.coro [option] - [argument ...]     (reads the program from standard input)

Runs a program in a coro after coro.patch(): while one of its threads waits, the others run.

{_OPTION}SECONDS[,stack][,always]
        Log a warning when code blocks the loop for more than SECONDS while something else waits (default 0.2; 0 turns
        the warnings off). With stack, also log the stack of that code. With always, also warn when nothing else waits.
        GRAPESHOT_LATENCY_WARNING=SECONDS[,stack][,always] in the environment does the same.

GRAPESHOT_BACKDOOR=PATH in the environment opens a back door at PATH for python -m grapeshot attach. If PATH is a
directory, each process opens a back door of its own in it.
"""


def _take_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt in this coro, as it does in the main thread of any program.

    After ``coro.patch()``, an exception that a signal handler raises goes to the coro that set the handler. So this
    coro sets the handler again.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Program:
    """The program that runs in the first coro, and how it ended."""

    def __init__(self, run: _program.Program) -> None:
        self._run = run
        self.outcome: BaseException | None = None

    def __call__(self) -> None:
        _take_interrupts()
        _thread.begin_main()
        try:
            # call_blocking() hides the loop: as in a program without coros, asyncio finds no running loop.
            coro.call_blocking(self._run_program)
        finally:
            _thread.end_main()

    def _run_program(self) -> None:
        self.outcome = _program.execute(self._run, coro.Interrupted)
        try:
            _thread.join_all()
        except KeyboardInterrupt as exc:
            self.outcome = _program.report(exc)


def _take_options(arguments: list[str]) -> list[str]:
    """Apply the options that come before the program, and return the remaining arguments."""
    while arguments and arguments[0].startswith(_OPTION):
        try:
            _latency.set_default(arguments[0].removeprefix(_OPTION))
        except ValueError as error:
            sys.stderr.write(f"{_OPTION[:-1]}: {error}\n")
            sys.exit(2)
        arguments = arguments[1:]
    return arguments


def main() -> None:
    arguments = _take_options(sys.argv[1:])
    run = _program.prepare(arguments)
    if run is None:
        _program.exit_with_usage(arguments, _USAGE)
    coro.patch()
    _command.open_back_door_if_asked()
    # Also set the handler before the loop runs: the patched `signal.signal` then puts a function of its own in place of
    # Python's default handler. The runner replaces only the default handler, so it leaves this function alone.
    _take_interrupts()
    program = _Program(run)
    coro.run(program, name="main")
    _program.end(program.outcome)


main()
