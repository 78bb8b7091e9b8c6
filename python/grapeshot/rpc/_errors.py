"""The exceptions of remote calls."""
# ruff: noqa: N818

from __future__ import annotations


class RpcError(Exception):
    """The base class of all exceptions of this package."""


class ConnectionLost(RpcError, ConnectionError):
    """There is no connection, or it was lost before the answer came.

    ``sent`` tells whether the call may have run. If so, it has run at most once, and the caller has to decide whether
    it is safe to repeat the call. If not, the call has not run and never will.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent

    def __str__(self) -> str:
        return f"{self.args[0]} ({'the call may have run' if self.sent else 'the call has not run'})"


class NotSent(Exception):
    """Internal: this connection's server has not taken the request. The client sends it through the next connection."""


class ProtocolError(RpcError):
    """The peer has violated the protocol. The connection is closed."""


class PacketTooLarge(RpcError, ValueError):
    """A message is longer than this side or the peer accepts. Nothing was sent."""


class DeadlineExceeded(RpcError, TimeoutError):
    """The time for a call is over. The call may have run. If its handler is still running, it is cancelled."""


class RemoteError(RpcError):
    """A handler has raised an exception, or the server has refused the call.

    ``type_name`` is the qualified name of the exception's class, ``message`` its text, and ``traceback`` its formatted
    traceback if the server sends tracebacks (``tracebacks=True``).
    """

    def __init__(self, type_name: str, message: str, traceback: str | None = None) -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        text = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"{text}\n\n{self.traceback.rstrip()}" if self.traceback else text


class UnknownMethod(RemoteError):
    """The server has no method of this name."""


class BadArguments(RemoteError):
    """The method was not run: the arguments do not fit, or ``call`` was used instead of ``stream`` or vice versa."""


class BadResult(RemoteError):
    """The method has run, but its result cannot be sent: the codec cannot encode it, or it is too large."""


class RemoteCancelled(RemoteError):
    """The handler was cancelled at the server, because the server is closing or because code there cancelled it."""
