"""Coros yield inside callbacks of C libraries."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sqlite3
import ssl
import sys
import xml.parsers.expat

import pytest
from support import coro_is_available, together

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


def slow(value):
    """Yield, then return the value."""
    coro.yield_slice()
    return value


@pytest.mark.parametrize("stack", ["own", "shared"])
def test_ctypes_callbacks(stack):
    """While a coro is suspended in qsort, nothing uses a pointer into qsort's frames, so a shared stack works, too."""
    callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    qsort = ctypes.CDLL(None).qsort
    qsort.restype = None

    def sort(number):
        def compare(left, right):
            coro.yield_slice()
            assert not coro.current().done()
            return left[0] - right[0]

        values = [(x * 7 + number) % 31 for x in range(20)]
        array = (ctypes.c_int * len(values))(*values)
        qsort(array, len(values), ctypes.sizeof(ctypes.c_int), callback_type(compare))
        return list(array) == sorted(values)

    assert together(sort, 5, stack=stack) == [True] * 5


def test_nested_ctypes_callbacks():
    callback_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)

    def work(number):
        def inner(value):
            coro.yield_slice()
            return value if value == 0 else callback(value - 1) + 1

        callback = callback_type(inner)
        return callback(number)

    assert together(work) == list(range(COUNT))


def test_an_exception_in_a_ctypes_callback(monkeypatch):
    seen: list = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_value.args))

    def work(number):
        def fail():
            coro.yield_slice()
            raise ValueError(number)

        ctypes.CFUNCTYPE(None)(fail)()
        return number

    assert together(work) == list(range(COUNT))
    assert sorted(seen) == [(number,) for number in range(COUNT)]


def test_sqlite_functions():
    def work(number):
        connection = sqlite3.connect(":memory:")

        class Product:
            value = 1

            def step(self, value):
                self.value *= slow(value)

            def finalize(self):
                return slow(self.value)

        traced: list = []
        connection.create_function("slow", 1, slow)
        connection.create_aggregate("product", 1, Product)
        connection.create_collation("backwards", lambda a, b: slow((a < b) - (a > b)))
        connection.set_trace_callback(lambda text: traced.append(slow(text)))
        connection.set_authorizer(lambda *_: slow(sqlite3.SQLITE_OK))
        connection.set_progress_handler(lambda: slow(0), 5)
        connection.row_factory = lambda _, row: slow(row)
        with connection:
            connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
            connection.executemany("INSERT INTO t VALUES (slow(?), ?)", ((slow(x), str(x)) for x in range(1, 4)))
        total = connection.execute("SELECT sum(slow(a)) + ?, product(a) FROM t", (number,)).fetchall()
        names = [row[0] for row in connection.execute("SELECT b FROM t ORDER BY b COLLATE backwards")]
        with pytest.raises(sqlite3.OperationalError):
            connection.execute("SELECT slow(1, 2)")
        connection.close()
        assert traced
        return total, names

    assert together(work, 5) == [([(6 + number, 6)], ["3", "2", "1"]) for number in range(5)]


def test_expat_handlers():
    def work(number):
        events: list = []
        parser = xml.parsers.expat.ParserCreate()
        parser.StartElementHandler = lambda name, attributes: events.append(slow((name, attributes)))
        parser.EndElementHandler = lambda name: events.append(slow(name))
        parser.CharacterDataHandler = lambda text: events.append(slow(text))
        parser.Parse(f'<a n="{number}"><b>', False)
        coro.yield_slice()
        parser.Parse("text</b></a>", True)
        return events

    assert together(work) == [[("a", {"n": str(n)}), ("b", {}), "text", "b", "a"] for n in range(COUNT)]


# ---------------------------------------------------------------- OpenSSL, and the loop's own native code


def test_callbacks_of_openssl():
    """OpenSSL calls back with the server's name during a handshake, while other handshakes proceed."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_context)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client_context)
    names: list = []

    def look_at(_connection, name, _context):
        coro.yield_slice()
        names.append((coro.current().name, name))

    server_context.sni_callback = look_at

    def connect(_):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = server_context.wrap_bio(to_server, to_client, server_side=True)
        client = client_context.wrap_bio(to_client, to_server, server_hostname="localhost")
        pending = [client, server]
        while pending:
            for side in list(pending):
                try:
                    side.do_handshake()
                    pending.remove(side)
                except ssl.SSLWantReadError:
                    coro.yield_slice()
        client.write(b"hello")
        return server.read(5), coro.current().name

    results = together(connect, 4)
    assert [data for data, _ in results] == [b"hello"] * 4
    assert sorted(names) == sorted((name, "localhost") for _, name in results)


def test_protocols_that_yield_where_the_loop_calls_them():
    """A transport calls `pause_writing` inside `write`. During that call, another coro writes to the transport and
    aborts it.
    """
    log: list = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def pause_writing(self):
            log.append("paused")
            coro.yield_slice()
            coro.sleep_relative(0)
            log.append(f"closing: {self.transport.is_closing()}")

        def connection_lost(self, exc):
            log.append("lost")

    def other(transport):
        transport.write(b"y" * 1000)
        log.append("written")
        transport.abort()

    def main():
        left, right = socket.socketpair()
        left.setblocking(False)
        with right:
            loop = asyncio.get_running_loop()
            transport, _ = coro.await_(loop.create_connection(Protocol, sock=left))
            transport.set_write_buffer_limits(high=0)
            beside = coro.spawn(other, transport)
            transport.write(b"x" * 10_000_000)
            log.append("back")
            beside.join()
            for _ in range(5):
                coro.yield_slice()

    coro.run(main)
    assert log == ["paused", "written", "lost", "closing: True", "back"] or log == [
        "paused",
        "written",
        "closing: True",
        "back",
        "lost",
    ]


def test_callbacks_that_compare_slowly():
    """`remove_done_callback` compares callbacks with `__eq__`, which yields. Meanwhile other coros change the list."""

    class Callback:
        def __init__(self, number):
            self.number = number

        def __call__(self, _):
            called.append(self.number)

        def __eq__(self, other):
            coro.yield_slice()
            return self.number == getattr(other, "number", None)

        __hash__ = None

    called: list = []

    def main():
        waiting = coro.spawn(coro.wait)
        coro.yield_slice()
        for number in range(5):
            waiting.add_done_callback(Callback(number))
        removers = [coro.spawn(waiting.remove_done_callback, Callback(number)) for number in (1, 3)]
        coro.yield_slice()
        waiting.add_done_callback(Callback(9))
        removed = [remover.join() for remover in removers]
        coro.schedule(waiting)
        waiting.join()
        for _ in range(3):
            coro.yield_slice()
        return removed

    assert coro.run(main) == [1, 1]
    assert called == [0, 2, 4, 9]
