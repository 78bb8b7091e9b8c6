"""`grapeshot.insight.tree()`: coros and tasks, timers, sockets and threads, as text and as objects."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading

import pytest
from support import HOST, Recorder, coro_is_available, gil_is_enabled, in_thread, spawn_blocked, until

import grapeshot
from grapeshot.insight import _tree


def node_of(tree, name):
    return next(node for node in tree.nodes if node.name == name)


async def test_tasks_that_await_each_other(loop):
    async def worker(event):
        await event.wait()

    async def boss(worker_task):
        await worker_task

    event = asyncio.Event()
    low = loop.create_task(worker(event), name="low")
    high = loop.create_task(boss(low), name="high")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tree = grapeshot.insight.tree()
    assert node_of(tree, "high").below == [node_of(tree, "low")]
    assert node_of(tree, "high").state == "waits for task 'low'"
    assert node_of(tree, "high") in tree.roots
    assert node_of(tree, "low") not in tree.roots
    assert node_of(tree, "low").waiter is low
    assert re.match(r"waits for <asyncio\.locks\.Event", node_of(tree, "low").state)
    assert [node.state for node in tree.nodes if node.waiter is asyncio.current_task()] == ["runs"]
    text = str(tree)
    assert "\ntask 'high' waits for task 'low'\n" in text
    assert "\n  task 'low' waits for <asyncio.locks.Event" in text
    assert re.search(r'      File ".*test_tree\.py", line \d+, in worker\n        await event\.wait\(\)\n', text)
    assert "/_tree.py" not in text
    event.set()
    await high


async def test_groups_and_gather(loop):
    async def group():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(1000), name="first")
            tasks.create_task(asyncio.sleep(1000), name="second")

    async def gather():
        await asyncio.gather(named := loop.create_task(asyncio.sleep(1000), name="gathered"), return_exceptions=True)
        return named

    waiting = [loop.create_task(group(), name="group"), loop.create_task(gather(), name="gather")]
    for _ in range(3):
        await asyncio.sleep(0)
    tree = grapeshot.insight.tree()
    assert sorted(node.name for node in node_of(tree, "group").below) == ["first", "second"]
    assert [node.name for node in node_of(tree, "gather").below] == ["gathered"]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


@pytest.mark.skip_on(uvloop="does not show its timers")
async def test_timers(loop):
    near, far = loop.call_later(100, print, "near"), loop.call_later(200, print, "far")
    cancelled = loop.call_later(50, print)
    loop.call_later(60, print)
    cancelled.cancel()
    sleeper = loop.create_task(asyncio.sleep(150), name="sleeper")
    await asyncio.sleep(0)
    tree = grapeshot.insight.tree()
    assert [round(timer.due_s, -1) for timer in tree.timers] == [60, 100, 150, 200]
    assert re.match(r"waits for a timer, due in 1[45]\d\.\d{3} s$", node_of(tree, "sleeper").state)
    assert re.search(r"\n4 timers\n  due in (60\.000|59\.\d{3}) s: <TimerHandle", str(tree))
    for handle in (near, far):
        handle.cancel()
    sleeper.cancel()


async def test_sockets(loop, serve):
    server = await serve(Recorder, HOST, 0)
    address = server.sockets[0].getsockname()
    transport, _protocol = await loop.create_connection(Recorder, *address)
    await until(
        lambda: any(each.local.endswith(f":{address[1]}") and each.peer for each in grapeshot.insight.tree().sockets)
    )
    plain = socket.socketpair()
    udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    try:
        udp.bind(("::1", 0))
    except OSError:
        udp.close()
    tree = grapeshot.insight.tree()
    found = {each.fd: each for each in tree.sockets}
    listening = found[server.sockets[0].fileno()]
    assert (listening.kind, listening.is_listening, listening.peer) == ("tcp", True, None)
    assert str(listening).endswith(f"tcp listens on {HOST}:{address[1]}")
    client = found[transport.get_extra_info("socket").fileno()]
    assert client.peer == f"{HOST}:{address[1]}"
    assert client.local == "{}:{}".format(*transport.get_extra_info("sockname"))
    assert "Recorder" in (client.owner or "") or loop_hides_transports(loop)
    assert [found[sock.fileno()].kind for sock in plain] == ["unix", "unix"]
    assert found[plain[0].fileno()].peer == ""
    if udp.fileno() >= 0:
        assert str(found[udp.fileno()]).endswith(f"udp [::1]:{udp.getsockname()[1]}")
    for sock in (*plain, udp):
        sock.close()
    transport.close()
    await asyncio.sleep(0)


def loop_hides_transports(loop):
    return type(loop).__module__.startswith("uvloop")


def test_tree_does_not_change_the_mode_of_sockets():
    """If a default timeout is set, a socket object that is made for a descriptor makes the descriptor non-blocking.
    tree() must avoid this.
    """
    first, second = socket.socketpair()
    with first, second:
        first.setblocking(True)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(5)
        try:
            grapeshot.insight.tree()
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(first.fileno())


async def test_threads(loop):
    event, began = threading.Event(), threading.Event()

    def is_idle(thread):
        return thread.is_executor and thread.is_idle

    def work():
        began.set()
        event.wait()

    waiting = loop.create_task(asyncio.to_thread(work), name="patient")
    try:
        await asyncio.sleep(0)
        await loop.run_in_executor(None, began.wait)
        if hasattr(loop, "_default_executor"):
            await until(
                lambda: len([one for one in grapeshot.insight.tree().threads if is_idle(one)]) == 1, "the second one"
            )
            threads = [thread for thread in grapeshot.insight.tree().threads if thread.is_executor]
            (busy,) = (thread for thread in threads if not thread.is_idle)
            assert any(line.endswith("in work") for line in busy.stack) == gil_is_enabled()
            assert [thread.stack for thread in threads if thread.is_idle] == [[]]
        assert node_of(grapeshot.insight.tree(), "patient").state == "waits for a call in another thread"
    finally:
        event.set()
        await waiting


async def test_a_tree_from_another_thread(loop):
    """A thread sees the tasks of the loop that it passes to tree(). Without a loop, it sees no tasks."""
    task = loop.create_task(asyncio.sleep(1000), name="seen")
    await asyncio.sleep(0)
    tree = await loop.run_in_executor(None, grapeshot.insight.tree, loop)
    assert node_of(tree, "seen").waiter is task
    assert tree.timers == []
    assert in_thread(grapeshot.insight.tree).nodes == []
    task.cancel()


def test_without_a_loop():
    tree = grapeshot.insight.tree()
    assert tree.nodes == []
    assert tree.timers == []
    assert str(tree).startswith("0 coros and 0 tasks")


def test_long_lists_are_cut_in_the_text_only():
    timers = [_tree.Timer(float(number), "callback") for number in range(250)]
    text = str(_tree.Tree("heading", [], [], [], timers, [], []))
    assert text.count("due in") == 100
    assert text.endswith("  and 150 more")


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_coros_and_tasks_are_one_tree():
    from grapeshot import coro

    def main():
        worker = spawn_blocked(coro.wait, name="worker")
        joiner = spawn_blocked(worker.join, name="joiner")

        async def ask():
            await joiner

        task = asyncio.get_running_loop().create_task(ask(), name="asker")
        first, second = coro.socketpair()
        reader = spawn_blocked(first.recv, 10, name="reader")
        sleeper = spawn_blocked(coro.sleep_relative, 1000, name="sleeper")
        coro.yield_slice()
        tree = grapeshot.insight.tree()
        asker = node_of(tree, "asker")
        assert [node.name for node in asker.below] == ["joiner"]
        assert [node.name for node in asker.below[0].below] == ["worker"]
        assert [node.kind for node in (asker, *asker.below)] == ["task", "coro"]
        assert node_of(tree, "reader").state == f"waits to read descriptor {first.fileno()}"
        assert node_of(tree, "sleeper").state.startswith("sleeps for another ")
        [owned] = [each for each in tree.sockets if each.fd == first.fileno()]
        assert owned.owner == "coro 'reader'"
        second.send(b"x")
        coro.schedule(worker)
        sleeper.shutdown()
        coro.wait([worker, joiner, reader])
        coro.await_(task)
        first.close()
        second.close()

    coro.run(main)


def test_importing_the_package_does_not_import_insight():
    code = "import sys, grapeshot; print([name for name in sys.modules if name.startswith('grapeshot')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not re.search("_tree|_waits|backdoor|_attach", done.stdout)


def test_tree_refuses_objects_that_are_not_loops():
    with pytest.raises(TypeError, match=r"tree\(\) needs an event loop, got 3"):
        grapeshot.insight.tree(3)
