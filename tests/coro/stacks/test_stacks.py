"""Data that C code keeps on its stack and in registers survives a yield. After each yield, known bytes are checked."""

from __future__ import annotations

import ctypes
import mmap
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


@pytest.fixture(scope="session")
def holder(tmp_path_factory: pytest.TempPathFactory) -> ctypes.PyDLL:
    """The functions of stack_holder.c."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NOT TESTED: the C stacks of coros, since there is no C compiler")
    library = tmp_path_factory.mktemp("stacks") / "stack_holder.so"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    source = Path(__file__).with_name("stack_holder.c")
    command = [compiler, "-O1", "-frounding-math", "-shared", "-fPIC", *undefined, "-o", library, source, "-lm"]
    subprocess.run(command, check=True)
    holder = ctypes.PyDLL(str(library))
    for name, kinds in {
        "hold": [ctypes.py_object, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_long],
        "hold_nested": [ctypes.py_object, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_long],
        "hold_rounding": [ctypes.py_object, ctypes.c_int, ctypes.c_long],
        "hold_registers": [ctypes.py_object, ctypes.c_uint64, ctypes.c_long],
        "rounding": [],
    }.items():
        function = getattr(holder, name)
        function.argtypes = kinds
        function.restype = ctypes.c_long
    return holder


def in_a_thread(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``coro.run(fn, *args)`` in a new thread, whose stacks and settings end with it."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((True, coro.run(fn, *args)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    is_result, value = outcome[0]
    if not is_result:
        raise value
    return value


def in_slots(slots: int | str | None, fn: Callable[..., Any], argument_lists: list[tuple[Any, ...]]) -> list[Any]:
    """Run ``fn`` in one coro for each list of arguments, and return the results. ``slots`` is the argument of
    ``set_stack_slots``, or "own": then each coro has a stack of its own.
    """

    def main() -> list[Any]:
        if slots == "own":
            threads = [coro.spawn(fn, *args, stack="own") for args in argument_lists]
        else:
            coro.set_stack_slots(slots)
            threads = [coro.spawn(fn, *args) for args in argument_lists]
        results = [thread.join() for thread in threads]
        assert coro.stack_info()["bytes_saved"] == 0
        return results

    return in_a_thread(main)


SLOTS = [None, 1, 2, 8, "own"]


def count_of(slots: int | str | None) -> int:
    return 4 * (slots if isinstance(slots, int) else 8)


@pytest.mark.parametrize("slots", SLOTS)
def test_bytes_on_the_stack_stay(holder, slots):
    generator = random.Random(f"{slots}")
    lens = [100, 4096, 65_536, 300_000]
    work = [(coro.yield_slice, lens[n % 4] + generator.randrange(100), n, 10) for n in range(count_of(slots))]
    generator.shuffle(work)
    assert in_slots(slots, holder.hold, work) == [0] * len(work)


@pytest.mark.parametrize("slots", SLOTS)
def test_bytes_stay_through_waits_of_any_kind(holder, slots):
    generator = random.Random(f"{slots}")

    def pause() -> None:
        kind = generator.randrange(4)
        if kind == 0:
            coro.sleep_relative(generator.random() / 1000)
        elif kind == 1:
            coro.current()._loop.call_soon(coro.current()._wake)
            coro.wait()
        elif kind == 2:
            coro.spawn(coro.yield_slice).join()
        else:
            coro.yield_slice()

    def work(seed: int) -> int:
        wrong = 0
        for _ in range(8):
            wrong += holder.hold(pause, generator.randrange(100, 20_000), seed, generator.randrange(1, 5))
        return wrong

    count = count_of(slots)
    assert in_slots(slots, work, [(seed,) for seed in range(count)]) == [0] * count


@pytest.mark.parametrize("slots", SLOTS)
def test_nested_c_and_python_frames(holder, slots):
    def deeper(level: int, seed: int) -> int:
        if level == 0:
            coro.yield_slice()
            return 0
        inner: list[int] = []

        def callback() -> None:
            inner.append(deeper(level - 1, seed + level))

        return holder.hold_nested(callback, 50 * level, seed, level) + sum(inner)

    count = count_of(slots)
    work = [(n % 6, 1000 * n) for n in range(count)]
    assert in_slots(slots, deeper, work) == [0] * count


def test_an_exception_passes_through_c_frames(holder):
    def work(number: int) -> int:
        left = [number % 5]

        def callback() -> None:
            coro.yield_slice()
            left[0] -= 1
            if left[0] < 0:
                raise KeyError(number)

        with pytest.raises(KeyError) as caught:
            holder.hold(callback, 5000, number, 100)
        assert caught.value.args == (number,)
        return number

    assert in_slots(1, work, [(number,) for number in range(12)]) == list(range(12))


def test_interruptions_pass_through_c_frames(holder):
    def work(number: int) -> str:
        try:
            holder.hold(coro.wait, 3000, number, 100)
        except coro.Interrupted as exc:
            return str(exc.value)
        return "not interrupted"

    def main() -> list[str]:
        threads = [coro.spawn(work, number) for number in range(8)]
        coro.yield_slice()
        for number, thread in enumerate(threads):
            thread.interrupt(number)
        return [thread.join() for thread in threads]

    assert in_a_thread(main) == [str(number) for number in range(8)]


@pytest.mark.parametrize("slots", SLOTS)
def test_each_coro_has_its_own_floating_point_state(holder, slots):
    def pause() -> None:
        # Other coros use other rounding modes in the meantime. A new coro rounds to nearest.
        assert coro.spawn(holder.rounding).join() == 0
        coro.yield_slice()

    async def on_the_own_stack() -> int:
        return holder.rounding()

    def main() -> list[int]:
        if slots != "own":
            coro.set_stack_slots(slots)
        stack = "own" if slots == "own" else "shared"
        threads = [coro.spawn(holder.hold_rounding, pause, n, 6, stack=stack) for n in range(count_of(slots))]
        for _ in range(5):
            coro.yield_slice()
            assert coro.await_(coro.current()._loop.create_task(on_the_own_stack())) == 0
        return [thread.join() for thread in threads]

    assert set(in_a_thread(main)) == {0}


@pytest.mark.parametrize("slots", SLOTS)
def test_each_coro_has_its_own_callee_saved_registers(holder, slots):
    if holder.hold_registers(lambda: None, 1, 1) == -2:
        pytest.skip("stack_holder.c has no code for this processor; the tests of the switch itself check the registers")
    count = count_of(slots)
    work = [(coro.yield_slice, seed, 20) for seed in range(count)]
    assert in_slots(slots, holder.hold_registers, work) == [0] * count


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads the memory use from /proc")
def test_free_slots_give_deep_memory_back(holder, eviction):
    """Each of a few coros goes 4 MiB deep in a slot that no other coro uses."""
    if eviction == "always":
        pytest.skip("evicted stacks are copied to the heap, which may keep the memory of freed copies")
    deep = 4 * 2**20

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    def main() -> tuple[int, int]:
        before = resident()
        threads = [coro.spawn(holder.hold, coro.yield_slice, deep, number, 3) for number in range(7)]
        coro.yield_slice()
        most = resident() - before
        assert [thread.join() for thread in threads] == [0] * 7
        for _ in range(100):
            coro.spawn(int).join()
        return most, resident() - before

    most, kept = in_a_thread(main)
    assert most > 6 * deep  # the process may free other memory at the same time
    assert kept < deep
