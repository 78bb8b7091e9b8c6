"""``serve``: accepts clients at a Unix socket, and gives each of them a prompt in the running loop.

Everything happens in the loop's thread, with ``add_reader`` and ``add_writer``, so any loop will do. A client is
served by a coro if the program uses coros on a grapeshot loop, otherwise by a task.
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

from grapeshot import _core
from grapeshot._loop import peer
from grapeshot.insight import _tree

from . import _output, _path
from ._session import Session
from ._wire import Wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_logger = logging.getLogger("grapeshot.insight.backdoor")
_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """An open back door. :func:`serve` returns one. As a context manager, it is closed at the end of the block."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: str | os.PathLike[str], namespace: dict[str, Any]
    ) -> None:
        if peer.peer_uid is None:
            raise NotImplementedError(f"no back doors on {sys.platform}: there is no way to identify a client's user")
        self._loop = loop
        self._namespace = namespace
        self._sessions: set[Session] = set()
        # The connections, including those of ended sessions whose last output is still being sent.
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
        # If the server was never closed, the loop was closed without closing its asynchronous generators, one of which
        # closes the server (`_close_with_loop`).
        file = getattr(self, "_file", None)
        if file is not None and not self._is_closed:
            file.close()

    def close(self) -> None:
        """Accept no more clients, remove the socket's file, and end all sessions and their commands. Idempotent.

        Running commands are cancelled like tasks, and end in the next iterations of the loop.
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
            wire.abort()  # data that was already sent still arrives
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
            # The socket stays readable, so stop watching it and try again later.
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
        assert peer.peer_uid is not None
        uid = peer.peer_uid(sock)
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
        """In the child of a fork: close the parent's listening socket and its connections."""
        self._file.sock.close()
        for wire in list(self._wires):
            wire.forget()


async def _close_with_loop(server: Server) -> AsyncGenerator[None]:
    """An asynchronous generator that closes the server when the generator is closed.

    When a program ends, its loop closes the generators that were started on it. So the server is closed, too.
    """
    try:
        yield
    finally:
        server.close()


def _step(awaitable: Any) -> None:
    """Run an awaitable that never waits."""
    try:
        awaitable.send(None)
    except (StopIteration, StopAsyncIteration, RuntimeError):
        pass


def _in_child() -> None:
    for server in list(_servers):
        server._forget_parent()


os.register_at_fork(after_in_child=_in_child)


def serve(path: str | os.PathLike[str], *, namespace: dict[str, Any] | None = None) -> Server:
    """Open a back door at ``path`` in the running loop. Call this in a task, a callback or a coro.

    A client that connects to the Unix socket (``python -m grapeshot attach PATH``, or ``nc -U PATH``) gets a Python
    prompt in this process. Only processes of this user and of root can connect. ``{pid}`` in the path is replaced by
    the process id. The prompt offers the names in ``namespace`` and some helpers; ``help`` lists both. The back door is
    closed by :meth:`Server.close`, at the end of a ``with`` block, or when ``asyncio.run``, ``grapeshot.run`` or
    ``coro.run`` ends.

    Raises:
        RuntimeError: no loop is running in this thread.
        PermissionError: other users could replace the socket; see docs/insight.md.
        FileExistsError: a symbolic link, or another file that is not a socket, exists there.
        OSError: a process is listening there (EADDRINUSE), or the path is too long for a socket (ENAMETOOLONG).
        ValueError: the path has no file name, or contains a NUL.
        NotImplementedError: this system cannot tell which user connects.
    """
    loop = _tree.running_loop()
    if loop is None:
        raise RuntimeError("no running event loop: call serve() in a task, a callback or a coro, or use enable()")
    return Server(loop, path, dict(namespace or {}))
