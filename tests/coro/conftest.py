"""Run the tests of coros with one or both modes of eviction. Eviction copies a suspended coro's stack out of its slot.
In the mode `lazy`, this happens when another coro needs the slot; in the mode `always`, each time a coro is suspended.

`TEST_EVICTION` chooses `lazy` (the default), `always` or `both`. `.ci/run` uses `always` for one version of CPython and
for a debug build; `.ci/matrix` uses `both` for all versions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support import coro_is_available

# The files whose tests depend on where stacks are. With `lazy`, they get a single stack slot, so that even a few coros
# evict each other.
ONE_SLOT = {
    "diagnosis/test_tracing",
    "io/test_closing",
    "io/test_sockets",
    "io/test_storms",
    "io/test_stream",
    "io/test_timeouts",
    "io/test_tls",
    "io/test_waits",
    "soak/test_soak",
    "stacks/test_c_libraries",
    "stacks/test_callbacks",
    "stacks/test_data_stack",
    "stacks/test_exceptions",
    "stacks/test_finalizers",
    "stacks/test_frame_chain",
    "stacks/test_frame_walkers",
    "stacks/test_generators",
    "stacks/test_lazy_imports",
    "stacks/test_memory",
    "stacks/test_recursion",
    "stacks/test_reprs",
    "stacks/test_slots",
    "stacks/test_stacks",
    "stacks/test_state",
    "sync/test_channels",
    "sync/test_primitives",
    "sync/test_random",
    "test_collector",
    "test_coro_limit",
    "test_ending",
    "test_fairness",
    "test_fork",
    "test_interruption",
    "test_pool",
    "test_scheduler",
    "test_threads",
    "threads/test_lock_finalizers",
    "threads/test_locks",
    "threads/test_polling",
    "threads/test_simple_queue",
    "with_asyncio/test_bridge",
    "with_asyncio/test_greenlets",
}


def has_one_slot(module: ModuleType) -> bool:
    """Return whether the tests of the module get a single stack slot."""
    assert module.__file__ is not None
    path = Path(module.__file__).relative_to(Path(__file__).parent)
    return path.with_suffix("").as_posix() in ONE_SLOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = os.environ.get("TEST_EVICTION", "lazy")
    modes = ["lazy", "always"] if chosen == "both" else [chosen]
    metafunc.parametrize("eviction", modes, indirect=True)


@pytest.fixture(autouse=True)
def eviction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the mode of eviction for this thread, and for the threads and processes that the test starts."""
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
    _core._coro_set_stack_slots(1 if mode == "lazy" and has_one_slot(request.module) else None)
    yield mode
    _core._coro_set_stack_slots(None)
    _core._coro_evict_always(False)
