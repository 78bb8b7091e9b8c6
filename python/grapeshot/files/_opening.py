"""``open``: checks the arguments as the built-in function does, opens the file, and chooses its class."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
import warnings
from typing import Any, Generic, TypeVar

from grapeshot._loop import aio

from ._binary import BinaryFile
from ._raw import AsyncFile, RawFile
from ._text import TextFile, TextOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from typing import Literal, overload

    from _typeshed import FileDescriptorOrPath, OpenBinaryMode, OpenTextMode

    Opener = Callable[[str, int], int]

_F = TypeVar("_F", bound=AsyncFile)
_CREATION = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND}


class Opening(Generic[_F]):
    """The result of :func:`open`: ``await`` it to get the file, or use it as an asynchronous context manager."""

    def __init__(self, opening: Coroutine[Any, Any, _F]) -> None:
        self._opening = opening
        self._file: _F | None = None

    def __await__(self) -> Generator[Any, Any, _F]:
        return self._open().__await__()

    async def __aenter__(self) -> _F:
        return await self._open()

    async def _open(self) -> _F:
        if self._file is None:
            self._file = await self._opening
        return self._file

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            await self._file.close()


if TYPE_CHECKING:

    @overload
    def open(  # noqa: A001
        file: FileDescriptorOrPath,
        mode: OpenTextMode = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Opener | None = None,
    ) -> Opening[TextFile]: ...

    @overload
    def open(  # type: ignore[overload-overlap]  # noqa: A001
        file: FileDescriptorOrPath,
        mode: OpenBinaryMode,
        buffering: Literal[0],
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        closefd: bool = True,
        opener: Opener | None = None,
    ) -> Opening[RawFile]: ...

    @overload
    def open(  # noqa: A001
        file: FileDescriptorOrPath,
        mode: OpenBinaryMode,
        buffering: int = -1,
        encoding: None = None,
        errors: None = None,
        newline: None = None,
        closefd: bool = True,
        opener: Opener | None = None,
    ) -> Opening[BinaryFile]: ...


def open(  # noqa: A001
    file: FileDescriptorOrPath,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Opener | None = None,
) -> Opening[Any]:
    """Open a file; return an object to ``await``, or to use in ``async with``.

    The arguments are those of the built-in ``open``. A text file is a :class:`TextFile`, a binary one a
    :class:`BinaryFile`, or with ``buffering=0`` a :class:`RawFile`. ``opener`` is called in the loop's default
    executor.

    Raises:
        OSError: the file cannot be opened. This is raised when the result is awaited.
        ValueError, TypeError, LookupError: wrong arguments, as for the built-in function.
    """
    kind = _parsed(mode)
    is_binary = "b" in mode
    if is_binary:
        for name, value in (("encoding", encoding), ("errors", errors), ("newline", newline)):
            if value is not None:
                article = "a" if name == "newline" else "an"
                raise ValueError(f"binary mode doesn't take {article} {name} argument")
        options = None
        if buffering == 1:
            warnings.warn(
                "line buffering (buffering=1) isn't supported in binary mode, the default buffer size will be used",
                RuntimeWarning,
                stacklevel=2,
            )
    else:
        if buffering == 0:
            raise ValueError("can't have unbuffered text I/O")
        if sys.flags.warn_default_encoding and encoding is None:
            warnings.warn("'encoding' argument not specified", EncodingWarning, stacklevel=2)
        options = TextOptions(encoding, errors, newline, line_buffering=buffering == 1)
    if isinstance(file, int):
        if file < 0:
            raise ValueError("negative file descriptor")
    else:
        os.fspath(file)  # raises TypeError if it is not a path
        if not closefd:
            raise ValueError("Cannot use closefd=False with file name")
    return Opening(_open(file, kind, mode, buffering, options, closefd, opener))


def _parsed(mode: str) -> str:
    """Return the letter r, w, x or a of the mode. Raises the exceptions of the built-in function."""
    if not isinstance(mode, str):
        raise TypeError(f"open() argument 'mode' must be str, not {type(mode).__name__}")
    letters = set(mode)
    if letters - set("rwxabt+") or len(mode) > len(letters):
        raise ValueError(f"invalid mode: {mode!r}")
    if {"t", "b"} <= letters:
        raise ValueError("can't have text and binary mode at once")
    kinds = letters & set("rwxa")
    if len(kinds) != 1:
        if kinds:
            raise ValueError("must have exactly one of create/read/write/append mode")
        raise ValueError("Must have exactly one of create/read/write/append mode and at most one plus")
    return kinds.pop()


async def _open(
    file: Any, kind: str, mode: str, buffering: int, options: TextOptions | None, closefd: bool, opener: Opener | None
) -> Any:
    queue = aio.queue_of(asyncio.get_running_loop())
    raw_mode = kind + "b" + ("+" if "+" in mode else "")
    fd = file if isinstance(file, int) else await _descriptor(queue, file, kind, raw_mode, opener)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        # The mode that io.FileIO would show.
        shown = "rb+" if raw_mode == "wb+" and sys.version_info < (3, 15) else raw_mode
        arguments: Any = (queue, fd, file, shown)
        keywords: Any = {"closefd": closefd, "appends": kind == "a", "status": status}
        if buffering == 0:
            return RawFile(*arguments, **keywords)
        if buffering > 1:
            keywords["buffer_size"] = buffering
        binary = BinaryFile(*arguments, **keywords)
    except BaseException:
        if not isinstance(file, int):
            os.close(fd)
        raise
    if options is None:
        return binary
    if buffering == -1 and os.isatty(fd):
        options.line_buffering = True
    return TextFile(binary, options, mode)


async def _descriptor(queue: aio.AioQueue, path: Any, kind: str, raw_mode: str, opener: Opener | None) -> int:
    writes = kind != "r"
    access = os.O_RDWR if "+" in raw_mode else os.O_WRONLY if writes else os.O_RDONLY
    flags = _CREATION[kind] | access | os.O_CLOEXEC
    sys.audit("open", path, raw_mode, flags)
    if opener is not None:
        fd = await asyncio.get_running_loop().run_in_executor(None, opener, path, flags)
        if not isinstance(fd, int):
            raise TypeError("expected integer from opener")
        if fd < 0:
            raise ValueError(f"opener returned {fd}")
        os.set_inheritable(fd, False)
        return fd
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    try:
        return await aio.open_file(queue, encoded, flags, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
