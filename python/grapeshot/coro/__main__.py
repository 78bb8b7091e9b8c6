"""``python -m grapeshot.coro script.py``: run an ordinary program in a coro, with everything patched.

The program runs as ``__main__`` in the first coro. Arguments, exit status, tracebacks and Ctrl-C are those of ``python
script.py``, and at the end it waits for the threads that are no daemons.
"""

from __future__ import annotations

import signal
import sys

from grapeshot import _program, coro
from grapeshot.coro._patching import _thread

_USAGE = """\
usage: python -m grapeshot.coro script.py [argument ...]
       python -m grapeshot.coro -m module [argument ...]
       python -m grapeshot.coro -c code [argument ...]
       python -m grapeshot.coro - [argument ...]     (a program on the standard input)

Runs a program in a coro after coro.install(): where it blocks, others of its threads run.
"""


def _take_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt in this coro, as in the main thread of any program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Program:
    """The program in the first coro, and how it ends."""

    def __init__(self, run: _program.Program) -> None:
        self._run = run
        self.outcome: BaseException | None = None

    def __call__(self) -> None:
        _take_interrupts()
        _thread.begin_main()
        try:
            # As in a plain program, asyncio sees no running loop.
            coro.call_blocking(self._run_program)
        finally:
            _thread.end_main()

    def _run_program(self) -> None:
        self.outcome = _program.execute(self._run, coro.Interrupted)
        try:
            _thread.join_all()
        except KeyboardInterrupt as exc:
            self.outcome = _program.report(exc)


def main() -> None:
    run = _program.prepare(sys.argv[1:])
    if run is None:
        is_help = sys.argv[1:2] in (["-h"], ["--help"])
        (sys.stdout if is_help else sys.stderr).write(_USAGE)
        sys.exit(0 if is_help else 2)
    coro.install()
    # Also now: the runner of the loop sets no handler of its own then.
    _take_interrupts()
    program = _Program(run)
    coro.run(program, name="main")
    _program.end(program.outcome)


main()
