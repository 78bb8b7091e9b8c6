"""How long callbacks take: histograms in ``loop.statistics()``, and listeners that are told of the slow ones.

Off by default, because it takes two readings of the clock for each callback.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import sys
import time
import traceback
import weakref
from dataclasses import dataclass, field

from . import _lifecycle
from ._base import BaseLoop
from ._subjects import Subject, innermost_protocol, subject_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_RUN = _lifecycle.run_forever.__code__
# The least and the most time between two looks at a callback that runs.
_LOOK_S = (0.001, 0.05)
# So long the end of that thread is waited for.
_END_S = 1.0
# No callback takes so long, and in nanoseconds it is a number that the native loop takes.
_NEVER_S = 1e9
# Of a connection the protocol was called.
_KINDS = {"connection": "protocol"}


@dataclass(frozen=True, slots=True)
class SlowCallback:
    """What has kept the loop for a long time."""

    kind: str
    """``"task"``, ``"coro"``, ``"callback"``, ``"protocol"`` or ``"server"`` (accepting)."""
    name: str
    """The name of the task or coro, the qualified name of the callback or of the protocol's class."""
    started_s: float
    """When it began, in seconds of ``time.monotonic()`` and ``loop.time()``."""
    duration_s: float
    stack: tuple[str, ...]
    """Where it was when it had run for half of the listener's ``seconds`` or for longer, as the lines of a traceback.
    Empty if nobody asked for stacks, or if no other thread could look, because C code kept the GIL."""
    subject: Subject | None = field(default=None, repr=False)
    """The same with the function and its place, and without the names of asyncio's own making, such as ``Task-7``."""


def measure_callbacks(self: BaseLoop, enabled: bool = True) -> None:
    """Measure how long each callback takes and how long it had to wait, or stop that.

    :meth:`statistics` then has ``callback_durations`` and ``scheduling_delays``. What is measured is everything that
    the loop calls once: handles (and with them the steps of tasks), runs of coros, and the methods that a transport
    calls for one event. It goes on while there are slow listeners, whatever ``enabled`` is.
    """
    measuring = _of(self)
    measuring.is_wanted = enabled
    measuring.update()


def add_slow_listener(
    self: BaseLoop, listener: Callable[[SlowCallback], object], seconds: float = 0.1, *, stacks: bool = False
) -> None:
    """Call ``listener(slow)`` after each callback that took at least ``seconds``, with a :class:`SlowCallback`.

    It is called in the loop's thread, in no particular context, and must be quick. An exception goes to the loop's
    exception handler. With ``stacks`` a thread looks where a callback is while it lasts. The first listener makes the
    loop measure its callbacks, as :meth:`measure_callbacks` does.
    """
    if not seconds > 0:
        raise ValueError("seconds must be positive")
    measuring = _of(self)
    measuring.listeners.append((listener, min(seconds, _NEVER_S), stacks))
    measuring.update()


def remove_slow_listener(self: BaseLoop, listener: Callable[[SlowCallback], object]) -> bool:
    """Remove a listener; return whether it was there."""
    measuring = _of(self)
    for entry in measuring.listeners:
        if entry[0] == listener:
            measuring.listeners.remove(entry)
            measuring.update()
            return True
    return False


def on_slow(self: BaseLoop, what: Any, started_ns: int, took_ns: int) -> None:
    """Tell the listeners. The native loop calls this."""
    measuring = _of(self)
    stack = () if measuring.looker is None else measuring.looker.stack_of(started_ns)
    subject = subject_of(what)
    kind = _KINDS.get(subject.kind, subject.kind)
    slow = SlowCallback(kind, _name(what, subject), started_ns / 1e9, took_ns / 1e9, stack, subject)
    for listener, seconds, _ in tuple(measuring.listeners):
        if slow.duration_s >= seconds:
            try:
                listener(slow)
            except Exception as exc:
                self.call_exception_handler({"message": f"Exception in slow listener {listener!r}", "exception": exc})


def _name(what: Any, subject: Subject) -> str:
    """Return the name of a task or coro, even if it is ``Task-7``, a protocol's class, or the name of the function."""
    owner = getattr(what, "__self__", what)
    if subject.kind in ("task", "coro"):
        return str(owner.get_name())
    if isinstance(owner, asyncio.BaseTransport):
        return type(innermost_protocol(owner)).__qualname__
    return subject.function or subject.name


def _of(loop: BaseLoop) -> _Measuring:
    if loop._measuring is None:
        loop._measuring = _Measuring(loop)
    return loop._measuring  # type: ignore[no-any-return]


class _Measuring:
    """Who wants what of a loop."""

    def __init__(self, loop: BaseLoop) -> None:
        self._loop = weakref.ref(loop)
        self.is_wanted = False
        self.listeners: list[tuple[Callable[[SlowCallback], object], float, bool]] = []
        self.looker: _Looker | None = None

    def update(self) -> None:
        loop = self._loop()
        assert loop is not None
        limits = [seconds for _, seconds, _ in self.listeners]
        loop._set_measured(self.is_wanted or bool(limits), int(min(limits) * 1e9) if limits else None)
        limits = [seconds for _, seconds, has_stacks in self.listeners if has_stacks]
        if self.looker is not None:
            self.looker.stop()
            self.looker = None
        if limits:
            self.looker = _Looker(loop, min(limits) / 2)

    def close(self) -> None:
        """The loop is about to be closed."""
        self.listeners.clear()
        self.is_wanted = False
        self.update()


class _Looker:
    """A thread that notes where callbacks are that last long.

    It is made by ``_thread``: in a program that :func:`grapeshot.coro.install` has patched, those of ``threading`` are
    coros, and one would look only while nothing else runs.
    """

    def __init__(self, loop: BaseLoop, after_s: float) -> None:
        self._loop = weakref.ref(loop)
        self._after_ns = int(after_s * 1e9)
        # Taken while it is to look, and while it lives.
        self._is_wanted = _thread.allocate_lock()
        self._lives = _thread.allocate_lock()
        # When the last callback began that was seen, how long it had run then, and where it was.
        self._seen: tuple[int, int, tuple[str, ...]] = (0, 0, ())
        pause_s = min(max(after_s, _LOOK_S[0]), _LOOK_S[1])
        self._pid = os.getpid()
        self._is_wanted.acquire()
        self._lives.acquire()
        try:
            self._thread = _thread.start_new_thread(self._run, (pause_s,))
        except BaseException:
            self._lives.release()
            raise

    def stop(self) -> None:
        self._is_wanted.release()
        # A forked child has no such thread, and one that the interpreter's end has frozen never ends.
        if self._pid == os.getpid() and self._thread != _thread.get_ident():
            self._lives.acquire(timeout=_END_S)

    def stack_of(self, started_ns: int) -> tuple[str, ...]:
        seen_ns, _, stack = self._seen
        return stack if seen_ns == started_ns else ()

    def _run(self, pause_s: float) -> None:
        try:
            while not self._is_wanted.acquire(timeout=pause_s):
                loop = self._loop()
                if loop is None:
                    return
                self._look(loop)
                del loop
        finally:
            self._lives.release()

    def _look(self, loop: BaseLoop) -> None:
        since_ns, thread = loop._running_since_ns(), loop._thread_id
        if since_ns is None or thread is None:
            return
        ran_ns = time.monotonic_ns() - since_ns
        seen_ns, seen_after_ns, _ = self._seen
        # Once, and again whenever it has run for twice as long.
        if ran_ns < (2 * seen_after_ns if seen_ns == since_ns else self._after_ns):
            return
        stack = _stack_of(sys._current_frames().get(thread))
        if loop._running_since_ns() == since_ns:
            self._seen = (since_ns, ran_ns, stack)


def _stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the lines of a thread's stack, without what has called the loop."""
    frames = []
    while frame is not None and frame.f_code is not _RUN:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    lines = traceback.StackSummary.extract(reversed(frames)).format()
    return tuple(line for entry in lines for line in entry.rstrip("\n").split("\n"))
