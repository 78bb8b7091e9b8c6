"""Fixtures: the path of a back door for each test, on each kind of loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from insight.callers import without_coros


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "app.bd"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every client of a back door a task, even if another test has imported `grapeshot.coro`."""
    without_coros(monkeypatch)
