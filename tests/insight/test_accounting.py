"""`insight.accounting()`: CPU by owner, descriptors by the code that opened them, memory per connection and coro."""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from insight.callers import call, without_coros
from support import HOST, Echo, address_of, coro_is_available, run_script, until

import grapeshot
from grapeshot.insight import _charges, _subjects, backdoor

pytestmark = pytest.mark.skip_on(asyncio="has no accounting", uvloop="has no accounting")


def burn(seconds=0.02):
    """Use CPU time of this thread, not just wall time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def account(loop, kind, part):
    """Return the only account of the given kind whose name contains the text `part`."""
    [found] = [each for each in grapeshot.insight.accounting(loop).cpu if each.kind == kind and part in each.name]
    return found


async def worker(steps):
    for _ in range(steps):
        burn()
        await asyncio.sleep(0)


async def test_cpu_is_charged_to_the_task_that_used_it(loop):
    loop.set_cpu_accounting(True)
    busy = loop.create_task(worker(3), name="busy")
    idle = loop.create_task(asyncio.sleep(0.01), name="idle")
    await idle
    await busy
    mine = account(loop, "task", "busy")
    assert mine.name == "busy (worker)"
    assert mine.steps == 4
    assert 0.06 <= mine.cpu_s < 30
    assert mine.ended == 0, "the task counts as gone, although the test still refers to it"
    assert account(loop, "task", "idle").cpu_s < 0.02
    assert grapeshot.insight.accounting(loop).cpu[0] == mine, "the largest first"
    assert "busy (worker)" in str(grapeshot.insight.accounting(loop)).splitlines()[1]


async def test_sleeping_costs_nothing(loop):
    loop.set_cpu_accounting(True)
    loop.call_soon(time.sleep, 0.05)
    await asyncio.sleep(0)
    assert account(loop, "callback", "sleep").cpu_s < 0.04


async def test_tasks_that_are_gone_are_added_up_by_name(loop):
    loop.set_cpu_accounting(True)
    for _ in range(5):
        await loop.create_task(worker(1))
    await asyncio.sleep(0)
    total = account(loop, "task", "worker")
    assert (total.name, total.ended, total.steps) == ("worker", 5, 10)
    assert total.cpu_s >= 0.1


async def test_callbacks_and_connections(loop, serve):
    class Busy(Echo):
        def data_received(self, data):
            burn()
            super().data_received(data)

    def burning():
        burn()

    server = await serve(Busy, HOST, 0)
    loop.set_cpu_accounting(True)
    loop.call_soon(burning)
    loop.call_soon(functools.partial(functools.partial(burning)))
    with socket.create_connection(address_of(server), 10) as client:
        client.setblocking(False)
        client.send(b"x")
        await until(lambda: account_is(loop, "connection", "Busy"), "the event")
        assert account(loop, "connection", "Busy").cpu_s >= 0.02
    both = [each for each in grapeshot.insight.accounting(loop).cpu if "burning" in each.name]
    assert sum(each.cpu_s for each in both) >= 0.04
    assert {each.kind for each in both} == {"callback"}
    await until(lambda: loop._open_connections == 0, "the end of the connection")


def account_is(loop, kind, part):
    return any(each.kind == kind and part in each.name for each in grapeshot.insight.accounting(loop).cpu)


async def test_each_method_of_an_object_has_an_account(loop):
    class Worker:
        def light(self):
            pass

        def heavy(self):
            burn()

    loop.set_cpu_accounting(True)
    worker = Worker()
    loop.call_soon(worker.light)
    loop.call_soon(worker.heavy)
    loop.call_soon(len, [])
    loop.call_soon(sum, [])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert account(loop, "callback", "Worker.heavy").cpu_s >= 0.02
    assert account(loop, "callback", "Worker.light").cpu_s < 0.02
    assert account(loop, "callback", "len").steps == account(loop, "callback", "sum").steps == 1


async def test_counting_ends(loop):
    loop.set_cpu_accounting(True)
    loop.set_cpu_accounting(False)
    await asyncio.sleep(0)
    found = grapeshot.insight.accounting(loop)
    assert (found.cpu, found.is_cpu_counted) == ([], False)
    assert str(found).startswith("CPU: not counted; call loop.set_cpu_accounting(True) to start counting")


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
async def test_cpu_of_coros(loop):
    from grapeshot import coro

    def work(steps):
        for _ in range(steps):
            burn()
            coro.sleep_relative(0.0001)

    loop.set_cpu_accounting(True)
    busy = coro.spawn(work, 3, name="busy")
    waiting = coro.spawn(coro.wait, name="waiting")
    await busy
    assert account(loop, "coro", "busy").cpu_s >= 0.06
    assert account(loop, "coro", "busy").steps >= 4
    assert account(loop, "coro", "waiting").cpu_s < 0.02
    info = busy.stack_info()
    assert (info["cpu_s"], info["steps"]) == (account(loop, "coro", "busy").cpu_s, account(loop, "coro", "busy").steps)
    loop.set_cpu_accounting(False)
    assert "cpu_s" not in waiting.stack_info()
    memory = grapeshot.insight.accounting(loop).memory
    assert memory.coros == 1
    assert 1000 < memory.per_coro < 100_000
    waiting.shutdown()
    await asyncio.wait([waiting])


def test_an_error_of_the_observer_does_not_end_the_loop():
    out = run_script(
        None,
        """
        import asyncio, grapeshot, sys
        sys.unraisablehook = lambda args: print("unraisable", args.exc_value)
        async def main():
            def fail(what, wall_ns, cpu_ns):
                loop._set_step_observer(None)
                raise ValueError("observer")
            loop = asyncio.get_running_loop()
            loop._set_step_observer(fail)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            print("goes on")
        grapeshot.run(main())
        """,
    )
    assert out.splitlines() == ["unraisable observer", "goes on"]


# ---- descriptors


def owner_at(loop, fd):
    [found] = [each for each in grapeshot.insight.accounting(loop).descriptors if each.fd == fd]
    return found


@pytest.mark.skipif(
    sys.version_info >= (3, 12) and tracemalloc.is_tracing(),
    reason="tracemalloc also tells where sockets were made",
)
async def test_debug_mode_names_the_code_that_opened_a_descriptor(loop, monkeypatch):
    monkeypatch.setattr(
        "grapeshot.insight._accounting._SHOWN", 10_000
    )  # the process may have many descriptors from elsewhere
    loop.set_debug(True)
    server = await loop.create_server(Echo, HOST, 0)  # the server
    transport, _ = await loop.create_connection(asyncio.Protocol, *address_of(server))  # the client
    endpoint, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=(HOST, 0))  # the endpoint
    await until(lambda: loop._open_connections == 2, "both ends")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()

    def place(comment):
        number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
        name = "test_debug_mode_names_the_code_that_opened_a_descriptor"
        return f"{__file__}:{number} in {name}"

    listening = owner_at(loop, server.sockets[0].fileno())
    assert listening.opened_at == place("the server")
    assert listening.owner == "Server"
    assert listening.what.startswith(f"tcp listens on {HOST}:")
    client = owner_at(loop, transport.get_extra_info("socket").fileno())
    assert client.opened_at == place("the client")
    assert "StreamTransport of" in client.owner
    assert owner_at(loop, endpoint.get_extra_info("socket").fileno()).opened_at == place("the endpoint")
    accepted = [each for each in grapeshot.insight.accounting(loop).descriptors if "Echo" in str(each.owner)]
    assert [each.opened_at for each in accepted] == [f"{place('the server')} (accepted)"]
    assert f", opened at {place('the client')}" in str(grapeshot.insight.accounting(loop))
    transport.abort()
    endpoint.abort()
    server.close()
    await until(lambda: loop._open_connections == 0, "both ends to close")


async def test_without_debug_mode_nothing_is_noted(loop):
    server = await loop.create_server(Echo, HOST, 0)
    assert owner_at(loop, server.sockets[0].fileno()).opened_at is None
    assert loop._origins is None
    server.close()


async def test_a_task_that_only_connects_is_named_by_where_it_was_made(loop, serve):
    server = await serve(Echo, HOST, 0)
    loop.set_debug(True)
    task = loop.create_task(loop.create_connection(asyncio.Protocol, *address_of(server)))
    transport, _ = await task
    opened = owner_at(loop, transport.get_extra_info("socket").fileno()).opened_at
    assert opened.startswith(f"{__file__}:")
    assert opened.endswith(" in test_a_task_that_only_connects_is_named_by_where_it_was_made")
    transport.abort()
    await until(lambda: loop._open_connections == 0, "both ends to close")


async def test_tracemalloc_tells_where_sockets_and_files_were_made(loop, tmp_path):
    tracemalloc.start(5)
    try:
        with socket.socket() as sock, open(tmp_path / "file", "wb") as file:
            found = {each.fd: each for each in grapeshot.insight.accounting(loop).descriptors}
            assert found[sock.fileno()].opened_at.startswith(f"{__file__}:")
            assert found[file.fileno()].opened_at.startswith(f"{__file__}:")
            if sys.platform == "linux":
                assert found[file.fileno()].what == str(tmp_path / "file")
    finally:
        tracemalloc.stop()


# ---- similar entries share a row


def rows(found):
    return {row.what: (row.count, row.growth) for row in found.descriptor_tallies()}


async def test_connections_of_a_server_are_one_row_that_grows(loop, serve):
    server = await serve(Echo, HOST, 0)
    host, port = address_of(server)
    name = f"TCP connection accepted by the server at {host}:{port}: Echo"
    clients = [socket.create_connection((host, port), 10) for _ in range(3)]
    await until(lambda: loop._open_connections == 3, "the connections")
    first = grapeshot.insight.accounting(loop)
    assert rows(first)[name] == (3, None)
    assert rows(first)[f"TCP connection to {host}:{port}"] == (3, None)
    assert rows(first)[f"TCP server at {host}:{port}"] == (1, None)
    assert sum(count for count, _ in rows(first).values()) == len(first.descriptors)
    clients += [socket.create_connection((host, port), 10) for _ in range(2)]
    await until(lambda: loop._open_connections == 5, "two more")
    second = grapeshot.insight.accounting(loop, since=first)
    assert rows(second)[name] == (5, 2)
    assert rows(second)[f"TCP server at {host}:{port}"] == (1, 0)
    text = str(second)
    assert f"     5    (+2)  {name}\n" in text
    assert f"{len(second.descriptors)} open descriptors (+4)\n" in text
    assert f"{host}:{port} -> " not in text, "no row for a single connection"
    assert second.text(each=True).count(f"tcp {host}:{port} -> ") == 5
    server.close()  # its connections stay open, but their row does not name a closed server
    assert rows(grapeshot.insight.accounting(loop))[f"TCP connection accepted at {host}:{port}: Echo"] == (5, None)
    for client in clients:
        client.close()
    await until(lambda: loop._open_connections == 0, "the connections to end")
    assert rows(grapeshot.insight.accounting(loop, since=second))[name] == (0, -5)


async def test_streams_are_named_by_the_function_that_serves_them(loop):
    async def serve_one(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve_one, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    with socket.create_connection((HOST, port), 10):
        await until(lambda: loop._open_connections == 1, "the connection")
        [name] = [row for row in rows(grapeshot.insight.accounting(loop)) if "accepted" in row]
        assert name == f"TCP connection accepted by the server at 0.0.0.0:{port}: {serve_one.__qualname__}"
    await until(lambda: loop._open_connections == 0, "the connection to end")
    server.close()


async def test_cpu_is_added_up_by_function_and_name(loop):
    loop.set_cpu_accounting(True)
    names = [None, None, "worker 1", "worker 2", "nightly"]
    tasks = [loop.create_task(worker(1), name=name) for name in names]
    await asyncio.gather(*tasks)
    first = grapeshot.insight.accounting(loop)
    found = {row.name: row for row in first.cpu_tallies() if "worker" in row.name}
    assert found.keys() == {"worker", "worker * (worker)", "nightly (worker)"}
    assert [found[name].alive for name in ("worker", "worker * (worker)", "nightly (worker)")] == [2, 2, 1]
    assert found["worker"].place == f"{__file__}:{worker.__code__.co_firstlineno}"
    assert found["worker"].cpu_s == sum(each.cpu_s for each in first.cpu if each.name == "worker")
    tasks.append(loop.create_task(worker(1)))
    await tasks[-1]
    second = grapeshot.insight.accounting(loop, since=first)
    [more] = [row for row in second.cpu_tallies() if row.name == "worker"]
    assert (more.alive, more.steps) == (3, 6)
    assert more.growth_s >= 0.02
    assert re.search(r" ms +6 steps +\(\+\d[\d.]+\)  task worker \(3 alive\), ", str(second))


async def test_ended_names_with_numbers_share_an_account(loop):
    """If a program numbers its tasks, counting their CPU does not use more and more memory."""
    loop.set_cpu_accounting(True)
    for number in range(20):
        await loop.create_task(asyncio.sleep(0), name=f"request {number}")
    await asyncio.sleep(0)
    assert account(loop, "task", "request").name == "request * (sleep)"
    assert account(loop, "task", "request").ended == 20


async def test_tasks_that_end_with_the_interpreter_are_counted_without_functions(loop, monkeypatch):
    """An interpreter that exits clears its modules, so the functions that make the names of accounts may be gone."""
    loop.set_cpu_accounting(True)
    await loop.create_task(worker(0), name="kept")
    await asyncio.sleep(0)
    task = loop.create_task(worker(0), name="last")
    await task
    for name in ("_label", "without_numbers", "subject_of"):
        monkeypatch.setattr(_subjects, name, None)
    monkeypatch.setattr(_charges, "_Open", None)
    del task
    await asyncio.sleep(0)
    monkeypatch.undo()
    assert account(loop, "task", "last").ended == 1


async def test_control_characters_in_names_do_not_reach_a_terminal(loop, tmp_path):
    """Names of tasks and files may come from an untrusted source."""
    loop.set_cpu_accounting(True)
    task = loop.create_task(worker(1), name="a\x1b[31m\nb")
    await task
    with open(tmp_path / "c\x1b]0;d\x07", "w"):
        found = grapeshot.insight.accounting(loop)
        for text in (str(found), found.text(each=True)):
            assert "\x1b" not in text
            assert "\x07" not in text
            assert "a\ufffd[31m\ufffdb (worker)" in text
            assert "/c\ufffd]0;d\ufffd" in text


async def test_the_back_door_shows_growth(loop, tmp_path, monkeypatch):
    without_coros(monkeypatch)
    tmp_path.chmod(0o700)
    with backdoor.serve(tmp_path / "app.bd"):
        with await call(tmp_path / "app.bd") as caller, open(tmp_path / "file", "w"):
            assert "(+" not in await caller.ask("accounting()")
            with open(tmp_path / "file"):
                assert f"     2    (+1)  file {tmp_path}/file\n" in await caller.ask("accounting()")
            text = await caller.ask("accounting(each=True)")
            assert re.search(rf"fd \d+ {tmp_path}/file\n", text)
    await until(lambda: len(asyncio.all_tasks()) == 1, "the session to end")


# ---- memory


async def test_memory(loop, serve):
    server = await serve(Echo, HOST, 0)
    clients = [socket.create_connection(address_of(server), 10) for _ in range(3)]
    await until(lambda: loop._open_connections == 3, "the connections")
    memory = grapeshot.insight.accounting(loop).memory
    assert memory.connections == 3
    assert 300 < memory.per_connection < 2000
    assert memory.write_buffers == 0
    if sys.platform == "linux":
        assert memory.rss > 10_000_000
    for client in clients:
        client.close()
    await until(lambda: loop._open_connections == 0, "the connections to end")


async def test_limits_are_shown(loop):
    loop.set_limits(connections=7)
    assert grapeshot.insight.accounting(loop).limits == {"connections": 7, "descriptors": None, "coros": None}
    assert str(grapeshot.insight.accounting()).endswith("\nLimits: connections 7")


def test_accounting_needs_a_grapeshot_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        grapeshot.insight.accounting()
    loop = asyncio.SelectorEventLoop()
    try:
        with pytest.raises(TypeError, match=r"accounting\(\) needs a grapeshot loop"):
            grapeshot.insight.accounting(loop)
    finally:
        loop.close()
