"""Name resolution: native threads look up names, and IP addresses are answered at once.

Names do not go to the default executor, so they do not wait behind other work there. Native threads of the process
(``core/src/sys/resolver``) ask the C library. They do no other work, and the process does not wait for them when it
exits. If a program has replaced ``socket.getaddrinfo`` or ``socket.getnameinfo``, the executor calls the replacement,
as in asyncio, even for IP addresses. For arguments that the native threads do not accept (wrong values and unusual
types), the executor calls CPython's own functions.

Most IP addresses with a numeric port never get here, because ``Loop.getaddrinfo`` answers them natively
(``src/dns/literals.rs``). The others (with a zone, with unusual flags, or in debug mode) and ``host=None`` need no
server and no file either, so this module calls the C library directly: that takes about 2 us, a thread would take 50.
``inet_pton`` decides whether a host is an IP address. The answer comes from the C library, so scope ids, flags and the
order of several socket types are exactly the same as in :func:`socket.getaddrinfo`.
"""

from __future__ import annotations

import _socket
import asyncio
import os
import socket
import sys
import types
from asyncio.log import logger

from grapeshot import _core

from .answers import Answers
from .base import BaseLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    # The name of a method of _core._Resolver, and its arguments. (Resolver.ask adds the last one, `max_age`.)
    Question = tuple[str, tuple[Any, ...]]
    AddrInfo = tuple[Any, Any, int, str, Any]

_STREAM_PROTOCOLS = frozenset((0, socket.IPPROTO_TCP, socket.IPPROTO_UDP))
_NUMERIC_NAMES = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_SOCKET, _NATIVE_SOCKET = vars(socket), vars(_socket)


def is_own(function: Any, module: types.ModuleType) -> bool:
    """Whether a function that was found in the module is the module's own, and not a replacement.

    A replacement, such as one of wrapt's proxies, may imitate all attributes of the original, but not its exact type.
    So the exact type is compared, too.
    """
    if type(function) is types.FunctionType:
        return function.__globals__ is vars(module)
    return type(function) is types.BuiltinFunctionType and function.__self__ is module


def _own(function: Any, module: types.ModuleType) -> Any:
    """Return the function if it is the module's own, else an object that is equal to nothing.

    A program may have replaced the function before it imports this module.
    """
    return function if is_own(function, module) else object()


# CPython's own functions. Native threads do the lookups instead of these functions.
_NATIVE = {name: _own(_NATIVE_SOCKET.get(name), _socket) for name in ("getaddrinfo", "getnameinfo")}
_ORIGINAL = {"getaddrinfo": _own(socket.getaddrinfo, socket), "getnameinfo": _NATIVE["getnameinfo"]}
# The functions that grapeshot.coro.patch() puts into the socket module. They ask the native threads, too.
_patched: list[Callable[..., Any]] = []
_core._set_resolver(_ORIGINAL["getaddrinfo"], _NATIVE["getaddrinfo"])
_FAMILIES = {int(family): family for family in socket.AddressFamily}
_KINDS = {int(kind): kind for kind in socket.SocketKind}
# The C library answers some questions without a server and without files. In place of such a question, the functions
# below return AT_ONCE, and the caller calls the C library directly, without another thread.
AT_ONCE: Question = ("", ())

os.register_at_fork(before=_core._resolver_before_fork, after_in_child=_core._resolver_after_fork)


async def getaddrinfo(
    loop: BaseLoop,
    host: bytes | str | None,
    port: bytes | str | int | None,
    *,
    family: int = 0,
    type: int = 0,  # noqa: A002
    proto: int = 0,
    flags: int = 0,
) -> list[Any]:
    """Return what :func:`socket.getaddrinfo` returns, without blocking the loop.

    ``Loop.getaddrinfo`` calls this for everything that it does not answer natively. IP addresses (``"127.0.0.1"``,
    ``"::1"``, ``"fe80::1%eth0"``) and ``host=None``, with a numeric port or no port, are answered at once. Everything
    else is looked up in a thread, even an empty host, for which the resolver raises an error.

    Raises:
        socket.gaierror: the name does not resolve.
        RuntimeError: the process cannot start another thread, or the loop is closed.
    """
    args = (host, port, family, type, proto, flags)
    question = question_of_addresses(*args)
    if question is AT_ONCE:
        return _lookup_logged(loop, *args) if loop.get_debug() else _lookup(*args)
    if question is None:
        if loop.get_debug():
            return await loop.run_in_executor(None, _lookup_logged, loop, *args)
        return await loop.run_in_executor(None, current("getaddrinfo"), *args)
    if not loop.get_debug():
        return address_infos(await ask(loop, question))
    report = _log_question(loop, *args)
    answer = address_infos(await ask(loop, question))
    report(answer)
    return answer


async def getnameinfo(loop: BaseLoop, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
    """Return ``(host, service)`` for a socket address, like :func:`socket.getnameinfo`, without blocking the loop.

    With both ``NI_NUMERICHOST`` and ``NI_NUMERICSERV`` there is nothing to look up, so no thread is needed.

    Raises:
        socket.gaierror: the address has no name, or ``sockaddr`` is not an address.
    """
    question = question_of_names(sockaddr, flags)
    if question is AT_ONCE:
        return current("getnameinfo")(sockaddr, flags)  # type: ignore[no-any-return]
    if question is None:
        return await loop.run_in_executor(None, current("getnameinfo"), sockaddr, flags)
    return await ask(loop, question)  # type: ignore[no-any-return]


# --- lookups in native threads ------------------------------------------------------------------


class Resolver(Answers):
    """The lookups of a loop that are under way."""

    _kind = _core._Resolver

    def ask(self, question: Question) -> asyncio.Future[Any]:
        """Return a future of the answer. Cancelling the future ends the wait, but a lookup that has begun goes on."""
        name, args = question
        return self._future_of(getattr(self._open(), name)(*args, self._loop._dns_cache_s))

    def close(self) -> None:
        """Drop all lookups. Their futures stay pending, like the futures of an executor when a loop is closed."""
        native = self._release()
        if native is not None:
            for ticket in self._waiting:
                native.forget(ticket)
        self._waiting = {}

    def _withdraw(self, native: Any, ticket: int) -> bool:
        native.forget(ticket)
        return True


def ask(loop: BaseLoop, question: Question) -> asyncio.Future[Any]:
    """Look up in a native thread; return a future of the answer.

    Raises:
        RuntimeError: the process cannot start a thread, or the loop is closed.
        OSError: the process has no descriptor left.
    """
    resolver = loop._resolver
    if resolver is None:
        resolver = loop._resolver = Resolver(loop)
    return resolver.ask(question)  # type: ignore[no-any-return]


def set_dns_cache(loop: BaseLoop, ttl: float) -> None:
    """Reuse the answers of this loop's name lookups for ``ttl`` seconds. 0, the default, switches this off.

    This applies to :meth:`getaddrinfo`, :meth:`getnameinfo`, connections to host names, and the lookups of coros,
    unless a program has replaced :func:`socket.getaddrinfo`. Errors are not remembered. The C library does not tell how
    long an answer is valid, so choose how long your program may go on using the old address of a server that has moved.
    All loops of the process share the remembered answers, at most 1,024.

    Raises:
        ValueError: ``ttl`` is negative or not a number.
    """
    if not ttl >= 0:
        raise ValueError(f"ttl must not be negative, got {ttl!r}")
    loop._dns_cache_s = float(ttl)


def uses(function: Callable[..., Any]) -> None:
    """Record that ``function``, which a program may find in the socket module, itself asks the native threads."""
    _patched.append(function)


def current(name: str) -> Callable[..., Any]:
    """Return the function of this name from the program's socket module. It may be a replacement.

    The name is looked up at each call, because programs and tests replace the function.
    """
    # eventlet patches the socket module, but gives asyncio's modules a copy that is not patched. Use that copy.
    of_asyncio: Any = vars(asyncio.base_events).get("socket")
    if type(of_asyncio) is types.ModuleType and vars(of_asyncio) is not _SOCKET:
        return getattr(of_asyncio, name)  # type: ignore[no-any-return]
    function: Any = _SOCKET[name]
    # If coro.patch() has replaced the function in the program's socket module, return the function from before the
    # patch. The name `socket` in this module then stands for a view that still has it.
    is_patched = any(function is patched for patched in _patched)
    # CPython's tests replace `socket` in this module with a mock.
    is_mock = not issubclass(type(socket), types.ModuleType)
    return getattr(socket, name) if is_patched or is_mock else function  # type: ignore[no-any-return]


def is_original(name: str) -> bool:
    """Whether the socket module's function of this name is CPython's own or grapeshot's, and not a replacement."""
    return _NATIVE_SOCKET.get(name) is _NATIVE[name] and current(name) is _ORIGINAL[name]


def question_of_addresses(host: Any, port: Any, family: int, type_: int, proto: int, flags: int) -> Question | None:
    """Return the question, or AT_ONCE if ``socket.getaddrinfo`` may be called in this thread.

    Return None if ``socket.getaddrinfo`` must be called in another thread, because a program has replaced the function,
    or because the native threads do not accept the arguments.

    Raises:
        UnicodeError: the host is not a valid internationalised domain name.
    """
    if not is_original("getaddrinfo"):
        return None
    if is_answered_at_once(host, port, family):
        return AT_ONCE
    numbers = (family, type_, proto, flags)
    if not all(_is_int(number) for number in numbers):
        return None
    # Call the methods of `str` itself, as CPython's C code does: a subclass may have methods of its own.
    name = str.encode(host, "idna") if isinstance(host, str) else host
    service = port
    if type(port) is int and -(2**63) <= port < 2**63:
        service = b"%d" % port
    elif isinstance(port, str):
        try:
            service = str.encode(port)
        except UnicodeError:
            return None
    if not _is_text(name) or not _is_text(service):
        return None
    plain = [int(number) for number in numbers]
    sys.audit("socket.getaddrinfo", host, port, *plain[:3])
    if sys.platform == "darwin" and flags & socket.AI_NUMERICSERV and service in (None, b"0"):
        service = b"00"  # CPython does this too: the system's function fails otherwise
    return "getaddrinfo", (name, service, *plain)


def question_of_names(sockaddr: Any, flags: int) -> Question | None:
    """Return the question, AT_ONCE or None, like :func:`question_of_addresses`.

    With both ``NI_NUMERICHOST`` and ``NI_NUMERICSERV``, there is nothing to look up.
    """
    if not is_original("getnameinfo") or type(sockaddr) is not tuple or not 2 <= len(sockaddr) <= 4:
        return None
    host, *numbers = sockaddr
    if not isinstance(host, str) or not all(_is_int(number) for number in (*numbers, flags)):
        return None
    if flags & _NUMERIC_NAMES == _NUMERIC_NAMES and _is_literal(host, socket.AF_UNSPEC):
        return AT_ONCE
    port, flowinfo, scope_id = (*numbers, 0, 0)[:3]
    if not 0 <= flowinfo < 2**20 or scope_id < 0 or (len(sockaddr) > 2 and ":" not in host):
        return None
    try:
        encoded = str.encode(host)
    except UnicodeError:
        return None
    if not _is_text(encoded):
        return None
    sys.audit("socket.getnameinfo", sockaddr)
    return "getnameinfo", (encoded, b"%d" % port, int(flowinfo), int(scope_id), int(flags))


def question_of_host(function: str, name: Any) -> Question | None:
    """Return the question for a host's entry, or None if CPython's own function must be called.

    ``function`` is "gethostbyname" (for ``gethostbyname_ex``, too) or "gethostbyaddr".
    """
    if not _core._HAS_HOST_LOOKUPS or not isinstance(name, str):
        return None
    try:
        encoded = str.encode(name, "idna")
    except UnicodeError:
        return None
    if not _is_text(encoded) or is_special(encoded):
        return None
    sys.audit("socket.gethostbyname" if function == "gethostbyname" else "socket.gethostbyaddr", name)
    return function, (encoded,)


def is_special(host: object) -> bool:
    """Whether the host is "" (the wildcard address) or "<broadcast>", which CPython itself turns into an address."""
    if isinstance(host, str):
        return host in ("", "<broadcast>")
    return isinstance(host, bytes) and host in (b"", b"<broadcast>")


def address_infos(answer: list[AddrInfo]) -> list[AddrInfo]:
    """Replace families and types in an answer by members of the socket module's enumerations, where these exist."""
    return [
        (_FAMILIES.get(family, family), _KINDS.get(kind, kind), proto, name, address)
        for family, kind, proto, name, address in answer
    ]


def _is_int(number: object) -> bool:
    """Whether ``number`` is an int that fits into a C int."""
    return isinstance(number, int) and -(2**31) <= number < 2**31


def _is_text(text: object) -> bool:
    """Whether ``text`` is None, or bytes without a null character."""
    return text is None or (type(text) is bytes and 0 not in text)


# --- addresses and debug mode -------------------------------------------------------------------


async def resolve(
    loop: BaseLoop,
    address: Any,
    *,
    family: int = 0,
    type_: int = socket.SOCK_STREAM,
    proto: int = 0,
    flags: int = 0,
) -> list[AddrInfo]:
    """Return the address infos for ``(host, port[, flowinfo, scope_id])``.

    For most IP addresses without a zone, ``getaddrinfo`` is not called; it would drop ``flowinfo`` and ``scope_id``.

    Raises:
        socket.gaierror: the name does not resolve.
    """
    host, port = address[:2]
    info = _literal_info(host, port, family, type_, proto, *address[2:])
    if info is not None:
        return [info]
    return await loop.getaddrinfo(host, port, family=family, type=type_, proto=proto, flags=flags)


def _literal_info(
    host: Any, port: Any, family: int, type_: int, proto: int, flowinfo: int = 0, scope_id: int = 0
) -> AddrInfo | None:
    """Return the only address info of an IP address without a zone, or None if the resolver is needed."""
    if host is None or proto not in _STREAM_PROTOCOLS:
        return None
    if type_ == socket.SOCK_STREAM:
        proto = socket.IPPROTO_TCP
    elif type_ == socket.SOCK_DGRAM:
        proto = socket.IPPROTO_UDP
    else:
        return None
    if port is None or (isinstance(port, (str, bytes)) and not port):
        number = 0
    else:
        try:
            number = int(port)
        except (TypeError, ValueError):
            return None  # a service name, which the resolver has to look up
    if isinstance(host, (bytes, bytearray)):
        host = host.decode("ascii", "replace")
    if "%" in host:
        return None  # the zone has to be turned into a scope id
    literal_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not _is_literal(host, family):
        return None
    if literal_family == socket.AF_INET6:
        return literal_family, type_, proto, "", (host, number, flowinfo, scope_id)
    return literal_family, type_, proto, "", (host, number)


def is_answered_at_once(host: Any, port: Any, family: int) -> bool:
    """Whether the C library can answer without asking a server and without the hosts and services files."""
    if type(port) in (bytes, str):
        if port and not (port.isdigit() and port.isascii()):
            return False
    elif port is not None and not isinstance(port, int):
        return False
    return host is None or _is_literal(host, family)


def _is_literal(host: Any, family: Any) -> bool:
    """Whether ``host`` is an IPv4 or IPv6 address (with or without a zone) of the requested family (0: either).

    False for a subclass of ``str`` or ``bytes``, because CPython may get a different text from it than this check.
    """
    if type(host) is bytes:
        host = host.decode("ascii", "replace")
    elif type(host) is not str:
        return False
    literal_family = socket.AF_INET
    if ":" in host:
        literal_family = socket.AF_INET6
        host = host.partition("%")[0]
    if not isinstance(family, int) or family not in (socket.AF_UNSPEC, literal_family):
        return False
    try:
        socket.inet_pton(literal_family, host)
    except (OSError, ValueError):  # ValueError: a null character or a lone surrogate
        return False
    return True


def _lookup(host: Any, port: Any, family: int, type_: int, proto: int, flags: int) -> list[Any]:
    return current("getaddrinfo")(host, port, family, type_, proto, flags)  # type: ignore[no-any-return]


def _lookup_logged(
    loop: BaseLoop, host: Any, port: Any, family: int, type_: int, proto: int, flags: int
) -> list[AddrInfo]:
    """Look up in debug mode."""
    report = _log_question(loop, host, port, family, type_, proto, flags)
    answer = _lookup(host, port, family, type_, proto, flags)
    report(answer)
    return answer


def _log_question(
    loop: BaseLoop, host: Any, port: Any, family: int, type_: int, proto: int, flags: int
) -> Callable[[list[AddrInfo]], None]:
    """Log the question. The function that this returns logs the answer and the time it took, at INFO if it was slow."""
    parts = [f"{host}:{port!r}"]
    given = {"family": family, "type": type_, "proto": proto, "flags": flags}
    parts += [f"{name}={value!r}" for name, value in given.items() if value]
    question = ", ".join(parts)
    logger.debug("Get address info %s", question)
    start_s = loop.time()

    def report(answer: list[AddrInfo]) -> None:
        took_s = loop.time() - start_s
        text = f"Getting address info {question} took {took_s * 1e3:.3f}ms: {answer!r}"
        if took_s >= loop.slow_callback_duration:
            logger.info(text)
        else:
            logger.debug(text)

    return report
