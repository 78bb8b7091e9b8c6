"""Fixtures: the path of a back door for each test, and back doors that serve their clients in tasks."""

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
    """Make back doors serve each client in a task, even if another test has imported `grapeshot.coro`."""
    without_coros(monkeypatch)
