"""The part ``stdin`` of :func:`grapeshot.coro.patch`: other coros run while one waits for input.

It patches ``sys.stdin`` and ``input()``. The interpreter's own stream objects stay, because they may have data in their
buffers. Only the methods that wait are replaced, by functions that are set as attributes of these objects.
"""

from __future__ import annotations

import builtins
import functools
import io
import sys

from grapeshot import _core

from . import _originals, _os, _waits
from ._file_objects import read_all_raw, read_raw
from ._shared_reads import SharedReads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_input = builtins.input


def read_line(prompt: object = "", /) -> str:
    """Read a line from standard input, like the original, but in a coro without line editing by the module readline."""
    stdin: Any = getattr(sys, "stdin", None)
    if not _waits.can_wait() or not _is_patched(stdin) or not stdin.isatty():
        # If standard input is not a terminal, the original calls the patched sys.stdin.readline().
        return _input(prompt)
    sys.audit("builtins.input", prompt)
    if sys.stderr is not None:
        sys.stderr.flush()
    sys.stdout.write(str(prompt))
    sys.stdout.flush()
    line: str = stdin.readline()
    if not line:
        raise EOFError
    line = line.removesuffix("\n")
    sys.audit("builtins.input/result", line)
    return line


def _raw_of(stdin: Any) -> Any:
    """Return the raw file below ``stdin``, or None if ``stdin`` is not of the interpreter's classes."""
    buffer = stdin.buffer if type(stdin) is io.TextIOWrapper else None
    raw = buffer.raw if type(buffer) is io.BufferedReader else None
    return raw if type(raw) is io.FileIO else None


def _is_patched(stdin: Any) -> bool:
    raw = _raw_of(stdin)
    return raw is not None and "readinto" in vars(raw)


def _read_alone(file: Any, name: str, reads: SharedReads) -> None:
    method: Callable[..., Any] = getattr(file, name)

    def call(*args: Any) -> Any:
        return reads.read(method, *args)

    setattr(file, name, call)


def _read_text_alone(file: Any, name: str, lock: Any) -> None:
    method: Callable[..., Any] = getattr(file, name)

    def call(*args: Any) -> Any:
        with lock:
            return method(*args)

    setattr(file, name, call)


def _patch_raw(raw: Any, reads: SharedReads) -> None:
    """Let other coros run while ``readinto`` waits for data, and make ``read`` and ``readall`` use ``readinto``."""
    original: Callable[[Any], int | None] = raw.readinto

    def wait_and_read(buffer: Any) -> int | None:
        if _waits.can_wait() and not raw.closed and _waits.may_block(raw.fileno()):
            with memoryview(buffer) as view, view.cast("B") as octets:
                # Leave read-only buffers to the original: it refuses them before it reads anything.
                if octets.nbytes and not octets.readonly:
                    return _os.read_into_as_coro(raw.fileno(), octets)
        return original(buffer)

    def readinto(buffer: Any, /) -> int | None:
        return reads.fill(wait_and_read, buffer)

    raw.readinto = readinto
    raw.read = functools.partial(read_raw, raw)
    raw.readall = functools.partial(read_all_raw, raw)


def _patch_stdin() -> None:
    stdin: Any = sys.stdin
    raw = _raw_of(stdin)
    if raw is None or raw.closed or _is_patched(stdin) or not _waits.may_block(raw.fileno()):
        return
    reads = SharedReads()
    _patch_raw(raw, reads)
    for name in ("read", "read1", "readinto", "readinto1", "readline", "peek"):
        _read_alone(stdin.buffer, name, reads)
    lock = _core.thread_rlock()
    for name in ("read", "readline"):
        _read_text_alone(stdin, name, lock)


def patch() -> None:
    """Replace ``input``, and patch the object that ``sys.stdin`` is now."""
    _patch_stdin()
    read_line.__name__ = read_line.__qualname__ = "input"
    _originals.replace("builtins", "input", read_line)
