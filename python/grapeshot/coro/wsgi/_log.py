"""Lines of the access log, in the combined format that web servers share, with the time in seconds at the end."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._request import Request
    from ._response import Response


def line(request: Request, response: Response, elapsed_s: float) -> str:
    """Return the line of one answer."""
    when = time.strftime("%d/%b/%Y:%H:%M:%S %z")
    what = f"{request.method} {request.target} HTTP/{'1.1' if request.is_http11 else '1.0'}"
    environ: dict[str, Any] = request.environ
    referrer, agent = environ.get("HTTP_REFERER", "-"), environ.get("HTTP_USER_AGENT", "-")
    return (
        f'{environ.get("REMOTE_ADDR") or "-"} - - [{when}] "{_quoted(what)}" {response.status[:3] or "-"} '
        f'{response.sent_len} "{_quoted(referrer)}" "{_quoted(agent)}" {elapsed_s:.6f}'
    )


def _quoted(text: str) -> str:
    """Return text of a client so that it ends neither its quotes nor the line, and says nothing to a terminal."""
    return text.encode("unicode_escape").decode().replace('"', '\\"')
