"""Tracing, profiling, monitoring and coverage of interleaved coros. Trace functions belong to the thread."""

from __future__ import annotations

import asyncio
import collections
import cProfile
import importlib.util
import os
import pstats
import subprocess
import sys
import textwrap
import threading
import tracemalloc

import pytest
from support import coro_is_available, run_script, together

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 5


def called(value):
    result = value
    coro.yield_slice()
    return result


def traced(number):
    total = number
    for item in range(3):
        coro.yield_slice()
        total += called(item)
    try:
        coro.yield_slice()
        raise KeyError
    except KeyError:
        total += 1
    return sorted([total, number], key=called)


class Tracer:
    """Events per frame, as `sys.settrace` reports them."""

    def __init__(self, *functions, yields=False):
        self.codes = {function.__code__ for function in functions or (traced, called)}
        self.yields = yields
        self.events = collections.defaultdict(list)
        self.frames = []  # keep the frames, so that no two have the same id

    def __call__(self, frame, event, arg):
        if frame.f_code not in self.codes:
            return None
        if event == "call":
            self.frames.append(frame)
        self.events[id(frame)].append((frame.f_code.co_name, event, frame.f_lineno))
        if self.yields and any(thread._status == "running" for thread in coro.get_live_coros()):
            coro.yield_slice()
        return self

    def of(self, function):
        """The events of each frame of that function."""
        return [events for events in self.events.values() if events[0][0] == function.__name__]

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def alone(function, *args):
    """Return the events of one call, made in a coro while there are no other coros."""
    with Tracer(function) as tracer:
        coro.run(function, *args)
    (events,) = tracer.of(function)
    return events


@pytest.fixture(autouse=True)
def _no_tracing_is_left():
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before
    assert sys.getprofile() is None or before is not None


@pytest.mark.parametrize("yields", [False, True])
def test_line_events(yields):
    """The events of each coro are correct and complete, even if the trace function itself lets other coros run."""
    expected, expected_called = alone(traced, 1), alone(called, 1)
    with Tracer(yields=yields) as tracer:
        results = together(traced, COUNT)
    assert results == [sorted([number + 4, number]) for number in range(COUNT)]
    assert tracer.of(traced) == [expected] * COUNT
    assert tracer.of(called) == [expected_called] * (COUNT * 5)


def test_tracing_is_switched_on_and_off_in_a_coro():
    expected = alone(called, 1)
    tracer = Tracer()

    def work(number):
        called(number)
        with tracer:
            for _ in range(number):
                called(number)
        called(number)
        return number

    def main():
        # Run the coros one after the other, because tracing belongs to the thread.
        assert [coro.spawn(work, number).join() for number in range(COUNT)] == list(range(COUNT))

    coro.run(main)
    assert tracer.of(called) == [expected] * sum(range(COUNT))


def test_tracing_is_switched_on_and_off_by_another_coro():
    tracer = Tracer()

    def main():
        threads = [coro.spawn(traced, number) for number in range(COUNT)]
        switch = itertools_cycle([tracer, None])
        while not all(thread.done() for thread in threads):
            sys.settrace(next(switch))
            coro.yield_slice()
        sys.settrace(None)
        return [thread.join() for thread in threads]

    def itertools_cycle(items):
        while True:
            yield from items

    before = sys.gettrace()
    try:
        assert coro.run(main) == [sorted([number + 4, number]) for number in range(COUNT)]
    finally:
        sys.settrace(before)
    assert tracer.of(called)


def test_tracing_of_the_loop_beside_coros():
    async def task(number):
        total = number
        await asyncio.sleep(0)
        total += 1
        return total

    expected = None
    for count in (1, COUNT):

        async def main(count=count):
            with Tracer(task, called) as tracer:
                threads = [coro.spawn(called, number) for number in range(count)]
                await asyncio.gather(*(task(number) for number in range(count)), *threads)
            return sorted(event[1] for events in tracer.events.values() for event in events)

        events = grapeshot.run(main())
        expected = expected or events
        assert events == sorted(expected * count)


def test_a_trace_function_that_raises():
    """Tracing ends, and the error is raised in the coro whose call was traced."""

    def fail(frame, event, arg):
        if frame.f_code is called.__code__:
            coro.yield_slice()
            raise LookupError(event)

    def main():
        threads = [coro.spawn(called, number) for number in range(COUNT)]
        before = sys.gettrace()
        sys.settrace(fail)
        try:
            outcomes = []
            for thread in threads:
                try:
                    outcomes.append(thread.join())
                except LookupError as exc:
                    outcomes.append(exc.args)
            assert sys.gettrace() is None
            return outcomes
        finally:
            sys.settrace(before)

    outcomes = coro.run(main)
    assert ("call",) in outcomes
    assert all(outcome == ("call",) or outcome == number for number, outcome in enumerate(outcomes))


def test_profile_functions():
    """In each coro, every call event has its return event, also for C functions, whatever other coros do."""
    events = collections.defaultdict(list)
    frames = []

    def profile(frame, event, arg):
        if frame.f_code in (traced.__code__, called.__code__):
            frames.append(frame)
            events[id(frame)].append((event, getattr(arg, "__name__", None) if event.startswith("c_") else None))

    def main():
        sys.setprofile(profile)
        try:
            return [thread.join() for thread in [coro.spawn(traced, number) for number in range(COUNT)]]
        finally:
            sys.setprofile(None)

    assert coro.run(main) == [sorted([number + 4, number]) for number in range(COUNT)]
    pause = coro.yield_slice.__name__
    expected = [
        ("call", None),
        *[("c_call", pause), ("c_return", pause)] * 4,
        ("c_call", "sorted"),
        ("c_return", "sorted"),
        ("return", None),
    ]
    seen = [found for found in events.values() if ("c_call", "sorted") in found]
    assert seen == [expected] * COUNT
    assert len(events) == COUNT * 6


def test_settrace_of_all_new_threads():
    tracers = []

    def trace(frame, event, arg):
        return tracers[-1](frame, event, arg)

    def in_thread(expected):
        def run():
            assert together(traced, COUNT) == [sorted([number + 4, number]) for number in range(COUNT)]

        tracers.append(Tracer())
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert tracers[-1].of(traced) == [expected] * COUNT

    expected = alone(traced, 1)
    before = threading.gettrace()
    threading.settrace(trace)
    try:
        in_thread(expected)
        in_thread(expected)
    finally:
        threading.settrace(before)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with 3.12")
@pytest.mark.parametrize("is_global", [True, False])
def test_monitoring(is_global):
    monitoring = sys.monitoring
    tool, events = monitoring.PROFILER_ID, monitoring.events
    counts: collections.Counter = collections.Counter()
    wanted = events.PY_START | events.PY_RETURN | events.LINE | events.RAISE | events.CALL

    def count(kind):
        def callback(code, *args):
            if code is traced.__code__:
                counts[kind, args[0] if kind == "line" else None] += 1

        return callback

    monitoring.use_tool_id(tool, "test")
    try:
        for kind, event in (
            ("start", events.PY_START),
            ("return", events.PY_RETURN),
            ("line", events.LINE),
            ("raise", events.RAISE),
            ("call", events.CALL),
        ):
            monitoring.register_callback(tool, event, count(kind))
        if is_global:
            monitoring.set_events(tool, wanted)
        else:
            monitoring.set_local_events(tool, traced.__code__, wanted & ~events.RAISE)
            monitoring.set_events(tool, events.RAISE)
        once = dict(counts), coro.run(traced, 1), dict(counts)
        counts.clear()
        together(traced, COUNT)
    finally:
        monitoring.set_local_events(tool, traced.__code__, 0)
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    assert once[0] == {}
    assert once[2]["start", None] == once[2]["return", None] == once[2]["raise", None] == 1
    assert counts == {key: number * COUNT for key, number in once[2].items()}


# A tool is switched on while coros wait. At that time no thread state refers to the coros' frames, and the coros'
# functions are not yet instrumented for the tool.
WATCH = """
    import sys
    import grapeshot
    from grapeshot import coro

    monitoring = sys.monitoring
    tool, events = monitoring.PROFILER_ID, monitoring.events
    seen = []

    def watch(wanted=events.RAISE | events.PY_RETURN | events.PY_UNWIND):
        monitoring.use_tool_id(tool, "test")
        for event in (events.RAISE, events.PY_RETURN, events.PY_UNWIND):
            monitoring.register_callback(tool, event, lambda code, *_, event=event: seen.append((event, code.co_name)))
        monitoring.set_events(tool, wanted)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with 3.12")
@pytest.mark.parametrize("stack", ["shared", "own"])
def test_monitoring_that_begins_while_coros_wait(stack):
    """Once the tool is on, the functions in which the coros waited raise and return. From 3.15 on the tool gets both
    events; earlier versions do not report the returns.
    """
    output = run_script(
        None,
        WATCH
        + f"""
    stack = {stack!r}
    """
        + """
    def fails():
        coro.yield_slice()
        raise ValueError

    def catches(number):
        try:
            sorted([number], key=lambda _: fails())
        except ValueError:
            return number

    def main():
        cos = [coro.spawn(catches, number, stack=stack) for number in range(3)]
        coro.yield_slice()
        watch()
        results = [co.join() for co in cos]
        monitoring.set_events(tool, 0)
        return results

    print(coro.run(main), seen.count((events.RAISE, "fails")), seen.count((events.PY_RETURN, "catches")))
    """,
    )
    assert output == ("[0, 1, 2] 3 3\n" if sys.version_info >= (3, 15) else "[0, 1, 2] 3 0\n")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with 3.12")
@pytest.mark.parametrize("way", ["watch()", "sys.settrace(lambda *_: None)"])
def test_a_tool_that_a_coro_switches_on_sees_the_callers_of_the_loop(way):
    """The frames of the loop's callers are on the thread's own stack. The coro's SystemExit leaves the loop and passes
    through them.
    """
    output = run_script(
        None,
        WATCH
        + f"""
    def main():
        {way}
        raise SystemExit(5)

    def below():
        coro.run(main)

    try:
        below()
    except SystemExit as exc:
        print(exc.code, (events.RAISE, "below") in seen)
    """,
    )
    assert output == f"5 {way == 'watch()'}\n"


def test_cprofile_counts():
    """The counts of calls are right. The times are not checked: they include what other coros did during a yield."""
    profiler = cProfile.Profile()

    def main():
        profiler.enable()
        try:
            for thread in [coro.spawn(traced, number) for number in range(COUNT)]:
                thread.join()
        finally:
            profiler.disable()

    coro.run(main)
    stats = pstats.Stats(profiler).stats
    calls = {name: numbers[1] for (_, _, name), numbers in stats.items()}
    assert calls["traced"] == COUNT
    assert calls["called"] == COUNT * 5


def test_tracemalloc():
    """The traceback of an allocation has the frames of its coro, even if the coro's stack was evicted earlier."""

    def allocate():
        coro.yield_slice()
        return bytearray(100_000)

    def work(_):
        block = allocate()
        traceback = tracemalloc.get_object_traceback(block)
        return [line.lineno - allocate.__code__.co_firstlineno for line in traceback]

    tracemalloc.start(10)
    try:
        assert together(work, COUNT) == [[5, 2]] * COUNT
    finally:
        tracemalloc.stop()


def test_origins_of_coroutines():
    async def coroutine():
        coro.yield_slice()

    def work(_):
        made = coroutine()
        origin = [function for _, _, function in made.cr_origin]
        coro.await_(made)
        return origin

    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(10)
    try:
        assert together(work, COUNT) == [["work"]] * COUNT
    finally:
        sys.set_coroutine_origin_tracking_depth(depth)


# ---------------------------------------------------------------- coverage.py

ONE = """
from grapeshot import coro
import two


def work(number):
    total = 0
    for item in range(3):
        coro.yield_slice()
        total += two.add(item, number)
    if number == 99:
        total = -1
    return total
"""

TWO = """
from grapeshot import coro


def add(first, second):
    result = first
    coro.yield_slice()
    result += second
    if second == 77:
        result = 0
    coro.yield_slice()
    return result
"""

PROGRAM = """
import coverage, sys

measured = coverage.Coverage(data_file=None, include=["*/one.py", "*/two.py"], config_file=False)
measured.start()
import one, two
from grapeshot import coro


def main():
    threads = [coro.spawn(one.work, number) for number in range(4)] + [coro.spawn(two.add, 1, 2) for _ in range(4)]
    return [thread.join() for thread in threads]


results = coro.run(main)
measured.stop()
assert results == [3, 6, 9, 12, 3, 3, 3, 3], results
for module in (one, two):
    _, _, _, missing, _ = measured.analysis2(module)
    print(module.__name__, missing)
"""


@pytest.mark.skipif(importlib.util.find_spec("coverage") is None, reason="coverage is not installed")
@pytest.mark.parametrize("core", ["ctrace", "pytrace", *(["sysmon"] if sys.version_info >= (3, 12) else [])])
def test_coverage(core, tmp_path):
    """With sys.monitoring the lines are right. coverage's trace functions may assign a line to the wrong file, namely
    to a file that another coro has entered. So with trace functions, the test checks only the results of the program.
    """
    for name, text in (("one.py", ONE), ("two.py", TWO), ("program.py", PROGRAM)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"COVERAGE_CORE": core},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if core == "sysmon":
        assert done.stdout.split("\n")[:2] == ["one [12]", "two [10]"]
