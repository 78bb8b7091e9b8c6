"""gevent on a grapeshot loop. Each script also runs on gevent's own loop as a control, unless it uses asyncio."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
from support import PROCESS_CAP_S

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")

OURS, LIBEV = "grapeshot.gevent.Loop", "libev-cext"
HEAD = """
import gevent, gevent.event, gevent.exceptions, gevent.monkey, gevent.pool, gevent.queue, gevent.server
gevent.monkey.patch_all()
import asyncio, os, signal, socket, subprocess, sys, threading, time
"""


def run(code: str, loop: str = OURS) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", HEAD + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PROCESS_CAP_S,
        check=False,
        env={**os.environ, "GEVENT_LOOP": loop},
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{loop}: {done.stdout}\n{done.stderr}"
    return done.stdout


def check(code: str) -> None:
    """Run a script on both loops. It must print the same text on each."""
    ours, libev = run(code), run(code, LIBEV)
    assert ours == libev
    assert ours


def test_greenlets_sleep_and_wait():
    check(
        """
        order = []
        def sleeper(number):
            time.sleep(number / 50)
            order.append(number)
            return number
        greenlets = [gevent.spawn(sleeper, number) for number in (3, 1, 2)]
        print([each.value for each in gevent.joinall(greenlets)], order)
        event, queue = gevent.event.Event(), gevent.queue.Queue()
        gevent.spawn_later(0.01, event.set)
        print(event.wait(5))
        gevent.spawn(lambda: [queue.put(number) for number in range(3)])
        print([queue.get() for _ in range(3)])
        try:
            with gevent.Timeout(0.01):
                gevent.sleep(10)
        except gevent.Timeout as exc:
            print(exc)
        greenlet = gevent.spawn(gevent.sleep, 10)
        gevent.sleep(0)
        greenlet.kill()
        print(repr(greenlet.value))
        """
    )


def test_nothing_left_to_do():
    """The hub's loop ends when nothing is left that could wake a greenlet."""
    check(
        """
        try:
            gevent.event.Event().wait()
        except gevent.exceptions.LoopExit as exc:
            print(type(exc).__name__)
        print(gevent.wait(timeout=1))
        timer = gevent.get_hub().loop.timer(100, ref=False)
        timer.start(print)
        try:
            gevent.event.Event().wait()
        except gevent.exceptions.LoopExit:
            print("an unreferenced timer does not count")
        timer.close()
        """
    )


def test_sockets():
    check(
        """
        def echo(sock, address):
            while data := sock.recv(1000):
                sock.sendall(data)
        server = gevent.server.StreamServer(("127.0.0.1", 0), echo)
        server.start()
        def client(number):
            with socket.create_connection(("127.0.0.1", server.server_port)) as sock:
                for size in (1, 100_000):
                    sent, got = b"x" * size, b""
                    writer = gevent.spawn(sock.sendall, sent)
                    while len(got) < size:
                        got += sock.recv(65536)
                    writer.join()
                sock.settimeout(0.01)
                try:
                    sock.recv(1)
                except TimeoutError:
                    return number
        print(sorted(each.value for each in gevent.joinall([gevent.spawn(client, number) for number in range(20)])))
        server.stop()
        # A descriptor is closed while a greenlet waits for it, and its number is used again.
        gevent.get_hub().exception_stream = None
        near, far = socket.socketpair()
        reader = gevent.spawn(near.recv, 1)
        gevent.sleep(0)
        near.close()
        reader.join()
        print(type(reader.exception).__name__)
        again, other = socket.socketpair()
        reader = gevent.spawn(again.recv, 1)
        gevent.sleep(0)
        other.send(b"y")
        print(reader.get(timeout=5))
        for each in (far, again, other):
            each.close()
        """
    )


def test_processes_signals_and_forks():
    check(
        """
        print(subprocess.check_output([sys.executable, "-c", "print('child')"]))
        print(subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode)
        process = subprocess.Popen(["sleep", "100"])
        gevent.spawn_later(0.05, process.kill)
        print(process.wait())
        got = gevent.event.Event()
        handler = gevent.signal_handler(signal.SIGUSR1, got.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        print(got.wait(5))
        handler.cancel()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            greenlet = gevent.spawn(lambda: (gevent.sleep(0.01), b"from the child")[1])
            os.write(write, greenlet.get())
            os._exit(7)
        print(os.read(read, 100), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )


def test_threads():
    """Each real thread has a hub and a loop of its own, and real threads wake greenlets."""
    check(
        """
        from gevent.threadpool import ThreadPool
        pool = ThreadPool(2)
        print(pool.map(lambda number: number * number, range(5)))
        real = gevent.monkey.get_original("threading", "Thread")
        ended = gevent.event.AsyncResult()
        loop = gevent.get_hub().loop
        def work():
            gevent.sleep(0.01)
            loop.run_callback_threadsafe(ended.set, "from a thread")
            gevent.get_hub().destroy()
        start = gevent.monkey.get_original("_thread", "start_new_thread")
        start(work, ())
        keep = gevent.spawn_later(5, int)
        print(ended.get(timeout=5))
        keep.kill()
        """
    )


def test_errors():
    """A greenlet keeps its exception, and KeyboardInterrupt is raised in the main greenlet."""
    check(
        """
        gevent.get_hub().exception_stream = sys.stdout
        def fail():
            raise LookupError("nothing")
        greenlet = gevent.spawn(fail)
        gevent.get_hub().exception_stream = None
        greenlet.join()
        print(repr(greenlet.exception))
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
        gevent.spawn_later(0.01, interrupt)
        try:
            gevent.sleep(10)
        except KeyboardInterrupt:
            print("interrupted")
        gevent.sleep(0.01)
        try:
            gevent.get_hub().loop.io(9999, 1)
        except (OSError, ValueError):
            print("bad descriptor")
        """
    )


def test_tasks_and_greenlets():
    """Tasks run in the hub. Greenlets can wait for awaitables, and tasks can wait for greenlets."""
    out = run(
        """
        from grapeshot.gevent import await_, run_sync
        async def answer(number):
            await asyncio.sleep(0.01)
            return number, type(asyncio.get_running_loop()).__module__
        print([gevent.spawn(await_, answer(number)).get() for number in range(3)])
        async def fail():
            raise LookupError("nothing")
        try:
            await_(fail())
        except LookupError as exc:
            print(exc)
        try:
            asyncio.get_running_loop()
        except RuntimeError as exc:
            print(exc)
        def blocking(number):
            time.sleep(0.01)
            return number, await_(answer(number))[0]
        async def both():
            return await asyncio.gather(*(run_sync(blocking, number) for number in range(3)))
        print(await_(both()))
        async def wrong():
            try:
                gevent.sleep(1)
            except gevent.exceptions.BlockingSwitchOutError:
                return "a task cannot block"
        print(await_(wrong()))
        """
    )
    assert out.splitlines() == [
        "[(0, 'grapeshot._loop'), (1, 'grapeshot._loop'), (2, 'grapeshot._loop')]",
        "nothing",
        "no running event loop",
        "[(0, 0), (1, 1), (2, 2)]",
        "a task cannot block",
    ]


def test_tasks_in_any_greenlet_add_signal_handlers():
    """Tasks may add signal handlers, even if `threading.current_thread()` in their greenlet is not the main thread."""
    out = run(
        """
        from grapeshot.gevent import await_
        async def main():
            loop = asyncio.get_running_loop()
            got = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR1, got.set)
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(got.wait(), 10)
            return loop.remove_signal_handler(signal.SIGUSR1)
        print(gevent.spawn(await_, main()).get(), await_(main()))
        print(gevent.spawn(asyncio.run, main()).get())
        """
    )
    assert out.splitlines() == ["True True", "True"]


def test_asyncio_in_greenlets():
    """`asyncio.run()` in a greenlet runs a loop of its own, and lets other greenlets run. (On libev, only one greenlet
    at a time can call it.)
    """
    out = run(
        """
        order = []
        async def main(name):
            for number in range(3):
                await asyncio.sleep(0.01)
                asyncio.get_running_loop()
                order.append(name)
            gevent.sleep(0.01)
            return name, asyncio.get_running_loop() is not gevent.get_hub().loop.asyncio_loop
        work = [gevent.spawn(lambda name=name: asyncio.run(main(name))) for name in "ab"]
        print(sorted(each.get() for each in work), sorted(order))
        print(asyncio.run(main("c")))
        try:
            asyncio.get_running_loop()
        except RuntimeError as exc:
            print(exc)
        """
    )
    assert out.splitlines() == [
        "[('a', True), ('b', True)] ['a', 'a', 'a', 'b', 'b', 'b']",
        "('c', True)",
        "no running event loop",
    ]


def test_executor_of_the_hub():
    """Functions that tasks send to the default executor run in real threads, even if gevent has patched the program."""
    out = run(
        """
        from grapeshot.gevent import await_
        ident = gevent.monkey.get_original("_thread", "get_ident")
        def work(number):
            return number, ident() != here
        here = ident()
        async def main():
            print(sorted(await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(100))))[-1])
            try:
                await asyncio.to_thread(lambda: 1 / 0)
            except ZeroDivisionError as exc:
                print(exc)
        await_(main())
        """
    )
    assert out.splitlines() == ["(99, True)", "division by zero"]


def test_late_wakeups_do_not_reach_another_wait():
    out = run(
        """
        from grapeshot.gevent import await_
        future = gevent.get_hub().loop.asyncio_loop.create_future()
        def wait():
            try:
                return await_(future)
            except gevent.GreenletExit:
                gevent.sleep(0.01)
                return "slept"
        greenlet = gevent.spawn(wait)
        gevent.sleep(0)
        future.set_result(1)
        greenlet.kill(block=False)
        print(greenlet.get(timeout=5))
        """
    )
    assert out == "slept\n"


def test_contexts_are_not_inherited_by_callbacks():
    check(
        """
        import contextvars
        var = contextvars.ContextVar("var", default="none")
        def work(name):
            var.set(name)
            gevent.sleep(0.01)
            gevent.get_hub().loop.run_callback(lambda: print(var.get()))
            timer = gevent.get_hub().loop.timer(0.001)
            timer.start(lambda: print(var.get()))
            gevent.sleep(0.02)
            timer.close()
        gevent.joinall([gevent.spawn(work, name) for name in "ab"])
        """
    )


def test_corners_of_watchers():
    check(
        """
        loop = gevent.get_hub().loop
        read, write = os.pipe()
        os.write(write, b"x")
        unreferenced = loop.io(read, 1, ref=False)
        unreferenced.start(lambda: (print("fired"), unreferenced.stop()))
        loop.run(nowait=True)
        loop.run_callback_threadsafe(gevent.getcurrent().switch, 7)  # on an idle loop
        print(gevent.get_hub().switch())
        from gevent import select
        near, far = socket.socketpair()
        far.send(b"x")
        poll = select.poll()
        poll.register(near, select.POLLIN | select.POLLOUT)
        print([events for _, events in poll.poll(100)])
        start = time.monotonic()
        pid = None
        def sleeper():
            gevent.sleep(0.4)
            return time.monotonic() - start < 0.75
        greenlet = gevent.spawn(sleeper)
        gevent.sleep(0.35)
        pid = os.fork()
        if pid == 0:
            os._exit(int(not greenlet.get()))  # the greenlet's timer does not start anew in the child
        print(os.waitpid(pid, 0)[1], greenlet.get())
        for each in (near, far):
            each.close()
        """
    )


def test_cancellation_crosses_both_ways():
    out = run(
        """
        from grapeshot.gevent import await_, run_sync
        async def sleep():
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                print("task cancelled")
                await asyncio.sleep(0.01)
                print("task cleaned up")
                raise
        try:
            with gevent.Timeout(0.01):
                await_(sleep())
        except gevent.Timeout:
            print("timeout")
        greenlet = gevent.spawn(await_, sleep())
        gevent.sleep(0.01)
        greenlet.kill()
        print(repr(greenlet.value))
        def blocking():
            try:
                gevent.sleep(100)
            except gevent.GreenletExit:
                print("greenlet ends")
                gevent.sleep(0.01)
                print("greenlet cleaned up")
                raise
        async def limited():
            try:
                await asyncio.wait_for(run_sync(blocking), 0.01)
            except TimeoutError:
                print("timeout")
        await_(limited())
        """
    )
    assert out.splitlines() == [
        *("task cancelled", "task cleaned up", "timeout"),
        *("task cancelled", "task cleaned up", "GreenletExit()"),
        *("greenlet ends", "greenlet cleaned up", "timeout"),
    ]


def test_asyncio_libraries_in_greenlets():
    """An asyncio server and client run in the hub beside greenlets that use sockets."""
    out = run(
        """
        from grapeshot.gevent import await_
        async def serve():
            async def echo(reader, writer):
                writer.write(await reader.readline())
                await writer.drain()
                writer.close()
            return await asyncio.start_server(echo, "127.0.0.1", 0)
        server = await_(serve())
        address = server.sockets[0].getsockname()
        def blocking(number):
            with socket.create_connection(address) as sock:
                sock.sendall(b"%d\\n" % number)
                return sock.makefile("rb").readline()
        async def client(number):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"%d\\n" % number)
            line = await reader.readline()
            writer.close()
            return line
        work = [gevent.spawn(blocking, 1), gevent.spawn(await_, client(2))]
        print(sorted(each.value for each in gevent.joinall(work)))
        server.close()
        await_(server.wait_closed())
        """
    )
    assert out == "[b'1\\n', b'2\\n']\n"


def test_watchers_of_a_descriptor():
    """One descriptor has several watchers, for both directions. Callbacks stop and move watchers."""
    check(
        """
        loop = gevent.get_hub().loop
        def until(condition):
            while not condition():
                gevent.sleep(0.001)
        near, far = socket.socketpair()
        fired = []
        reader, writer = loop.io(near.fileno(), 1), loop.io(near.fileno(), 2)
        both = loop.io(near.fileno(), 3)
        both.start(lambda events: (fired.append(("both", events)), both.stop()), pass_events=True)
        until(lambda: fired)
        print(fired)
        fired.clear()
        writer.start(lambda: (fired.append("writer"), writer.stop()))
        reader.start(lambda: (fired.append("reader"), reader.stop()))
        until(lambda: fired)
        print(fired, reader.active, writer.active)
        far.send(b"x")
        until(lambda: not reader.active)
        print(fired)
        # Data comes while no watcher is active. Afterwards, the reader fires each time it is started.
        near.recv(1)
        far.send(b"y")
        gevent.sleep(0.01)
        for _ in range(3):
            fired.clear()
            reader.start(lambda: (fired.append("again"), reader.stop()))
            until(lambda: fired)
            print(fired)
            gevent.sleep(0.001)
        # A callback stops the other watcher of the same event.
        other = loop.io(near.fileno(), 1)
        for mine, its in ((reader, other), (other, reader)):
            mine.start(lambda mine=mine, its=its: (fired.append("one of two"), its.stop(), mine.stop()))
        fired.clear()
        until(lambda: fired)
        gevent.sleep(0.01)
        print(fired)
        # A callback moves its watcher to another descriptor.
        second, third = socket.socketpair()
        def move():
            fired.append("moved")
            reader.stop()
            reader.fd = second.fileno()
            reader.start(lambda: (fired.append("there"), reader.stop()))
        fired.clear()
        reader.start(move)
        until(lambda: fired)
        gevent.sleep(0.01)
        third.send(b"z")
        until(lambda: not reader.active)
        print(fired)
        for watcher in (reader, writer, both, other):
            watcher.close()
        for sock in (far, second, third):
            sock.close()
        for bad in (lambda: reader.start(None), lambda: loop.io(-1, 1), lambda: loop.io(near.fileno(), 8)):
            try:
                bad()
            except (TypeError, ValueError) as exc:
                print(type(exc).__name__)
        near.close()
        """
    )


def test_the_number_of_a_closed_descriptor_is_used_again():
    check(
        """
        near, far = socket.socketpair()
        number = near.fileno()
        waiting = gevent.spawn(gevent.socket.wait_read, number)
        gevent.sleep(0.01)
        os.close(near.detach())  # without gevent's knowledge
        near, other = socket.socketpair()
        print(near.fileno() == number)
        reader = gevent.spawn(near.recv, 1)
        gevent.sleep(0.01)
        other.send(b"x")
        print(reader.get(timeout=5))
        waiting.kill()
        for sock in (far, near, other):
            sock.close()
        """
    )


def test_a_forked_child_that_closes_a_socket_leaves_the_parents_alone():
    """Before `gevent.reinit`, the child shares its parent's poller, and must not remove descriptors from it."""
    check(
        """
        near, far = socket.socketpair()
        reader = gevent.spawn(near.recv, 10)
        gevent.sleep(0.01)
        done = subprocess.run([sys.executable, "-c", ""], preexec_fn=lambda: os.close(near.fileno()))
        far.send(b"1")
        print(done.returncode, reader.get(timeout=10))
        # The socket is still registered with the poller, although no greenlet waits for it any more.
        subprocess.run([sys.executable, "-c", ""], preexec_fn=near.close)
        far.send(b"2")
        print(gevent.spawn(near.recv, 10).get(timeout=10))
        near.close()
        far.close()
        """
    )


def test_an_event_that_is_over_fires_no_watcher():
    """The watcher that fires first reads all data, and stops and restarts the other one, which must then not fire."""
    check(
        """
        loop, fired = gevent.get_hub().loop, []
        near, far = socket.socketpair()
        first, second = loop.io(near.fileno(), 1), loop.io(near.fileno(), 1)
        def drain(other):
            if not fired:
                near.recv(10)
                other.stop()
                other.start(drain, None)
            fired.append(1)
        first.start(drain, second)
        second.start(drain, first)
        far.send(b"x")
        gevent.sleep(0.02)
        print(len(fired))
        for watcher in (first, second):
            watcher.close()
        near.close()
        far.close()
        """
    )


def test_a_second_loop_below_another_tracer():
    out = run(
        """
        import greenlet
        from grapeshot.gevent import Loop, await_
        gevent.get_hub()
        below = greenlet.gettrace()
        greenlet.settrace(lambda event, args: below(event, args))
        second = Loop(default=False)
        async def main():
            await asyncio.sleep(0.01)
            return asyncio.get_running_loop() is gevent.get_hub().loop.asyncio_loop
        print([await_(main()) for _ in range(3)])
        second.destroy()
        """
    )
    assert out == "[True, True, True]\n"


def test_files_that_are_always_ready():
    check(
        """
        import tempfile
        loop = gevent.get_hub().loop
        with tempfile.TemporaryFile() as file:
            fired = []
            watcher = loop.io(file.fileno(), 1)
            watcher.start(fired.append, 1)
            while len(fired) < 3:
                gevent.sleep(0)
            pid = os.fork()
            if pid == 0:
                fired.clear()
                with gevent.Timeout(5, False):
                    while not fired:
                        gevent.sleep(0.001)
                os._exit(7 if fired else 8)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            watcher.stop()
            fired.clear()
            gevent.sleep(0.01)
            print(fired)
            watcher.start(fired.append, 2)
            while not fired:
                gevent.sleep(0)
            watcher.close()
            print(set(fired))
        """
    )


def test_a_wait_for_what_asyncio_waits_for_is_refused():
    out = run(
        """
        from grapeshot.gevent import await_
        loop = gevent.get_hub().loop.asyncio_loop
        near, far = socket.socketpair()
        async def start():
            loop.add_reader(near.fileno(), print, "asyncio")
        await_(start())
        for _ in range(2):
            try:
                near.recv(1)
            except RuntimeError as exc:
                print(str(exc).replace(str(near.fileno()), "N"))
        async def stop():
            loop.remove_reader(near.fileno())
        await_(stop())
        far.send(b"x")
        print(near.recv(1))
        # asyncio may take over a descriptor whose gevent watcher is idle.
        await_(start())
        far.send(b"y")
        gevent.sleep(0.01)
        await_(stop())
        print(near.recv(1))
        waiting = gevent.spawn(near.recv, 1)
        gevent.sleep(0)
        try:
            await_(start())
        except RuntimeError as exc:
            print("is used by" in str(exc))
        far.send(b"z")
        print(waiting.get())
        near.close()
        far.close()
        """
    )
    refused = "asyncio waits for file descriptor N, so a greenlet cannot wait for it"
    first, *rest = out.splitlines()
    assert [first, *rest[:2]] == [refused, refused, "b'x'"]
    assert set(rest[2:-3]) == {"asyncio"}
    assert rest[-3:] == ["b'y'", "True", "b'z'"]


def test_a_switch_to_an_ended_greenlet_keeps_the_running_loop():
    out = run(
        """
        import greenlet
        from grapeshot.gevent import await_
        hub = gevent.get_hub()
        ended = greenlet.greenlet(lambda: None, parent=hub)
        hub.loop.run_callback(ended.switch)
        gevent.sleep(0.01)
        hub.loop.run_callback(ended.switch)
        async def main():
            await asyncio.sleep(0.01)
            return asyncio.get_running_loop() is hub.loop.asyncio_loop and asyncio.current_task() is not None
        for _ in range(3):
            hub.loop.run_callback(ended.switch)
            print(await_(main()))
        """
    )
    assert out == "True\n" * 3


WOKEN = """
import greenlet
from grapeshot.gevent import await_
try:
    import uvloop as other
except ImportError:
    other = asyncio
hub = gevent.get_hub()
def woken(function, *args):
    '''Call a function in a greenlet that has waited for a descriptor.

    Before the hub switches to such a greenlet, it usually removes its tracer (set with `greenlet.settrace`), which
    exchanges the running loops of greenlets. It puts the tracer back later; until then, switches are not traced.
    '''
    def call():
        near, far = socket.socketpair()
        with near, far:
            gevent.spawn_later(0.01, far.send, b"x")
            near.recv(1)
            return function(*args)
    return gevent.spawn(call)
def visible():
    return asyncio._get_running_loop()
async def of_hub():
    await asyncio.sleep(0.01)
    return asyncio.get_running_loop() is hub.loop.asyncio_loop and asyncio.current_task() is not None
async def main(name, wait=gevent.sleep):
    own, task = asyncio.get_running_loop(), asyncio.current_task()
    for _ in range(3):
        await asyncio.sleep(0.01)
        wait(0.01)
        assert asyncio.get_running_loop() is own is not hub.loop.asyncio_loop and asyncio.current_task() is task, name
    asyncio.get_running_loop().call_soon(gevent.sleep, 0.01)
    await asyncio.sleep(0.02)
    assert asyncio.get_running_loop() is own and asyncio.current_task() is task, name
    return name
def check_all(*greenlets):
    gevent.joinall(greenlets, timeout=10, raise_error=True)
    print([each.value for each in greenlets], gevent.spawn(visible).get(), visible(), await_(of_hub()))
"""


def run_woken(code: str) -> str:
    return run(WOKEN + textwrap.dedent(code))


def test_a_woken_greenlet_runs_a_loop():
    """The greenlet keeps its loop and its task while it waits, and no other greenlet sees them."""
    out = run_woken(
        """
        print(woken(visible).get(), woken(greenlet.gettrace).get())
        def bystander():
            for _ in range(20):
                gevent.sleep(0.005)
                assert visible() is None
        import grapeshot
        def run_ours():
            with asyncio.Runner(loop_factory=grapeshot.new_event_loop) as runner:
                return runner.run(main("grapeshot"))
        check_all(
            woken(lambda: asyncio.run(main("asyncio"))),
            woken(lambda: other.run(main("other"))),
            woken(run_ours),
            gevent.spawn(bystander),
        )
        check_all(woken(lambda: asyncio.run(main("again"))))
        print(woken(await_, of_hub()).get(), asyncio.run(main("main")), woken(visible).get())
        print(woken(greenlet.gettrace).get())
        """
    )
    assert out.splitlines() == [
        "None None",
        "['asyncio', 'other', 'grapeshot', None] None None True",
        "['again'] None None True",
        "True main None",
        "None",
    ]


def test_a_woken_greenlet_switches_to_another_that_runs_a_loop():
    """The woken greenlet switches to another greenlet directly, not through the hub. This switch is not traced, so the
    hub has to find out which of the greenlets has started the loop.
    """
    out = run_woken(
        """
        def directly(function, *args):
            result = []
            raw = greenlet.greenlet(lambda: result.append(function(*args)))
            raw.switch()
            assert visible() is None
            while not raw.dead:
                gevent.sleep(0.01)
                assert visible() is None
            return result[0]
        check_all(woken(directly, asyncio.run, main("raw")))
        check_all(woken(directly, other.run, main("raw")))
        check_all(woken(directly, directly, asyncio.run, main("deeper")))
        # The loop runs in the greenlet that switches directly.
        def aside():
            seen = []
            def child():
                gevent.sleep(0.01)
                seen.append(visible())
                back.switch()
            async def inside():
                nonlocal back
                back = greenlet.getcurrent()
                greenlet.greenlet(child).switch()
                return await main("inside")
            back = None
            return asyncio.run(inside()), seen
        check_all(woken(aside))
        """
    )
    rest = "None None True"
    assert out.splitlines() == [f"['raw'] {rest}"] * 2 + [f"['deeper'] {rest}", f"[('inside', [None])] {rest}"]


def test_a_woken_greenlet_is_killed_while_its_loop_runs():
    out = run_woken(
        """
        async def wait():
            try:
                gevent.sleep(100)
            finally:
                assert asyncio.current_task() is not None
                gevent.sleep(0.01)
                print(asyncio.get_running_loop() is not hub.loop.asyncio_loop)
        waiting = woken(lambda: asyncio.run(wait()))
        gevent.sleep(0.05)
        waiting.kill()
        print(repr(waiting.value))
        waiting = woken(lambda: asyncio.run(wait()))
        gevent.sleep(0.05)
        hub.loop.run_callback(waiting.throw, LookupError("thrown"))
        hub.exception_stream = None
        waiting.join()
        print(repr(waiting.exception))
        check_all(woken(visible), woken(lambda: asyncio.run(main("later"))))
        """
    )
    assert out.splitlines() == [
        "True",
        "GreenletExit()",
        "True",
        "LookupError('thrown')",
        "[None, 'later'] None None True",
    ]


def test_the_main_greenlet_runs_a_loop_after_a_woken_greenlet_has_failed():
    """KeyboardInterrupt ends a greenlet and is raised in the main greenlet, to which the hub switches directly."""
    out = run_woken(
        """
        def fail():
            raise KeyboardInterrupt
        hub.exception_stream = None
        failing = woken(fail)
        try:
            failing.join()
        except KeyboardInterrupt:
            print(asyncio.run(main("main")))
        check_all(woken(lambda: asyncio.run(main("later"))))
        """
    )
    assert out.splitlines() == ["main", "['later'] None None True"]


def test_the_hubs_loop_runs_again_after_a_woken_greenlet():
    """Callbacks of asyncio, of gevent and of descriptors see the hub's loop, in whichever order they run."""
    out = run_woken(
        """
        seen = []
        def note(*_):
            seen.append(visible() is hub.loop.asyncio_loop)
        near, far = socket.socketpair()
        watcher = hub.loop.io(near.fileno(), 1)
        watcher.start(lambda: (note(), near.recv(1), watcher.stop()))
        async def watch():
            asyncio.get_running_loop().add_reader(other, lambda: (note(), os.read(other, 1)))
        other, end = os.pipe()
        await_(watch())
        def work():
            assert visible() is None
            far.send(b"x")
            os.write(end, b"x")
            hub.loop.asyncio_loop.call_soon(note)
            hub.loop.asyncio_loop.call_later(0.01, note)
            hub.loop.run_callback(note)
            timer = hub.loop.timer(0.01)
            timer.start(note)
            gevent.getcurrent().rawlink(note)
            gevent.sleep(0.05)
            timer.close()
        gevent.joinall([woken(work) for _ in range(3)], raise_error=True)
        while len(seen) < 1 + 1 + 5 * 3:
            gevent.sleep(0.01)
        print(set(seen), greenlet.gettrace() is not None)
        hub.loop.asyncio_loop.remove_reader(other)
        watcher.close()
        near.close(), far.close()
        """
    )
    assert out == "{True} True\n"


def test_a_tracer_that_a_woken_greenlet_sets():
    out = run_woken(
        """
        events = []
        def trace(event, args):
            events.append(event)
        def work():
            assert greenlet.settrace(trace) is None
            gevent.sleep(0.01)
            count = len(events)
            assert count >= 2
            value = asyncio.run(main("traced"))
            assert len(events) > count
            return value
        tracing = woken(work)
        tracing.join()
        print(tracing.value, visible(), await_(of_hub()), gevent.spawn(visible).get())
        # The program removes its tracer. Unknown to the program, this also removes the tracer of the hub.
        greenlet.settrace(None)
        near, far = socket.socketpair()
        gevent.spawn_later(0.01, far.send, b"x")
        near.recv(1)
        gevent.sleep(0.01)
        check_all(woken(lambda: asyncio.run(main("later"))))
        near.close(), far.close()
        """
    )
    assert out.splitlines() == ["traced None True None", "['later'] None None True"]


def test_woken_greenlets_in_the_hubs_of_threads():
    out = run_woken(
        """
        from gevent.threadpool import ThreadPool
        pool = ThreadPool(3)
        def work(name):
            global hub
            near, far = socket.socketpair()
            with near, far:
                gevent.spawn_later(0.01, far.send, b"x")
                near.recv(1)
                assert greenlet.gettrace() is None and visible() is None
                asyncio.run(main(name))
                assert visible() is None
                return name
        print(pool.map(work, "abc"))
        check_all(woken(lambda: asyncio.run(main("main"))))
        """
    )
    assert out.splitlines() == ["['a', 'b', 'c']", "['main'] None None True"]


def test_a_woken_greenlet_forks():
    out = run_woken(
        """
        def work():
            pid = os.fork()
            if pid == 0:
                try:
                    gevent.sleep(0.01)
                    assert visible() is None
                    asyncio.run(main("child"))
                    os._exit(3)
                finally:
                    os._exit(4)
            gevent.sleep(0.01)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        check_all(woken(work))
        """
    )
    assert out == "[3] None None True\n"


def test_an_error_of_a_woken_greenlet_reaches_the_hub():
    check(
        """
        def fail(sock):
            sock.recv(1)
            raise LookupError("after the wait")
        hub = gevent.get_hub()
        def handle_error(context, kind, value, tb):
            print(type(context).__name__, kind.__name__, value, tb is not None)
        hub.handle_error = handle_error
        near, far = socket.socketpair()
        failing = gevent.spawn(fail, near)
        def raw():
            gevent.socket.wait_read(near.fileno())
            raise LookupError("in a raw greenlet")
        gevent.spawn_raw(raw)
        gevent.sleep(0.01)
        far.send(b"x")
        failing.join()
        gevent.sleep(0.01)
        for sock in (near, far):
            sock.close()
        """
    )


def test_another_loop_is_refused():
    out = run(
        """
        from grapeshot.gevent import await_
        async def nothing(): pass
        coroutine = nothing()
        try:
            await_(coroutine)
        except RuntimeError as exc:
            print("GEVENT_LOOP=grapeshot.gevent.Loop" in str(exc))
        coroutine.close()
        """,
        LIBEV,
    )
    assert out == "True\n"


def test_command(tmp_path):
    program = tmp_path / "program.py"
    lines = ["import gevent, socket, sys", "print(gevent.get_hub().loop, socket.socket.__module__, sys.argv[1:])"]
    program.write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "grapeshot.gevent", str(program), "argument"],
        capture_output=True,
        text=True,
        timeout=PROCESS_CAP_S,
        check=True,
    )
    assert "grapeshot.gevent._loop.Loop" in done.stdout
    assert done.stdout.endswith("gevent._socket3 ['argument']\n")


def test_watchers_of_one_child_and_of_any_child_are_each_told_once():
    check(
        """
        loop = gevent.get_hub().loop
        loop.install_sigchld()
        any_child, told = loop.child(0), []
        any_child.start(lambda: told.append(("any", any_child.rpid, any_child.rstatus)))
        pids = []
        for number in range(20):
            pid = os.fork()
            if not pid:
                os._exit(number)
            watcher = loop.child(pid)
            watcher.start(lambda watcher=watcher: told.append(("one", watcher.rpid, watcher.rstatus)))
            pids.append(pid)
        while len(told) < 40:
            gevent.sleep(0.001)
        gevent.sleep(0.1)
        expected = [(who, pid, number << 8) for who in ("any", "one") for number, pid in enumerate(pids)]
        print(sorted(told) == sorted(expected), len(told))
        """
    )
