"""Coros wait inside calls of extensions built with pybind11, which keeps a list of the thread's calls."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from support import coro_is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]

SOURCE = """
#include <functional>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <string>

namespace py = pybind11;

static void add_functions(py::module_ &m) {
    // Each call is in pybind11's list until it returns. pybind11 terminates the process if a call returns while it is
    // not at the head of the list.
    m.def("call", [](const std::function<py::object()> &function, const std::u16string &text) {
        return py::make_tuple(function(), text);
    });
    m.def("call_view", [](py::function function, const char *text) {
        py::object result = function();
        return py::make_tuple(result, std::string(text));
    });
}

// The library is installed twice, once under each name. It is compiled only once, because that takes ten seconds.
PYBIND11_MODULE(first_calls, m) { add_functions(m); }
PYBIND11_MODULE(second_calls, m) { add_functions(m); }
"""

HEAD = """
import asyncio, random, sys, threading
import grapeshot
from grapeshot import coro
sys.path.insert(0, sys.argv[1])


def together(function, count=10, stacks=("shared", "own")):
    def main():
        return [co.join() for co in [coro.spawn(function, n, stack=stacks[n % len(stacks)]) for n in range(count)]]
    return coro.run(main)
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The folder of the two modules."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    include = sysconfig.get_path("include")
    if compiler is None or not Path(include, "Python.h").exists() or importlib.util.find_spec("pybind11") is None:
        pytest.skip("NOT TESTED: pybind11 (requirements/dev.txt), a C++ compiler or Python.h is missing")
    if sys.platform != "linux":
        pytest.skip("NOT TESTED: only on Linux does grapeshot find the variable in which pybind11 keeps its list")
    import pybind11

    folder = tmp_path_factory.mktemp("pybind11")
    (folder / "calls.cpp").write_text(SOURCE)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    first, second = folder / f"first_calls{suffix}", folder / f"second_calls{suffix}"
    command = [compiler, "-O1", "-std=c++17", "-fvisibility=hidden", "-shared", "-fPIC", "-w"]
    includes = ["-I", include, "-I", pybind11.get_include()]
    subprocess.run([*command, *includes, "-o", first, folder / "calls.cpp"], check=True)
    shutil.copy(first, second)
    return folder


def run(folder, code, imports="import first_calls, second_calls\n"):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", HEAD + imports + textwrap.dedent(code), folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_calls_end_in_any_order(folder):
    run(
        folder,
        """
        def work(number):
            generator = random.Random(number)

            def wait():
                for _ in range(generator.randrange(5)):
                    coro.yield_slice()
                return number

            def nested():
                inner = generator.choice([first_calls, second_calls])
                assert inner.call(wait, f"inner {number}") == (number, f"inner {number}")
                return wait()

            for _ in range(10):
                outer = generator.choice([first_calls, second_calls])
                function = generator.choice([wait, nested])
                call = generator.choice([outer.call, outer.call_view])
                assert call(function, f"text {number}") == (number, f"text {number}")
            return number

        assert together(work, 40) == list(range(40))
        """,
    )


def test_a_loop_inside_a_call(folder):
    """Each switch from a coro to the thread's own stack restores the list of calls that were made on that stack."""
    run(
        folder,
        """
        def work(number):
            def wait():
                for _ in range(5 - number % 5):
                    coro.yield_slice()
                return number
            return [first_calls.call(wait, "x")[0] for _ in range(3)]

        def outer():
            return second_calls.call(lambda: together(work), "y")[0]

        expected = [[number] * 3 for number in range(10)]
        for _ in range(3):
            assert first_calls.call(outer, "z") == (expected, "z")
        assert together(work) == expected
        """,
    )


def test_a_call_outlives_the_run_that_it_began_in(folder):
    run(
        folder,
        """
        loop = grapeshot.new_event_loop()

        async def begin(gate):
            made = coro.spawn(lambda: first_calls.call(gate.pop, "x"))
            for _ in range(3):
                await asyncio.sleep(0)
            return made

        async def end(made, gate):
            gate.push(5)
            return await made

        gate = []
        async def make():
            gate.append(coro.fifo())
        loop.run_until_complete(make())
        began = first_calls.call(lambda: loop.run_until_complete(begin(gate[0])), "a")[0]
        deeper = lambda: second_calls.call(lambda: loop.run_until_complete(end(began, gate[0])), "b")[0]
        assert first_calls.call(deeper, "c") == ((5, "x"), "c")
        loop.close()
        """,
    )


def test_errors_and_ends(folder):
    run(
        folder,
        """
        def work(number):
            def wait():
                coro.sleep_relative(0.001)
                raise KeyError(number)
            try:
                first_calls.call(wait, "x")
            except KeyError as exc:
                return exc.args[0]

        assert together(work) == list(range(10))

        def main():
            waiting = [coro.spawn(lambda: first_calls.call(coro.fifo().pop, "x")) for _ in range(5)]
            coro.yield_slice()
            for co in waiting[::2]:
                co.shutdown()
            coro.yield_slice()
            assert first_calls.call(lambda: 1, "y") == (1, "y")

        coro.run(main)
        """,
    )


def test_threads(folder):
    run(
        folder,
        """
        def work(number):
            def wait():
                for _ in range(number % 4):
                    coro.yield_slice()
                return number
            return [first_calls.call(wait, "x")[0] for _ in range(20)][0]

        done = []
        threads = [threading.Thread(target=lambda: done.append(together(work))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [list(range(10))] * 4
        """,
    )


def test_an_extension_that_a_coro_imports(folder):
    run(
        folder,
        """
        def work(number):
            import first_calls

            def wait():
                for _ in range(5 - number % 5):
                    coro.yield_slice()
                return number

            return first_calls.call(wait, "x")[0]

        assert together(work) == list(range(10))
        """,
        imports="",
    )
