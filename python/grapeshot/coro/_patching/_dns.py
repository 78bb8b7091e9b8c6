"""The part ``dns`` of :func:`grapeshot.coro.patch`: native threads look up host names while the coro waits.

Some calls go to CPython's function instead, in a thread of the loop's executor. These are calls with wrong arguments,
and calls of ``getaddrinfo`` and ``getnameinfo`` if a program has replaced them in the socket module. Calls of
``gethostbyname``, ``gethostbyname_ex`` and ``gethostbyaddr`` also go there if the host is not an ASCII string, or if
the system has no form of these functions that is safe in several threads.
"""

from __future__ import annotations

import _socket
import functools
import socket

from grapeshot import _core
from grapeshot._loop import dns
from grapeshot._loop.dns import is_answered_at_once
from grapeshot.coro._bridge import run_in_thread
from grapeshot.coro._dns import look_up

from . import _originals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_getaddrinfo = socket.getaddrinfo
_can_wait = _core._coro_can_wait


def getaddrinfo(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> list[Any]:  # noqa: A002
    """Resolve host and port into a list of address info entries. Other coros run while it waits."""
    if not _can_wait() or is_answered_at_once(host, port, family):
        return _getaddrinfo(host, port, family, type, proto, flags)
    question = dns.question_of_addresses(host, port, family, type, proto, flags)
    if question is None:
        return run_in_thread(_getaddrinfo, host, port, family, type, proto, flags)
    return dns.address_infos(look_up(question))


def _needs_no_lookup(name: object) -> bool:
    """Whether a host is special or a literal IPv4 address."""
    if _is_special(name):
        return True
    try:
        _socket.inet_aton(name)  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return False
    return True


def _is_special(name: object) -> bool:
    """Whether CPython gives the host a meaning without asking the C library."""
    return name in ("", "<broadcast>")


def _first_address(name: Any) -> dns.Question | None:
    """The question of ``gethostbyname``: CPython takes the first IPv4 address that getaddrinfo(3) returns."""
    question = dns.question_of_host("gethostbyname", name)
    if question is None:
        return None
    return "getaddrinfo", (*question[1], None, socket.AF_INET, socket.SOCK_DGRAM, 0, 0)


def _replacement(
    function: Callable[..., Any],
    question_of: Callable[..., dns.Question | None],
    answer_of: Callable[[Any], Any] = lambda answer: answer,
    is_quick: Callable[[Any], bool] = lambda _: False,
) -> Callable[..., Any]:
    @functools.wraps(function)
    def resolve(*args: Any) -> Any:
        if not _can_wait() or not args or is_quick(args[0]):
            return function(*args)
        try:
            question = question_of(*args)
        except TypeError:  # the number of arguments is wrong
            question = None
        if question is None:
            return run_in_thread(function, *args)
        return answer_of(look_up(question))

    return resolve


def patch() -> None:
    """Replace the names. Functions that call them, such as ``getfqdn``, then use the replacements.

    Modules that keep the originals get a copy of ``getfqdn`` that calls the originals.
    """
    names = dict(vars(socket))
    replacements = {
        "getaddrinfo": getaddrinfo,
        "gethostbyname": _replacement(
            _socket.gethostbyname, _first_address, lambda infos: infos[0][4][0], _needs_no_lookup
        ),
        "gethostbyname_ex": _replacement(
            _socket.gethostbyname_ex,
            functools.partial(dns.question_of_host, "gethostbyname"),
            is_quick=_needs_no_lookup,
        ),
        "gethostbyaddr": _replacement(
            _socket.gethostbyaddr, functools.partial(dns.question_of_host, "gethostbyaddr"), is_quick=_is_special
        ),
        "getnameinfo": _replacement(_socket.getnameinfo, dns.question_of_names),
    }
    for name, replacement in replacements.items():
        _originals.replace("socket", name, replacement)
    for name in ("getaddrinfo", "getnameinfo"):
        dns.uses(replacements[name])
    _originals.show("socket", "getfqdn", _originals.clone_function(names["getfqdn"], names))
