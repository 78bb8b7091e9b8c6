"""``enable``: a back door that is opened on request, by a signal or an environment variable.

``python -m grapeshot``, ``python -m grapeshot.coro`` and ``python -m grapeshot.coro.wsgi`` open one if the variable
GRAPESHOT_BACKDOOR contains a path, without any code in the program.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys

from grapeshot._loop import hooks
from grapeshot._loop.locks import real_rlock
from grapeshot.insight import _tree

from ._server import Server, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

VARIABLE = "GRAPESHOT_BACKDOOR"
# Values of the variable that open_by_environment() ignores: they are for enable(), which then opens a back door at the
# path that the program passes to it.
_YES = ("1", "yes", "true", "on")

_logger = logging.getLogger("grapeshot.insight.backdoor")
# Switches that were asked to open. Each opens in the running loop, or else when the next loop begins to run.
_asked: list[Switch] = []
# The switch of `python -m grapeshot` and the like. If the program calls enable() with a variable that asks for
# a back door, the program's switch replaces this one.
_of_command: Switch | None = None
# Held while a switch opens or closes, because loops of several threads may begin to run at the same time.
_opening = real_rlock()


def _on_run(loop: Any) -> None:
    """Open the requested back doors, because a loop begins to run. Some may still be open from an earlier run."""
    for switch in tuple(_asked):
        server = switch.server
        if server is None or server._loop is not loop:
            loop.call_soon(switch._open)


class Switch:
    """Opens a back door on request. :func:`enable` returns a switch. The end of a ``with`` block closes the switch."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        signum: int | None,
        variable: str | None,
        namespace: dict[str, Any] | None,
    ) -> None:
        value = os.environ.get(variable, "") if variable is not None else ""
        self._path = _path_of(value) if "/" in value else os.fsdecode(path)
        self._signum = signum
        self._namespace = namespace
        self.server: Server | None = None
        """The back door. None before it has been opened, and after :meth:`close`."""
        self._pid = self._first_pid = os.getpid()
        if signum is not None:
            handler = signal.getsignal(signum)
            if handler not in (signal.SIG_DFL, signal.SIG_IGN):
                is_ours = isinstance(getattr(handler, "__self__", None), Switch)
                who = "another enable() uses {}" if is_ours else "the program has a handler for {}"
                raise ValueError(f"{who.format(signal.Signals(signum).name)}: pass another signal as signum")
            self._before = signal.signal(signum, self._on_signal)
        if value not in ("", "0"):
            if _of_command is not None:
                _of_command.close()
            self._ask()
            self._open()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the back door and stop reacting to the signal. Idempotent."""
        if self._signum is not None:
            if signal.getsignal(self._signum) == self._on_signal:
                signal.signal(self._signum, self._before)
            self._signum = None
        with _opening:
            if self in _asked:
                _asked.remove(self)
                if not _asked:
                    hooks.on_run = None
            server, self.server = self.server, None
        if server is not None:
            server.close()

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._ask()
        loop = _tree.running_loop()
        if loop is not None:
            loop.call_soon_threadsafe(self._open)

    def _ask(self) -> None:
        if self not in _asked:
            _asked.append(self)
        hooks.on_run = _on_run

    def _open(self) -> None:
        if self._pid != os.getpid():
            # This is the child of a fork. The back door belongs to the parent.
            self._pid = os.getpid()
            self.server = None
        path = self._path
        if "{pid}" not in path and self._is_in_child():
            path += ".{pid}"
        try:
            with _opening:
                if self not in _asked or _tree.running_loop() is None:
                    return
                if self.server is not None and not self.server.is_closed:
                    return
                server = self.server = serve(path, namespace=self._namespace)
        except (OSError, ValueError) as exc:
            self._report_failure(exc)
        else:
            self._report_success(server.path)

    def _is_in_child(self) -> bool:
        """Whether a parent process may be using the path: this process was forked, or started by multiprocessing."""
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            return True
        # If this process was forked and its parent has ended, the program has become a daemon. Then this process is the
        # program itself, and not a child in the sense of this method.
        return self._first_pid != os.getpid() and _is_alive(self._first_pid)

    def _report_failure(self, exc: Exception) -> None:
        _logger.error("the back door cannot be opened: %s", str(exc))

    def _report_success(self, path: str) -> None:
        _logger.warning("the back door %s is open", path)


class _SwitchOfCommand(Switch):
    """Opens the back door for ``python -m grapeshot``. It writes no warnings or errors to the program's log."""

    def __init__(self, value: str) -> None:
        super().__init__(_path_of(value), None, None, None)
        self._value = value
        self._has_failed = False
        self._ask()
        atexit.register(self._at_exit)

    def _report_failure(self, exc: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            where = f" ({exc.filename})" if isinstance(exc, OSError) and exc.filename else ""
            _print_problem(self._value, f"the back door cannot be opened: {reason}{where}")

    def _report_success(self, path: str) -> None:
        _logger.info("the back door %s is open", path)

    def _at_exit(self) -> None:
        """Remove the socket's file, in case the program has not closed its loop."""
        server = self.server
        if server is not None and not server.is_closed and self._pid == os.getpid():
            server._file.close()


def open_by_environment() -> None:
    """For the commands: open a back door when the first loop begins to run, if the variable contains a path."""
    global _of_command
    value = os.environ.get(VARIABLE, "")
    if "/" in value:
        _of_command = _SwitchOfCommand(value)
    elif value not in ("", "0", *_YES):
        _print_problem(value, f"not a path: a path must contain a slash, as in ./{value}")


def _is_alive(pid: int) -> bool:
    """Whether a process is running. A zombie (ended, but not yet waited for) is not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat")  # it has just ended, unless this system has no /proc
    except OSError:
        return True


def _path_of(value: str) -> str:
    """Return the absolute path for a value of the variable. For a directory: a path in it that contains ``{pid}``.

    It is absolute because the program may change its current directory later.
    """
    path = os.path.abspath(value)
    return os.path.join(path, "{pid}.bd") if value.endswith("/") or os.path.isdir(path) else path


def _print_problem(value: str, problem: str) -> None:
    os.write(2, f"{VARIABLE}={value}: {problem}\n".encode(errors="backslashreplace"))


def enable(
    path: str | os.PathLike[str],
    *,
    signum: int | None = signal.SIGUSR2,
    variable: str | None = VARIABLE,
    namespace: dict[str, Any] | None = None,
) -> Switch:
    """Open a back door at ``path`` when the process receives the signal, or now if the environment variable is set.

    Call this in the main thread. If no loop is running at the time of the request, the back door opens when the next
    grapeshot loop begins to run. Until then, nothing listens.

    If the value of the variable contains a slash, it is used instead of ``path``; a directory means a file ``PID.bd``
    in it. Any other value asks for ``path``, unless it is 0 or empty. A child of this process, forked or made by
    multiprocessing, opens a back door of its own at ``path.PID``, or at ``path`` if that contains ``{pid}``. An error
    while opening is logged (logger ``grapeshot.insight.backdoor``). Pass None as ``signum`` or ``variable`` to disable
    that way of asking.

    Raises:
        ValueError: the program already handles that signal, or this is not the main thread.
    """
    return Switch(path, signum, variable, namespace)
