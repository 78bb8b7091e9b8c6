"""``GRAPESHOT_DEBUG=latency,io,tls``: a line in the log for each event of what is named.

| topic | logger | a line for |
|---|---|---|
| ``latency`` | ``grapeshot.latency`` | each step that takes 10 ms (``latency=0.001``: 1 ms), and whose it is |
| ``io`` | ``grapeshot.io`` | what happens to connections: open, accepted, received, sent, paused, closed, lost |
| ``tls`` | ``grapeshot.tls`` | the begin, result and cipher of each handshake, or why it failed; the end of input |

``io`` and ``tls`` are of transports only: sockets of coros and ``sock_*`` have no lines. The records have the level
DEBUG. Where the program has not configured logging they go to stderr. The variable is read when the package makes its
first loop; without it the loop pays one test of a flag per read and send.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from . import _core

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    StepObserver = Callable[[Any, int, int], object]

_DEFAULT_LATENCY_S = 0.01
_MAX_LATENCY_S = 1e9
_latency_s: float | None = None
_is_read = False


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]  # a class without items
    """Writes to stderr, unless the program has handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def begin(loop: Any) -> None:
    """Log what the environment asks for. Called for each new loop."""
    global _is_read
    if not _is_read:
        _is_read = True
        _read(os.environ.get("GRAPESHOT_DEBUG", ""))
    if _latency_s is not None:
        from ._charges import observe_steps

        observe_steps(loop, "latency", _latency_observer(round(_latency_s * 1e9)))


def _read(text: str) -> None:
    global _latency_s
    topics = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    unknown = topics.keys() - {"latency", "io", "tls"}
    if unknown:
        names = ", ".join(sorted(unknown))
        warnings.warn(f"GRAPESHOT_DEBUG has no topic {names}; there are latency, io, tls", RuntimeWarning, stacklevel=2)
    if "latency" in topics:
        _latency_s = _seconds(topics["latency"])
    _core._log_topics("io" in topics, "tls" in topics)
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
    problem = f"GRAPESHOT_DEBUG=latency={text}: that is no number of seconds; {_DEFAULT_LATENCY_S} is taken"
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
