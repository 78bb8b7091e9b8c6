"""The loop as the program itself and other processes see it: reprs, call graphs, `asyncio ps` and `asyncio pstree`."""

from __future__ import annotations

import asyncio
import io
import os
import re
import subprocess
import sys

import pytest
from support import HOST, Recorder, Script, connected, until

NEW_IN_3_14 = pytest.mark.skipif(sys.version_info < (3, 14), reason="new in 3.14")
OTHER_TEXT = "other texts"


# ---------------------------------------------------------------- reprs


@pytest.mark.xfail_on(uvloop=OTHER_TEXT)
def test_repr_of_the_loop(new_loop):
    loop = new_loop()
    name = type(loop).__name__
    assert repr(loop) == f"<{name} running=False closed=False debug=False>"
    loop.set_debug(True)
    texts = []
    loop.call_soon(lambda: texts.append(repr(loop)))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert texts == [f"<{name} running=True closed=False debug=True>"]
    loop.close()
    assert repr(loop) == f"<{name} running=False closed=True debug=True>"


def state_of(transport):
    """The repr without the name of the type and the number of the descriptor."""
    text = re.fullmatch(r"<(?:StreamTransport|_SelectorSocketTransport) (.*)>", repr(transport)).group(1)
    return re.sub(r"fd=\d+", "fd=N", text)


@pytest.mark.skip_on(uvloop=OTHER_TEXT)
async def test_repr_of_a_transport(loop):
    made = []

    class Protocol(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(state_of(transport))

    transport, protocol, peer = await connected(loop, Protocol, small=True)
    with peer:
        await asyncio.sleep(0)
        idle = "write=<idle, bufsize=0>"
        assert made == [f"fd=N read=idle {idle}"]
        assert state_of(transport) == f"fd=N read=polling {idle}"
        assert f" fd={transport.get_extra_info('socket').fileno()} " in repr(transport)
        transport.pause_reading()
        assert state_of(transport) == f"fd=N read=idle {idle}"
        transport.resume_reading()
        assert state_of(transport) == f"fd=N read=polling {idle}"
        transport.write(b"x" * 10_000_000)
        unsent = transport.get_write_buffer_size()
        assert unsent > 0
        assert state_of(transport) == f"fd=N read=polling write=<polling, bufsize={unsent}>"
        transport.close()
        assert state_of(transport) == f"closing fd=N read=idle write=<polling, bufsize={unsent}>"
        descriptor = transport.get_extra_info("socket").fileno()
        transport.abort()
        assert state_of(transport) == f"closing fd=N read=idle {idle}"
        await until(lambda: protocol.is_lost, "the end of the connection")
        await asyncio.sleep(0)
        assert state_of(transport) == "closed fd=N"
        assert f"fd={descriptor}>" in repr(transport)


@pytest.mark.skip_on(uvloop=OTHER_TEXT)
async def test_repr_of_a_server(loop):
    server = await loop.create_server(Recorder, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    assert re.fullmatch(
        rf"<Server sockets=\(<asyncio\.TransportSocket fd=\d+, family=2, type=1, proto=6, "
        rf"laddr=\('{HOST}', {port}\)>,\)>",
        repr(server),
    )
    server.close()
    assert repr(server) == "<Server sockets=()>"
    await server.wait_closed()


@pytest.mark.skip_on(asyncio="it would replace its own reader", uvloop="it would close the server's descriptor")
async def test_the_listener_names_its_server(loop):
    """The error of add_reader on a listening socket names the server that the socket belongs to."""
    server = await loop.create_server(Recorder, HOST, 0)
    sock = server.sockets[0]
    with pytest.raises(RuntimeError, match=rf"<_Listener fd={sock.fileno()} of <Server sockets="):
        loop.add_reader(sock.fileno(), print)
    server.close()
    await server.wait_closed()


# ---------------------------------------------------------------- call graphs


async def inner():
    await asyncio.Event().wait()


async def outer():
    async with asyncio.TaskGroup() as group:
        group.create_task(inner(), name="one")
        group.create_task(inner(), name="two")


@NEW_IN_3_14
async def test_call_graph_of_a_task(loop):
    task = loop.create_task(outer(), name="outer")
    children = lambda: {each.get_name(): each for each in asyncio.all_tasks()}  # noqa: E731
    await until(lambda: "two" in children(), "the tasks to start")
    await asyncio.sleep(0)
    graph = asyncio.capture_call_graph(children()["one"])
    assert [entry.frame.f_code.co_name for entry in graph.call_stack] == ["wait", "inner"]
    [awaiter] = graph.awaited_by
    assert awaiter.future is task
    assert [entry.frame.f_code.co_name for entry in awaiter.call_stack][-1] == "outer"
    del graph, awaiter
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@NEW_IN_3_14
async def test_call_graph_of_the_running_task(loop):
    async def nested():
        text = io.StringIO()
        asyncio.print_call_graph(file=text)
        return text.getvalue()

    lines = (await nested()).splitlines()
    assert lines[0].startswith("* Task(name='Task-")
    assert any(line.endswith("in async test_call_graph_of_the_running_task.<locals>.nested()") for line in lines), lines
    assert lines[-1].endswith("in async test_call_graph_of_the_running_task()")


def test_current_and_all_tasks(loop):
    async def child():
        assert asyncio.current_task().get_name() == "child"
        assert {each.get_name() for each in asyncio.all_tasks()} == {"child", "main"}

    async def main():
        await loop.create_task(child(), name="child")

    loop.call_soon(lambda: seen.append(asyncio.current_task()))
    seen = []
    loop.run_until_complete(loop.create_task(main(), name="main"))
    assert seen == [None]
    assert asyncio.all_tasks(loop) == set()


# ---------------------------------------------------------------- seen from another process


WAITING = """
    import asyncio

    async def inner(event):
        await event.wait()

    async def outer():
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(inner(event), name="one")
            group.create_task(inner(event), name="two")
            asyncio.get_running_loop().call_later(0, print, "waiting")

    loop = new_event_loop()
    loop.run_until_complete(loop.create_task(outer(), name="outer"))
"""


def look_at(process, command):
    done = subprocess.run(
        [sys.executable, "-m", "asyncio", command, str(process.pid)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHON_COLORS": "0"},
    )
    if done.returncode and re.search("ermission|not permitted|not supported", done.stdout + done.stderr):
        pytest.skip(f"this system does not let a process look into another: {(done.stdout + done.stderr)[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@NEW_IN_3_14
def test_ps(loop_kind):
    with Script(loop_kind, WAITING) as script:
        assert script.line() == "waiting"
        script.wait_blocked()
        output = look_at(script.process, "ps")
    for name, stack in (("one", "inner"), ("two", "inner"), ("outer", "outer")):
        assert re.search(rf"\s{name}\s.*\b{stack}\b", output), output


@NEW_IN_3_14
def test_pstree(loop_kind):
    with Script(loop_kind, WAITING) as script:
        assert script.line() == "waiting"
        script.wait_blocked()
        output = look_at(script.process, "pstree")
    names = re.findall(r"\(T\) (\w+)", output)
    assert names[0] == "outer"
    assert sorted(names[1:]) == ["one", "two"]
    assert re.search(r"TaskGroup\._aexit .*\n.*\(T\) (one|two)", output), output


@pytest.mark.xfail_on(uvloop="it has other names")
def test_asyncios_names_of_the_loops_state(new_loop):
    """These names are private in asyncio, but other code reads them."""
    loop = new_loop()
    assert loop._closed is False
    assert loop._debug is False
    loop.set_debug(True)
    assert loop._debug is True
    assert 0 < loop._clock_resolution <= 0.001
    loop.close()
    assert loop._closed is True
