"""A call whose allocations fail raises MemoryError, raises the error that it would raise anyway, or succeeds.

In all three cases, the loop continues.

CPython's `_testcapi` can make the n-th allocation of a call fail, or all its allocations from the n-th on.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="no _testcapi")

HEAD = """
import _testcapi, asyncio, contextvars, gc, socket, sys, warnings
import grapeshot

warnings.simplefilter("ignore")  # coroutines that were never awaited
told, wrong, failures = [], [], 0
sys.unraisablehook = lambda hook: told.append(hook.exc_type)

def nothing():
    pass

def sweep(name, call, undo=None, count=60, others=()):
    global failures
    call_and_undo(call, undo, others)  # the first call creates objects that are created only once
    gc.disable()
    for start in range(count):
        for stop in (start + 1, 0):
            value = error = None
            _testcapi.set_nomemory(start, stop)
            try:
                value = call()
            except BaseException as caught:
                error = caught
            finally:
                _testcapi.remove_mem_hooks()
            if error is None:
                undo and undo(value)
            elif type(error) is MemoryError:
                failures += 1
            elif not isinstance(error, others):
                wrong.append((name, start, stop, repr(error)))
    gc.enable()

def call_and_undo(call, undo, others):
    try:
        value = call()
    except others:
        return
    undo and undo(value)

def report():
    print(wrong, set(told) <= {MemoryError}, failures > 0)
"""
LOOP = """
class Protocol(asyncio.Protocol):
    pass

async def coroutine():
    pass

async def main():
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    def cancel(handle):
        handle.cancel()
    sweep("call_soon", lambda: loop.call_soon(nothing), cancel)
    sweep("call_soon", lambda: loop.call_soon(nothing, context=context), cancel)
    sweep("call_later", lambda: loop.call_later(60, nothing), cancel)
    sweep("call_at", lambda: loop.call_at(60, nothing), cancel)
    sweep("call_soon_threadsafe", lambda: loop.call_soon_threadsafe(nothing), cancel)
    sweep("create_future", loop.create_future)
    loop.set_exception_handler(lambda loop, context: None)  # ignore reports of destroyed pending tasks
    for options in ({}, {"name": "x"}, {"context": context}, {"name": "x", "context": context}):
        sweep("create_task", lambda: loop.create_task(coroutine(), **options), cancel)
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    far.send(bytes(10_000))
    buffer = bytearray(1)
    operations = {
        "sock_recv": (near, 1), "sock_recv_into": (near, buffer), "sock_recvfrom": (near, 1),
        "sock_recvfrom_into": (near, buffer), "sock_sendall": (near, b"x"), "sock_sendto": (near, b"x", b""),
    }
    for name, arguments in operations.items():
        made = []
        def step():
            made.append(getattr(loop, name)(*arguments))
            try:
                made[-1].send(None)
            except StopIteration:
                pass
        sweep(name, step, others=OSError)
        for operation in made:
            operation.close()
    sweep("add_reader", lambda: loop.add_reader(near, nothing), lambda _: loop.remove_reader(near))
    loop.remove_reader(near)
    transport, _ = await loop.create_connection(Protocol, sock=near)
    sweep("write", lambda: transport.write(b"x"))
    sweep("writelines", lambda: transport.writelines((b"x", b"y")))
    for name in ("sockname", "peername", "socket", "other"):
        sweep("get_extra_info", lambda: transport.get_extra_info(name))
    sweep("reading", lambda: (transport.pause_reading(), transport.resume_reading()))
    sweep("repr", lambda: repr(transport))
    sweep("time", loop.time)
    transport.abort()
    far.close()
    await asyncio.sleep(0)

with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
    runner.run(main())
report()
"""
COROS = """
from grapeshot import coro

def main():
    coro.set_latency_warning(None)
    sweep("new", lambda: coro.new(nothing))
    def spawn():
        coro.spawn(nothing)
    sweep("spawn", spawn)
    sweep("with_timeout", lambda: coro.with_timeout(60, nothing))
    sweep("yield_slice", coro.yield_slice)
    for kind in (coro.lock, coro.mutex, coro.fifo, coro.channel, coro.condition_variable):
        sweep(kind.__name__, kind)
    near, far = coro.socketpair()
    near.settimeout(0)
    far.settimeout(0)
    def drain():
        try:
            while near.recv(100_000):
                pass
        except BlockingIOError:
            pass
    buffer = bytearray(1)
    calls = {
        "recv": (1,), "recv_into": (buffer,), "recvfrom": (1,), "recvfrom_into": (buffer,), "recvmsg": (1,),
        "recvmsg_into": ([buffer],), "recv_exact": (1,),
    }
    for name, arguments in calls.items():
        far.send(bytes(1000))
        sweep(name, lambda: getattr(near, name)(*arguments), count=40, others=BlockingIOError)
        drain()
    calls = {
        "send": (b"x",), "sendall": (b"x",), "write": (b"x",), "sendmsg": ([b"x", bytearray(1)], [(1, 2, b"")]),
        "sendto": (b"x", b"/"),
    }
    for name, arguments in calls.items():
        sweep(name, lambda: getattr(far, name)(*arguments), count=40, others=OSError)
        drain()
    def close(connection):
        connection.close()
    sweep("sock", coro.tcp_sock, close)
    with coro.tcp_sock() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(500)
        address = listener.getsockname()
        def connect():
            with coro.tcp_sock() as client:
                client.connect(address)
        sweep("connect", connect, others=OSError)
        clients = []
        for _ in range(250):
            client = socket.socket()
            client.connect(address)
            clients.append(client)
        listener.settimeout(0)
        sweep("accept", listener.accept, lambda accepted: accepted[0].close(), others=BlockingIOError)
        sweep("accept_many", lambda: listener.accept_many(1), lambda made: made[0][0].close(), others=BlockingIOError)
        for client in clients:
            client.close()
    near.close()
    far.close()
    # The failed calls have left nothing behind that would prevent other callbacks from running.
    print(coro.spawn(lambda: "runs").join())

coro.run(main)
report()
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr
    return done.stdout


def test_loop():
    assert run(LOOP) == "[] True True\n"


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_coros():
    assert run(COROS) == "runs\n[] True True\n"
