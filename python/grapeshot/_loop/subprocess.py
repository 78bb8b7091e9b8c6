"""Subprocesses: started by :class:`subprocess.Popen`, watched by the loop, with pipes as transports.

    subprocess_exec, subprocess_shell -> asyncio's own -> make_transport -> Popen
                                                    |
                                         SubprocessTransport
                                                    |- one pipe transport per PIPE among stdin, stdout, stderr
                                                    '- the child's exit, reported by the native loop (pidfd, no SIGCHLD)

``Popen`` starts the child with ``vfork`` where it can. That costs the parent little, however much memory it has, and
runs no at-fork hooks. If there is a ``preexec_fn``, the child calls this Python function between fork and exec, and
``Popen`` waits until it has returned. Such a child is started in a helper thread, so that the loop is not blocked.

Where versions of asyncio differ, this module behaves like the newest one on all Python versions: ``wait()`` returns
when the process has ended, even if its pipes are still open elsewhere, and no signal is sent to a process that has
ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import signal
import subprocess
import warnings
from asyncio.log import logger
from collections.abc import Callable

from .base import BaseLoop, ComputedAttribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Literal, TypeVar

    _P = TypeVar("_P", bound=asyncio.BaseProtocol)
    Process = subprocess.Popen[bytes]

# asyncio's own coroutines check the arguments, log, and call `make_transport`. They are used here because tools that
# detect blocking calls recognize their frames, and then allow Popen to wait until the child has started.
_asyncio_exec: Any = asyncio.base_events.BaseEventLoop.subprocess_exec
_asyncio_shell: Any = asyncio.base_events.BaseEventLoop.subprocess_shell

# The return code to report for a child whose status was fetched outside the loop.
_UNKNOWN_RETURNCODE = 255

# --- starting -------------------------------------------------------------------------------------


async def subprocess_exec(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    program: Any,
    *args: Any,
    stdin: int | IO[Any] | None = subprocess.PIPE,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
    universal_newlines: Literal[False] = False,
    shell: Literal[False] = False,
    bufsize: Literal[0] = 0,
    encoding: None = None,
    errors: None = None,
    text: Literal[False] | None = None,
    **kwargs: Any,
) -> tuple[SubprocessTransport, _P]:
    """Start ``program`` with ``args``; return ``(transport, protocol)`` after ``connection_made`` was called.

    ``kwargs`` are passed to :class:`subprocess.Popen`. A ``preexec_fn`` does not block the loop.

    Raises:
        ValueError: text mode, buffering or ``shell=True`` was requested.
        OSError: the program cannot be started.
    """
    made: tuple[SubprocessTransport, _P] = await _asyncio_exec(
        loop,
        protocol_factory,
        program,
        *args,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        universal_newlines=universal_newlines,
        shell=shell,
        bufsize=bufsize,
        encoding=encoding,
        errors=errors,
        text=text,
        **kwargs,
    )
    return made


async def subprocess_shell(
    loop: BaseLoop,
    protocol_factory: Callable[[], _P],
    cmd: str | bytes,
    *,
    stdin: int | IO[Any] | None = subprocess.PIPE,
    stdout: int | IO[Any] | None = subprocess.PIPE,
    stderr: int | IO[Any] | None = subprocess.PIPE,
    universal_newlines: Literal[False] = False,
    shell: Literal[True] = True,
    bufsize: Literal[0] = 0,
    encoding: None = None,
    errors: None = None,
    text: Literal[False] | None = None,
    **kwargs: Any,
) -> tuple[SubprocessTransport, _P]:
    """Run the command line ``cmd`` in the shell. Otherwise like :meth:`subprocess_exec`.

    Raises:
        ValueError: ``cmd`` is neither str nor bytes, or text mode, buffering or ``shell=False`` was requested.
        OSError: the shell cannot be started.
    """
    made: tuple[SubprocessTransport, _P] = await _asyncio_shell(
        loop,
        protocol_factory,
        cmd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        universal_newlines=universal_newlines,
        shell=shell,
        bufsize=bufsize,
        encoding=encoding,
        errors=errors,
        text=text,
        **kwargs,
    )
    return made


async def make_transport(
    loop: BaseLoop,
    protocol: asyncio.BaseProtocol,
    command: Any,
    shell: bool,
    stdin: Any,
    stdout: Any,
    stderr: Any,
    bufsize: int,
    **kwargs: Any,
) -> SubprocessTransport:
    """Start ``command`` and return its transport, after ``connection_made`` of the protocol was called."""
    options = dict(kwargs, shell=shell, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=bufsize)
    start: Callable[[], Process] = lambda: subprocess.Popen(command, **options)  # noqa: E731
    loop._check_limits(False)
    process = start() if options.get("preexec_fn") is None else await _start_in_thread(loop, start)
    transport = SubprocessTransport(loop, protocol, process)
    if loop.get_debug():
        program = command if isinstance(command, (bytes, str)) else command[0]
        logger.debug("process %r created: pid %s", program, process.pid)
    try:
        transport._watch()
        await transport._connect_pipes()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        transport.close()
        await asyncio.shield(transport._wait())
        raise
    return transport


# --- starting with a preexec_fn -------------------------------------------------------------------

# The threads that start children with a preexec_fn, by the id of the process they belong to: the child of a fork does
# not have its parent's threads. All of these threads are kept until the program ends, because a preexec_fn often sets
# PR_SET_PDEATHSIG, and that signal is sent as soon as the thread that started the child ends.
_starters: dict[int, concurrent.futures.ThreadPoolExecutor] = {}


def _starter_threads() -> concurrent.futures.ThreadPoolExecutor:
    threads = _starters.get(os.getpid())
    if threads is None:
        # If the loops of two threads make an executor at the same time, both use the one that was stored first. The
        # other executor has not started any threads.
        threads = _starters.setdefault(os.getpid(), concurrent.futures.ThreadPoolExecutor(16, "grapeshot-preexec"))
    return threads


async def _start_in_thread(loop: BaseLoop, start: Callable[[], Process]) -> Process:
    """Call ``start()`` in a helper thread; return its result. On cancellation, kill the child once it has started."""
    threads = _starter_threads()
    starting = threads.submit(contextvars.copy_context().run, start)
    try:
        return await asyncio.wrap_future(starting, loop=loop)
    except asyncio.CancelledError:
        if not starting.cancel():
            threads.submit(_discard, starting)
        raise


def _discard(starting: concurrent.futures.Future[Process]) -> None:
    """In a helper thread: wait until an unwanted child has started, and kill it."""
    if starting.exception() is not None:
        return
    process = starting.result()
    with process:  # closes its pipes and waits
        process.kill()


# --- the transport --------------------------------------------------------------------------------


class SubprocessTransport(asyncio.SubprocessTransport):
    """A child process and its pipes. Only the loop makes one.

    ``get_extra_info("subprocess")`` returns the :class:`subprocess.Popen`. Closing the transport kills the process if
    it is still running.
    """

    # asyncio's name for the Popen object. None after connection_lost
    _proc = ComputedAttribute(lambda self: self._process)

    def __init__(self, loop: BaseLoop, protocol: asyncio.BaseProtocol, process: Process) -> None:
        super().__init__({"subprocess": process})
        # the next three are None after connection_lost, which is the last event
        self._loop: Any = loop
        self._protocol: Any = protocol
        self._process: Any = process
        self._pid = process.pid
        self._returncode: int | None = None
        self._closed = False
        # by the child's descriptor; None if the pipe is not connected yet
        files = (process.stdin, process.stdout, process.stderr)
        self._pipes: dict[int, _Pipe | None] = {fd: None for fd, file in enumerate(files) if file is not None}
        self._live_pipes = len(self._pipes)
        # calls of the protocol that have to wait for connection_made; None once connection_made is scheduled
        self._held_back: list[tuple[Any, ...]] | None = []
        self._waiters: set[asyncio.Future[int]] = set()

    def __repr__(self) -> str:
        state = "running" if self._returncode is None else f"returncode={self._returncode}"
        words = [type(self).__name__, *(["closed"] if self._closed else []), f"pid={self._pid}", state]
        for fd, name in enumerate(("stdin", "stdout", "stderr")):
            pipe = self._pipes.get(fd)
            if pipe is not None:
                words.append(f"{name}={pipe.transport!r}")
        return f"<{' '.join(words)}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not self._closed:
            _warn(f"unclosed transport {self!r}", ResourceWarning, source=self)
            self.close()

    def get_pid(self) -> int:
        """Return the process id, even after the process has ended."""
        return self._pid

    def get_returncode(self) -> int | None:
        """Return the exit code, or the negated number of the signal that ended the process. None while it is running.

        255 also stands for a status that the loop could not fetch, because other code had fetched it (with
        ``os.waitpid``) or because SIGCHLD is ignored.
        """
        return self._returncode

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        """Return the transport for the child's descriptor 0, 1 or 2, or None if that is not a pipe."""
        pipe = self._pipes.get(fd)
        return None if pipe is None else pipe.transport

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol in use, or None after ``connection_lost``."""
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Use ``protocol`` from the next event on."""
        self._protocol = protocol

    def is_closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def send_signal(self, signal: int) -> None:
        """Send ``signal`` to the process. Does nothing if the process has ended.

        Raises:
            ProcessLookupError: ``connection_lost`` was already called.
        """
        process = self._process
        if process is None:
            raise ProcessLookupError
        # The second condition: the program has called wait() or poll() of the Popen object, and the loop has not
        # noticed the end yet.
        if self._returncode is not None or process.returncode is not None:
            return
        try:
            os.kill(self._pid, signal)
        except ProcessLookupError:
            pass  # its status was fetched outside the loop

    def terminate(self) -> None:
        """Send SIGTERM. Raises: like :meth:`send_signal`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Raises: like :meth:`send_signal`."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, and kill the process if it is still running. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loop, process = self._loop, self._process
        if loop is not None and not loop.is_closed():
            self._close_pipes()
        if process is None or self._returncode is not None or _has_ended(process):
            return
        if loop is not None and loop.get_debug():
            logger.warning("Close running child process: kill %r", self)
        try:
            process.kill()
        except (ProcessLookupError, PermissionError):
            pass  # it has just ended, or runs as another user

    def _close_pipes(self) -> None:
        for pipe in self._pipes.values():
            if pipe is not None and pipe.transport is not None:
                pipe.transport.close()

    async def _wait(self) -> int:
        """Wait for the end of the process; return its return code. :class:`asyncio.subprocess.Process` calls this."""
        if self._returncode is not None:
            return self._returncode
        waiter: asyncio.Future[int] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)

    # --- setting up

    def _watch(self) -> None:
        """Make the loop call :meth:`_process_ended` when the process has ended."""
        loop = self._loop
        try:
            loop._watch_child(self._pid, self._process_ended)
        except ProcessLookupError:
            loop.call_soon(self._process_ended, None)  # its status is gone, so it has ended
        except BaseException:
            # Nothing would notice the end of the process, so kill it now.
            process = self._process
            self._closed = True
            with process:  # closes its pipes and waits
                process.kill()
            self._process_ended(process.returncode)
            raise

    async def _connect_pipes(self) -> None:
        """Make the pipe transports, then schedule ``connection_made`` and the calls that were held back until then."""
        loop, process = self._loop, self._process
        try:
            if process.stdin is not None:
                _, self._pipes[0] = await loop.connect_write_pipe(lambda: _Pipe(self, 0), process.stdin)
            if process.stdout is not None:
                _, self._pipes[1] = await loop.connect_read_pipe(lambda: _ReadPipe(self, 1), process.stdout)
            if process.stderr is not None:
                _, self._pipes[2] = await loop.connect_read_pipe(lambda: _ReadPipe(self, 2), process.stderr)
        except BaseException:
            self._close_pipes()
            for file in (process.stdin, process.stdout, process.stderr):
                if file is not None:
                    file.close()  # it has no transport, or one that was just closed
            raise
        loop.call_soon(self._protocol.connection_made, self)
        held_back, self._held_back = self._held_back or [], None
        for call in held_back:
            loop.call_soon(*call)
        await asyncio.sleep(0)  # so that the caller continues after connection_made

    # --- events

    def _call(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a call of the protocol. Calls keep the order of the events and never precede ``connection_made``."""
        if self._held_back is not None:
            self._held_back.append((callback, *args))
        else:
            self._loop.call_soon(callback, *args)

    def _pipe_data_received(self, fd: int, data: bytes) -> None:
        self._call(self._protocol.pipe_data_received, fd, data)

    def _pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._live_pipes -= 1
        self._call(self._protocol.pipe_connection_lost, fd, exc)
        self._finish_if_over()

    def _process_ended(self, returncode: int | None) -> None:
        """Handle the end of the process. ``returncode`` is None if the status was fetched outside the loop."""
        process = self._process
        if returncode is None:
            returncode = process.returncode  # known if the Popen object has fetched it
        if returncode is None:
            returncode = _UNKNOWN_RETURNCODE
            logger.warning(
                "child process pid %d exit status already read:  will report returncode %d", self._pid, returncode
            )
        self._returncode = returncode
        if process.returncode is None:
            process.returncode = returncode  # so that Popen neither waits for the process nor warns that it is running
        if self._loop.get_debug():
            logger.info("%r exited with return code %r", self, returncode)
        self._call(self._protocol.process_exited)
        self._finish_if_over()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(returncode)

    def _finish_if_over(self) -> None:
        if self._returncode is not None and self._live_pipes == 0:
            self._call(self._connection_lost)

    def _connection_lost(self) -> None:
        try:
            self._protocol.connection_lost(None)
        finally:
            self._loop = self._process = self._protocol = None


class _Pipe(asyncio.BaseProtocol):
    """The protocol of one pipe, which passes its events on to the transport of the process."""

    def __init__(self, owner: SubprocessTransport, fd: int) -> None:
        self._owner: Any = owner  # None after connection_lost
        self._fd = fd
        self.transport: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fd={self._fd} transport={self.transport!r}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        owner, self._owner = self._owner, None
        owner._pipe_connection_lost(self._fd, exc)

    def pause_writing(self) -> None:
        self._owner._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._owner._protocol.resume_writing()


class _ReadPipe(_Pipe, asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        self._owner._pipe_data_received(self._fd, data)


def _has_ended(process: Process) -> bool:
    """Whether the process has ended. Its status is left for the loop to fetch, except where ``waitid`` is missing."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
