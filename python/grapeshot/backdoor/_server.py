"""``serve``: accepts clients at a unix socket, and gives each a prompt in the loop that runs here.

Everything happens in the loop's thread, through ``add_reader`` and ``add_writer`` of whatever loop it is. A client is a
coro where the program uses coros on a grapeshot loop, and a task elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import os
import socket
import sys
import weakref
from collections.abc import AsyncGenerator

from grapeshot import _core, _peer, _tree

from . import _output, _path
from ._session import Session
from ._wire import Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_logger = logging.getLogger("grapeshot.backdoor")
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """A back door that is open. Made by :func:`serve`; a context manager that closes it in the end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str | os.PathLike[str], namespace: dict[str, Any]
    ) -> None:
        if _peer.peer_uid is None:
            raise NotImplementedError(f"how to ask for the user of a connection is not known on {sys.platform}")
        self._loop = loop
        self._namespace = namespace
        self._sessions: set[Session] = set()
        # Also of sessions that are over, while the rest of their output is sent.
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()
        self._count = 0
        self._file = _path.SocketFile(os.fsdecode(path).replace("{pid}", str(os.getpid())))
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        _servers.add(self)
        try:
            loop.add_reader(self._file.sock, self._accept)
            self._end = _close_with_loop(self)
            _step(self._end.__anext__())
        except BaseException:
            self._file.close()
            raise

    @property
    def path(self) -> str:
        """The path of the socket."""
        return self._file.path

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._sessions)} clients"
        return f"<{type(self).__name__} {self.path!r} {state}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The loop was closed without having been asked to close its asynchronous generators.
        file = getattr(self, "_file", None)
        if file is not None and not self._is_closed:
            file.close()

    def close(self) -> None:
        """Accept no more clients, remove the socket's file, and end the clients and their commands. Idempotent.

        Commands are cancelled, as a task is, and end in the next iterations of the loop.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._file.sock)
        if self._timer is not None:
            self._timer.cancel()
        self._file.close()
        for session in list(self._sessions):
            session.write("\n[the back door is closed]\n")
            session.cancel()
        for wire in list(self._wires):
            wire.abort()  # what was sent arrives
        _servers.discard(self)
        _step(self._end.aclose())

    def _accept(self) -> None:
        try:
            sock, _ = self._file.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            if exc.errno not in _NO_MORE:
                raise
            # It stays readable: look again later.
            _logger.warning("%s: no client can be accepted: %s", self.path, exc.strerror)
            self._loop.remove_reader(self._file.sock)
            self._timer = self._loop.call_later(_PAUSE_S, self._accept_again)
            return
        try:
            if self._is_allowed(sock):
                self._begin(sock)
                return
        except OSError as exc:
            _logger.warning("%s: a client was refused: %s", self.path, exc.strerror)
        except BaseException:
            sock.close()
            raise
        sock.close()

    def _accept_again(self) -> None:
        self._timer = None
        self._loop.add_reader(self._file.sock, self._accept)

    def _is_allowed(self, sock: socket.socket) -> bool:
        assert _peer.peer_uid is not None
        uid = _peer.peer_uid(sock)
        if uid in (0, os.geteuid()):
            return True
        _logger.warning("%s: a client of the user %d was refused", self.path, uid)
        return False

    def _begin(self, sock: socket.socket) -> None:
        self._count += 1
        session = Session(self._loop, sock, self._count, self._namespace)
        session.context = contextvars.copy_context()
        session.context.run(_output.client.set, session)
        self._sessions.add(session)
        self._wires.add(session.wire)
        _output.take()
        steps = session.run()
        try:
            coro: Any = sys.modules.get("grapeshot.coro")
            if coro is not None and isinstance(self._loop, _core.Loop):
                session.task = coro.spawn(coro.await_, steps, name=session.name, context=session.context)
            else:
                session.task = self._loop.create_task(steps, name=session.name, context=session.context)
        except BaseException:
            steps.close()
            self._forget(session)
            raise
        session.task.add_done_callback(lambda task: self._ended(session, task))

    def _ended(self, session: Session, task: Any) -> None:
        self._forget(session)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            message = f"a client of the back door {self.path} has ended with an error"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _forget(self, session: Session) -> None:
        session.wire.close()
        if session in self._sessions:
            self._sessions.remove(session)
            _output.give_back()

    def _forget_parent(self) -> None:
        """In a forked child: close what the parent listens on and talks to."""
        self._file.sock.close()
        for wire in list(self._wires):
            wire.forget()


async def _close_with_loop(server: Server) -> AsyncGenerator[None]:
    """Loops close the asynchronous generators that have begun on them when they end. This one closes the server."""
    try:
        yield
    finally:
        server.close()


def _step(awaitable: Any) -> None:
    """Run what never waits."""
    try:
        awaitable.send(None)
    except (StopIteration, StopAsyncIteration, RuntimeError):
        pass


def _in_child() -> None:
    for server in list(_servers):
        server._forget_parent()


os.register_at_fork(after_in_child=_in_child)


def serve(path: str | os.PathLike[str], *, namespace: dict[str, Any] | None = None) -> Server:
    """Open a back door at ``path`` in the loop that runs here, in a task, a callback or a coro.

    Whoever connects to the unix socket (``python -m grapeshot attach PATH``, or ``nc -U PATH``) gets a Python prompt in
    this process: only processes of this user and of root can. ``{pid}`` in the path stands for the process id. The
    names of ``namespace`` are there beside the helpers, which ``help`` lists. It is closed by :meth:`Server.close`, at
    the end of a ``with`` block, or when ``asyncio.run``, ``grapeshot.run`` or ``coro.run`` ends.

    Raises:
        RuntimeError: no loop runs in this thread.
        PermissionError: others could replace the socket, see docs/insight.md.
        FileExistsError: something that is no socket lies there, or a symbolic link.
        OSError: EADDRINUSE: a process listens there; ENAMETOOLONG: the path is too long for a socket.
        ValueError: the path does not name a file.
        NotImplementedError: this system does not tell who connects.
    """
    loop = _tree.running_loop()
    if loop is None:
        raise RuntimeError("no event loop runs here: call serve() in a task, a callback or a coro, or use enable()")
    return Server(loop, path, dict(namespace or {}))
