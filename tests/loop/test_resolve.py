"""getaddrinfo and getnameinfo return the same as the socket module's functions, also for literal addresses.

The threads that look up names are tested in test_resolver.py.
"""

from __future__ import annotations

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


@pytest.mark.xfail_on(uvloop="#539: it loses scope ids, and its other shortcuts differ")
@pytest.mark.parametrize("kind", [0, socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("flags", [0, socket.AI_NUMERICHOST])
def test_literals_equal_the_socket_module(loop, kind, flags):
    """With AI_NUMERICHOST, which forbids name servers, every host is tested; without it, only numeric hosts."""
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
    """IPv4 and IPv6 literals in all their spellings, and texts that almost are literals."""
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


@pytest.mark.skip_on(uvloop="#539: it loses scope ids, and its other shortcuts differ")
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
    for port in (80, 443):
        loop.run_until_complete(loop.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asked = [args for args in seen if args[0] == "127.0.0.1" and args[1] != 1]
    assert asked == [("127.0.0.1", port, 0, socket.SOCK_STREAM, 0) for port in (80, 443)], seen
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


@pytest.mark.parametrize("address", [("127.0.0.1",), ("127.0.0.1", "80"), "127.0.0.1", ("not an address", 80)])
@pytest.mark.skip_on(uvloop="it accepts some of these addresses, and raises other errors")
async def test_getnameinfo_errors(loop, address):
    expected = answer(lambda: socket.getnameinfo(address, 0))
    with pytest.raises((TypeError, OSError)):
        await loop.getnameinfo(address)
    assert isinstance(expected[0], str)
