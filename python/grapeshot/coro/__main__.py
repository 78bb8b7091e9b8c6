"""``python -m grapeshot.coro script.py``: run an ordinary program in a coro, with everything patched.

The program runs as ``__main__`` in the first coro. Arguments, exit status, tracebacks and Ctrl-C are those of ``python
script.py``, and at the end it waits for the threads that are no daemons.
"""

from __future__ import annotations

import os
import signal
import sys
import types

from grapeshot import coro
from grapeshot.coro._patching import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_USAGE = """\
usage: python -m grapeshot.coro script.py [argument ...]
       python -m grapeshot.coro -m module [argument ...]
       python -m grapeshot.coro -c code [argument ...]

Runs a program in a coro after coro.install(): where it blocks, others of its threads run.
"""


def _prepare(arguments: list[str]) -> Callable[[dict[str, Any]], None] | None:
    """Set ``sys.argv`` and ``sys.path`` as the interpreter would; return what runs the program in a namespace."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return None
    kind, rest = arguments[0], arguments[1:]
    if kind not in ("-c", "-m"):
        return _prepare_script(kind, rest)
    if not rest:
        return None
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        _set_first_path("")
        code = rest[0]
        return lambda names: exec(compile(code, "<string>", "exec", dont_inherit=True), names)
    sys.argv = ["-m", *rest[1:]]
    _set_first_path(os.getcwd())
    module = rest[0]
    return lambda _: _run_module(module, True)


def _prepare_script(path: str, rest: list[str]) -> Callable[[dict[str, Any]], None]:
    import pkgutil

    sys.argv = [path, *rest]
    importer = pkgutil.get_importer(path)
    if importer is not None and type(importer).__name__ != "NoneType":
        # A directory or an archive with a __main__.py.
        sys.path[:1] = [path]
        return lambda _: _run_module("__main__", False)
    try:
        open(path, "rb").close()
    except OSError as error:
        problem = f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {problem}\n")
        sys.exit(2)
    _set_first_path(os.path.dirname(os.path.realpath(path)))

    def run(names: dict[str, Any]) -> None:
        import importlib.machinery
        import io

        absolute = os.path.abspath(path)
        if path.endswith(".pyc"):
            loader: Any = importlib.machinery.SourcelessFileLoader("__main__", path)
            code = loader.get_code("__main__")
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", absolute)
            with io.open_code(absolute) as file:
                code = compile(file.read(), absolute, "exec", dont_inherit=True)
        names.update(__file__=absolute, __loader__=loader)
        if sys.version_info < (3, 15):
            names.update(__cached__=None)
        exec(code, names)

    return run


def _set_first_path(path: str) -> None:
    """``sys.path[0]`` is the directory of ``-m grapeshot.coro`` so far, unless the interpreter leaves it out."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [path]


def _run_module(name: str, sets_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, sets_argv)  # type: ignore[attr-defined]


def _take_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt in this coro, as in the main thread of any program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Program:
    """The program in the first coro, and how it ends."""

    def __init__(self, run: Callable[[dict[str, Any]], None]) -> None:
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
        module = types.ModuleType("__main__")
        module.__dict__.update(__builtins__=__builtins__, __spec__=None)
        if sys.version_info < (3, 14):
            module.__dict__.update(__annotations__={})
        sys.modules["__main__"] = module
        try:
            self._run(module.__dict__)
        except SystemExit as exc:
            self.outcome = exc
        except coro.Interrupted:
            raise
        except BaseException as exc:
            self._report(exc)
        self._join()

    def _report(self, exc: BaseException) -> None:
        # Not the frames of this module: this one, `run` or the lambda.
        traceback = exc.__traceback__
        while traceback is not None and traceback.tb_frame.f_globals is globals():
            traceback = traceback.tb_next
        self.outcome = exc.with_traceback(traceback)
        sys.excepthook(type(exc), exc, traceback)

    def _join(self) -> None:
        try:
            _thread.join_all()
        except KeyboardInterrupt as exc:
            self._report(exc)


def main() -> None:
    run = _prepare(sys.argv[1:])
    if run is None:
        is_help = sys.argv[1:2] in (["-h"], ["--help"])
        (sys.stdout if is_help else sys.stderr).write(_USAGE)
        sys.exit(0 if is_help else 2)
    coro.install()
    # Also now: the runner of the loop sets no handler of its own then.
    _take_interrupts()
    program = _Program(run)
    coro.run(program, name="main")
    outcome = program.outcome
    if isinstance(outcome, SystemExit):
        sys.exit(outcome.code)
    if isinstance(outcome, KeyboardInterrupt):
        # It is printed already. The interpreter ends by the signal, as it does by itself.
        sys.excepthook = lambda *_: None
        raise outcome
    if outcome is not None:
        sys.exit(1)


main()
