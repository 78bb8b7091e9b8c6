"""Runs a program as the interpreter does: a script, directory or archive, ``-m module``, ``-c code`` or stdin.

``python -m grapeshot`` and ``python -m grapeshot.coro`` pass the rest of their command lines to this module. The
program runs as ``__main__``, in the main thread. Its arguments, exit status, tracebacks and behaviour on Ctrl-C are the
same as with plain Python. This module does not depend on loops and coros.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from importlib import machinery

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Program = Callable[[dict[str, Any]], None]


def prepare(arguments: list[str]) -> Program | None:
    """Set ``sys.argv`` and ``sys.path`` as the interpreter would; return a function that runs the program.

    That function takes the namespace to run the program in. If the arguments name no program, return None instead. If
    the file cannot be read, end this process with status 2.
    """
    if not arguments:
        return None
    kind, rest = arguments[0], arguments[1:]
    if kind == "-" and not sys.stdin.isatty():
        sys.argv = list(arguments)
        _set_first_path("")
        return _run_stdin
    if kind not in ("-c", "-m"):
        return None if kind.startswith("-") else _prepare_script(kind, rest)
    if not rest:
        return None
    sys.argv = [kind, *rest[1:]]
    if kind == "-c":
        _set_first_path("")
        return lambda names: exec(_compile_text(rest[0]), names)
    _set_first_path(os.getcwd())
    return lambda _: _run_module(rest[0], True)


def exit_with_usage(arguments: list[str], usage: str) -> NoReturn:
    """Print the usage text, because ``arguments`` ask for it or name no program, and end this process."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        sys.stdout.write(usage)
        sys.exit(0)
    sys.stderr.write(usage)
    if first in ("-c", "-m"):
        sys.stderr.write(f"error: {first} needs an argument\n")
    elif first != "-" and first:
        sys.stderr.write(f"error: unknown option: {first}\n")
    sys.exit(2)


def _compile_text(source: str) -> types.CodeType:
    if sys.version_info >= (3, 14):
        import textwrap

        source = textwrap.dedent(source)
    if sys.version_info >= (3, 13):
        # Let tracebacks show the lines of the code given with -c.
        import linecache

        linecache.cache["<string>"] = (len(source), None, [f"{line}\n" for line in source.splitlines()], "<string>")
    return compile(source, "<string>", "exec", dont_inherit=True)


def _prepare_script(path: str, rest: list[str]) -> Program:
    import pkgutil

    sys.argv = [path, *rest]
    if pkgutil.get_importer(path) is not None:
        # It is a directory or an archive; its __main__.py runs, as with python's own command line.
        sys.path[: 0 if sys.flags.safe_path else 1] = [path]
        return lambda _: _run_module("__main__", False)
    try:
        open(path, "rb").close()
    except OSError as error:
        problem = f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {problem}\n")
        sys.exit(2)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    return lambda names: _run_file(path, names)


def _run_file(path: str, names: dict[str, Any]) -> None:
    import io

    absolute = os.path.abspath(path)
    if path.endswith(".pyc"):
        loader: Any = machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = machinery.SourceFileLoader("__main__", absolute)
        with io.open_code(absolute) as file:
            code = compile(file.read(), absolute, "exec", dont_inherit=True)
    names.update(__loader__=loader)
    _run_code(code, absolute, names)


def _run_code(code: types.CodeType, file: str, names: dict[str, Any]) -> None:
    names.update(__file__=file)
    if sys.version_info < (3, 15):
        names.update(__cached__=None)
    exec(code, names)


def _run_stdin(names: dict[str, Any]) -> None:
    _run_code(compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True), "<stdin>", names)


def _set_first_path(path: str) -> None:
    """Replace ``sys.path[0]``, which ``-m grapeshot`` has added. In safe-path mode, nothing was added: do nothing."""
    if not sys.flags.safe_path:
        sys.path[:1] = [path]


def _run_module(name: str, sets_argv: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, sets_argv)  # type: ignore[attr-defined]


def execute(program: Program, *passing: type[BaseException]) -> BaseException | None:
    """Run ``program`` as ``__main__``. If it raises, print the exception (except SystemExit) and return it.

    An exception of one of the types in ``passing`` is not caught.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __spec__=None, __loader__=machinery.BuiltinImporter)
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    sys.modules["__main__"] = module
    try:
        program(module.__dict__)
    except passing:
        raise
    except BaseException as exc:
        outcome = exc
    else:
        return None
    if isinstance(outcome, SystemExit) and not _inspects():
        return outcome
    return report(outcome)


def _inspects() -> bool:
    """Whether the interpreter will show its prompt after the program (``python -i``)."""
    return bool(sys.flags.inspect or os.environ.get("PYTHONINSPECT"))


def report(exc: BaseException) -> BaseException:
    """Print an exception as the interpreter would, without the frames of this module, and return it."""
    traceback = exc.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals is globals():
        traceback = traceback.tb_next
    exc = exc.with_traceback(traceback)
    sys.last_type, sys.last_value, sys.last_traceback = type(exc), exc, traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = exc
    try:
        sys.excepthook(type(exc), exc, traceback)
    except SystemExit:
        raise
    except BaseException as failure:
        inner = failure.__traceback__ and failure.__traceback__.tb_next
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), failure.with_traceback(inner), inner)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(exc), exc, traceback)
    return exc


def end(outcome: BaseException | None) -> None:
    """End this process with the exit status that ``outcome`` calls for, unless the prompt is to follow (``-i``)."""
    if _inspects():
        return
    if isinstance(outcome, SystemExit):
        sys.exit(outcome.code)
    if isinstance(outcome, KeyboardInterrupt):
        # Raising the exception makes the interpreter end by the signal, as usual. The exception has already been
        # printed, so do not print it again.
        sys.excepthook = lambda *_: None
        raise outcome
    if outcome is not None:
        sys.exit(1)
