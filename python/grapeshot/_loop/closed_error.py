"""``ClosedError``, for the modules that raise it."""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ClosedError(OSError):
    """A descriptor was closed while a coro waited on it, or a file or channel is closed. The errno is ``EBADF``."""

    def __init__(self, message: str = "it was closed") -> None:
        super().__init__(errno.EBADF, message)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.strerror,)
