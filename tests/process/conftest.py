"""Check that no test in this folder leaves a child behind, running or ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from process.children import children, note_other_children


@pytest.fixture(autouse=True)
def _no_children(loop_kind: str) -> Iterator[None]:
    note_other_children()
    yield
    # waitpid() fetches the statuses, so that later tests do not see these children.
    left = []
    for pid in children():
        os.kill(pid, signal.SIGKILL)  # it may be running
        left.append(os.waitpid(pid, 0))
    assert not left, f"children left behind by the test, (pid, status): {left}"
