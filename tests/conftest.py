"""Fixtures for all tests: a time limit, an audit of what a test leaves behind, and a new loop for each behaviour test.

A test that uses the fixture `loop` (or `new_loop`) runs once per kind of loop: on asyncio's own loop, which checks the
test itself, and on grapeshot. If grapeshot cannot be imported, its tests fail and are not skipped. The environment
variable `TEST_LOOPS` chooses other kinds, for example `TEST_LOOPS="asyncio uvloop grapeshot"`. `.ci/matrix` also runs
the tests on uvloop, except on free-threaded builds. Tests for which uvloop is known to deviate are marked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import resource
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
from leftovers import Leftovers
from support import coro_is_available, expect_failure, has_uvloop, loop_factory

# The time limit for each phase of a test: its setup, its body and its teardown. Tests that run once per kind of loop
# are short; other tests start programs, compile, or build the site.
LOOP_TEST_S = float(os.environ.get("TEST_WATCHDOG_S", "30"))
OTHER_TEST_S = 300.0
# After the first interruption, the same phase is interrupted again at this interval, because an `except` or
# `finally` block or the next fixture may hang too.
AGAIN_S = float(os.environ.get("TEST_AGAIN_S", "5"))
# If the phase takes this much longer than its limit, faulthandler ends the process, because a signal does not interrupt
# native code that hangs. pytest-xdist then starts a new process and continues.
GRACE_S = float(os.environ.get("TEST_GRACE_S", "60"))
# Some tests have 500 clients and their server in one process, which needs more descriptors than the usual 1,024.
DESCRIPTORS = 16384

_stderr_fd = -1

# Containers often set this variable. It is removed here, so that the programs under test buffer their output as usual.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_configure(config: pytest.Config) -> None:
    global _stderr_fd
    _stderr_fd = os.dup(2)  # the real stderr, because pytest does not capture yet
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes background processes ignore Ctrl-C. The programs under test must not inherit this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "xfail_on(when=True, **reasons): the named kinds of loop behave differently here (strict xfail)",
        "skip_on(when=True, **reasons): the named kinds of loop cannot run this test (skip)",
        "leaks_on(**reasons): the named kinds of loop leak resources here (no audit)",
        "no_audit(reason): this test may leave threads, descriptors and children behind",
        "slow: .ci/run runs this test only on the default version of CPython, .ci/matrix on all",
        "watchdog(seconds): how long each phase of this test may take before it fails",
        "only_on(*kinds): the kinds of loop that this test runs on (default: all)",
    ):
        config.addinivalue_line("markers", line)
    _raise_limit_of_descriptors()


def _raise_limit_of_descriptors() -> None:
    """Raise the soft limit to `DESCRIPTORS`, or to a lower hard limit, for this process and the programs it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def pytest_unconfigure() -> None:
    global _stderr_fd
    if _stderr_fd >= 0:
        os.close(_stderr_fd)
        _stderr_fd = -1


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "loop_kind" in metafunc.fixturenames:
        wanted = os.environ.get("TEST_LOOPS", "asyncio grapeshot").split()
        only_on = metafunc.definition.get_closest_marker("only_on")
        kinds = [kind for kind in wanted if only_on is None or kind in only_on.args]
        metafunc.parametrize("loop_kind", [kind for kind in kinds if kind != "uvloop" or has_uvloop()])


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
    # Make these two lasting changes before the first test, so that the audit does not blame a test for them.
    coro_is_available()  # imports grapeshot.coro, which adds a function to gc.callbacks
    if has_uvloop():
        loop_factory("uvloop")().close()  # libuv opens a pipe for signals with its first loop, and keeps it open
    # The collections after each test need not scan the objects that exist now.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def imports_stay() -> Iterator[None]:
    """After a test module, make all later collections skip the objects that the module has imported."""
    yield
    gc.collect()
    gc.freeze()


def _kind(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("loop_kind") if callspec is not None else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on its `loop` fixture."""
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


# ---------------------------------------------------------------- a test that hangs fails alone


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from _in_time(item))


def _in_time(item: pytest.Item) -> Iterator[None]:
    """Interrupt a phase of the test that takes too long. The run continues with the next fixture, or the next test."""
    seconds = _watchdog_s(item)
    before = signal.signal(signal.SIGALRM, _end_phase)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_stderr_fd)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def _end_phase(_signum: int, _frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=_stderr_fd)
    pytest.fail("the test did not end in time")


def _watchdog_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("watchdog")
    if marker is not None:
        return float(marker.args[0])
    return OTHER_TEST_S if _kind(item) is None else LOOP_TEST_S


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: do not run a test again if its process ended during the test.

    pytest-xdist's own scheduler would run it in a new process, which would probably end too, and so on.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            workload = self.assigned_work.pop(node)
            unfinished = [(unit, name) for unit in workload.values() for name, is_done in unit.items() if not is_done]
            if not unfinished:
                return None
            unit, crashed = unfinished[0]
            unit[crashed] = True
            self.workqueue.update({file: unit for file, unit in workload.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return FileScheduling(config, log)


# ---------------------------------------------------------------- what a test leaves behind


@pytest.fixture(autouse=True)
def _leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the test leaves the process with the same threads, descriptors, children and settings as before."""
    before = Leftovers()
    yield
    if request.node.get_closest_marker("no_audit"):
        return
    if request.node.stash.get(_failed, False) or _leaks(request.node):
        before.restore()
        return
    if "_audit" not in request.fixturenames:
        # Run the destructors of garbage now, so that they print their messages during this test. (In a test with
        # `_audit`, that fixture has already run them.)
        gc.collect()
    found = before.found()
    assert not found, f"left behind by the test: {found}"


def _leaks(item: pytest.Item) -> bool:
    """Return whether the test's kind of loop is known to leak in this test."""
    kind = _kind(item)
    return any(kind in marker.kwargs for marker in item.iter_markers("leaks_on"))


_LOOP_OBJECTS = (asyncio.BaseProtocol, asyncio.BaseTransport, asyncio.Handle, asyncio.Future)


def _loop_objects() -> dict[int, object]:
    """Return live protocols, transports, handles and futures. None of them may outlive its test."""
    return {
        id(thing): thing
        for thing in gc.get_objects()
        if issubclass(type(thing), _LOOP_OBJECTS) or type(thing).__name__ in ("Handle", "TimerHandle")
    }


def _left_objects(before: set[int]) -> list[str]:
    """Return loop objects that are not in `before`, after a short wait for threads that may still hold references."""
    deadline = time.monotonic() + 2
    while True:
        left = [repr(thing)[:300] for key, thing in _loop_objects().items() if key not in before]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
        gc.collect()


@pytest.fixture
def _audit(loop_kind: str, _leftovers: None, request: pytest.FixtureRequest) -> Iterator[None]:
    unraisable: list[str] = []
    in_threads: list[str] = []

    def on_unraisable(args: Any) -> None:
        unraisable.append(f"{args.err_msg or 'ignored in'} {args.object!r}: {args.exc_value!r}")

    hook, thread_hook = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = on_unraisable
    threading.excepthook = lambda args: in_threads.append(repr(args.exc_value))
    gc.collect()
    unraisable.clear()  # these belong to an earlier failed test, whose report kept its frames alive
    objects = set(_loop_objects())
    try:
        yield
        for _ in range(2):
            gc.collect()
    finally:
        sys.unraisablehook, threading.excepthook = hook, thread_hook
    if request.node.stash.get(_failed, False) or _leaks(request.node):
        return
    left = _left_objects(objects)
    problems = {
        "unraisable": unraisable,
        "raised in threads": in_threads,
        "live objects": left,
    }
    found = {name: what for name, what in problems.items() if what}
    assert not found, f"left behind by the test: {found}"


class Contexts(list[dict[str, Any]]):
    """The contexts that the loop has passed to its exception handler."""

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
    """Give the test the contexts that reach the loop's exception handler. A test without this fixture fails if there
    are any.
    """
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
    """A factory of loops with default settings. The fixture closes the loops that are still open after the test."""
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
    """A loop whose exception handler records its contexts; see `reported`."""
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
    """A function like `loop.create_server`. The fixture closes the servers after the test, even after a failed test."""
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
    """Record warnings instead of raising them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
