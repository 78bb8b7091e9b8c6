"""Measuring how long callbacks take: histograms in ``loop.statistics()``, and listeners for slow callbacks.

Measuring is off by default, because it costs two readings of the clock for each callback.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
import weakref
from dataclasses import dataclass, field

from grapeshot._loop import lifecycle
from grapeshot._loop.base import BaseLoop
from grapeshot._loop.helper_thread import HelperThread

from . import _waits
from ._subjects import Subject, application_protocol, subject_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_RUN = lifecycle.run_forever.__code__
# The shortest and the longest time between two checks of how long the current callback has been running.
_CHECK_S = (0.001, 0.05)
# How long to wait for the end of the thread that checks, in seconds.
_END_S = 1.0
# The largest limit for slow callbacks. No callback takes that long, and the native loop can store it as nanoseconds.
_NEVER_S = 1e9
# The kind to report, where it differs from the subject's kind: a step of a connection is a call of its protocol.
_KINDS = {"connection": "protocol"}


@dataclass(frozen=True, slots=True)
class SlowCallback:
    """A callback, task step, coro run or protocol call that took long."""

    kind: str
    """``"task"``, ``"coro"``, ``"callback"``, ``"protocol"`` or ``"server"`` (accepting)."""
    name: str
    """The name of the task or coro, or the qualified name of the callback or of the protocol's class."""
    started_s: float
    """When it began, in seconds of ``time.monotonic()`` and ``loop.time()``."""
    duration_s: float
    stack: tuple[str, ...]
    """Its stack, as the lines of a traceback. A thread takes the stack if there are listeners that were added with
    ``stacks=True``, and if the callback runs for at least half of the smallest ``seconds`` of these listeners. Empty if
    there are no such listeners, if C code kept the GIL so that the thread could not run, or if there is no GIL."""
    subject: Subject | None = field(default=None, repr=False)
    """Its kind, name, function and place. The name is empty if it is a default name such as ``Task-7``."""


def measure_callbacks(self: BaseLoop, enabled: bool = True) -> None:
    """Start (or stop) measuring how long each callback takes and how long it had to wait before it ran.

    The results are ``callback_durations`` and ``scheduling_delays`` of :meth:`statistics`. One measurement covers one
    callback or task step, one run of a coro until it waits, or the calls of a protocol's methods for one event of a
    transport. While there are listeners for slow callbacks, measuring continues even if ``enabled`` is false.
    """
    measuring = _of(self)
    measuring.is_wanted = enabled
    measuring.update()


def add_slow_listener(
    self: BaseLoop, listener: Callable[[SlowCallback], object], seconds: float = 0.1, *, stacks: bool = False
) -> None:
    """Call ``listener(slow)``, with a :class:`SlowCallback`, after each callback that took at least ``seconds``.

    The listener is called in the loop's thread, in no particular context, and must be quick. If it raises, the loop's
    exception handler is called. With ``stacks``, a thread records the stack of a callback while it is still running.
    The first listener makes the loop measure its callbacks, like :meth:`measure_callbacks`.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")
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
    """Call the listeners. The native loop calls this function after a slow step."""
    measuring = _of(self)
    stack = () if measuring.recorder is None else measuring.recorder.stack_of(started_ns)
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
    """Return the name of a task or coro (also one like ``Task-7``), of a protocol's class, or of a function."""
    owner = getattr(what, "__self__", what)
    if subject.kind in ("task", "coro"):
        return str(owner.get_name())
    if isinstance(owner, asyncio.BaseTransport):
        return type(application_protocol(owner)).__qualname__
    return subject.function or subject.name


def _of(loop: BaseLoop) -> _Measuring:
    if loop._measuring is None:
        loop._measuring = _Measuring(loop)
    return loop._measuring  # type: ignore[no-any-return]


class _Measuring:
    """A loop's listeners for slow callbacks, the thread that takes stacks, and whether `measure_callbacks` is on."""

    def __init__(self, loop: BaseLoop) -> None:
        self._loop = weakref.ref(loop)
        self.is_wanted = False
        self.listeners: list[tuple[Callable[[SlowCallback], object], float, bool]] = []
        self.recorder: _StackRecorder | None = None

    def update(self) -> None:
        loop = self._loop()
        assert loop is not None
        limits = [seconds for _, seconds, _ in self.listeners]
        loop._set_measured(self.is_wanted or bool(limits), int(min(limits) * 1e9) if limits else None)
        limits = [seconds for _, seconds, has_stacks in self.listeners if has_stacks]
        if self.recorder is not None:
            self.recorder.stop(_END_S)
            self.recorder = None
        if limits:
            recorder = _StackRecorder(loop, min(limits) / 2)
            recorder.start()
            self.recorder = recorder

    def close(self) -> None:
        """Stop measuring, because the loop is about to be closed."""
        self.listeners.clear()
        self.is_wanted = False
        self.update()


class _StackRecorder(HelperThread):
    """A helper thread that records the stacks of callbacks that run for long."""

    def __init__(self, loop: BaseLoop, after_s: float) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)
        self._after_ns = int(after_s * 1e9)
        self._pause_s = min(max(after_s, _CHECK_S[0]), _CHECK_S[1])
        # The last stack that was taken: when its callback began, how long the callback had run by then, and the stack.
        self._seen: tuple[int, int, tuple[str, ...]] = (0, 0, ())

    def stack_of(self, started_ns: int) -> tuple[str, ...]:
        seen_ns, _, stack = self._seen
        return stack if seen_ns == started_ns else ()

    def run(self) -> None:
        while not self.wait_for_stop(self._pause_s):
            loop = self._loop()
            if loop is None:
                return
            self._record(loop)
            del loop

    def _record(self, loop: BaseLoop) -> None:
        since_ns, thread = loop._running_since_ns(), loop._thread_id
        if since_ns is None or thread is None:
            return
        ran_ns = time.monotonic_ns() - since_ns
        seen_ns, seen_after_ns, _ = self._seen
        # Take the first stack after the given time, and another one each time the running time has doubled.
        if ran_ns < (2 * seen_after_ns if seen_ns == since_ns else self._after_ns):
            return
        frame = sys._current_frames().get(thread) if _waits.threads_are_readable() else None
        stack = _stack_of(frame)
        if loop._running_since_ns() == since_ns:
            self._seen = (since_ns, ran_ns, stack)


def _stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the lines of a thread's stack, without the frames that called the loop."""
    frames = []
    while frame is not None and frame.f_code is not _RUN:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    lines = traceback.StackSummary.extract(reversed(frames)).format()
    return tuple(line for entry in lines for line in entry.rstrip("\n").split("\n"))
