"""Fixtures of the behaviour tests: one loop per test, on each kind of loop, and an audit of what the test leaves
behind.

A test that asks for `loop` (or `new_loop`) runs once per kind: on asyncio's own loop (which checks the test itself),
on uvloop where it is installed (known deviations are marked) and on grapeshot. No test skips grapeshot: if it cannot
be imported, its tests fail. `TEST_LOOPS="grapeshot"` in the environment restricts the tests to that kind.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from support import expect_failure, has_uvloop, loop_factory, wait_until

WATCHDOG_S = float(os.environ.get("TEST_WATCHDOG_S", "30"))
# After this time more, a test that the signal could not end ends with its process.
GRACE_S = 30.0
HANG_S = 900.0

_stderr_fd = -1


def pytest_configure(config: pytest.Config) -> None:
    global _stderr_fd
    _stderr_fd = os.dup(2)  # the real stderr: capturing has not begun yet
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts it in the background ignores Ctrl-C, and the programs of the tests would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "xfail_on(when=True, **reasons): the named kinds of loop behave differently here (strict xfail)",
        "skip_on(when=True, **reasons): the named kinds of loop cannot run this test (skip)",
        "leaks_on(**reasons): the named kinds of loop leak resources here (no audit)",
        "slow: .ci/run runs it on two versions of CPython only, .ci/matrix on all",
        "watchdog(seconds): replaces the default time after which a test fails with a traceback of all threads",
    ):
        config.addinivalue_line("markers", line)


def pytest_unconfigure() -> None:
    global _stderr_fd
    if _stderr_fd >= 0:
        os.close(_stderr_fd)
        _stderr_fd = -1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "loop_kind" in metafunc.fixturenames:
        wanted = os.environ.get("TEST_LOOPS", "asyncio uvloop grapeshot").split()
        metafunc.parametrize("loop_kind", [kind for kind in wanted if kind != "uvloop" or has_uvloop()])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = _kind(item)
        if kind is None:
            continue
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)
        for marker in item.iter_markers("xfail_on"):
            if kind in marker.kwargs and marker.kwargs.get("when", True):
                item.add_marker(pytest.mark.xfail(strict=True, reason=marker.kwargs[kind]))
        for marker in item.iter_markers("skip_on"):
            if kind in marker.kwargs and marker.kwargs.get("when", True):
                item.add_marker(pytest.mark.skip(reason=marker.kwargs[kind]))


def pytest_collection_finish() -> None:
    if has_uvloop():
        loop_factory("uvloop")().close()  # libuv opens a pipe for signals with its first loop and keeps it
    # The collections after each test need not scan what exists now.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def imports_stay() -> Iterator[None]:
    """Excludes what a test module has imported from later collections."""
    yield
    gc.collect()
    gc.freeze()


def _kind(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("loop_kind") if callspec is not None else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test that asks for `loop` runs on it."""
    function = pyfuncitem.obj
    loop = pyfuncitem.funcargs.get("loop")
    if loop is None or not inspect.iscoroutinefunction(function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop.run_until_complete(function(**arguments))
    return True


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None:
        item.stash[_failed] = True
    return report


@pytest.fixture(autouse=True)
def _short_waits_for_expected_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    expected = request.node.get_closest_marker("xfail") is not None
    expect_failure(expected)
    yield
    expect_failure(False)


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    if _kind(request.node) is None:
        # Only so that a test that hangs does not hang all.
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=_stderr_fd)
        yield
    else:
        seconds = _watchdog_s(request.node)
        before = signal.signal(signal.SIGALRM, _end_test)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _arm_watchdog(request.node)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    faulthandler.cancel_dump_traceback_later()


def _end_test(_signum: int, _frame: FrameType | None) -> None:
    """Fails the test that runs. Ending the process would lose the other tests of a pytest-xdist worker."""
    faulthandler.dump_traceback(file=_stderr_fd)
    pytest.fail("the test did not end in time")


def _watchdog_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("watchdog")
    return marker.args[0] if marker else WATCHDOG_S


def _arm_watchdog(item: pytest.Item) -> None:
    """Ends the process if the signal does not end the test, or a fixture hangs in its teardown."""
    faulthandler.dump_traceback_later(_watchdog_s(item) + GRACE_S, exit=True, file=_stderr_fd)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    # pytest's own plugin has just cancelled it, but fixtures may still hang in their teardown
    if isinstance(node, pytest.Item) and _kind(node) is not None:
        _arm_watchdog(node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- the audit


def _open_fds() -> set[str]:
    fds = set()
    for fd in os.listdir("/dev/fd"):
        try:
            fds.add(f"{fd} -> {os.readlink(f'/dev/fd/{fd}')}")
        except OSError:
            continue  # the descriptor of the listing itself
    return fds


_LOOP_OBJECTS = (asyncio.BaseProtocol, asyncio.BaseTransport, asyncio.Handle, asyncio.Future)


def _loop_objects() -> dict[int, object]:
    """Live protocols, transports, handles and futures. None of them may outlive its test."""
    return {
        id(thing): thing
        for thing in gc.get_objects()
        if issubclass(type(thing), _LOOP_OBJECTS) or type(thing).__name__ in ("Handle", "TimerHandle")
    }


def _left_objects(before: set[int]) -> list[str]:
    """Loop objects that are not in `before`. A thread may release one a moment late, so this waits."""
    deadline = time.monotonic() + 2
    while True:
        left = [repr(thing)[:300] for key, thing in _loop_objects().items() if key not in before]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
        gc.collect()


@pytest.fixture
def _audit(loop_kind: str, request: pytest.FixtureRequest) -> Iterator[None]:
    unraisable: list[str] = []
    in_threads: list[str] = []

    def on_unraisable(args: Any) -> None:
        unraisable.append(f"{args.err_msg or 'ignored in'} {args.object!r}: {args.exc_value!r}")

    hook, thread_hook = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = on_unraisable
    threading.excepthook = lambda args: in_threads.append(repr(args.exc_value))
    gc.collect()
    unraisable.clear()  # left by a failed test before this one, whose report keeps its frames
    fds, threads, objects = _open_fds(), set(threading.enumerate()), set(_loop_objects())
    try:
        yield
        for _ in range(2):
            gc.collect()
    finally:
        sys.unraisablehook, threading.excepthook = hook, thread_hook
    item = request.node
    leaks = any(loop_kind in marker.kwargs for marker in item.iter_markers("leaks_on"))
    if item.stash.get(_failed, False) or leaks:
        return
    wait_until(lambda: set(threading.enumerate()) <= threads, "the threads of the test to end")
    left = _left_objects(objects)
    problems = {
        "unraisable": unraisable,
        "raised in threads": in_threads,
        "open descriptors": sorted(_open_fds() - fds),
        "live objects": left,
    }
    found = {name: what for name, what in problems.items() if what}
    assert not found, f"left behind by the test: {found}"


class Contexts(list[dict[str, Any]]):
    """What the loop reported to its exception handler."""

    expected = False

    @property
    def messages(self) -> list[str]:
        return [context["message"] for context in self]

    @property
    def exceptions(self) -> list[BaseException]:
        return [context["exception"] for context in self if "exception" in context]


@pytest.fixture
def _contexts(_audit: None) -> Iterator[Contexts]:
    contexts = Contexts()
    yield contexts
    contexts.clear()


@pytest.fixture
def reported(_contexts: Contexts) -> Contexts:
    """The contexts that reached the loop's exception handler. Without this fixture any such context fails the test."""
    _contexts.expected = True
    return _contexts


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        return
    for task in asyncio.all_tasks(loop):
        task.cancel()

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    settling = settle()
    try:
        loop.run_until_complete(settling)
    finally:
        settling.close()
        loop.close()


@pytest.fixture
def new_loop(loop_kind: str, _audit: None) -> Iterator[Callable[[], asyncio.AbstractEventLoop]]:
    """A factory of loops as the library makes them. The fixture closes those that are still open."""
    factory = loop_factory(loop_kind)
    made: list[asyncio.AbstractEventLoop] = []

    def make() -> asyncio.AbstractEventLoop:
        loop = factory()
        made.append(loop)
        return loop

    yield make
    while made:
        _finish(made.pop())


@pytest.fixture
def loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], _contexts: Contexts, request: pytest.FixtureRequest
) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop with an exception handler that records; see `reported`."""
    loop = new_loop()

    def record(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _contexts.append(context)

    loop.set_exception_handler(record)
    yield loop
    _finish(loop)
    unexpected = [] if _contexts.expected or request.node.stash.get(_failed, False) else list(_contexts)
    _contexts.clear()
    assert not unexpected, f"reported to the exception handler: {unexpected}"


@pytest.fixture
def serve(loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., Any]]:
    """create_server. The fixture closes the servers when the test ends, even if it fails."""
    servers: list[Any] = []

    async def create(*args: Any, **kwargs: Any) -> Any:
        servers.append(await loop.create_server(*args, **kwargs))
        return servers[-1]

    yield create
    while servers:
        servers.pop().close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected non-blocking sockets."""
    first, second = socket.socketpair()
    first.setblocking(False)
    second.setblocking(False)
    with first, second:
        yield first, second


@pytest.fixture
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Records warnings instead of raising them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
