"""The part ``dns`` of :func:`grapeshot.coro.patch`: native threads look up host names while the coro waits.

Some calls go to CPython's function instead, in a thread of the loop's executor. These are calls with arguments that
are wrong or unusual (a host name as bytes for ``gethostbyname``), and calls of ``gethostbyname``, ``gethostbyname_ex``
and ``gethostbyaddr`` if the system has no form of these functions that is safe in several threads. If a program had
replaced a function before ``patch()``, its replacement is called in such a thread.
"""

from __future__ import annotations

import _socket
import functools
import socket

from grapeshot import _core
from grapeshot._loop import dns
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
    args = (host, port, family, type, proto, flags)
    question = dns.question_of_addresses(*args) if _can_wait() else dns.AT_ONCE
    if question is dns.AT_ONCE:
        return _getaddrinfo(*args)
    if question is None:
        return run_in_thread(_getaddrinfo, *args)
    return dns.address_infos(look_up(question))


def _needs_no_lookup(name: Any) -> bool:
    """Whether CPython's ``gethostbyname`` answers without a lookup.

    False for an object of a subclass of ``str``, because CPython may get a different text from it than this check.
    """
    return type(name) is str and (dns.is_special(name) or dns.is_answered_at_once(name, None, socket.AF_INET))


def _first_address(name: Any) -> dns.Question | None:
    """Return the question for ``gethostbyname``, which returns the first IPv4 address that getaddrinfo(3) finds."""
    if _needs_no_lookup(name):
        return dns.AT_ONCE
    question = dns.question_of_host("gethostbyname", name)
    if question is None:
        return None
    return "getaddrinfo", (*question[1], None, socket.AF_INET, socket.SOCK_DGRAM, 0, 0)


def _replacement(
    function: Callable[..., Any],
    question_of: Callable[..., dns.Question | None],
    answer_of: Callable[[Any], Any] = lambda answer: answer,
    count: int = 1,
) -> Callable[..., Any]:
    """Return a replacement of ``function``, which takes ``count`` arguments.

    If the arguments allow it, the replacement asks the resolver: ``question_of`` turns the arguments into a question,
    and ``answer_of`` turns the resolver's answer into the result.
    """
    is_own = dns.is_own(function, _socket)

    @functools.wraps(function)
    def resolve(*args: Any, **kwargs: Any) -> Any:
        if not _can_wait():
            return function(*args, **kwargs)
        if not is_own:
            return run_in_thread(functools.partial(function, *args, **kwargs))
        if kwargs or len(args) != count:
            return function(*args, **kwargs)  # raises TypeError
        question = question_of(*args)
        if question is dns.AT_ONCE:
            return function(*args)
        if question is None:
            return run_in_thread(function, *args)
        return answer_of(look_up(question))

    return resolve


def patch() -> None:
    """Replace the socket module's functions. Others that call them, such as ``getfqdn``, then use the replacements.

    Modules that keep the originals get a copy of ``getfqdn`` that calls the originals.
    """
    names = dict(vars(socket))
    by_name = functools.partial(dns.question_of_host, "gethostbyname")
    by_address = functools.partial(dns.question_of_host, "gethostbyaddr")
    replacements = {
        "getaddrinfo": getaddrinfo,
        "gethostbyname": _replacement(names["gethostbyname"], _first_address, lambda infos: infos[0][4][0]),
        "gethostbyname_ex": _replacement(names["gethostbyname_ex"], by_name),
        "gethostbyaddr": _replacement(names["gethostbyaddr"], by_address),
        "getnameinfo": _replacement(names["getnameinfo"], dns.question_of_names, count=2),
    }
    for name, replacement in replacements.items():
        _originals.replace("socket", name, replacement)
    for name in ("getaddrinfo", "getnameinfo"):
        dns.uses(replacements[name])
    _originals.show("socket", "getfqdn", _originals.clone_function(names["getfqdn"], names))
