"""Deep recursion in Python and in C: RecursionError where the interpreter counts the depth, otherwise a message that
names the coro.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import coro_is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in its own process, which may crash."""
    head = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    command = [sys.executable, *flags, "-c", head + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# ---------------------------------------------------------------------------------------------- the guard below a stack


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose function ``recurse`` calls itself without end. Each call takes a kilobyte of stack."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NOT TESTED: stacks that are used up, since there is no C compiler")
    folder = tmp_path_factory.mktemp("endless")
    source = folder / "endless.c"
    source.write_text(
        "int recurse(int n) { volatile char room[1000]; room[n % 1000] = 1; return recurse(n + 1) + *room; }\n"
    )
    library = folder / "endless.so"
    subprocess.run([compiler, "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


OVERFLOW = """
import ctypes, faulthandler, sys, threading
from grapeshot import coro

def overflow():
    ctypes.PyDLL({library!r}).recurse(0)

def main():
    coro.spawn(coro.sleep_relative, 1)
    coro.yield_slice()
    {before_spawn}
    coro.spawn(overflow, {arguments}).join()

{run}
"""
RUN = "coro.run(main)"
RUN_IN_THREAD = "thread = threading.Thread(target=coro.run, args=(main,)); thread.start(); thread.join()"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ("name='gr\\u00f6\\u00dfe \\U0001f347'", RUN),
        ("stack='own', name='gr\\u00f6\\u00dfe \\U0001f347'", RUN),
        ("name='gr\\u00f6\\u00dfe \\U0001f347'", RUN_IN_THREAD),
    ],
    ids=["shared", "own", "thread"],
)
def test_the_message_about_a_stack_that_is_used_up_names_the_coro(endless, arguments, where):
    done = run(OVERFLOW.format(library=str(endless), before_spawn="", arguments=arguments, run=where), "-X", "utf8")
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr == "grapeshot: coro 3 (gr\u00f6\u00dfe \U0001f347) has used up its stack of 8 MiB\n"


def test_an_own_stack_on_an_older_kernel(endless):
    """On a kernel without MADV_GUARD_INSTALL, each guard is a mapping. A setting simulates such a kernel."""
    head = "import os; os.environ['GRAPESHOT_CORO_GUARDS'] = 'mappings'\n"
    done = run(head + OVERFLOW.format(library=str(endless), before_spawn="", arguments="stack='own'", run=RUN))
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr == "grapeshot: coro 3 has used up its stack of 8 MiB\n"


def test_a_coro_without_a_name(endless):
    done = run(OVERFLOW.format(library=str(endless), before_spawn="", arguments="", run=RUN))
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr == "grapeshot: coro 3 has used up its stack of 8 MiB\n"


@pytest.mark.parametrize("where", [RUN, RUN_IN_THREAD], ids=["main", "thread"])
@pytest.mark.parametrize("is_first", [True, False], ids=["enabled before", "enabled after"])
def test_faulthandler_reports_as_well(endless, where, is_first):
    flags = ("-X", "faulthandler") if is_first else ()
    before_spawn = "" if is_first else "faulthandler.enable()"
    done = run(OVERFLOW.format(library=str(endless), before_spawn=before_spawn, arguments="", run=where), *flags)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    lines = done.stderr.splitlines()
    assert lines.count("grapeshot: coro 3 has used up its stack of 8 MiB") == 1
    assert lines.count("Fatal Python error: Segmentation fault") == 1
    assert any("in overflow" in line for line in lines)


@pytest.mark.parametrize("faulthandler", ["", "faulthandler.enable()"], ids=["alone", "faulthandler"])
@pytest.mark.parametrize(
    "fault", ["os.kill(os.getpid(), signal.SIGSEGV)", "ctypes.string_at(16)"], ids=["sent", "wild"]
)
def test_other_faults_end_the_process_as_usual(fault, faulthandler):
    done = run(f"""
        import ctypes, faulthandler, os, signal
        from grapeshot import coro
        coro.run(int)
        {faulthandler}
        coro.run(lambda: {fault})
        print("alive")
    """)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == ""
    assert "used up" not in done.stderr
    assert ("Fatal Python error" in done.stderr) == bool(faulthandler)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS"])
def test_each_signal_goes_to_the_handler_that_it_had_before(name):
    """A Python handler is set for one of SIGSEGV and SIGBUS. The other signal has the default action."""
    done = run(f"""
        import os, signal
        from grapeshot import coro
        signal.signal(signal.{name}, lambda number, _: print(signal.Signals(number).name))
        coro.run(int)
        coro.run(lambda: os.kill(os.getpid(), signal.{name}))
        print("alive")
    """)
    assert (done.returncode, done.stdout) == (0, f"{name}\nalive\n"), done.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings on this system")
def test_the_stack_for_signal_handlers_is_freed_with_its_thread():
    done = run("""
        import threading
        from grapeshot import coro

        def mappings():
            with open("/proc/self/maps") as file:
                return len(file.readlines())

        def in_a_thread():
            thread = threading.Thread(target=coro.run, args=(int,))
            thread.start()
            thread.join()

        for _ in range(20):
            in_a_thread()
        before = mappings()
        for _ in range(100):
            in_a_thread()
        print(mappings() - before)
    """)
    assert done.returncode == 0, done.stderr
    # The C library makes a varying number of mappings for itself.
    assert int(done.stdout) < 60


# ---------------------------------------------------------------------------------------------- the interpreter counts

# Functions that recurse without end, or through a very deeply nested object or text.
RECURSIONS = """
import copy, functools, json, operator, pickle, re, sys

def nest(wrap, innermost, depth=DEPTH):
    for _ in range(depth):
        innermost = wrap(innermost)
    return innermost

def through_python():
    def deep(level):
        return deep(level + 1)
    deep(0)

def through_reduce():
    def deep(*_):
        return functools.reduce(deep, [1, 2])
    deep()

def through_sorted():
    def deep(_):
        return sorted([1, 2], key=deep)
    deep(0)

def through_getattr():
    class Deep:
        def __getattr__(self, name):
            return getattr(self, name + "x")
    Deep().a

def through_repr():
    class Deep:
        def __repr__(self):
            return repr([self])
    repr(Deep())

def through_call():
    class Deep:
        pass
    Deep.__call__ = Deep()
    Deep()()

def through_subclasses():
    from abc import ABC
    class Deep(ABC):
        @classmethod
        def __subclasshook__(cls, other):
            return issubclass(int, Deep)
    issubclass(str, Deep)

def json_of_lists():
    json.dumps(nest(lambda inner: [inner], None), check_circular=False)

def json_from_text():
    try:
        json.loads("[" * DEPTH)
    except ValueError:
        pass

def pickle_of_lists():
    pickle.dumps(nest(lambda inner: [inner], None))

def deep_copy():
    copy.deepcopy(nest(lambda inner: [inner], None))

def comparison():
    nest(lambda inner: [inner], None) == nest(lambda inner: [inner], None)

def hash_of_tuples():
    hash(nest(lambda inner: (inner,), None))

def compile_parentheses():
    try:
        compile("(" * DEPTH + ")" * DEPTH, "x", "eval")
    except SyntaxError:
        pass

def compile_signs():
    try:
        compile("-" * DEPTH + "1", "x", "eval")
    except (MemoryError, SyntaxError):
        pass

def compile_attributes():
    compile("a" + ".b" * DEPTH, "x", "eval")

def regular_expression():
    re.compile("(" * 2000 + ")" * 2000)

def backtracking():
    re.match("(?:(?:a|b)+c?)*$", "ab" * DEPTH)

def deallocation_of_lists():
    nest(lambda inner: [inner], None)

def deallocation_of_tuples():
    nest(lambda inner: (inner,), None)

def deallocation_of_objects():
    class Node:
        def __init__(self, next):
            self.next = next
    nest(Node, None)

def deallocation_of_slots():
    class Node:
        __slots__ = ("next",)
        def __init__(self, next):
            self.next = next
    nest(Node, None)

def deallocation_of_causes():
    def chain(cause):
        error = ValueError()
        error.__cause__ = cause
        return error
    nest(chain, None)

def deallocation_of_partials():
    nest(functools.partial(functools.partial, print).__call__, None)

def outcome(function):
    try:
        function()
    except RecursionError:
        return "RecursionError"
    return "done"

FUNCTIONS = [value for name, value in list(globals().items())
             if name.split("_")[0] in ("through", "json", "pickle", "deep", "comparison", "hash", "compile",
                                       "regular", "backtracking", "deallocation") and callable(value)]
"""


def test_deep_recursion_leaves_coro_and_loop_alive():
    """With the default limit nothing crashes. Code that raises on the thread's own stack raises in a coro, too."""
    done = run(
        f"DEPTH = 100_000\n{RECURSIONS}"
        + textwrap.dedent("""
        from grapeshot import coro

        coro.set_latency_warning(0)

        def in_a_coro(function):
            coro.yield_slice()
            first = outcome(function)
            coro.yield_slice()
            # The coro works as before.
            assert outcome(function) == first
            return first

        def others():
            while is_running:
                coro.yield_slice()

        def main():
            beside = [coro.spawn(others) for _ in range(2)]
            ended = [coro.spawn(in_a_coro, function).join() for function in FUNCTIONS]
            is_running.clear()
            for co in beside:
                co.join()
            return ended

        is_running = [True]
        on_the_main_stack = [outcome(function) for function in FUNCTIONS]
        for function, here, there in zip(FUNCTIONS, on_the_main_stack, coro.run(main)):
            print(function.__name__, here, there)
        """),
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) >= 24
    # A coro may raise although the same code ends normally on the thread's own stack: on that stack, 3.13 allows
    # more nested C calls than on a coro's stack.
    assert [line for line in lines if line[1] != line[2] and line[1] != "done"] == []
    assert {line[0]: line[2] for line in lines}["through_python"] == "RecursionError"
    assert {line[0]: line[2] for line in lines}["json_of_lists"] == "RecursionError"


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="3.11 counts C and Python calls together: a high limit allows too many C calls"
)
def test_a_high_limit_allows_deeper_calls_only_in_python():
    done = run(
        f"DEPTH = 100_000\n{RECURSIONS}"
        + textwrap.dedent("""
        from grapeshot import coro

        def main():
            sys.setrecursionlimit(100_000)
            counted = [function for function in FUNCTIONS if function.__name__.startswith(("through", "json_of"))]
            ended = [coro.spawn(outcome, function).join() for function in counted]
            return dict(zip([function.__name__ for function in counted], ended))

        def deep(level):
            return 0 if level == 0 else 1 + deep(level - 1)

        def deep_and_back():
            return coro.spawn(deep, 50_000).join()

        ended = coro.run(main)
        assert set(ended.values()) == {"RecursionError"}, ended
        assert coro.run(deep_and_back) == 50_000
        """),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from 3.12 on, C recursion has a separate limit")
def test_a_message_names_the_coro_if_the_limit_is_too_high_for_any_stack():
    done = run("""
        import functools, sys
        from grapeshot import coro

        def deep(*_):
            return functools.reduce(deep, [1, 2])

        def main():
            sys.setrecursionlimit(10_000_000)
            coro.spawn(deep, name="too deep").join()

        coro.run(main)
    """)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr == "grapeshot: coro 2 (too deep) has used up its stack of 8 MiB\n"


def test_depth_is_counted_per_coro():
    """A coro or a callback may recurse as deep as the limit allows, even while other coros are just as deep."""
    done = run("""
        import asyncio, sys
        from grapeshot import coro

        def deep(level, at_the_bottom):
            return at_the_bottom() if level == 0 else deep(level - 1, at_the_bottom)

        def work():
            return deep(sys.getrecursionlimit() - 100, coro.yield_slice)

        def count():
            return sys.getrecursionlimit() - 100

        def main():
            event_loop = asyncio.get_running_loop()
            threads = [coro.spawn(work) for _ in range(10)]
            coro.yield_slice()
            reached = event_loop.create_future()
            event_loop.call_soon(lambda: reached.set_result(deep(count(), lambda: "bottom")))
            assert coro.await_(reached) == "bottom"
            for co in threads:
                co.join()

        coro.run(main)
    """)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------- panics


def test_a_panic_stays_in_its_coro():
    done = run("""
        from grapeshot import _core, coro

        def try_to_wait():
            try:
                coro.yield_slice()
            except RuntimeError as exc:
                print(exc)

        def panic():
            coro.yield_slice()
            try:
                _core._coro_panic(try_to_wait)
            except RuntimeError as exc:
                print(exc)
            coro.yield_slice()
            _core._coro_panic(lambda: None)

        def others():
            for _ in range(10):
                coro.yield_slice()
            return "unharmed"

        def main():
            threads = [coro.spawn(function) for function in (others, panic, others)]
            try:
                threads[1].join()
            except RuntimeError as exc:
                print(exc)
            print(threads[0].join(), threads[2].join())

        coro.run(main)
    """)
    assert done.returncode == 0, done.stderr
    internal = "internal error in grapeshot: a test has asked for it"
    refused = "a coro cannot yield while it panics"
    assert done.stdout.splitlines() == [refused, internal, internal, "unharmed unharmed"]
