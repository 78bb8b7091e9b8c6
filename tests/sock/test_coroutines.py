"""The sock_* methods as coroutines, and the checks of their arguments."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import io
import re
import socket
import ssl
import sys
import sysconfig
import warnings
import weakref

import pytest
from loop.test_introspection import NEW_IN_3_14, look_at
from support import HOST, Script, blocked_task, iterations, run_script

OPERATIONS = {
    "sock_recv": lambda loop, sock: loop.sock_recv(sock, 10),
    "sock_recv_into": lambda loop, sock: loop.sock_recv_into(sock, bytearray(10)),
    "sock_recvfrom": lambda loop, sock: loop.sock_recvfrom(sock, 10),
    "sock_recvfrom_into": lambda loop, sock: loop.sock_recvfrom_into(sock, bytearray(10)),
    "sock_sendall": lambda loop, sock: loop.sock_sendall(sock, b"x"),
    "sock_sendto": lambda loop, sock: loop.sock_sendto(sock, b"x", (HOST, 1)),
    "sock_accept": lambda loop, sock: loop.sock_accept(sock),
    "sock_connect": lambda loop, sock: loop.sock_connect(sock, (HOST, 1)),
    "sock_sendfile": lambda loop, sock: loop.sock_sendfile(sock, None),
}


@pytest.fixture(params=OPERATIONS)
def operation(request, loop_kind):
    name = request.param
    if loop_kind == "uvloop" and name in ("sock_recvfrom", "sock_recvfrom_into", "sock_sendto", "sock_sendfile"):
        pytest.skip("#561, #228: uvloop has not implemented it")
    return OPERATIONS[name]


def test_it_is_a_coroutine(loop, pair, operation):
    coroutine = operation(loop, pair[0])
    assert asyncio.iscoroutine(coroutine)
    assert isinstance(coroutine, collections.abc.Coroutine)
    assert inspect.isawaitable(coroutine)
    assert not asyncio.isfuture(coroutine)
    assert coroutine.close() is None


async def test_ways_to_run_one(loop, pair):
    ours, theirs = pair
    for run in (
        loop.create_task,
        asyncio.ensure_future,
        asyncio.gather,
        lambda coroutine: asyncio.wait_for(coroutine, 10),
        lambda coroutine: asyncio.shield(coroutine),
    ):
        theirs.send(b"x")
        assert await run(loop.sock_recv(ours, 10)) in (b"x", [b"x"])

    async def through_a_delegate():
        return await (await asyncio.sleep(0, loop.sock_recv(ours, 10)))

    theirs.send(b"y")
    assert await through_a_delegate() == b"y"
    async with asyncio.TaskGroup() as group:
        task = group.create_task(loop.sock_recv(ours, 10))
        theirs.send(b"z")
    assert task.result() == b"z"


def test_run_until_complete_takes_a_sock_coroutine(loop, pair):
    pair[1].send(b"x")
    assert loop.run_until_complete(loop.sock_recv(pair[0], 10)) == b"x"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12")
@pytest.mark.skip_on(when=sys.version_info < (3, 14), uvloop="create_task() makes no eager tasks before 3.14")
async def test_eager_tasks(loop, pair):
    ours, theirs = pair
    loop.set_task_factory(asyncio.eager_task_factory)
    theirs.send(b"x")
    task = loop.create_task(loop.sock_recv(ours, 10))
    assert await task == b"x"
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"y")
    assert await task == b"y"
    loop.set_task_factory(None)


async def test_tasks_written_in_python(loop, pair):
    """Programs that trace tasks may replace asyncio.Task with its Python implementation."""
    ours, theirs = pair
    task_type = asyncio.tasks._PyTask
    task = task_type(loop.sock_recv(ours, 10), loop=loop)
    await iterations(3)
    theirs.send(b"x")
    assert await task == b"x"
    task = task_type(loop.sock_recv(ours, 10), loop=loop)
    await iterations(3)
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await task
    theirs.send(b"y")
    assert await loop.sock_recv(ours, 10) == b"y"


def test_nothing_is_received_before_the_coroutine_is_awaited(loop, pair, quiet):
    ours, theirs = pair
    theirs.send(b"x")
    coroutine = loop.sock_recv(ours, 10)
    assert ours.recv(10) == b"x"
    del coroutine
    gc.collect()
    [warning] = quiet
    assert warning.category is RuntimeWarning
    assert "sock_recv' was never awaited" in str(warning.message)


def test_each_coroutine_that_is_never_awaited_warns(loop, pair, quiet):
    for _ in range(3):
        loop.sock_recv(pair[0], 10)
    gc.collect()
    assert len(quiet) == 3


@pytest.mark.parametrize("debug", [False, True])
def test_a_coroutine_that_is_never_awaited_is_collected_in_another_thread(loop, pair, quiet, debug):
    loop.set_debug(debug)

    async def forget():
        cycle = [loop.sock_recv(pair[0], 10)]
        cycle.append(cycle)
        del cycle
        await loop.run_in_executor(None, gc.collect)

    loop.run_until_complete(forget())
    assert [warning.category for warning in quiet] == [RuntimeWarning]


def test_a_coroutine_that_is_never_awaited_warns_at_the_end_of_the_interpreter(loop_kind):
    """The warning is given although the interpreter can no longer import modules at that time."""
    error = run_script(
        loop_kind,
        """
        import os, socket

        async def forget():
            global cycle
            cycle = [loop.sock_recv(ours, 10)]
            cycle.append(cycle)

        os.dup2(1, 2)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = new_event_loop()
        loop.run_until_complete(forget())
        loop.close()
        ours.close()
        theirs.close()
        """,
        flags=("-W", "default"),
    )
    assert re.fullmatch(r"(<sys>:0|sys:1): RuntimeWarning: coroutine '.*sock_recv' was never awaited\s*", error)


@pytest.mark.xfail_on(uvloop="compiled coroutines do not record where they were created")
def test_debug_mode_shows_where_a_coroutine_was_made(loop, pair, quiet):
    loop.set_debug(True)

    async def forget():
        loop.sock_recv(pair[0], 10)

    loop.run_until_complete(forget())
    gc.collect()
    texts = [str(warning.message) for warning in quiet if "never awaited" in str(warning.message)]
    assert len(texts) == 1
    assert "in forget" in texts[0]


def test_closing_a_coroutine_that_was_not_started(loop, pair):
    loop.sock_recv(pair[0], 10).close()
    with pytest.raises(ZeroDivisionError):
        loop.sock_recv(pair[0], 10).throw(ZeroDivisionError)


@pytest.mark.skip_on(uvloop="a second await sometimes raises nothing, or an error about StopIteration")
async def test_a_coroutine_is_awaited_once(loop, pair):
    ours, theirs = pair
    theirs.send(b"xy")
    coroutine = loop.sock_recv(ours, 1)
    assert await coroutine == b"x"
    with pytest.raises(RuntimeError, match="already awaited"):
        await coroutine
    coroutine.close()


@pytest.mark.skip_on(uvloop="accepts both waits, and the second one never ends")
async def test_a_suspended_coroutine_cannot_be_awaited_again(loop, pair):
    ours, theirs = pair
    coroutine = loop.sock_recv(ours, 10)

    async def first():
        return await coroutine

    task = await blocked_task(loop, first())
    with pytest.raises(RuntimeError, match="being awaited already"):
        await coroutine
    theirs.send(b"x")
    assert await task == b"x"


@pytest.mark.xfail_on(uvloop="waits for its own kind of future, which has fewer methods")
def test_driven_by_hand(loop, pair):
    """The first send() returns the future that the coroutine waits for. The second one raises StopIteration, which
    carries the result of the coroutine.
    """
    ours, theirs = pair

    async def main():
        coroutine = loop.sock_recv(ours, 10)
        with pytest.raises(TypeError, match="just-started"):
            coroutine.send(1)
        future = coroutine.send(None)
        assert asyncio.isfuture(future)
        assert future.get_loop() is loop
        assert not future.done()
        assert not future.cancelled()
        with pytest.raises(asyncio.InvalidStateError):
            future.result()
        calls = []
        future.add_done_callback(calls.append)
        future.add_done_callback(calls.append)
        future.add_done_callback(print)
        assert future.remove_done_callback(print) == 1
        order = []
        first, second, third = (lambda _, number=number: order.append(number) for number in (1, 2, 3))
        future.remove_done_callback(calls.append)
        future.add_done_callback(first)
        future.add_done_callback(second)
        assert future.remove_done_callback(first) == 1
        future.add_done_callback(third)
        future.add_done_callback(calls.append)
        future.add_done_callback(calls.append)
        theirs.send(b"x")
        while not future.done():
            await asyncio.sleep(0)
        await iterations(2)
        assert calls == [future, future]
        assert order == [2, 3]
        future.result()
        assert future.exception() is None
        future.add_done_callback(calls.append)
        await iterations(2)
        assert len(calls) == 3
        assert not future.cancel()
        with pytest.raises(StopIteration) as stopped:
            coroutine.send(None)
        assert stopped.value.value == b"x"

    loop.run_until_complete(main())


@pytest.mark.xfail_on(uvloop="waits for its own kind of future, which has fewer methods")
def test_a_comparison_that_raises_removes_no_callback(loop, pair):
    ours, theirs = pair

    class Unequal:
        def __eq__(self, other):
            raise ZeroDivisionError

        __hash__ = None

    async def main():
        coroutine = loop.sock_recv(ours, 10)
        future = coroutine.send(None)
        calls = []
        for number in range(3):
            future.add_done_callback(lambda _, number=number: calls.append(number))
        with pytest.raises(ZeroDivisionError):
            future.remove_done_callback(Unequal())
        theirs.send(b"x")
        while not future.done():
            await asyncio.sleep(0)
        await iterations(2)
        assert calls == [0, 1, 2]
        with pytest.raises(StopIteration):
            coroutine.send(None)

    loop.run_until_complete(main())


@pytest.mark.xfail_on(uvloop="waits for its own kind of future, which has fewer methods")
def test_a_callback_added_by_a_comparison_is_called(loop, pair):
    ours, theirs = pair
    calls = []

    class Callback:
        def __call__(self, future):
            calls.append("compared")

        def __eq__(self, other):
            if "added" not in known:
                known.append("added")
                future.add_done_callback(lambda _: calls.append("added"))
            return False

        __hash__ = None

    known = []
    coroutine = loop.sock_recv(ours, 10)

    async def main():
        nonlocal future
        future = coroutine.send(None)
        future.add_done_callback(lambda _: calls.append("first"))
        future.add_done_callback(Callback())
        assert future.remove_done_callback(print) == 0
        theirs.send(b"x")
        while not future.done():
            await asyncio.sleep(0)
        await iterations(2)
        assert calls == ["first", "compared", "added"]
        with pytest.raises(StopIteration):
            coroutine.send(None)

    future = None
    loop.run_until_complete(main())


@pytest.mark.xfail_on(asyncio="takes the StopIteration for the result of the future", uvloop="raises the StopIteration")
def test_a_thrown_stop_iteration_is_not_a_result(loop, pair):
    """A StopIteration that leaves a coroutine would count as a result, so RuntimeError is raised instead (PEP 479)."""

    async def main():
        coroutine = loop.sock_recv(pair[0], 10)
        coroutine.send(None)
        with pytest.raises(RuntimeError, match="coroutine raised StopIteration") as raised:
            coroutine.throw(StopIteration("no result"))
        assert isinstance(raised.value.__cause__, StopIteration)
        assert raised.value.__context__ is raised.value.__cause__

    loop.run_until_complete(main())


@pytest.mark.xfail_on(uvloop="the message says generator instead of coroutine")
async def test_a_stop_iteration_from_the_socket_is_not_a_result(loop):
    class Stops(socket.socket):
        def recv(self, *_):
            raise StopIteration("no result")

        def fileno(self):
            raise StopIteration("no result")

    with Stops() as sock:
        sock.setblocking(False)
        with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
            await loop.sock_recv(sock, 10)


def test_thrown_into_by_hand(loop, pair):
    async def main():
        for error in (ZeroDivisionError("why"), ZeroDivisionError, GeneratorExit()):
            coroutine = loop.sock_recv(pair[0], 10)
            coroutine.send(None)
            with pytest.raises((ZeroDivisionError, GeneratorExit)):
                coroutine.throw(error)
            with pytest.raises(RuntimeError, match="already awaited"):
                coroutine.send(None)
        coroutine = loop.sock_recv(pair[0], 10)
        coroutine.send(None)
        coroutine.close()
        coroutine.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # deprecated since 3.12: throw() with three arguments
            coroutine = loop.sock_recv(pair[0], 10)
            coroutine.send(None)
            with pytest.raises(ZeroDivisionError, match="why"):
                coroutine.throw(ZeroDivisionError, "why", None)
        coroutine = loop.sock_recv(pair[0], 10)
        coroutine.send(None)
        for wrong in (
            lambda: coroutine.throw(),
            lambda: coroutine.throw(ZeroDivisionError("why"), unknown=1),
            lambda: coroutine.throw(ZeroDivisionError, "why", None, None),
        ):
            with pytest.raises(TypeError):
                wrong()
        coroutine.close()
        pair[1].send(b"x")
        assert await loop.sock_recv(pair[0], 10) == b"x"

    loop.run_until_complete(main())


async def test_a_future_of_another_loop_is_refused(loop, new_loop, pair):
    other = new_loop()
    with pytest.raises(RuntimeError, match="attached to a different loop"):
        await loop.create_task(other.sock_recv(pair[0], 10))
    pair[1].send(b"x")
    assert await loop.sock_recv(pair[0], 10) == b"x"


@pytest.mark.skip_on(uvloop="on some versions of Python, compiled coroutines do not show what they wait for")
async def test_a_waiting_task_shows_the_method(loop, pair):
    task = await blocked_task(loop, loop.sock_recv(pair[0], 10))
    assert "sock_recv" in repr(task)
    assert "wait_for=<" in repr(task)
    task.get_stack()
    task.print_stack(file=io.StringIO())
    task.cancel()
    await asyncio.wait([task])


@NEW_IN_3_14
async def test_call_graphs(loop, pair):
    async def within():
        await loop.sock_recv(pair[1], 10)

    direct = await blocked_task(loop, loop.sock_recv(pair[0], 10))
    awaited = await blocked_task(loop, within())
    assert asyncio.format_call_graph(direct).startswith("* Task(")
    assert "within()" in asyncio.format_call_graph(awaited)
    for task in (direct, awaited):
        task.cancel()
    await asyncio.wait([direct, awaited])


OPERATIONS_THAT_WAIT = """
    import asyncio, socket

    async def within(loop, sock):
        await loop.sock_recv(sock, 10)

    async def main():
        loop = asyncio.get_running_loop()
        pair, other = socket.socketpair(), socket.socketpair()
        for sock in (*pair, *other):
            sock.setblocking(False)
        tasks = [
            loop.create_task(loop.sock_recv(pair[0], 10), name="direct"),
            loop.create_task(loop.sock_sendall(pair[0], memoryview(bytes(10_000_000))), name="sending"),
            loop.create_task(within(loop, other[0]), name="awaited"),
        ]
        loop.call_later(0.01, print, "waiting")
        await asyncio.wait(tasks)

    loop = new_event_loop()
    loop.run_until_complete(main())
"""


@NEW_IN_3_14
@pytest.mark.parametrize("kind", ["asyncio", "grapeshot"])
def test_ps_shows_tasks_of_operations(kind):
    with Script(kind, OPERATIONS_THAT_WAIT) as script:
        assert script.line() == "waiting"
        script.wait_blocked()
        output = look_at(script.process, "ps")
    for name in ("direct", "sending", "awaited"):
        assert re.search(rf"\s{name}\s", output), output
    assert re.search(r"\sawaited\s.*\bwithin\b", output), output


# ---------------------------------------------------------------- references


class Holder:
    pass


def test_an_abandoned_wait_is_collected(new_loop, pair):
    """The wait is in a reference cycle with the loop, the task and the coroutine."""
    loop = new_loop()
    holder = Holder()
    reference = weakref.ref(holder)

    async def wait(event_loop, _holder):
        await event_loop.sock_recv(pair[0], 10)

    task = loop.create_task(wait(loop, holder))
    task._log_destroy_pending = False
    loop.run_until_complete(iterations(3))
    loop.close()
    del loop, holder, task, wait
    for _ in range(3):
        gc.collect()
    # the loop itself is still alive, because the fixture refers to it
    assert reference() is None


@pytest.mark.skip_on(asyncio="the loop refers to the buffer", uvloop="the loop refers to the buffer")
async def test_a_wait_is_collected_in_another_thread(loop, pair):
    """In a free-threaded build, the other thread must not change the loop's table of descriptors, because the loop may
    be using it. So the wait stays in the table, and its next event has no effect.
    """

    class Buffer(bytearray):
        pass

    ours, theirs = pair
    buffer = Buffer(10)
    buffer.operation = loop.sock_recv_into(ours, buffer)
    waiter = buffer.operation.send(None)
    reference = weakref.ref(buffer)
    del buffer
    await loop.run_in_executor(None, gc.collect)
    assert reference() is None
    assert waiter.done() == (not sysconfig.get_config_var("Py_GIL_DISABLED"))
    theirs.send(b"x")
    assert await loop.sock_recv(ours, 10) == b"x"


async def test_references_come_back(loop, pair):
    ours, theirs = pair
    buffer, size = bytearray(10), 123456789
    before = [sys.getrefcount(thing) for thing in (loop, ours, buffer, size)]
    for _ in range(100):
        theirs.send(b"x")
        assert await loop.sock_recv_into(ours, buffer) == 1
        task = loop.create_task(loop.sock_recv(ours, size))
        await asyncio.sleep(0)
        theirs.send(b"x")
        await task
        task = loop.create_task(loop.sock_recv_into(ours, buffer))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        del task
    await iterations(3)
    gc.collect()
    after = [sys.getrefcount(thing) for thing in (loop, ours, buffer, size)]
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), (before, after)


# ---------------------------------------------------------------- arguments


def outcome(function):
    try:
        return function()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("size", [-1, 1 << 40, 1 << 62, 1 << 64, "1", 1.5, None, True])
async def test_strange_sizes(loop, pair, size):
    ours, theirs = pair
    theirs.send(b"xy")
    expected = outcome(lambda: ours.recv(size))
    theirs.send(b"xy")
    if expected == b"x":
        ours.recv(1)
    try:
        found = await asyncio.wait_for(loop.sock_recv(ours, size), 10)
    except Exception as error:
        found = type(error)
    if expected is MemoryError and isinstance(found, bytes):
        return  # sock_recv does not allocate the whole size, so there is no MemoryError
    assert found == expected


@pytest.mark.parametrize("buffer", [b"fixed", "text", None, 5, memoryview(bytearray(10))[::2], bytearray()])
async def test_strange_buffers(loop, loop_kind, pair, buffer):
    ours, theirs = pair
    theirs.send(b"x")
    expected = outcome(lambda: ours.recv_into(buffer))
    theirs.send(b"x")
    try:
        found = await asyncio.wait_for(loop.sock_recv_into(ours, buffer), 10)
    except Exception as error:
        found = type(error)
    assert found == expected


@pytest.mark.skip_on(uvloop="takes None for empty data")
@pytest.mark.parametrize("data", ["text", None, 5, memoryview(b"0123456789")[::2]])
async def test_strange_data(loop, pair, data):
    expected = outcome(lambda: pair[0].send(data))
    assert isinstance(expected, type)
    with pytest.raises(expected):
        await loop.sock_sendall(pair[0], data)


def test_wrong_numbers_of_arguments(loop, pair):
    for call in (
        lambda: loop.sock_recv(),
        lambda: loop.sock_recv(pair[0]),
        lambda: loop.sock_recv(pair[0], 1, 2),
        lambda: loop.sock_recv(pair[0], 1, bufsize=2),
        lambda: loop.sock_recv(pair[0], sock=pair[0]),
        lambda: loop.sock_accept(),
        lambda: loop.sock_sendto(pair[0], b""),
    ):
        with pytest.raises(TypeError):
            call()


async def test_keywords(loop, pair):
    ours, theirs = pair
    await loop.sock_sendall(sock=theirs, data=b"xyz")
    assert await loop.sock_recv_into(sock=ours, buf=bytearray(1)) == 1


async def test_debug_mode_wants_a_nonblocking_socket(loop, operation, pair):
    loop.set_debug(True)
    pair[0].setblocking(True)
    with pytest.raises(ValueError, match="non-blocking"):
        await operation(loop, pair[0])
    pair[0].settimeout(1)
    with pytest.raises(ValueError, match="non-blocking"):
        await operation(loop, pair[0])


@pytest.mark.skip_on(uvloop="looks for TLS sockets in debug mode only")
async def test_a_tls_socket_is_refused(loop, operation):
    context = ssl.create_default_context()
    with (
        socket.socket() as plain,
        context.wrap_socket(plain, do_handshake_on_connect=False, server_hostname="x") as sock,
    ):
        sock.setblocking(False)
        with pytest.raises(TypeError, match="SSLSocket"):
            await operation(loop, sock)


@pytest.mark.skip_on(uvloop="waits for data without a time limit")
async def test_the_timeout_of_a_socket_applies(loop, pair):
    ours, theirs = pair
    ours.settimeout(0.01)
    with pytest.raises(TimeoutError):
        await loop.sock_recv(ours, 10)
    theirs.send(b"x")
    assert await loop.sock_recv(ours, 10) == b"x"


def test_a_closed_loop(new_loop, pair):
    loop = new_loop()
    loop.close()
    coroutine = loop.sock_recv(pair[0], 10)
    with pytest.raises(RuntimeError, match="closed"):
        coroutine.send(None)


# ---------------------------------------------------------------- sockets of other classes


class Recording(socket.socket):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def recv(self, *args):
        self.calls.append("recv")
        return super().recv(*args)

    def recv_into(self, *args):
        self.calls.append("recv_into")
        return super().recv_into(*args)

    def send(self, *args):
        self.calls.append("send")
        return super().send(*args)


@pytest.fixture
def recording(pair):
    sock = Recording(fileno=pair[0].detach())
    sock.setblocking(False)
    with sock:
        yield sock, pair[1]


async def test_methods_of_a_subclass_are_called(loop, recording):
    ours, theirs = recording
    task = await blocked_task(loop, loop.sock_recv(ours, 10))
    theirs.send(b"x")
    assert await task == b"x"
    task = await blocked_task(loop, loop.sock_recv_into(ours, bytearray(10)))
    theirs.send(b"x")
    assert await task == 1
    content = bytes(range(256)) * 10_000
    sending = loop.create_task(loop.sock_sendall(ours, content))
    received = bytearray()
    while len(received) < len(content):
        received += await loop.sock_recv(theirs, 1 << 18)
    await sending
    assert received == content
    assert set(ours.calls) == {"recv", "recv_into", "send"}


async def test_methods_patched_into_the_class_are_called(loop, pair, monkeypatch):
    calls = []
    original = socket.socket.recv

    def recv(self, *args):
        calls.append(args)
        return original(self, *args)

    pair[1].send(b"xyz")
    assert await loop.sock_recv(pair[0], 1) == b"x"
    monkeypatch.setattr(socket.socket, "recv", recv, raising=False)
    assert await loop.sock_recv(pair[0], 1) == b"y"
    assert calls == [(1,)]
    monkeypatch.undo()
    assert await loop.sock_recv(pair[0], 1) == b"z"
    assert calls == [(1,)]
