"""The exceptions of calls between processes."""
# ruff: noqa: N818

from __future__ import annotations


class RpcError(Exception):
    """What every exception of this package derives from."""


class ConnectionLost(RpcError, ConnectionError):
    """There is no connection, or it was lost before the answer came.

    ``sent`` says whether the request was handed to the transport. If so, the call may have run, once and not more, and
    it is for the caller to know whether it can be repeated. If not, it has not run and never will.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent

    def __str__(self) -> str:
        return f"{self.args[0]} ({'the call may have run' if self.sent else 'the call has not run'})"


class NotLeft(Exception):
    """No user sees it: the connection ended before it had this request, and the client sends it through the next."""


class ProtocolError(RpcError):
    """The peer has sent what this protocol does not know. The connection is closed."""


class PacketTooLarge(RpcError, ValueError):
    """A message is longer than this side or the peer accepts. Nothing was sent."""


class DeadlineExceeded(RpcError, TimeoutError):
    """The time for a call is over. The call may have run; its handler is cancelled if it still runs."""


class RemoteError(RpcError):
    """A handler has raised an exception, or the server has refused the call.

    ``type_name`` is the qualified name of the exception's class, ``message`` its text, and ``traceback`` its formatted
    traceback if the server sends them (``tracebacks=True``).
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
    """The method cannot be called in this way: other arguments, or ``call`` where ``stream`` is right. Nothing ran."""


class BadResult(RemoteError):
    """The method has run, and its result cannot be sent: no type that the codec knows, or too large."""


class RemoteCancelled(RemoteError):
    """The handler was cancelled on the server's side: it stops, or somebody there has cancelled the handler."""
