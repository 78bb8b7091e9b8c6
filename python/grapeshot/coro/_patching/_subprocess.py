"""``subprocess`` of :func:`grapeshot.coro.install`.

``Popen`` waits with ``os.waitpid``, ``selectors``, ``os.read`` and ``time.sleep``, which other parts replace. What is
left are its pipes: file objects, whose reads and writes are C code.
"""

from __future__ import annotations

import io
import subprocess
import types
import warnings

from . import _os, _waits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_open = io.open


class PipeIO(io.FileIO):
    """One end of a pipe. A coro that reads or writes waits while others run."""

    def _wait_for_data(self) -> None:
        if _waits.can_wait() and not self.closed and _waits.may_block(self.fileno()):
            _waits.wait_until_ready(self.fileno(), _waits.READABLE)

    def readinto(self, buffer: Any, /) -> Any:
        self._wait_for_data()
        return super().readinto(buffer)

    def read(self, size: int | None = -1, /) -> Any:
        if size is None or size < 0:
            return self.readall()
        self._wait_for_data()
        return super().read(size)

    def readall(self) -> Any:
        if not _waits.can_wait():
            return super().readall()
        parts: list[Any] = []
        while True:
            part = self.read(io.DEFAULT_BUFFER_SIZE * 8)
            if not part:
                return b"".join(parts) if parts or part is not None else None
            parts.append(part)

    def write(self, data: Any, /) -> Any:
        if _waits.can_wait() and not self.closed and _waits.may_block(self.fileno()):
            return _os.write(self.fileno(), data)
        return super().write(data)


def open_pipe(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
    """``io.open`` for the ends of pipes, in binary mode; all other files are the original's."""
    if not isinstance(file, int) or mode not in ("rb", "wb") or args or kwargs:
        return _open(file, mode, buffering, *args, **kwargs)
    if buffering == 1:
        # As the original.
        text = "line buffering (buffering=1) isn't supported in binary mode, the default buffer size will be used"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    raw = PipeIO(file, mode)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    return io.BufferedReader(raw, size) if mode == "rb" else io.BufferedWriter(raw, size)


def patch() -> None:
    """Let Popen open its pipes so."""
    names = types.ModuleType("io", io.__doc__)
    vars(names).update(vars(io), open=open_pipe)
    subprocess.io = names  # type: ignore[attr-defined]
