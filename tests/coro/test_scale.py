"""A hundred thousand coros in one process, and what they leave behind. Each test runs scale.py in a new process.

The environment variable CORO_SCALE scales the numbers. With 1 (the default), one test has 100,000 sleeping coros, one
has 40,000 coros that are suspended deep in shared stacks, and one has 40,000 coros on stacks of their own. If each of
the latter stacks needed two mappings, the process would exceed the kernel's limit of mappings.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import coro_is_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(sys.platform != "linux", reason="the tests read the memory use from /proc"),
]

SHARE = float(os.environ.get("CORO_SCALE", "1"))
MIB = 1024 * 1024


def run(kind, count):
    program = Path(__file__).with_name("scale.py")
    done = subprocess.run(
        [sys.executable, program, kind, str(count)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["live"] == 0
    assert report["bytes_saved"] == 0
    # Kept for later coros: 1,024 chunks for frames, 16 KiB of each of 1,024 stacks, 1 MiB of buffers for evicted
    # stacks, and the thread's slots.
    assert report["kept"] < 40 * MIB
    assert report["mappings_after"] - report["mappings_before"] < 50
    return report


def test_a_hundred_thousand_sleep_wake_and_end():
    count = int(100_000 * SHARE)
    report = run("sleepers", count)
    assert report["at_once"] == report["interrupted"] == count
    assert report["sum"] == count * (count - 1) // 2
    assert report["woken_early"] == 0
    assert report["peak"] - report["before"] > count * 1024


def test_forty_thousand_are_suspended_deep_down():
    count = int(40_000 * SHARE)
    report = run("suspended", count)
    assert report["waiting"] == report["right"] == count
    assert report["depths"] == [22]
    # All stacks except a few were evicted, and no evicted stack has its own mapping.
    assert report["saved"] > (count - 1) * 500
    assert report["mappings"] - report["mappings_before"] < 200


def has_guards_without_mappings():
    """Return whether the kernel has MADV_GUARD_INSTALL (Linux 6.13)."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        held = ctypes.c_char.from_buffer(pages)
        start, c = ctypes.c_void_p(ctypes.addressof(held)), ctypes.CDLL(None)
        installed = c.madvise(start, ctypes.c_size_t(mmap.PAGESIZE), 102) == 0
        del held
    return installed


def test_forty_thousand_have_stacks_of_their_own():
    if not has_guards_without_mappings():
        pytest.skip("NOT TESTED: 40,000 own stacks, since the kernel has no MADV_GUARD_INSTALL")
    count = int(40_000 * SHARE)
    report = run("own", count)
    assert report["waiting"] == report["right"] == count
    # One mapping holds 128 stacks, and the interpreter makes a few mappings for itself.
    assert report["mappings"] - report["mappings_before"] < count // 100 + 60
