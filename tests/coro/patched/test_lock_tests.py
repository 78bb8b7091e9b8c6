"""CPython's own tests of locks on patched threading: in the main thread with real threads, in a coro with coros."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import coro_is_available

pytest.importorskip("test.lock_tests")
pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SUBJECT = Path(__file__).with_name("lock_subject.py")


@pytest.mark.parametrize("where", ["thread", "coro"])
def test_lock_tests(where):
    done = subprocess.run(
        [sys.executable, str(SUBJECT), where], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = int(done.stdout.split()[1])
    assert ran > 100, "CPython's module has more tests than that"
