"""Deep recursion, in Python and in C: RecursionError where the interpreter counts, else the coro is named."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process of its own, which may crash."""
    head = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    command = [sys.executable, *flags, "-c", head + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# ---------------------------------------------------------------------------------------------- the guard below a stack


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose function ``recurse(0)`` uses its stack up, a kilobyte at a time, and asks nobody."""
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
def test_a_stack_that_is_used_up_names_the_coro(endless, arguments, where):
    done = run(OVERFLOW.format(library=str(endless), before_spawn="", arguments=arguments, run=where), "-X", "utf8")
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr == "grapeshot: coro 3 (gr\u00f6\u00dfe \U0001f347) has used up its stack of 8 MiB\n"


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
def test_other_faults_end_the_process_as_ever(fault, faulthandler):
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


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings on this system")
def test_the_alternate_stack_goes_with_its_thread():
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
    assert int(done.stdout) < 20
