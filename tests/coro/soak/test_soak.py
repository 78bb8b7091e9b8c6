"""Run run.py for a short time. The environment variable SOAK_STEPS sets the number of steps. `.ci/soak` also runs
run.py, with builds and settings that check more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

STEPS = int(os.environ.get("SOAK_STEPS", "4000"))


@pytest.mark.parametrize("arguments", [[], ["--mixed"]], ids=["", "mixed"])
def test_random_coros_in_three_threads(arguments):
    seed = os.environ.get("SOAK_SEED", "1")
    program = Path(__file__).with_name("run.py")
    done = subprocess.run(
        [sys.executable, program, "--steps", str(STEPS), "--seed", seed, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["steps"] >= STEPS
    assert report["kills"] > STEPS // 100
    assert report["evictions"] > STEPS // 10
    assert len(report["scenes"]) >= 20
