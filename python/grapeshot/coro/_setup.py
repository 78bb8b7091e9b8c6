"""Connects the package with the native code. This runs when the package is imported, before any coro is made."""

from __future__ import annotations

import gc
import os

from grapeshot import _core
from grapeshot._loop import hooks, lifecycle

from . import _ending, _errors, _fork, _latency
from ._coroutine import Coro
from ._event_loop import pending_loop
from ._groups import wait_for

_reason = _core._coro_setup(_errors, Coro)
if _reason is not None:
    raise ImportError(_reason)
_core._coro_set_hooks(
    pending_loop, _ending.watch_thread, wait_for, _latency.report, _fork.end_child, lifecycle.run_forever
)
_latency.apply_variable()
# This callback must be the first one, so that the native code knows of a garbage collection before another callback
# tries to wait.
gc.callbacks.insert(0, _core._coro_note_collection)
os.register_at_fork(
    before=_fork.before_fork, after_in_parent=_fork.after_fork_in_parent, after_in_child=_fork.after_fork_in_child
)
hooks.before_close = _ending.before_close
hooks.watch_end = _ending.watch_end
