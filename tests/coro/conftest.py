"""Every test of coros runs twice: stacks move when another coro needs the place, and after each switch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import coro_is_available


@pytest.fixture(autouse=True, params=["lazy", "always"])
def eviction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """When suspended stacks are evacuated: in this thread, and in the threads and processes that the test starts."""
    mode: str = request.param
    if not coro_is_available():
        yield mode
        return
    from grapeshot import _core

    if mode == "always":
        monkeypatch.setenv("GRAPESHOT_CORO_EVICT", "always")
    else:
        monkeypatch.delenv("GRAPESHOT_CORO_EVICT", raising=False)
    _core._coro_evict_always(mode == "always")
    yield mode
    _core._coro_evict_always(False)
