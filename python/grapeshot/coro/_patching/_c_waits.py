"""Changes libraries that wait in C code: they then wait in Python code, which calls patched functions.

A library is changed when it is imported, or at once if it was imported before. For psycopg, the Python code is one of
psycopg's own wait functions. For sqlite3, it is in ``_sqlite3``.
"""

from __future__ import annotations

import os

from . import _import_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _change_psycopg(waiting: Any) -> None:
    """Make psycopg 3 wait with ``select.poll``, unless the program has chosen another wait function."""
    if "PSYCOPG_WAIT_FUNC" not in os.environ and waiting.wait is getattr(waiting, "wait_c", None):
        waiting.wait = getattr(waiting, "wait_poll", waiting.wait_selector)


def _change_sqlite3(_: Any) -> None:
    from . import _sqlite3

    _sqlite3.replace()


def patch_clients() -> None:
    """Let psycopg, which waits for sockets in C code, wait in Python code."""
    _import_hooks.after_import("psycopg.waiting", _change_psycopg)


def patch() -> None:
    """The part ``sqlite3`` of ``coro.patch()``: make sqlite3 let other coros run while it waits."""
    _import_hooks.after_import("sqlite3", _change_sqlite3)
