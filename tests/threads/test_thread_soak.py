"""Run soak.py for a short time. The environment variable SOAK_ROUNDS sets the number of rounds. `.ci/soak threads` also
runs soak.py, for longer.
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

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "8"))


@pytest.mark.parametrize("arguments", [[], ["--mixed"]], ids=["", "mixed"])
def test_loops_in_many_threads_exchange_items(arguments):
    seed = os.environ.get("SOAK_SEED", "1")
    program = Path(__file__).with_name("soak.py")
    done = subprocess.run(
        [sys.executable, program, "--rounds", str(ROUNDS), "--seed", seed, "--forks", "0.3", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout)
    assert report["rounds"] >= ROUNDS
    assert report["items"] > 50 * ROUNDS
    assert report["calls"] > ROUNDS
    assert report["interruptions"] > ROUNDS // 2
