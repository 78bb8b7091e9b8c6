"""getaddrinfo and getnameinfo: the answers of the socket module, literals included."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading

import pytest
from support import turns

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


@pytest.mark.deviates(uvloop="#539: scope ids are lost, and other short cuts differ")
@pytest.mark.parametrize("kind", [0, socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("flags", [0, socket.AI_NUMERICHOST])
def test_literals_equal_the_socket_module(loop, kind, flags):
    """Every host with the flag that forbids name servers; without it those that need none."""
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


@pytest.mark.deviates(uvloop="its short cut ignores flags and protocols")
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


async def test_types_of_a_literals_answer(loop):
    [info] = await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    assert info == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 80))
    assert isinstance(info[0], socket.AddressFamily)
    assert isinstance(info[1], socket.SocketKind)


async def test_unknown_names(loop):
    with pytest.raises(socket.gaierror):
        await loop.getaddrinfo("name.invalid", 80)


@pytest.mark.unfit(uvloop="it resolves in a thread pool of its own")
async def test_cancelled_lookup(loop):
    """It waits for the only thread of the executor when it is cancelled."""
    gate = threading.Event()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, gate.wait)
    task = loop.create_task(loop.getaddrinfo("localhost", 80))
    await turns(2)
    task.cancel()
    await turns(2)
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
@pytest.mark.unfit(uvloop="it takes some of them, and names other errors")
async def test_getnameinfo_errors(loop, address):
    expected = answer(lambda: socket.getnameinfo(address, 0))
    with pytest.raises((TypeError, OSError)):
        await loop.getnameinfo(address)
    assert isinstance(expected[0], str)
