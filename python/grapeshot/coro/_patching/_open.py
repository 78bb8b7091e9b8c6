"""The part ``open`` of :func:`grapeshot.coro.patch`: ``open`` for descriptors of pipes, sockets and terminals.

Everything else is passed on to the original ``open``.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import warnings

from . import _originals
from ._file_objects import PipeFile, Reader, Text, Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_open = io.open
_fstat = os.fstat
# mode -> direction, and whether the mode is binary. Modes with "+" are left to the original. With a buffer, the
# original refuses them for files that are not seekable.
_MODES = {mode: (way, "b" in kind) for way in "rwax" for kind in ("", "t", "b") for mode in (way + kind, kind + way)}

# A buffer is as large as one block of its file. But from Python 3.14 on, its size is at least `io.DEFAULT_BUFFER_SIZE`
# and at most `_LARGEST`.
_LARGEST = 8192 * 1024


def _may_wait(fd: int) -> bool:
    try:
        mode = _fstat(fd).st_mode
    except (OSError, OverflowError):
        # The original raises the error.
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """Open a file like :func:`io.open`. Other coros run while a read or write of a pipe, socket or terminal waits."""
    if type(file) is int and opener is None and type(mode) is str and type(buffering) is int and mode in _MODES:
        way, is_binary = _MODES[mode]
        fits = encoding is errors is newline is None if is_binary else buffering != 0
        if fits and _may_wait(file):
            return _wrap(PipeFile(file, way + "b", closefd), mode, buffering, is_binary, (encoding, errors, newline))
    return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)


def _usual_size(raw: Any) -> int:
    """Return the buffer size that the original would choose, which depends on the block size of the file."""
    size: int = raw._blksize
    return max(min(size, _LARGEST), io.DEFAULT_BUFFER_SIZE) if sys.version_info >= (3, 14) else size


def _wrap(raw: PipeFile, mode: str, buffering: int, is_binary: bool, text: tuple[Any, Any, Any]) -> Any:
    """Return the file object that the original would return for such a raw file."""
    result: Any = raw
    try:
        if not buffering:
            return raw
        if buffering == 1 and is_binary:
            message = (
                "line buffering (buffering=1) isn't supported in binary mode, the default buffer size will be used"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        is_by_line = not is_binary and (buffering == 1 or (buffering < 0 and raw.isatty()))
        size = buffering if buffering > 1 else _usual_size(raw)
        if raw.readable():
            result = Reader(raw, size)
        else:
            raw._writes_parts = True
            result = Writer(raw, size)
        if not is_binary:
            encoding, errors, newline = text
            result = Text(result, io.text_encoding(encoding, 3), errors, newline, is_by_line)
            result.mode = mode
    except BaseException:
        result.close()
        raise
    return result


class _Open:
    """``open``. An object of this class, like the builtin, does not become a method when it is a class attribute."""

    __module__ = "io"
    __name__ = __qualname__ = "open"
    __doc__ = _open.__doc__
    __wrapped__ = open_file
    __call__ = staticmethod(open_file)

    def __repr__(self) -> str:
        return repr(_open)

    def __reduce__(self) -> str:
        return "open"


def patch() -> None:
    """Replace the names."""
    new = _Open()
    for module_name in ("builtins", "io"):
        _originals.replace(module_name, "open", new)
    # pickle looks up `open` in the module that `__module__` names. replace() has copied `__module__` from the original.
    # From Python 3.12 on, that is `_io`, which is not patched.
    new.__module__ = "io"
