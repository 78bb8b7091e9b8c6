"""Run the tests of coros with both modes of eviction: when another coro needs the stack, and after each switch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support import coro_is_available

# These files test things that do not depend on where stacks are: names, arguments, messages, times, locks. They run
# with the first mode only. Set TEST_EVICTION=both to run everything with both modes (as .ci/matrix does), or lazy or
# always to run everything with that mode.
EITHER_WAY = {
    "test_asyncio_run",
    "test_basics",
    "test_blocking_libraries",
    "test_borrowed_host",
    "test_borrowed_loop",
    "test_cpython",
    "test_ctrl_c",
    "test_datagrams",
    "test_files",
    "test_future",
    "test_help",
    "test_hidden_loop",
    "test_latency_warning",
    "test_limits",
    "test_lock_tests",
    "test_main",
    "test_memray",
    "test_messages",
    "test_multiprocessing",
    "test_native_functions",
    "test_outcome",
    "test_patch",
    "test_patched_threads",
    "test_process",
    "test_programs",
    "test_pybind11",
    "test_remote_tools",
    "test_run_info",
    "test_run_sync",
    "test_scale",
    "test_selecting",
    "test_serve",
    "test_shared_files",
    "test_signal_handler",
    "test_signals",
    "test_sqlite",
    "test_starting",
    "test_sync_objects",
    "test_task_api",
    "test_thread_programs",
    "test_timers",
    "test_tools",
    "test_used_up",
    "test_waitpid",
    "test_watch_by_kqueue",
    "test_watch_file",
    "test_watchdog",
}


def is_sensitive(module: str) -> bool:
    """Whether the behaviour that this file tests depends on where stacks are."""
    return module.rpartition(".")[2] not in EITHER_WAY


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = os.environ.get("TEST_EVICTION")
    if chosen in ("lazy", "always"):
        modes = [chosen]
    else:
        modes = ["lazy", "always"] if chosen == "both" or is_sensitive(metafunc.module.__name__) else ["lazy"]
    metafunc.parametrize("eviction", modes, indirect=True)


@pytest.fixture(autouse=True)
def eviction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mode of eviction of suspended stacks, in this thread and in threads and processes that the test starts."""
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
    # In files that run with both modes, the first mode gets a single stack slot, so that even a few coros evict each
    # other. The second mode evicts anyway.
    is_shared = mode == "lazy" and is_sensitive(request.module.__name__)
    _core._coro_set_stack_slots(1 if is_shared else None)
    yield mode
    _core._coro_set_stack_slots(None)
    _core._coro_evict_always(False)
