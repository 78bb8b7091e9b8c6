"""memray beside coros: it does not crash, and it attributes each allocation to the coro that made it.

memray keeps pointers to the frames of all calls that have not returned, and reads these frames at each allocation.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
from support import coro_is_available, gil_is_enabled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]

# The head of the scripts. Each block that they allocate has a different length, which identifies it. `check` compares
# the functions that memray names for a block, the innermost first, with the functions that ran.
HEAD = """
import asyncio, collections, functools, itertools, os, random, sys
import memray
import grapeshot
from grapeshot import coro

PLACE = sys.argv[1]
# How many bytes a bytearray allocates beyond its length. From 3.15 on, its data is a bytes object.
MORE = sys.getsizeof(b"") if sys.version_info >= (3, 15) else 1
expected = {}
serials = itertools.count(1_000_000)
kept = []


def allocate():
    length = next(serials)
    names, frame = [], sys._getframe()
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    expected[length + MORE] = names
    kept.append(bytearray(length))
    if len(kept) > 50:
        kept.pop(random.randrange(len(kept)))


def named(function, number):
    # Return a copy of the function. The copy's name says which coro it belongs to.
    name = f"{function.__name__}_{number}"
    return type(function)(function.__code__.replace(co_name=name, co_qualname=name), globals(), name)


def check(below=None, at_least=1, complete=True):
    seen = collections.Counter()
    with memray.FileReader(PLACE) as reader:
        for record in reader.get_allocation_records():
            names = expected.get(record.size)
            if names is None or not record.n_allocations:
                continue
            found = [function for function, _, _ in record.stack_trace(max_stacks=100)]
            if complete:
                assert found[: len(names)] == names, (found, names)
            else:
                assert all(name in names for name in found if name[-1].isdigit()), (found, names)
            rest = found[len(names):]
            assert not any(name[-1].isdigit() for name in rest), (found, names)
            if below is not None:
                assert below in rest, (found, names)
            seen[record.size] += 1
    assert len(seen) >= at_least, (len(seen), len(expected))
    print("checked")
"""


def run(code, tmp_path, *, native=False):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", HEAD + textwrap.dedent(code), tmp_path / "memory.bin"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        # Free-threaded builds do not know the allocator `malloc`.
        env=os.environ | ({"PYTHONMALLOC": "malloc"} if gil_is_enabled() else {}),
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout == "checked\n"
    assert "Traceback" not in done.stderr, done.stderr


@pytest.fixture(autouse=True)
def _memray():
    if importlib.util.find_spec("memray") is None:
        pytest.skip("NOT TESTED: coros under memray, which is not installed (requirements/dev.txt)")


WORK = """
def deeper(level):
    if level:
        if level % 3 == 0:
            functools.reduce(lambda left, right: deeper(level - 1), range(2))
        else:
            deeper(level - 1)
    allocate()
    coro.yield_slice()
    allocate()


def pieces(number):
    for _ in range(3):
        allocate()
        coro.yield_slice()
        yield number


async def hold(number):
    allocate()
    await asyncio.sleep(0)
    allocate()


def work(number):
    generator = random.Random(number)
    for _ in range(4):
        kind = generator.randrange(4)
        if kind == 0:
            deeper(generator.randrange(5))
        elif kind == 1:
            list(pieces(number))
        elif kind == 2:
            coro.await_(hold(number))
        else:
            try:
                deeper(2)
                coro.yield_slice()
                raise KeyError(number)
            except KeyError:
                allocate()
        coro.sleep_relative(generator.random() / 1000)


def main():
    threads = [coro.spawn(named(work, number), number) for number in range(12)]
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("native", [False, True])
def test_each_allocation_has_the_functions_of_its_coro(native, tmp_path):
    code = (
        WORK
        + f"""
with memray.Tracker(PLACE, native_traces={native}, trace_python_allocators=True):
    coro.run(main)
check(below="run", at_least=100)
"""
    )
    run(code, tmp_path)


def test_connections(tmp_path):
    """Coros take items from a queue and await streams."""
    run(
        """
        async def echo(reader, writer):
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()

        def work(number, jobs, done, port):
            while (item := jobs.pop()) is not None:
                reader, writer = coro.await_(asyncio.open_connection("127.0.0.1", port))
                allocate()
                writer.write(b"%d\\n" % item)
                line = coro.await_(reader.readline())
                writer.close()
                coro.await_(writer.wait_closed())
                allocate()
                done.push(int(line))

        def main():
            server = coro.await_(asyncio.start_server(echo, "127.0.0.1", 0))
            port = server.sockets[0].getsockname()[1]
            jobs, done = coro.fifo(), coro.fifo()
            threads = [coro.spawn(named(work, number), number, jobs, done, port) for number in range(10)]
            for item in range(100):
                jobs.push(item)
            assert sorted(done.pop() for _ in range(100)) == list(range(100))
            for thread in threads:
                jobs.push(None)
            for thread in threads:
                thread.join()
            server.close()

        with memray.Tracker(PLACE, trace_python_allocators=True):
            coro.run(main)
        check(below="run", at_least=100)
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    "place",
    [
        "loop",
        "coro",
        pytest.param(
            "thread",
            marks=pytest.mark.skipif(
                not gil_is_enabled(),
                reason="memray crashes if it is started while other threads are busy, even without coros",
            ),
        ),
    ],
)
def test_memray_begins_and_ends_while_coros_wait(place, tmp_path):
    """When memray starts, each coro is in some functions already. From 3.12 on, these functions may be missing from
    the stacks that memray records for the coro. But these stacks never contain functions of other coros.
    """
    run(
        WORK
        + f"""
PLACE_OF_TRACKER = {place!r}


def begin():
    tracker = memray.Tracker(PLACE, trace_python_allocators=True)
    tracker.__enter__()
    return tracker


def everywhere(function, *args):
    # Run the function where PLACE_OF_TRACKER says: in a callback of the loop, in this coro, or in another thread.
    if PLACE_OF_TRACKER == "coro":
        return function(*args)
    if PLACE_OF_TRACKER == "thread":
        return coro.threads.run(function, *args)
    done = coro.fifo()
    asyncio.get_running_loop().call_soon(lambda: done.push(function(*args)))
    return done.pop()


ending = []


def again(number):
    while not ending:
        named(work, number)(number)
        coro.yield_slice()
        allocate()


def main():
    threads = [coro.spawn(named(again, number), number) for number in range(8)]
    for count in (1, 20, 100):
        for _ in range(3):
            coro.yield_slice()
        expected.clear()
        if os.path.exists(PLACE):
            os.unlink(PLACE)
        tracker = everywhere(begin)
        enough = len(expected) + count
        while len(expected) < enough:
            coro.sleep_relative(0.001)
        everywhere(tracker.__exit__, None, None, None)
    ending.append(True)
    before = set(expected)
    for thread in threads:
        thread.join()
    for length in set(expected) - before:
        del expected[length]


coro.run(main)
check(complete=False, at_least=20)
""",
        tmp_path,
    )


def test_waits_inside_a_trace_function(tmp_path):
    """memray gets no events from inside a trace function, so its stacks may lack functions. The test checks only that
    nothing crashes.
    """
    run(
        WORK
        + """
def trace(frame, event, arg):
    if frame.f_globals is globals():
        if any(thread._status == "running" for thread in coro.get_live_coros()):
            deeper(1)
        return trace


with memray.Tracker(PLACE, trace_python_allocators=True):
    sys.settrace(trace)
    coro.run(main)
    sys.settrace(None)
print("checked")
""",
        tmp_path,
    )


def test_a_python_profile_function_gets_no_switch_events():
    """Only native profile functions such as memray's get events for switches between coros. A function that was set
    with `sys.setprofile` gets none. grapeshot recognizes it by the Python object that CPython keeps for it.
    """
    from grapeshot import coro

    events = []

    def profile(frame, event, _):
        if frame.f_code is work.__code__:
            events.append(event)

    def work():
        coro.yield_slice()
        return coro.yield_slice()

    def main():
        sys.setprofile(profile)
        try:
            for thread in [coro.spawn(work) for _ in range(3)]:
                thread.join()
        finally:
            sys.setprofile(None)

    coro.run(main)
    assert [event for event in events if not event.startswith("c_")] == ["call"] * 3 + ["return"] * 3
