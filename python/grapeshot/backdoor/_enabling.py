"""``enable``: a back door that opens when somebody asks for it, by a signal or by a variable of the environment."""

from __future__ import annotations

import logging
import os
import signal

from grapeshot import _tree
from grapeshot._base import BaseLoop

from ._server import Server, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_logger = logging.getLogger("grapeshot.backdoor")


class Switch:
    """Opens a back door when it is asked for. Made by :func:`enable`; a context manager."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        signum: int | None,
        variable: str | None,
        namespace: dict[str, Any] | None,
    ) -> None:
        asked = os.environ.get(variable, "") if variable is not None else ""
        self._is_asked = asked not in ("", "0")
        self._path = asked if "/" in asked else os.fsdecode(path)
        self._signum = signum
        self._namespace = namespace
        self.server: Server | None = None
        """The back door, None while it was not asked for."""
        self._pid = os.getpid()
        self._hook = self._on_run
        if signum is not None:
            handler = signal.getsignal(signum)
            if handler not in (signal.SIG_DFL, signal.SIG_IGN):
                is_ours = isinstance(getattr(handler, "__self__", None), Switch)
                who = "another enable() handles {}" if is_ours else "the program handles {} itself"
                raise ValueError(f"{who.format(signal.Signals(signum).name)}: choose another signal")
            self._before = signal.signal(signum, self._on_signal)
        if self._is_asked:
            BaseLoop._on_run = self._hook
            self._open()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the back door, and open none any more. Idempotent."""
        if self._signum is not None:
            if signal.getsignal(self._signum) == self._on_signal:
                signal.signal(self._signum, self._before)
            self._signum = None
        if BaseLoop._on_run is self._hook:
            BaseLoop._on_run = None
        self._is_asked = False
        if self.server is not None:
            self.server.close()
            self.server = None

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_asked = True
        BaseLoop._on_run = self._hook
        loop = _tree.running_loop()
        if loop is not None:
            loop.call_soon_threadsafe(self._open)

    def _on_run(self, loop: Any) -> None:
        """A loop begins to run: for the first time, or again, as the ends of a program do."""
        if self.server is None or self.server._loop is not loop:
            loop.call_soon(self._open)

    def _open(self) -> None:
        if self._pid != os.getpid():
            # A forked child, which has a path of its own if that has a {pid}.
            self._pid = os.getpid()
            self.server = None
        if not self._is_asked or _tree.running_loop() is None:
            return
        if self.server is not None and not self.server.is_closed:
            return
        try:
            self.server = serve(self._path, namespace=self._namespace)
        except (OSError, ValueError) as exc:
            _logger.error("the back door cannot be opened: %s", str(exc))
        else:
            _logger.warning("the back door %s is open", self.server.path)


def enable(
    path: str | os.PathLike[str],
    *,
    signum: int | None = signal.SIGUSR2,
    variable: str | None = "GRAPESHOT_BACKDOOR",
    namespace: dict[str, Any] | None = None,
) -> Switch:
    """Open a back door at ``path`` once the process gets the signal, or if the variable is set now.

    Call it in the main thread, also before a loop runs: the back door then opens with the next grapeshot loop. Nothing
    listens before. A value of the variable with a slash is the path; any other value but 0 asks for ``path``. What
    goes wrong when it opens is logged (logger ``grapeshot.backdoor``). ``None`` switches either of the ways off.

    Raises:
        ValueError: the program handles that signal already, or this is not the main thread.
    """
    return Switch(path, signum, variable, namespace)
