"""`insight.profiler`: which functions are charged, and for what. Most tests replace the clocks, so that numbers are
exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import sys
import threading
import time

import pytest
from support import coro_is_available, in_thread, run_script, until

from grapeshot.insight import profiler
from grapeshot.insight.profiler import _collector, _events

needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


class Clocks:
    """The CPU clock advances only in `burn`, the wall clock also in `block`."""

    def __init__(self):
        self.wall_ns = self.cpu_ns = 0
        self.switches = 0

    def burn(self, units):
        self.cpu_ns += units
        self.wall_ns += units

    def block(self, units):
        self.wall_ns += units
        self.switches += 1

    @contextlib.contextmanager
    def profiled(self):
        """Like `profile()`, but with these clocks."""
        collector = _collector.Collector(
            wall=lambda: self.wall_ns,
            cpu=lambda: self.cpu_ns,
            stamps=lambda: (0, 0, 0, 0),
            usage=lambda: (0, 0, self.switches, 0),
        )
        found = profiler.Profile()
        collector.begin_here(sys._getframe(2))
        _events.install(collector)
        try:
            yield found
        finally:
            _events.uninstall()
            found._fill(collector.end(), _events.THREADS)


@pytest.fixture
def clocks():
    return Clocks()


def function(found, name, owner=None):
    rows = [row for row in found.function_rows(owner) if row.name.split(".")[-1] == name]
    assert len(rows) == 1, [str(row) for row in found.function_rows(owner)]
    return rows[0]


def owner(found, name):
    [row] = [row for row in found.owners if row.name == name]
    return row


def test_functions_and_their_callees(clocks):
    def inner():
        clocks.burn(5)

    def outer():
        clocks.burn(3)
        inner()
        inner()
        clocks.block(100)

    with clocks.profiled() as found:
        outer()
    row = function(found, "outer")
    assert (row.calls, row.cpu, row.own_cpu, row.wall, row.own_wall, row.wait) == (1, 13, 0, 113, 0, 100)
    row = function(found, "inner")
    assert (row.calls, row.cpu, row.own_cpu, row.wait) == (2, 10, 0, 0)
    assert function(found, "burn").calls == 3
    assert function(found, "burn").own_cpu == 13
    here = owner(found, threading.current_thread().name)
    assert (here.kind, here.cpu, here.wall, here.wait) == ("thread", 13, 113, 100)
    assert function(found, "test_functions_and_their_callees").cpu == 13  # this test began before the profile


def test_recursion_counts_the_time_once(clocks):
    def down(depth):
        clocks.burn(1)
        if depth:
            down(depth - 1)

    with clocks.profiled() as found:
        down(9)
    row = function(found, "down")
    assert (row.calls, row.primitive_calls, row.cpu) == (10, 1, 10)


def test_generators(clocks):
    def generate():
        for _ in range(3):
            clocks.burn(2)
            yield
            clocks.burn(1)

    def consume():
        for _ in generate():
            clocks.burn(10)

    with clocks.profiled() as found:
        consume()
    row = function(found, "generate")
    assert (row.calls, row.cpu, row.wall) == (1, 9, 9)
    assert function(found, "consume").cpu == 39


def test_exceptions_that_unwind(clocks):
    def fail():
        clocks.burn(1)
        raise KeyError

    def passing():
        fail()

    def throws_into():
        def generate():
            try:
                yield
            except KeyError:
                clocks.burn(4)
                yield

        generator = generate()
        next(generator)
        generator.throw(KeyError)
        generator.close()

    def catch():
        with contextlib.suppress(KeyError):
            passing()
        with contextlib.suppress(ValueError):
            int("x")
        clocks.burn(7)

    with clocks.profiled() as found:
        catch()
        throws_into()
        clocks.burn(100)
    assert [function(found, name).cpu for name in ("fail", "passing", "catch")] == [1, 1, 8]
    assert [function(found, name).cpu for name in ("generate", "throws_into")] == [4, 4]
    assert function(found, "test_exceptions_that_unwind").cpu == 112


def test_functions_that_began_before_the_profile(clocks):
    stack = contextlib.ExitStack()

    def began():
        clocks.burn(1)
        found = stack.enter_context(clocks.profiled())
        clocks.burn(2)
        return found

    def after():
        clocks.burn(4)

    found = began()
    after()
    stack.close()
    assert function(found, "after").cpu == 4
    assert owner(found, threading.current_thread().name).cpu == 6


async def test_tasks_are_charged_for_their_functions(loop, clocks):
    async def deep(units):
        clocks.burn(units)
        await asyncio.sleep(0)
        clocks.burn(units)

    async def work(units):
        await deep(units)
        clocks.burn(units)

    def callback():
        clocks.burn(1000)

    with clocks.profiled() as found:
        tasks = [loop.create_task(work(units), name=f"work {units}") for units in (1, 10)]
        loop.call_soon(callback)
        await asyncio.gather(*tasks)
    assert [(owner(found, f"work {units}").cpu) for units in (1, 10)] == [3, 30]
    first = owner(found, "work 1")
    # The time between the task's two steps counts as wait time of the function that awaited.
    assert (first.kind, first.wall) == ("task", 3 + 10 + 1000)
    assert function(found, "deep", first).wait == 1010
    assert function(found, "deep").calls == 2
    assert function(found, "work").cpu == 33
    assert owner(found, threading.current_thread().name).cpu == 1000


async def test_a_task_that_is_cancelled_and_one_that_still_waits(loop, clocks):
    async def sleeps():
        await asyncio.sleep(1000)

    with clocks.profiled() as found:
        gone, waiting = (loop.create_task(sleeps(), name=name) for name in ("gone", "waiting"))
        await asyncio.sleep(0)
        clocks.block(5)
        gone.cancel()
        await asyncio.wait([gone])
        clocks.block(50)
    waiting.cancel()
    assert owner(found, "gone").wait == 5
    assert owner(found, "waiting").wait == 55
    assert owner(found, "waiting").cpu == 0


async def test_context_switches_are_charged_to_the_running_task(loop, clocks):
    async def blocks(times):
        for _ in range(times):
            clocks.block(1)
            await asyncio.sleep(0)

    with clocks.profiled() as found:
        await asyncio.gather(*(loop.create_task(blocks(times), name=f"blocks {times}") for times in (1, 2, 3)))
    assert [owner(found, f"blocks {times}").voluntary_switches for times in (1, 2, 3)] == [1, 2, 3]


async def test_beyond_the_limit_tasks_share_a_row(loop, clocks, monkeypatch):
    async def work(units):
        clocks.burn(units)
        await asyncio.sleep(0)
        clocks.burn(units)

    monkeypatch.setattr(_collector, "MAX_OWNERS", 3)
    with clocks.profiled() as found:
        await asyncio.gather(*(loop.create_task(work(1), name=f"work {number}") for number in range(9)))
    assert len(found.owners) == 4
    assert owner(found, "(further tasks)").cpu == 16
    assert function(found, "work").cpu == 18
    assert function(found, "work").calls == 9


@needs_coros
def test_coros_that_take_turns(clocks):
    from grapeshot import coro

    def burns(units):
        for _ in range(3):
            clocks.burn(units)
            coro.yield_slice()

    def main():
        with clocks.profiled() as found:
            coro.wait([coro.spawn(burns, units, name=f"burns {units}") for units in (1, 100)])
        return found

    found = coro.run(main)
    one, other = owner(found, "burns 1"), owner(found, "burns 100")
    assert [one.kind, one.cpu, other.cpu] == ["coro", 3, 300]
    assert one.wait == 300
    assert other.wait == 2  # during the second and third turn of `burns 1`
    assert function(found, "yield_slice", one).wait == 300
    assert function(found, "burns").cpu == 303
    assert function(found, "burns").calls == 2


@needs_coros
def test_coros_that_began_before(clocks):
    from grapeshot import coro

    ready = coro.fifo()

    def later():
        clocks.burn(20)

    def waits():
        clocks.burn(1)
        ready.pop()
        later()
        clocks.burn(300)

    def main():
        waiting = coro.spawn(waits, name="waits")
        coro.yield_slice()
        with clocks.profiled() as found:
            ready.push(None)
            waiting.join()
            clocks.burn(4000)
        return found

    found = coro.run(main)
    assert function(found, "later").calls == 1
    assert function(found, "later").cpu == 20
    # CPython 3.12 to 3.14 report less about a function in which a coro was suspended: see docs/insight.md.
    assert owner(found, "waits").cpu in (20, 320)
    assert sum(row.cpu for row in found.owners) == 4320


@needs_coros
def test_coros_and_tasks_together(clocks):
    from grapeshot import coro

    async def task_of():
        clocks.burn(7)
        await asyncio.sleep(0)
        clocks.burn(7)

    def main():
        with clocks.profiled() as found:
            task = asyncio.get_running_loop().create_task(task_of(), name="task of")
            coro.await_(task)
            clocks.burn(1)
        return found

    found = coro.run(main)
    assert (owner(found, "task of").kind, owner(found, "task of").cpu) == ("task", 14)
    assert function(found, "main").cpu == 1
    assert function(found, "main").wait == 14


def test_threads(clocks):
    def work():
        clocks.burn(9)

    def begins():
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()

    with clocks.profiled() as found:
        begins()
    worker = owner(found, "worker")
    assert worker.kind == "thread"
    assert function(found, "work", worker).calls == 1
    assert function(found, "burn", worker).own_cpu == 9


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.setprofile does not reach threads that already run")
async def test_threads_that_began_before(loop, clocks):
    first, second = threading.Event(), threading.Event()

    def late():
        clocks.burn(9)

    def work():
        first.wait()
        late()
        second.set()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    with clocks.profiled() as found:
        first.set()
        await until(second.is_set, "the thread")
    thread.join()
    assert function(found, "late", owner(found, "worker")).calls == 1


# ---- the clocks of the system


def test_the_real_clocks():
    """A function that runs until it has used 30 ms of CPU time is charged that much, minus the profiler's own cost."""

    def busy():
        end_ns = time.thread_time_ns() + 30_000_000
        while time.thread_time_ns() < end_ns:
            sum(range(1000))

    def idle():
        in_thread(time.sleep, 0.05)

    with profiler.profile() as found:
        busy()
        idle()
    assert found.cost_ns > 0
    assert function(found, "busy").cpu + found.overhead_ns >= 30_000_000
    assert function(found, "idle").wait > function(found, "idle").cpu
    assert found.duration_ns >= 80_000_000
    text = found.table()
    assert f"{found.events} events" in text
    assert "busy (test_profiler.py:" in text


@needs_coros
@pytest.mark.parametrize("others", [0, 1])
def test_work_of_the_loop_is_not_charged_to_waiting_coros(others):
    """Native calls by the loop and switches between coros cause no profiler events. So each switch records its time."""
    from grapeshot import coro

    def waits():
        for _ in range(5):
            asyncio.get_running_loop().call_soon(sum, range(500_000))
            coro.yield_slice()

    def main():
        with profiler.profile() as found:
            coro.wait([coro.spawn(waits), *(coro.spawn(coro.yield_slice) for _ in range(others))])
        return found

    found = coro.run(main)
    loop = owner(found, threading.current_thread().name)
    waiting = function(found, "waits")
    assert loop.cpu > 10 * waiting.cpu > 0
    assert waiting.wait > 10 * waiting.cpu


@needs_coros
def test_work_of_a_native_call_after_its_wait_is_charged_to_the_coro():
    from grapeshot import coro

    size = 4 << 20

    def reads(sock):
        return [len(sock.recv_exact(size)) for _ in range(5)]

    def writes(sock):
        data = bytes(size)
        for _ in range(5):
            sock.sendall(data)

    def main():
        first, second = coro.socketpair()
        with profiler.profile() as found:
            coro.wait([coro.spawn(reads, first), coro.spawn(writes, second)])
        first.close()
        second.close()
        return found

    found = coro.run(main)
    loop = owner(found, threading.current_thread().name)
    assert function(found, "recv_exact").own_cpu > loop.cpu / 4  # it copies 20 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="the test needs page faults for each thread, which Linux counts")
def test_page_faults():
    def touch():
        with mmap.mmap(-1, 1 << 20) as pages:  # not the heap, where freed memory may still have its pages
            pages.write(bytes(1 << 20))

    with profiler.profile() as found:
        touch()
    assert owner(found, threading.current_thread().name).minor_faults > 0
    assert function(found, "touch").calls == 1


# ---- one at a time


def test_a_second_profile_names_the_first():
    with profiler.profile(), pytest.raises(RuntimeError, match=r"it was started at .*test_profiler\.py:\d+$"):
        profiler.profile().__enter__()
    with profiler.profile() as found:
        pass
    assert found.owners


def test_another_profiler():
    if sys.version_info >= (3, 12):
        sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "a friend")
        try:
            with pytest.raises(RuntimeError, match=r"already active in sys\.monitoring: 'a friend'"):
                profiler.profile().__enter__()
        finally:
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
    else:
        sys.setprofile(lambda *_: None)
        try:
            with pytest.raises(RuntimeError, match=r"already active in sys\.setprofile: <function"):
                profiler.profile().__enter__()
        finally:
            sys.setprofile(None)
    with profiler.profile():
        pass


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_other_code_frees_the_profilers_tool_id():
    with profiler.profile() as found:
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)
    assert found.owners
    with profiler.profile():
        pass


@pytest.mark.parametrize("how", ["leaves the block", "profiles itself"])
def test_the_child_of_a_fork_is_not_profiled(how, tmp_path):
    script = f"""
        import os, sys
        from grapeshot.insight import profiler
        with profiler.profile({str(tmp_path / "p")!r}) as found:
            pid = os.fork()
            if not pid:
                assert sys.getprofile() is None
                assert sys.version_info < (3, 12) or sys.monitoring.get_tool(2) is None
                if {how!r} == "profiles itself":
                    with profiler.profile() as found:
                        sum(range(10))
                    assert found.owners
                    os._exit(7)
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        if not pid:
            assert found.owners == [], "the profile belongs to the parent"
            assert not os.path.exists({str(tmp_path / "p")!r})
            os._exit(7)
        assert found.owners
        print("ok")
    """
    assert run_script(None, script, flags=("-W", "ignore::DeprecationWarning")).strip() == "ok"


async def test_a_task_whose_get_name_raises(loop):
    class Task(asyncio.Task):
        def get_name(self):
            raise ZeroDivisionError

    with profiler.profile() as found:
        await Task(asyncio.sleep(0), loop=loop)
    assert owner(found, "test_a_task_whose_get_name_raises.<locals>.Task").kind == "task"


def test_nothing_is_installed_after_a_profile():
    with profiler.profile():
        pass
    assert sys.getprofile() is None
    if sys.version_info >= (3, 12):
        assert sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is None


def test_a_profile_that_ends_with_an_exception(tmp_path):
    with pytest.raises(KeyError), profiler.profile(tmp_path / "p"):
        raise KeyError
    assert profiler.Profile.load(tmp_path / "p").owners


def test_run(tmp_path, capfd):
    async def main():
        sum(range(300_000))  # so that `main` is among the first rows
        await asyncio.sleep(0)
        return "done"

    assert profiler.run(main(), tmp_path / "p") == "done"
    assert function(profiler.Profile.load(tmp_path / "p"), "main").calls == 1
    assert capfd.readouterr().err == ""
    assert profiler.run(main()) == "done"
    assert "main (test_profiler.py:" in capfd.readouterr().err


@needs_coros
def test_run_a_function_as_a_coro(tmp_path):
    from grapeshot import coro

    assert profiler.run(lambda: coro.current().name, tmp_path / "p").startswith("coro ")


def test_tasks_that_are_alike_share_a_row(loop, tmp_path):
    async def handle():
        await asyncio.sleep(0)

    async def main():
        names = [None, None, None, "worker 1", "worker 2", "nightly"]
        await asyncio.gather(*(loop.create_task(handle(), name=name) for name in names))

    with profiler.profile() as found:
        loop.run_until_complete(main())
    name = handle.__qualname__
    ends = [line.rpartition("  ")[2] for line in found.table().splitlines()]
    assert f"task '{name}' (3 tasks)" in ends
    assert "task 'worker *' (2 tasks)" in ends
    assert "task 'nightly'" in ends
    ends = [line.rpartition("  ")[2] for line in found.table(each=True).splitlines()]
    assert ends.count(f"task '{name}'") == 3
    assert "task 'worker 2'" in ends
    calls = {}
    for owner in (name, "worker *", "worker 2"):
        [line] = [line for line in found.table(owner=owner).splitlines() if f"  {name} (" in line]
        calls[owner] = int(line.split()[0])
    assert calls == {name: 3 * calls["worker 2"], "worker *": 2 * calls["worker 2"], "worker 2": calls["worker 2"]}
