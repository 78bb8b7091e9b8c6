"""``sys.stdin`` and ``input()`` of :func:`grapeshot.coro.install`: other coros run while a coro waits for input.

The objects stay the interpreter's own, with what they have read already. The methods that wait are put on the objects.
"""

from __future__ import annotations

import builtins
import io
import sys

from grapeshot import _core

from . import _originals, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_input = builtins.input


def read_line(prompt: object = "", /) -> str:
    """Read a line from standard input, as the original. A terminal's line is edited by the system, not by readline."""
    stdin: Any = sys.stdin
    if not _waits.can_wait() or not _is_patched(stdin) or not stdin.isatty():
        # The original reads a terminal by itself, and lines of anything else from `sys.stdin`.
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
    """Return the file below ``sys.stdin`` if that is the interpreter's own; otherwise None."""
    buffer = stdin.buffer if type(stdin) is io.TextIOWrapper else None
    raw = buffer.raw if type(buffer) is io.BufferedReader else None
    return raw if type(raw) is io.FileIO else None


def _is_patched(stdin: Any) -> bool:
    raw = _raw_of(stdin)
    return raw is not None and "readinto" in vars(raw)


def _wait_first(raw: Any, name: str) -> None:
    """Let a method that makes one system call wait before."""
    method: Callable[..., Any] = getattr(raw, name)

    def call(*args: Any) -> Any:
        if _waits.can_wait() and not raw.closed and _waits.may_block(raw.fileno()):
            _waits.wait_until_ready(raw.fileno(), _waits.READABLE)
        return method(*args)

    setattr(raw, name, call)


def _take_turns(buffer: Any, name: str, turn: Any) -> None:
    """Let coros wait for each other. The buffer's own lock keeps only real threads apart."""
    method: Callable[..., Any] = getattr(buffer, name)

    def call(*args: Any) -> Any:
        with turn:
            return method(*args)

    setattr(buffer, name, call)


def _patch_stdin() -> None:
    stdin: Any = sys.stdin
    raw = _raw_of(stdin)
    if raw is None or raw.closed or _is_patched(stdin) or not _waits.may_block(raw.fileno()):
        return
    for name in ("readinto", "read"):
        _wait_first(raw, name)

    def readall() -> bytes | None:
        parts: list[bytes] = []
        while part := raw.read(io.DEFAULT_BUFFER_SIZE * 8):
            parts.append(part)
        return b"".join(parts) if parts or part is not None else None

    raw.readall = readall
    turn = _core.thread_rlock()
    for name in ("read", "read1", "readinto", "readinto1", "readline", "readlines", "peek"):
        _take_turns(stdin.buffer, name, turn)


def patch() -> None:
    """Replace ``input``, and patch what ``sys.stdin`` is now."""
    _patch_stdin()
    read_line.__name__ = read_line.__qualname__ = "input"
    _originals.replace("builtins", "input", read_line)
