"""``enable``: a back door that opens when somebody asks for it, by a signal or by a variable of the environment.

``python -m grapeshot``, ``python -m grapeshot.coro`` and ``python -m grapeshot.coro.wsgi`` open one by the variable
alone, without a line of the program.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys

from grapeshot import _tree
from grapeshot._base import BaseLoop

from ._server import Server, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

VARIABLE = "GRAPESHOT_BACKDOOR"
# Values that ask for the path that the program gives to enable().
_YES = ("1", "yes", "true", "on")

_logger = logging.getLogger("grapeshot.backdoor")
# Those that were asked to open, each with the next loop; and that of the command, which the program's own one replaces.
_asked: list[Switch] = []
_of_command: Switch | None = None


def _on_run(loop: Any) -> None:
    """A loop begins to run: for the first time, or again, as the ends of a program do."""
    for switch in tuple(_asked):
        if switch.server is None or switch.server._loop is not loop:
            loop.call_soon(switch._open)


class Switch:
    """Opens a back door when it is asked for. Made by :func:`enable`; a context manager."""

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
        """The back door, None while it was not asked for."""
        self._pid = self._first_pid = os.getpid()
        if signum is not None:
            handler = signal.getsignal(signum)
            if handler not in (signal.SIG_DFL, signal.SIG_IGN):
                is_ours = isinstance(getattr(handler, "__self__", None), Switch)
                who = "another enable() handles {}" if is_ours else "the program handles {} itself"
                raise ValueError(f"{who.format(signal.Signals(signum).name)}: choose another signal")
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
        """Close the back door, and open none any more. Idempotent."""
        if self._signum is not None:
            if signal.getsignal(self._signum) == self._on_signal:
                signal.signal(self._signum, self._before)
            self._signum = None
        if self in _asked:
            _asked.remove(self)
            if not _asked:
                BaseLoop._on_run = None
        if self.server is not None:
            self.server.close()
            self.server = None

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._ask()
        loop = _tree.running_loop()
        if loop is not None:
            loop.call_soon_threadsafe(self._open)

    def _ask(self) -> None:
        if self not in _asked:
            _asked.append(self)
        BaseLoop._on_run = _on_run

    def _open(self) -> None:
        if self._pid != os.getpid():
            # A forked child: the back door is its parent's.
            self._pid = os.getpid()
            self.server = None
        if self not in _asked or _tree.running_loop() is None:
            return
        if self.server is not None and not self.server.is_closed:
            return
        path = self._path
        if "{pid}" not in path and self._is_in_child():
            path += ".{pid}"
        try:
            self.server = serve(path, namespace=self._namespace)
        except (OSError, ValueError) as exc:
            self._tell_failure(exc)
        else:
            self._tell_success(self.server.path)

    def _is_in_child(self) -> bool:
        """Whether another process may have the path: the one that has forked this one, or that of multiprocessing."""
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            return True
        # Where the first process has ended, this one has become a daemon, and is the program now.
        return self._first_pid != os.getpid() and _is_alive(self._first_pid)

    def _tell_failure(self, exc: Exception) -> None:
        _logger.error("the back door cannot be opened: %s", str(exc))

    def _tell_success(self, path: str) -> None:
        _logger.warning("the back door %s is open", path)


class _SwitchOfCommand(Switch):
    """Opens the back door of a program that may not know of it, so it leaves the program's log alone."""

    def __init__(self, value: str) -> None:
        super().__init__(_path_of(value), None, None, None)
        self._value = value
        self._has_failed = False
        self._ask()
        atexit.register(self._at_exit)

    def _tell_failure(self, exc: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            where = f" ({exc.filename})" if isinstance(exc, OSError) and exc.filename else ""
            _complain(self._value, f"the back door cannot be opened: {reason}{where}")

    def _tell_success(self, path: str) -> None:
        _logger.info("the back door %s is open", path)

    def _at_exit(self) -> None:
        """The program may have left its loop open."""
        if self.server is not None and not self.server.is_closed and self._pid == os.getpid():
            self.server._file.close()


def open_by_environment() -> None:
    """Open a back door with the first loop that runs, if the variable has a path. For the commands."""
    global _of_command
    value = os.environ.get(VARIABLE, "")
    if "/" in value:
        _of_command = _SwitchOfCommand(value)
    elif value not in ("", "0", *_YES):
        _complain(value, f"this is no path, which has a slash, as ./{value}")


def _is_alive(pid: int) -> bool:
    """Whether a process runs. One that nobody has collected yet does not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not os.path.exists("/proc/self/stat")  # it has ended just now, or this system has no /proc
    except OSError:
        return True


def _path_of(value: str) -> str:
    """Return the path that the variable asks for, whatever the directory will be; in a directory one per process."""
    path = os.path.abspath(value)
    return os.path.join(path, "{pid}.bd") if value.endswith("/") or os.path.isdir(path) else path


def _complain(value: str, problem: str) -> None:
    os.write(2, f"{VARIABLE}={value}: {problem}\n".encode(errors="backslashreplace"))


def enable(
    path: str | os.PathLike[str],
    *,
    signum: int | None = signal.SIGUSR2,
    variable: str | None = VARIABLE,
    namespace: dict[str, Any] | None = None,
) -> Switch:
    """Open a back door at ``path`` once the process gets the signal, or if the variable is set now.

    Call it in the main thread, also before a loop runs: the back door then opens with the next grapeshot loop. Nothing
    listens before. A value of the variable with a slash is the path, or a directory for a file ``PID.bd``; any other
    value but 0 asks for ``path``. A child of this process, forked or made by multiprocessing, opens one of its own at
    ``path.PID``, unless ``path`` has a ``{pid}``. What goes wrong when it opens is logged (logger
    ``grapeshot.backdoor``). ``None`` switches either of the ways off.

    Raises:
        ValueError: the program handles that signal already, or this is not the main thread.
    """
    return Switch(path, signum, variable, namespace)
