"""CPython's own tests of locks on patched threading. In the main thread they start real threads, in a coro they start
coros.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import coro_is_available

pytest.importorskip("test.lock_tests")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
]

SUBJECT = Path(__file__).with_name("lock_subject.py")
# The tests wait most of the time, so the parts run in parallel.
PARTS = 8
ALL = list(itertools.product(["thread", "coro"], range(PARTS)))


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, int], subprocess.Popen[str]]]:
    started = {}
    for where, part in ALL:
        arguments = [sys.executable, str(SUBJECT), where, f"{part}/{PARTS}"]
        started[where, part] = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("where", "part"), ALL)
def test_lock_tests(processes, where, part):
    output, _ = processes[where, part].communicate(timeout=240)
    assert processes[where, part].returncode == 0, output
    ran = re.search(r"^ran (\d+)$", output, re.MULTILINE)
    assert int(ran[1]) > 100 // PARTS, "CPython's module has more tests than that"
