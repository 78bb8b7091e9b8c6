"""Each coro has its own part of the interpreter's state. If the layout of the state is unknown, coros are refused."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
import weakref
from pathlib import Path

import pytest
from support import coro_is_available, gil_is_enabled, run_script

import grapeshot

needs_coros = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


# ---------------------------------------------------------------------------------------------- refused, with a reason

REFUSAL = """
import asyncio, grapeshot
assert grapeshot.run(asyncio.sleep(0, 5)) == 5
try:
    import grapeshot.coro
except ImportError as exc:
    print(exc)
"""


@pytest.mark.skipif(coro_is_available(), reason="coros are available here")
def test_an_interpreter_that_is_not_known_is_refused_with_the_reason():
    done = subprocess.run([sys.executable, "-c", REFUSAL], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    if not gil_is_enabled():
        assert done.stdout == "coros support only CPython 3.14 and 3.15 among the free-threaded builds\n"
    else:
        assert done.stdout == "coros support only CPython 3.11 to 3.15\n"


@needs_coros
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 14), reason="3.14.0 alone checks the bounds of stacks but has no function to set them"
)
def test_an_interpreter_without_stack_protection_calls_is_refused(tmp_path):
    """The test simulates 3.14.0 by renaming one of the functions that 3.14.0 lacks."""
    name = b"\0PyUnstable_ThreadState_SetStackProtection\0"
    program = original = Path(sys.executable).resolve()
    if is_in_library := name not in program.read_bytes():
        original = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    content = original.read_bytes()
    assert name in content
    copy = tmp_path / original.name
    copy.write_bytes(content.replace(name, b"\0PyUnstable_ThreadState_SetStackProtectioX\0"))
    shutil.copymode(original, copy)
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if is_in_library:
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run(
        [str(program if is_in_library else copy), "-c", REFUSAL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "coros need CPython 3.14.1 or later: 3.14.0 has no function to set the bounds of a stack\n"


@needs_coros
@pytest.mark.skipif(sys.version_info[:2] != (3, 14), reason="the JIT compiler of 3.14 is the only one that is refused")
@pytest.mark.parametrize("is_on", [False, True])
def test_the_jit_compiler_of_3_14_is_refused(is_on):
    """The test simulates a build with the JIT compiler by setting `sys._jit`."""
    head = f"import sys, types\nsys._jit = types.SimpleNamespace(is_enabled=lambda: {is_on})\n"
    done = subprocess.run(
        [sys.executable, "-c", head + REFUSAL], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    expected = "coros do not work with the JIT compiler of CPython 3.14: set PYTHON_JIT=0 to switch it off\n"
    assert done.stdout == (expected if is_on else "")


# ---------------------------------------------------------------------------------------------- per coro


@needs_coros
def test_room_for_errors_is_not_shared():
    """While the interpreter creates an exception, it lets a thread exceed its recursion limit. Another coro must not
    get that allowance.
    """

    class Slow(Exception):
        def __init__(self, *args):
            coro.wait()

    def make_slowly():
        generator = (number for number in range(2))
        next(generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Slow):
                generator.throw(Slow, 1)

    def deep(level):
        return deep(level + 1)

    def main():
        slow = [coro.spawn(make_slowly) for _ in range(100)]
        coro.yield_slice()
        with pytest.raises(RecursionError):
            coro.spawn(deep, 0).join()
        for co in slow:
            coro.schedule(co)
        for co in slow:
            co.join()

    coro.run(main)


@needs_coros
def test_nested_deallocation_across_yields():
    """A finalizer deep inside nested containers yields while other coros deallocate."""
    log = []

    class Last:
        def __init__(self, number):
            self.number = number

        def __del__(self):
            coro.yield_slice()
            log.append(self.number)
            coro.yield_slice()

    def nest(number):
        nested = (Last(number),)
        for _ in range(40 + number):
            nested = (nested, [number])
        del nested
        coro.yield_slice()

    def drop():
        for _ in range(20):
            nested = []
            for _ in range(10_000):
                nested = [nested]
            del nested
            coro.yield_slice()

    def main():
        threads = [coro.spawn(nest, number) for number in range(20)] + [coro.spawn(drop)]
        for thread in threads:
            thread.join()

    coro.run(main)
    assert sorted(log) == list(range(20))


@needs_coros
def test_context_variables_are_looked_up_again_after_a_switch():
    """The interpreter caches a variable's value together with a version number of the context."""
    variable = contextvars.ContextVar("variable")

    def look(number):
        variable.set(number)
        for _ in range(50):
            coro.yield_slice()
            assert variable.get() == number
            with pytest.raises(LookupError):
                contextvars.Context().run(variable.get)

    def main():
        threads = [coro.spawn(look, number) for number in range(5)]
        for thread in threads:
            thread.join()
        with pytest.raises(LookupError):
            variable.get()

    coro.run(main)


@needs_coros
def test_frames_beyond_the_first_chunk():
    """A coro starts with a small chunk of memory for its frames and gets more chunks as it needs them."""

    def deep(level, *values):
        if level == 0:
            coro.yield_slice()
            return sum(values)
        below = deep(level - 1, *range(level))
        coro.yield_slice()
        return below + sum(values)

    def measure(depth):
        return [deep(depth, depth) for _ in range(3)]

    def main():
        threads = [coro.spawn(measure, depth) for depth in (1, 5, 20, 80, 200)]
        return [thread.join() for thread in threads]

    expected = [[sum(sum(range(level)) for level in range(1, depth + 1)) + depth] * 3 for depth in (1, 5, 20, 80, 200)]
    assert coro.run(main) == expected


@needs_coros
def test_the_recursion_limit_may_change_while_coros_are_suspended():
    def deep(level):
        if level == 0:
            coro.wait()
            return 0
        return 1 + deep(level - 1)

    def endless(level=0):
        return endless(level + 1)

    def main():
        limit = sys.getrecursionlimit()
        threads = [coro.spawn(deep, 300) for _ in range(3)]
        coro.yield_slice()
        try:
            sys.setrecursionlimit(limit + 500)
            for thread in threads[:1]:
                coro.schedule(thread)
                assert thread.join() == 300
            with pytest.raises(RecursionError):
                coro.spawn(endless).join()
        finally:
            sys.setrecursionlimit(limit)
        for thread in threads[1:]:
            coro.schedule(thread)
            assert thread.join() == 300
        with pytest.raises(RecursionError):
            coro.spawn(endless).join()

    coro.run(main)


# ---------------------------------------------------------------------------------------------- the garbage collector


class Cycle:
    """Garbage that only the collector frees. Its finalizer tries to wait."""

    def __init__(self, log):
        self.myself = self
        self.log = log

    def __del__(self):
        try_to_wait(self.log)


def try_to_wait(log):
    try:
        coro.yield_slice()
    except coro.YieldFromMain:
        log.append("main")
    except RuntimeError as exc:
        log.append(str(exc))
    else:
        log.append("waited")


def leave_cycle(log):
    Cycle(log)


def leave_generator(log):
    def wait_at_the_end():
        try:
            yield
        finally:
            try_to_wait(log)

    generator = wait_at_the_end()
    next(generator)
    cycle = [generator]
    cycle.append(cycle)


def leave_weak_reference(log):
    cycle = [set()]
    cycle.append(cycle)
    # The weak reference is not part of the garbage, so its callback is called.
    return weakref.ref(cycle[0], lambda _: try_to_wait(log))


def allocate():
    """Allocate memory that overwrites what was freed."""
    for _ in range(20):
        coro.yield_slice()
        assert len([[number] for number in range(200)]) == 200


REFUSED = (
    "a coro cannot wait in a native profile function; in code that the garbage collector calls, it can wait only if it "
    "was started with stack='own'"
)


@needs_coros
@pytest.mark.parametrize("leave", [leave_cycle, leave_generator, leave_weak_reference])
@pytest.mark.parametrize(("stack", "outcome"), [("shared", REFUSED), ("own", "waited")])
def test_finalizers_of_the_collector_cannot_yield_on_a_shared_stack(leave, stack, outcome):
    log = []

    def work():
        for _ in range(3):
            kept = leave(log)
            gc.collect()
            coro.yield_slice()
            del kept

    def main():
        threads = [coro.spawn(work, stack=stack), coro.spawn(allocate)]
        for thread in threads:
            thread.join()

    coro.run(main)
    assert log == [outcome] * 3


@needs_coros
def test_a_native_profile_function_that_collects():
    """At a switch between coros, grapeshot calls native profile functions on the thread's own stack. In these calls a
    function cannot wait, and a collection that it runs must not change that. In the interpreter's calls it can wait.
    """
    out = run_script(
        None,
        """
        import ctypes, gc
        from grapeshot import coro

        outcomes, is_inside = set(), False

        def profile(_, frame, what, argument):
            global is_inside
            if not is_inside and frame.f_code.co_name == "work":
                is_inside = True
                gc.collect()
                try:
                    coro.yield_slice()
                    outcomes.add("waited")
                except RuntimeError as exc:
                    outcomes.add(str(exc))
                is_inside = False
            return 0

        def work():
            for _ in range(3):
                coro.yield_slice()

        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
        set_profile = ctypes.pythonapi.PyEval_SetProfile
        set_profile.argtypes = [kind, ctypes.c_void_p]
        function = kind(profile)

        def main():
            coros = [coro.spawn(work) for _ in range(3)]
            set_profile(function, None)
            for co in coros:
                co.join()
            set_profile(ctypes.cast(None, kind), None)

        coro.run(main)
        print(*sorted(outcomes), sep="\\n")
        """,
    )
    assert out.splitlines() == [REFUSED, "waited"]


@needs_coros
def test_a_collection_that_begins_by_itself():
    log = []

    def work():
        kept = []
        while len(log) < 3:
            leave_cycle(log)
            kept.append([])
        coro.yield_slice()

    def main():
        threads = [coro.spawn(work), coro.spawn(allocate)]
        for thread in threads:
            thread.join()

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        coro.run(main)
    finally:
        gc.set_threshold(*thresholds)
    assert set(log) <= {REFUSED, "main"}
    assert REFUSED in log


@needs_coros
def test_a_collection_on_the_threads_own_stack():
    log = []

    async def main():
        threads = [coro.spawn(allocate) for _ in range(3)]
        for _ in range(5):
            leave_cycle(log)
            gc.collect()
            await asyncio.sleep(0)
        for thread in threads:
            await thread

    grapeshot.run(main())
    assert log == ["main"] * 5


@needs_coros
def test_a_finalizer_that_reference_counting_calls_may_wait():
    log = []

    class Last:
        def __del__(self):
            try_to_wait(log)

    def work():
        for _ in range(3):
            Last()

    def main():
        threads = [coro.spawn(work), coro.spawn(work), coro.spawn(allocate)]
        for thread in threads:
            thread.join()

    coro.run(main)
    assert log == ["waited"] * 6


@needs_coros
def test_the_users_callbacks_of_the_collector():
    """A function in `gc.callbacks` cannot wait on a shared stack when a collection starts."""
    log = []

    def callback(phase, _info):
        if phase == "start":
            try_to_wait(log)

    def work():
        gc.collect()

    gc.callbacks.append(callback)
    try:
        coro.run(work)
    finally:
        gc.callbacks.remove(callback)
    assert REFUSED in log
    assert "waited" not in log


@needs_coros
def test_builtins_that_are_not_a_dict():
    """`exec` accepts any mapping as builtins. Coros wait deep inside a function that uses such a mapping."""

    class Builtins:
        def __getitem__(self, name):
            return vars(builtins)[name]

    namespace = {"__builtins__": Builtins(), "pause": coro.yield_slice if coro_is_available() else None}
    exec("def wait(depth): return max([depth], key=lambda _: wait(depth - 1) if depth else pause() or 0)", namespace)

    def main():
        waiters = [coro.spawn(namespace["wait"], 5) for _ in range(2)]
        assert [waiter.join() for waiter in waiters] == [5, 5]

    coro.run(main)
