"""Code that walks the frames of a thread finds a valid chain: at each allocation, in a signal handler, and in a
traceback that faulthandler writes.
"""

from __future__ import annotations

import importlib.machinery
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

WORK = """
import asyncio, faulthandler, functools, gc, random, signal, sys, time, tracemalloc
import grapeshot
from grapeshot import coro
sys.path.insert(0, sys.argv[1])
import frame_walker

END = time.process_time() + 1  # CPU time, so that a busy machine does not take the signals' time away


def deeper(level, pause):
    if level == 0:
        pause()
        return [0]
    if level % 5 == 0:
        return sorted([level], key=lambda item: deeper(level - 1, pause))
    return [*deeper(level - 1, pause), level]


def pieces(count, pause):
    for item in range(count):
        pause()
        yield item


class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        deeper(3, int)


async def hold(generator):
    await asyncio.sleep(0)
    return [generator.random() for _ in range(10)]


def work(seed, fifo):
    generator = random.Random(seed)

    def pause():
        kind = generator.randrange(5)
        if kind == 0:
            coro.yield_slice()
        elif kind == 1:
            fifo.push(seed)
        elif kind == 2:
            fifo.push(seed)
            fifo.pop()
        elif kind == 3:
            coro.await_(hold(generator))
        else:
            coro.sleep_relative(generator.random() / 10_000)

    while time.process_time() < END:
        kind = generator.randrange(6)
        try:
            if kind == 0:
                deeper(generator.randrange(60), pause)
            elif kind == 1:
                list(pieces(5, pause))
            elif kind == 2:
                coro.spawn(deeper, 5, pause).join()
            elif kind == 3:
                try:
                    raise KeyError(seed)
                except KeyError:
                    pause()
                    raise
            elif kind == 4:
                for _ in range(10):
                    Cycle()
                pause()
                gc.collect(0)
            else:
                [coro.current().get_frame(), *(other.get_frame() for other in coro.get_live_coros()[:5])]
                pause()
        except KeyError:
            pass
    return seed


def main():
    fifo = coro.fifo()
    threads = [coro.spawn(work, seed, fifo) for seed in range(40)]
    assert [thread.join() for thread in threads] == list(range(40))
"""


@pytest.fixture(scope="session")
def walker(tmp_path_factory) -> Path:
    """The folder of the module frame_walker."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    include = sysconfig.get_path("include")
    if compiler is None or not Path(include, "Python.h").exists() or sys.platform != "linux":
        pytest.skip("NOT TESTED: walks of frames, which need Linux, a C compiler and the headers of Python")
    folder = tmp_path_factory.mktemp("walker")
    source = Path(__file__).with_name("frame_walker.c")
    library = folder / ("frame_walker" + importlib.machinery.EXTENSION_SUFFIXES[0])
    includes = ["-I", include, "-I", os.path.join(include, "internal")]
    if sys.version_info < (3, 13):
        includes.append("-DPyThreadState_GetUnchecked=_PyThreadState_UncheckedGet")
    command = [compiler, "-O1", "-w", "-shared", "-fPIC", "-pthread", *includes, "-o", library, source]
    subprocess.run(command, check=True)
    return folder


def run(walker, code):
    """Return the numbers that the script prints."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", WORK + textwrap.dedent(code), walker],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-5000:]}"
    return [int(word) for word in done.stdout.split()]


def test_at_each_allocation(walker):
    _, allocations, deepest = run(
        walker,
        """
        frame_walker.hook_allocations()
        coro.run(main)
        print(*frame_walker.end())
        """,
    )
    assert allocations > 10_000
    assert deepest > 10


def test_at_each_allocation_with_tracemalloc(walker):
    """tracemalloc's own hooks walk the frames, too. The outermost function in the traceback of a block is the function
    of the coro that allocated the block.
    """
    blocks, allocations, _ = run(
        walker,
        """
        def take(number, blocks):
            def inner():
                coro.yield_slice()
                blocks.append((number, bytearray(1000 + number)))

            for _ in range(5):
                inner()

        def named(number):
            code = take.__code__.replace(co_filename=f"of_{number}")
            return type(take)(code, globals(), "take")

        def both():
            blocks = []
            threads = [coro.spawn(named(number), number, blocks) for number in range(20)]
            main()
            for thread in threads:
                thread.join()
            for number, block in blocks:
                (first, *_) = tracemalloc.get_object_traceback(block)
                assert first.filename == f"of_{number}", (number, first)
            return len(blocks)

        frame_walker.hook_allocations()
        tracemalloc.start(25)
        count = coro.run(both)
        tracemalloc.stop()
        print(count, *frame_walker.end()[1:])
        """,
    )
    assert blocks == 100
    assert allocations > 10_000


def test_in_a_signal_handler_during_switches(walker):
    """A signal handler in C walks the frames if the signal has interrupted grapeshot's code. The handler
    ignores signals that interrupt the interpreter's code: before 3.14, the interpreter sometimes makes the chain of
    frames invalid for a moment.
    """
    signals, _, deepest = run(
        walker,
        """
        from grapeshot import _core

        def busy(level):
            if level:
                return sorted([level], key=lambda _: busy(level - 1))
            while time.process_time() < END:
                for _ in range(100):
                    coro.yield_slice()
                coro.spawn(coro.yield_slice).join()

        def switches():
            for thread in [coro.spawn(busy, number % 4) for number in range(10)]:
                thread.join()

        frame_walker.begin_signals(_core.__file__, 0)
        coro.run(switches)
        print(*frame_walker.end())
        """,
    )
    assert signals > 100
    assert deepest >= 3


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before 3.14, CPython's chain of frames is invalid at times")
@pytest.mark.parametrize("with_faulthandler", [False, True])
def test_in_a_signal_handler(walker, with_faulthandler):
    signals, _, deepest = run(
        walker,
        f"""
        other = int(signal.SIGUSR1) if {with_faulthandler} else 0
        if other:
            faulthandler.register(other, file=open("/dev/null", "w"), all_threads=False)
        frame_walker.begin_signals(None, other)
        coro.run(main)
        print(*frame_walker.end())
        """,
    )
    assert signals > 100
    assert deepest > 10
