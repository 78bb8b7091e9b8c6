"""Coros that yield inside callbacks of C libraries."""

from __future__ import annotations

import ctypes
import sqlite3
import sys
import xml.parsers.expat

import pytest
from support import coro_is_available, together

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


def slow(value):
    """The value, after others have run."""
    coro.yield_slice()
    return value


@pytest.mark.parametrize("stack", ["own", "shared"])
def test_ctypes_callbacks(stack):
    """qsort keeps nothing of ours but what lies in its own frames, so that a shared stack is right, too."""
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
