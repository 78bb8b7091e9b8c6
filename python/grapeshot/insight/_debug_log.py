"""The environment variable ``GRAPESHOT_DEBUG=latency,io,tls``, which logs each event of the topics it names.

| topic | logger | logs |
|---|---|---|
| ``latency`` | ``grapeshot.latency`` | each step that takes at least 10 ms (``latency=0.001``: 1 ms), and its owner |
| ``io`` | ``grapeshot.io`` | events of connections: open, accepted, received, sent, paused, closed, lost |
| ``tls`` | ``grapeshot.tls`` | the start of each handshake, and its cipher or why it failed; EOF from the peer |

``io`` and ``tls`` cover transports only, not the sockets of coros and not ``sock_*``. The records have the level DEBUG.
They go to stderr if the program has not configured logging. The variable is read once, the first time that a loop is
made while the variable is set. If it is not set, the only cost is the test of a flag for each read and send.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from grapeshot._loop.locks import real_rlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    StepObserver = Callable[[Any, int, int], object]

_DEFAULT_LATENCY_S = 0.01
_MAX_LATENCY_S = 1e9
_latency_s: float | None = None
_logs_io = False
_logs_tls = False
_is_read = False
# Held while the variable is read.
_reading = real_rlock()


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]  # the type of its stream does not matter
    """Writes to stderr, unless the program has handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def begin(loop: Any) -> None:
    """Start the logging that the environment variable asks for. Called for each new loop."""
    global _is_read
    if not _is_read:
        with _reading:
            if not _is_read:
                try:
                    _read(os.environ.get("GRAPESHOT_DEBUG", ""))
                finally:
                    _is_read = True
    if _latency_s is not None:
        from ._charges import observe_steps

        observe_steps(loop, "latency", _latency_observer(round(_latency_s * 1e9)))
    loop._log_events(_logs_io, _logs_tls)


def _read(text: str) -> None:
    global _latency_s, _logs_io, _logs_tls
    topics = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    unknown = topics.keys() - {"latency", "io", "tls"}
    if unknown:
        names = ", ".join(sorted(unknown))
        problem = f"GRAPESHOT_DEBUG: unknown topic {names}; the topics are latency, io, tls"
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    if "latency" in topics:
        _latency_s = _seconds(topics["latency"])
    _logs_io = "io" in topics
    _logs_tls = "tls" in topics
    if topics.keys() - unknown:
        logging.getLogger("grapeshot").addHandler(_ToStderr())
    for name in topics.keys() - unknown:
        logging.getLogger(f"grapeshot.{name}").setLevel(logging.DEBUG)


def _seconds(text: str) -> float:
    try:
        seconds = float(text or _DEFAULT_LATENCY_S)
        if 0 <= seconds <= _MAX_LATENCY_S:
            return seconds
    except ValueError:
        pass
    problem = f"GRAPESHOT_DEBUG=latency={text}: not a valid number of seconds; using {_DEFAULT_LATENCY_S}"
    warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return _DEFAULT_LATENCY_S


def _latency_observer(limit_ns: int) -> StepObserver:
    logger = logging.getLogger("grapeshot.latency")

    def observe(what: Any, wall_ns: int, cpu_ns: int) -> None:
        if wall_ns >= limit_ns:
            from ._subjects import subject_of

            subject = subject_of(what)
            logger.debug("%s %s took %.1f ms (CPU %.1f ms)", subject.kind, subject.label, wall_ns / 1e6, cpu_ns / 1e6)

    return observe
