"""Lines of the access log, in the combined format of other web servers, followed by the duration in seconds."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._request import Request
    from ._response import Response


def line(request: Request, response: Response, elapsed_s: float) -> str:
    """Return the line for a response."""
    environ: dict[str, Any] = request.environ
    return _combined(
        _escaped(environ.get("REMOTE_ADDR")).replace(" ", "\\x20") or "-",
        f"{request.method} {request.target} HTTP/{'1.1' if request.is_http11 else '1.0'}",
        response.status,
        response.sent_len,
        environ.get("HTTP_REFERER", "-"),
        environ.get("HTTP_USER_AGENT", "-"),
        elapsed_s,
    )


def line_of_refusal(peer: str, status: str) -> str:
    """Return the line for a request that was refused before its head was complete, or because of its head."""
    return _combined(peer or "-", "-", status, 0, "-", "-", 0.0)


def _combined(peer: str, what: str, status: str, sent_len: int, referrer: Any, agent: Any, elapsed_s: float) -> str:
    when = time.strftime("%d/%b/%Y:%H:%M:%S %z")
    return (
        f'{peer} - - [{when}] "{_escaped(what)}" {status[:3] or "-"} {sent_len} '
        f'"{_escaped(referrer)}" "{_escaped(agent)}" {elapsed_s:.6f}'
    )


def _escaped(value: Any) -> str:
    """Escape a value that a client, a proxy or the application has chosen.

    The result has no line ends or control characters of terminals, and no double quotes without a backslash.
    """
    if value is None:
        return ""
    # Middleware may have put any object into the environ, even one of a str subclass with its own __str__.
    text = str.__str__(value) if isinstance(value, str) else object.__repr__(value)
    return text.encode("unicode_escape").decode().replace('"', '\\"')
