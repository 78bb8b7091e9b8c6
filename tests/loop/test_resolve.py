"""getaddrinfo and getnameinfo return the same as the socket module's functions, also for literal addresses.

The threads that look up names are tested in test_resolver.py.
"""

from __future__ import annotations

import _socket
import asyncio
import concurrent.futures
import random
import socket
import threading

import pytest
from support import iterations, run_script

HOSTS = [
    "127.0.0.1",
    "0.0.0.0",
    "255.255.255.255",
    "::1",
    "::",
    "2001:db8::1",
    "::ffff:1.2.3.4",
    "fe80::1%lo",
    "fe80::1%1",
    "fe80::1%0",
    "ff02::1%lo",
    "2001:db8::1%lo",
    "fe80::1%nosuchinterface",
    "fe80::1%",
    "1.2.3",
    "1",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "127.0.0.1.",
    "127.0.0.256",
    "01.02.03.04",
    " 127.0.0.1",
    "127.0.0.1 ",
    "1::2::3",
    "[::1]",
    "::1%lo",
    "127.0.0.1%lo",
    "",
    None,
    "localhost",
    b"127.0.0.1",
    b"::1",
    "\u0661.2.3.4",
    "127.0.0.1\0",
]
PORTS = [
    0,
    80,
    65535,
    65536,
    -1,
    "80",
    "http",
    b"80",
    b"http",
    None,
    "",
    "0",
    "no-such-service",
    " 80",
    "80 ",
    "+80",
    "-5",
]


def answer(function):
    try:
        return function()
    except Exception as error:
        return type(error).__name__, getattr(error, "errno", None)


def is_numeric(host):
    return not host or isinstance(answer(lambda: socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)), list)


async def ask(loop, *args, **kwargs):
    try:
        return await loop.getaddrinfo(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, getattr(error, "errno", None)


@pytest.mark.xfail_on(uvloop="#539: its shortcut for literals loses scope ids and differs in other ways")
@pytest.mark.parametrize("kind", [0, socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("flags", [0, socket.AI_NUMERICHOST])
def test_literals_equal_the_socket_module(loop, kind, flags):
    """With AI_NUMERICHOST, which forbids lookups, every host is tested; without this flag, only numeric hosts."""
    hosts = HOSTS if flags else [host for host in HOSTS if is_numeric(host)]

    async def main():
        different = {}
        for host in hosts:
            for port in PORTS:
                expected = answer(lambda h=host, p=port: socket.getaddrinfo(h, p, type=kind, flags=flags))
                found = await ask(loop, host, port, type=kind, flags=flags)
                if found != expected:
                    different[host, port] = (found, expected)
        return different

    assert loop.run_until_complete(main()) == {}


FLAGS = [
    0,
    socket.AI_PASSIVE,
    socket.AI_NUMERICHOST,
    socket.AI_NUMERICSERV,
    socket.AI_CANONNAME,
    socket.AI_PASSIVE | socket.AI_NUMERICHOST,
    socket.AI_ADDRCONFIG,
    socket.AI_V4MAPPED,
]


@pytest.mark.xfail_on(uvloop="its shortcut ignores flags and protocols")
@pytest.mark.parametrize("family", [socket.AF_UNSPEC, socket.AF_INET, socket.AF_INET6])
def test_families_protocols_and_flags(loop, family):
    async def main():
        different = {}
        for host in ("127.0.0.1", "::1", "fe80::1%lo", None, ""):
            for kind in (0, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                for proto in (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                    for flags in FLAGS:
                        arguments = {"family": family, "type": kind, "proto": proto, "flags": flags}
                        expected = answer(lambda h=host, a=arguments: socket.getaddrinfo(h, 80, **a))
                        found = await ask(loop, host, 80, **arguments)
                        if found != expected:
                            different[host, kind, proto, flags] = (found, expected)
        return different

    assert loop.run_until_complete(main()) == {}


async def test_the_answer_for_a_literal_has_enum_types(loop):
    [info] = await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    assert info == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 80))
    assert isinstance(info[0], socket.AddressFamily)
    assert isinstance(info[1], socket.SocketKind)


def literals(seed, count):
    """Yield random IPv4 and IPv6 literals in various spellings, and texts that are almost literals."""
    pattern = random.Random(seed)

    def group():
        return pattern.choice(["0", "1", "ffff", "0db8", "a", "1.2.3.4", "10000", "g", f"{pattern.randrange(65536):x}"])

    for _ in range(count):
        if pattern.random() < 0.3:
            numbers = [
                str(pattern.choice([0, 1, 9, 10, 127, 255, 256, 300])) for _ in range(pattern.choice([4, 4, 4, 3, 5]))
            ]
            text = ".".join(numbers)
            if pattern.random() < 0.2:
                text = text.replace(pattern.choice("1023"), pattern.choice(["01", "", " ", "0x1", "-1"]), 1)
        else:
            groups = [group() for _ in range(pattern.choice([1, 2, 3, 6, 7, 8, 8, 8, 9]))]
            if pattern.random() < 0.7:
                groups.insert(pattern.randrange(len(groups) + 1), "")
            text = ":".join(groups)
            text = pattern.choice(
                [text, "::" + text, text + "::", text.upper(), text + "%lo", text + "%1", f"[{text}]"]
            )
        yield pattern.choice([text, text, text.encode()])


@pytest.mark.skip_on(uvloop="#539: its shortcut for literals loses scope ids and differs in other ways")
@pytest.mark.parametrize("seed", range(4))
def test_any_literal_equals_the_socket_module(loop, seed):
    """Random literals with random arguments. AI_NUMERICHOST prevents lookups of texts that are not literals."""
    pattern = random.Random(seed)

    async def main():
        different = {}
        for host in literals(seed, 1500):
            arguments = {
                "family": pattern.choice([0, 0, socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 99]),
                "type": pattern.choice([0, 0, *socket.SocketKind, 77]),
                "proto": pattern.choice([0, 0, 0, socket.IPPROTO_TCP, socket.IPPROTO_UDP, 99]),
            }
            is_literal = is_numeric(host)
            arguments["flags"] = (0 if is_literal else socket.AI_NUMERICHOST) | pattern.choice([0, 0, *FLAGS])
            port = pattern.choice([0, 80, 65535, "80", None, 70000])
            expected = answer(lambda h=host, p=port, a=arguments: socket.getaddrinfo(h, p, **a))
            found = await ask(loop, host, port, **arguments)
            if found != expected:
                different[host, port, *arguments.values()] = (found, expected)
            elif isinstance(found, list):
                types = [[type(part) for part in info] for info in found]
                assert types == [[type(part) for part in info] for info in expected]
        return different

    assert loop.run_until_complete(main()) == {}


async def test_changing_an_answer_does_not_change_the_next(loop):
    first = await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    first.append("mine")
    assert len(await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)) == 1


@pytest.mark.skip_on(uvloop="it does not use the socket module")
async def test_a_replaced_resolver_is_used(loop, monkeypatch):
    """Programs and their tests replace socket.getaddrinfo. The loop then uses the replacement for literals, too."""
    asked = []

    def resolver(*args):
        asked.append(args)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", args[1]))]

    await loop.getaddrinfo("127.0.0.1", 80)
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    for host in ("127.0.0.1", "name.invalid"):
        [info] = await loop.getaddrinfo(host, 80)
        assert info[4] == ("192.0.2.1", 80)
    assert [args[:2] for args in asked] == [("127.0.0.1", 80), ("name.invalid", 80)]
    monkeypatch.undo()
    assert (await loop.getaddrinfo("127.0.0.1", 80))[0][4] == ("127.0.0.1", 80)


@pytest.mark.parametrize("is_debug", [False, True])
@pytest.mark.skip_on(uvloop="it does not use the socket module")
async def test_a_replacement_is_called_in_the_executor(loop, monkeypatch, is_debug):
    """The replacement may block until the loop has done something, so the executor calls it even for hosts that
    need no lookup.
    """
    threads = []

    def resolver(host, port, *args):
        threads.append(threading.get_ident())
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]

    def namer(*args):
        threads.append(threading.get_ident())
        return ("replaced", "0")

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    monkeypatch.setattr(socket, "getnameinfo", namer)
    monkeypatch.setattr("asyncio.log.logger.disabled", True)
    loop.set_debug(is_debug)
    for host in ("127.0.0.1", b"::1", "fe80::1%lo", None, "localhost"):
        assert (await loop.getaddrinfo(host, 80))[0][4] == ("192.0.2.1", 80)
    for flags in (0, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV):
        assert await loop.getnameinfo(("127.0.0.1", 80), flags) == ("replaced", "0")
    assert len(threads) == 7
    assert threading.get_ident() not in threads


@pytest.mark.skip_on(uvloop="it does not use the socket module")
@pytest.mark.parametrize("flags", [socket.AI_PASSIVE, socket.AI_PASSIVE | socket.AI_NUMERICHOST])
async def test_nothing_is_learnt_from_a_replacement(loop, monkeypatch, flags):
    arguments = {"type": socket.SOCK_DGRAM, "proto": socket.IPPROTO_UDP, "flags": flags}
    expected = socket.getaddrinfo("127.0.0.1", 80, **arguments)
    answer = [(2, 1, 6, "replaced", ("192.0.2.1", 80))]
    monkeypatch.setattr(_socket, "getaddrinfo", lambda *_: answer)
    assert await loop.getaddrinfo("127.0.0.1", 80, **arguments) == answer
    monkeypatch.undo()
    assert await loop.getaddrinfo("127.0.0.1", 80, **arguments) == expected
    monkeypatch.setattr(_socket, "getaddrinfo", lambda *_: answer)
    assert await loop.getaddrinfo("127.0.0.1", 80, **arguments) == answer


EARLY = {
    "a function": "socket.getaddrinfo, socket.getnameinfo = resolver, namer",
    "a native function": "_socket.getaddrinfo, socket.getnameinfo = resolver, namer",
    "a proxy with the attributes of the original": """
class Proxy:
    def __init__(self, original, function):
        self.original, self.function = original, function
    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)
    def __getattr__(self, name):
        return getattr(self.original, name)
socket.getaddrinfo = Proxy(socket.getaddrinfo, resolver)
socket.getnameinfo = Proxy(socket.getnameinfo, namer)
""",
}


@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
@pytest.mark.parametrize("replacement", EARLY)
def test_a_replacement_from_before_the_import(kind, replacement):
    """Instrumentation often replaces functions of `socket` before the program imports anything else."""
    code = f"""
import _socket, asyncio, socket, sys, threading
asked = []
real = socket.getaddrinfo
def resolver(host, port, *args):
    asked.append((host, threading.current_thread() is threading.main_thread()))
    return [(2, 1, 6, "", ("192.0.2.1", port))]
def namer(*args):
    asked.append((args[0][0], threading.current_thread() is threading.main_thread()))
    return ("replaced", "0")
{EARLY[replacement]}
if {kind!r} == "grapeshot":
    from grapeshot import new_event_loop
else:
    from asyncio import SelectorEventLoop as new_event_loop
loop = new_event_loop()
for host in ("127.0.0.1", "::1", None, "localhost"):
    [info] = loop.run_until_complete(loop.getaddrinfo(host, 80))
    assert info[4] == ("192.0.2.1", 80), info
for flags in (0, 3):
    assert loop.run_until_complete(loop.getnameinfo(("127.0.0.1", 80), flags)) == ("replaced", "0")
loop.run_until_complete(loop.shutdown_default_executor())
loop.close()
hosts = ["127.0.0.1", "::1", None, "localhost", "127.0.0.1", "127.0.0.1"]
assert asked == [(host, False) for host in hosts], asked
"""
    run_script(None, code)


def test_getaddrinfo_returns_a_coroutine(loop):
    for host in ("127.0.0.1", "localhost"):
        coroutine = loop.getaddrinfo(host, 80)
        assert asyncio.iscoroutine(coroutine)
        coroutine.close()
    assert loop.run_until_complete(loop.getaddrinfo("::1", 80))
    assert loop.run_until_complete(loop.create_task(loop.getaddrinfo("::1", 80)))


def test_wrong_arguments(loop):
    for call in (
        lambda: loop.getaddrinfo("127.0.0.1"),
        lambda: loop.getaddrinfo("127.0.0.1", 80, socket.AF_INET),
        lambda: loop.getaddrinfo("127.0.0.1", 80, kind=1),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
def test_audit_hooks_hear_of_literals(kind):
    code = """
    import asyncio, socket, sys
    seen = []
    sys.addaudithook(lambda event, args: seen.append(args) if event == "socket.getaddrinfo" else None)
    loop = new_event_loop()
    for host, port in (("127.0.0.1", 80), ("127.0.0.1", 443), ("fe80::1%lo", 80), (None, 80)):
        family = 0 if host is None else socket.AF_INET6 if ":" in host else socket.AF_INET
        loop.run_until_complete(loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM))
        assert seen == [(host, port, int(family), 1, 0)], seen
        assert all(type(value) is int for value in seen.pop()[1:]), seen
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    """
    run_script(kind, code)


@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
def test_an_audit_hook_that_raises(kind):
    """The coroutine raises the hook's exception; the call of the method does not. The hook is called once."""
    code = """
    import asyncio, socket, sys
    seen = []
    def hook(event, args):
        if event.startswith("socket.get"):
            seen.append(event)
            raise TypeError("not allowed")
    sys.addaudithook(hook)
    loop = new_event_loop()
    for call in (
        lambda: loop.getaddrinfo("127.0.0.1", 80),
        lambda: loop.getaddrinfo("::1", None),
        lambda: loop.getaddrinfo("fe80::1%lo", 80),
        lambda: loop.getaddrinfo("localhost", 80),
        lambda: loop.getnameinfo(("127.0.0.1", 80)),
        lambda: loop.getnameinfo(("127.0.0.1", 80), 3),
    ):
        coroutine = call()
        try:
            loop.run_until_complete(coroutine)
        except TypeError as error:
            assert error.args == ("not allowed",)
        else:
            raise AssertionError
        assert len(seen) == 1, seen
        seen.clear()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    """
    run_script(kind, code)


async def test_unknown_names(loop):
    with pytest.raises(socket.gaierror):
        await loop.getaddrinfo("name.invalid", 80)


@pytest.mark.skip_on(uvloop="it does not use the socket module")
async def test_a_cancelled_lookup_by_a_replaced_function(loop, monkeypatch):
    """The lookup is cancelled while it waits for the executor's only thread."""
    gate = threading.Event()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, gate.wait)
    original = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: original(*args))
    task = loop.create_task(loop.getaddrinfo("localhost", 80))
    await iterations(2)
    task.cancel()
    await iterations(2)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await blocker


async def test_getnameinfo(loop):
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    assert await loop.getnameinfo(("127.0.0.1", 80), flags) == ("127.0.0.1", "80")
    assert await loop.getnameinfo(("::1", 80, 0, 0), flags) == ("::1", "80")
    assert await loop.getnameinfo(("127.0.0.1", 80)) == socket.getnameinfo(("127.0.0.1", 80), 0)


class Text(str):
    """A string whose encode() does not return its content. CPython uses the content."""

    def encode(self, encoding="utf-8", errors="strict"):
        return b"192.0.2.1" if encoding == "ascii" else b"name.invalid"


class Index:
    def __index__(self):
        return socket.NI_NUMERICHOST | socket.NI_NUMERICSERV

    def __repr__(self):
        return "Index()"


@pytest.mark.skip_on(uvloop="it raises other errors")
@pytest.mark.parametrize("flags", [None, "0", b"", 1.5, [], 2**31, Index()], ids=repr)
async def test_getnameinfo_with_wrong_flags(loop, flags):
    def result(function):
        try:
            return function()
        except Exception as error:
            return type(error), error.args

    expected = result(lambda: socket.getnameinfo(("127.0.0.1", 80), flags))
    try:
        found = await loop.getnameinfo(("127.0.0.1", 80), flags)
    except Exception as error:
        found = type(error), error.args
    assert found == expected


@pytest.mark.skip_on(uvloop="it accepts no subclasses")
async def test_a_subclass_of_str(loop):
    for host in (Text("localhost"), Text("127.0.0.1")):
        flags = socket.AI_NUMERICHOST
        assert await loop.getaddrinfo(host, 80, flags=flags) == socket.getaddrinfo(host, 80, flags=flags)
    assert await ask(loop, "127.0.0.1", Text("80")) == socket.getaddrinfo("127.0.0.1", Text("80"))
    assert await ask(loop, "localhost", Text("80")) == socket.getaddrinfo("localhost", Text("80"))
    for flags in (0, socket.NI_NUMERICHOST, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV):
        address = (Text("127.0.0.1"), 80)
        assert await loop.getnameinfo(address, flags) == socket.getnameinfo(address, flags)


@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
def test_no_bytes_warning(kind):
    code = """
    import asyncio, socket
    loop = new_event_loop()
    loop.set_exception_handler(None)
    async def main():
        for host in ("127.0.0.1", b"127.0.0.1", "localhost", b"localhost"):
            for port in (80, "80", b"80", "", b"", None):
                await loop.getaddrinfo(host, port)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            for name in (str(port), str(port).encode(), port):
                transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", name)
                transport.abort()
        await asyncio.sleep(0)
    loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    """
    run_script(kind, code, flags=("-bb", "-W", "error"))


@pytest.mark.parametrize("address", [("127.0.0.1",), ("127.0.0.1", "80"), "127.0.0.1", ("not an address", 80)])
@pytest.mark.skip_on(uvloop="it accepts some of these addresses, and raises other errors")
async def test_getnameinfo_errors(loop, address):
    with pytest.raises((TypeError, OSError)) as expected:
        socket.getnameinfo(address, 0)
    with pytest.raises(expected.type) as found:
        await loop.getnameinfo(address)
    assert found.value.args == expected.value.args
