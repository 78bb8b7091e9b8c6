"""Every test here leaves no child behind, running or ended."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from process.children import has_children


@pytest.fixture(autouse=True)
def _no_children(loop_kind: str) -> Iterator[None]:
    assert not has_children()
    yield
    left = []
    while has_children():
        left.append(os.waitpid(-1, 0))  # so that the tests behind this one have none
    assert not left, f"children left behind by the test, (pid, status): {left}"
