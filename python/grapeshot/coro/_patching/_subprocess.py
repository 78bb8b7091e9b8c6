"""The part ``subprocess`` of :func:`grapeshot.coro.patch`.

``Popen`` waits with ``os.waitpid``, ``selectors``, ``os.read`` and ``time.sleep``, which other parts patch. This part
patches the pipes of ``Popen``, which are file objects that read and write in C code. If a child inherits a patched
socket without a timeout, this part also puts the socket into blocking mode (``_socket_numbers.lend``).
"""

from __future__ import annotations

import functools
import io
import subprocess
import types

from . import _open, _socket_numbers
from ._file_objects import Text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _lend_before(method: Callable[..., Any], files: Callable[..., Any]) -> Callable[..., Any]:
    """Patch a method of ``Popen``: it first calls ``_socket_numbers.lend`` for each file that ``files`` returns."""

    @functools.wraps(method)
    def lend(self: Any, *args: Any, **kwargs: Any) -> Any:
        for file in files(*args, **kwargs):
            _socket_numbers.lend(file)
        return method(self, *args, **kwargs)

    return lend


def _streams(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the arguments of ``_get_handles`` other than None. (Negative numbers among them are not descriptors.)"""
    return [file for file in (*args, *kwargs.values()) if file is not None]


def _passed(*args: Any, **kwargs: Any) -> list[Any]:
    """Return ``pass_fds`` of ``_execute_child(args, executable, preexec_fn, close_fds, pass_fds, ...)``."""
    return list(args[4] if len(args) > 4 else kwargs.get("pass_fds", ()))


def patch() -> None:
    """Make Popen open its pipes with the patched classes, and put inherited sockets into blocking mode."""
    names = types.ModuleType("io", io.__doc__)
    vars(names).update(vars(io), open=_open.open_file, TextIOWrapper=Text)
    subprocess.io = names  # type: ignore[attr-defined]
    popen: Any = subprocess.Popen
    popen._get_handles = _lend_before(popen._get_handles, _streams)
    popen._execute_child = _lend_before(popen._execute_child, _passed)
