"""A patched lookup of a name gives the same result or error as CPython's, and does not block other coros."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

# `compare` makes all calls before and after coro.patch(), and prints those whose outcomes differ. The outcome of a call
# includes its audit events.
HEAD = """
import socket, sys, threading

events, forbidden = [], []

def hook(event, args):
    if event.startswith("socket.gethostby") or event in ("socket.getaddrinfo", "socket.getnameinfo"):
        events.append((event, args, [type(arg) for arg in args]))
        if forbidden:
            raise forbidden[0]

sys.addaudithook(hook)

def ask(name, args, kwargs):
    events.clear()
    try:
        answer = getattr(socket, name)(*args, **kwargs)
    except Exception as error:
        answer = type(error), error.args
    return answer, list(events)

def compare(calls, is_same=lambda before, after: before == after):
    before = [ask(*call) for call in calls]
    from grapeshot import coro

    def main():
        for call, expected in zip(calls, before):
            found = ask(*call)
            if not is_same(expected, found):
                print(call, "\\n  CPython: ", expected, "\\n  in a coro:", found)

    coro.patch()
    coro.run(main)
"""


def run(code: str) -> None:
    assert run_script(None, HEAD + code, flags=("-bb", "-W", "error")) == ""


def test_hosts():
    run("""
class Text(str):
    def encode(self, encoding="utf-8", errors="strict"):
        return b"127.0.0.2" if encoding == "ascii" else b"name.invalid"

hosts = ["localhost", "LOCALHOST", "localhost.", b"localhost", bytearray(b"localhost"), "127.0.0.1", b"127.0.0.1"]
hosts += ["127.1", "0", "1", "255.255.255.255", "256.1.1.1", "::1", "::1%lo", "fe80::1", "::ffff:127.0.0.1"]
hosts += [" 127.0.0.1"]
hosts += ["", b"", None, 5]
hosts += ["a..b", "..", ".", ".a", "x" * 64, "x" * 64 + ".a", "x" * 300, "\\ud800", "\\u3002", "a\\0b", b"a\\0b", "\\0"]
hosts += ["\\uff11\\uff12\\uff17.0.0.1", "localho\\u017ft", Text("localhost"), Text("127.0.0.1"), Text("a..b")]
functions = ["gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getfqdn"]
compare([(function, (host,), {}) for function in functions for host in hosts])
""")


def test_broadcast():
    # For the name `<broadcast>`, glibc does not set the h_errno that CPython's gethostbyname_ex reads. So the error's
    # arguments come from an earlier lookup in the same thread.
    run("""
hosts = ["<broadcast>", b"<broadcast>", "\\uff1cbroadcast\\uff1e"]
functions = ["gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getfqdn"]

def is_same(before, after):
    errors = [answer for answer, _ in (before, after) if isinstance(answer, tuple) and answer[0] is socket.herror]
    return before == after or (len(errors) == 2 and before[1] == after[1])

compare([(function, (host,), {}) for function in functions for host in hosts], is_same)
""")


def test_arguments():
    run("""
calls = []
for function in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
    calls += [(function, (), {}), (function, ("localhost", 1), {}), (function, (), {"name": "localhost"})]
    calls += [(function, ("localhost",), {"x": 1})]
address = ("127.0.0.1", 80)
calls += [("getnameinfo", args, {}) for args in [(), (address,), (address, 0), (address, 3), (address, 0, 0)]]
calls += [("getnameinfo", (address, flags), {}) for flags in (None, "0", b"", 1.5, 2**31, -1)]
calls += [("getnameinfo", (address,), {"flags": 0})]
calls += [("getnameinfo", (other, 3), {}) for other in [("localhost", 80), (b"127.0.0.1", 80), ("::1", 80, 0, 0)]]
for host in ("localhost", b"localhost", "127.0.0.1", b"127.0.0.1", None, "", "a..b"):
    calls += [("getaddrinfo", (host, port), {}) for port in (80, "80", b"80", "http", "", b"", None, 1.5)]
    calls += [("getaddrinfo", (host, 80, socket.AF_INET, socket.SOCK_STREAM), {"flags": socket.AI_CANONNAME})]
compare(calls)
""")


def test_audit_hooks_that_raise():
    """A function stops when an audit hook raises, and does not call the hook again."""
    run("""
forbidden.append(TypeError("not allowed"))
calls = [(function, ("localhost",), {}) for function in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr")]
calls += [("getnameinfo", (("127.0.0.1", 80), flags), {}) for flags in (0, 3)]
calls += [("getaddrinfo", (host, 80), {}) for host in ("localhost", "127.0.0.1")]
compare(calls)
""")


@pytest.mark.parametrize("time", ["before the patch", "after the import"])
def test_replacements_are_called_in_a_thread(time):
    """If the program has replaced functions of `socket`, the replacements are called in a thread, because they may
    block. A replacement is also called for a host that needs no lookup. Other coros run during each call.
    """
    run(f"""
asked = []

def replace():
    def replacement(name, original):
        def function(*args):
            asked.append(name)
            os.read(reader, 1)
            return original(*args)
        return function
    for name in ("getaddrinfo", "getnameinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        setattr(socket, name, replacement(name, getattr(socket, name)))

import os
reader, writer = os.pipe()
if {time!r} == "before the patch":
    replace()
from grapeshot import coro
import grapeshot.coro._dns

def call(function, *args):
    asked.clear()
    lookup = coro.spawn(function, *args)
    with coro.timeout(20):
        while not asked:
            coro.sleep_relative(0.001)
    assert not lookup.done()
    os.write(writer, b".")
    lookup.join()
    return lookup.result()

def main():
    if {time!r} == "before the patch":
        coro.patch()
        for host in ("127.0.0.1", "localhost"):
            assert call(socket.gethostbyname, host) == "127.0.0.1"
            assert "127.0.0.1" in call(socket.gethostbyname_ex, host)[2]
            assert "127.0.0.1" in call(socket.gethostbyaddr, host)[2]
            assert call(socket.getaddrinfo, host, 80)
        assert call(socket.getnameinfo, ("127.0.0.1", 80), 3) == ("127.0.0.1", "80")
    else:
        replace()
    for host in ("127.0.0.1", b"::1", "localhost"):
        assert call(grapeshot.coro._dns.getaddrinfo, host, 80)

coro.run(main)
""")


def test_special_hosts_of_coro_sockets():
    run("""
from grapeshot import coro

def main():
    for host in ("127.0.0.1", b"127.0.0.1", "localhost", b"localhost", ""):
        with coro.tcp_sock() as server:
            server.bind((host, 0))
            server.listen(1)

coro.run(main)
""")
