"""Fixtures: which engine makes the calls on files, and whether reads and opens are first tried in the loop's thread."""

from __future__ import annotations

import pytest

from grapeshot import _core


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of each `AioQueue` that a test makes."""
    if request.param == "threads":
        monkeypatch.setenv("GRAPESHOT_FILE_THREADS", "1")
    elif not _core._AioQueue().has_ring():
        pytest.skip("NOT TESTED HERE: the kernel has no io_uring, or does not allow it")
    return str(request.param)


@pytest.fixture(params=["at once", "queue"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether reads and opens are first tried in the loop's thread, or always go to the queue."""
    if request.param == "queue":
        monkeypatch.setattr(_core, "_aio_read_now", lambda *_: None)
        monkeypatch.setattr(_core, "_aio_open_now", lambda *_: None)
    return str(request.param)
