"""The settings of a server: limits, timeouts and loggers."""

from __future__ import annotations

import logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Settings:
    """The settings of a server. ``serve()`` describes them."""

    __slots__ = (
        "access_log",
        "application",
        "error_log",
        "keepalive_timeout_s",
        "max_body",
        "max_head_size",
        "max_header_size",
        "max_headers",
        "max_target_size",
        "timeout_s",
    )

    def __init__(
        self,
        application: Callable[..., Any],
        timeout_s: float,
        keepalive_timeout_s: float,
        max_target_size: int,
        max_headers: int,
        max_header_size: int,
        max_head_size: int,
        max_body: int | None,
        access_log: logging.Logger | None,
        error_log: logging.Logger | None,
    ) -> None:
        for name, value in (("timeout", timeout_s), ("keepalive_timeout", keepalive_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, got {value!r}")
        self.application = application
        self.timeout_s = timeout_s
        self.keepalive_timeout_s = keepalive_timeout_s
        self.max_target_size = max_target_size
        self.max_headers = max_headers
        self.max_header_size = max_header_size
        self.max_head_size = max_head_size
        self.max_body: float = float("inf") if max_body is None else max_body
        self.access_log = access_log
        self.error_log = logging.getLogger("grapeshot.wsgi") if error_log is None else error_log
