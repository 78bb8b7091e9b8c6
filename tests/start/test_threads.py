"""`run(main, threads=N)`: a loop in each of several threads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from support import coro_is_available, gil_is_enabled, run_script

import grapeshot

COUNT = 3


def test_each_thread_has_a_loop_of_its_own():
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, grapeshot.Loop)
        await asyncio.sleep(0.01)
        return threading.current_thread().name, id(loop)

    names, loops = zip(*grapeshot.run(main, threads=COUNT), strict=True)
    assert names == (threading.current_thread().name, "grapeshot-2", "grapeshot-3")
    assert len(set(loops)) == COUNT
    assert grapeshot.run(main, threads=1)[0][0] == threading.current_thread().name


def test_the_threads_serve_at_the_same_time():
    """Each thread has a listening socket, and the kernel spreads the connections."""
    served: set[str] = set()
    ports: list[int] = []
    all_listen = threading.Barrier(COUNT + 1, timeout=30)

    async def main():
        async def answer(reader, writer):
            served.add(threading.current_thread().name)
            writer.write(await reader.readline())
            writer.close()

        with ports_lock:
            server = await asyncio.start_server(answer, "127.0.0.1", ports[0] if ports else 0, reuse_port=True)
            ports.append(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(all_listen.wait)
        async with server:
            await ended.wait_in_task()

    class Ended(threading.Event):
        async def wait_in_task(self):
            while not self.is_set():
                await asyncio.sleep(0.005)

    ports_lock, ended = threading.Lock(), Ended()

    def ask():
        try:
            all_listen.wait()
            deadline = time.monotonic() + 20
            while len(served) < COUNT and time.monotonic() < deadline:
                with socket.create_connection(("127.0.0.1", ports[0])) as client:
                    client.sendall(b"hello\n")
                    assert client.recv(100) == b"hello\n"
        finally:
            ended.set()

    client = threading.Thread(target=ask)
    client.start()
    grapeshot.run(main, threads=COUNT)
    client.join()
    assert len(served) == COUNT


@pytest.mark.parametrize("failing", [threading.current_thread().name, "grapeshot-2"])
def test_a_failure_ends_all(failing):
    """All threads end even if one fails at the start, before the others have begun."""
    ended: list[str] = []

    async def main():
        name = threading.current_thread().name
        if name == failing:
            raise LookupError("cannot start")
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    with pytest.raises(LookupError, match="cannot start") as caught:
        grapeshot.run(main, threads=COUNT)
    assert caught.value.__notes__ == [f"raised in thread {failing!r}"]
    assert failing not in ended
    assert not {f"grapeshot-{number}" for number in range(2, COUNT + 1)} & {
        thread.name for thread in threading.enumerate()
    }


def test_system_exit_in_another_thread():
    ended: list[str] = []

    async def main():
        name = threading.current_thread().name
        try:
            if name == "grapeshot-3":
                await asyncio.sleep(0.01)
                raise SystemExit(5)
            await asyncio.sleep(100)
        finally:
            ended.append(name)

    with pytest.raises(SystemExit) as caught:
        grapeshot.run(main, threads=COUNT)
    assert caught.value.code == 5
    assert len(ended) == COUNT


def test_a_failed_thread_is_restarted_if_the_program_asks_for_it(caplog):
    tries: dict[str, int] = {}

    async def main():
        name = threading.current_thread().name
        tries[name] = tries.get(name, 0) + 1
        if name == "grapeshot-2" and tries[name] < 3:
            raise LookupError("not yet")
        return tries[name]

    assert grapeshot.run(main, threads=2, restart=True) == [1, 3]
    records = [record for record in caplog.records if "failed" in record.message]
    assert [record.exc_info[0] for record in records] == [LookupError] * 2
    assert "thread 'grapeshot-2'" in records[0].message


def test_the_loop_goes_on_until_the_other_threads_have_ended():
    """The destructor of another thread's local variable runs after the thread has reported its outcome."""
    loops, answers = [], []
    local = threading.local()

    async def answer():
        return "answered"

    class Asking:
        def __del__(self):
            answers.append(asyncio.run_coroutine_threadsafe(answer(), loops[0]).result(20))

    async def main():
        if threading.current_thread().name != "grapeshot-2":
            loops.append(asyncio.get_running_loop())
            return
        while not loops:
            await asyncio.sleep(0.001)
        local.value = Asking()

    grapeshot.run(main, threads=2)
    assert answers == ["answered"]


def test_cancelling_main_in_one_thread():
    """If one main function is cancelled, run() raises CancelledError, as it does with a single thread."""

    async def main():
        if threading.current_thread().name == "grapeshot-2":
            asyncio.current_task().cancel()
        await asyncio.sleep(100)

    with pytest.raises(asyncio.CancelledError):
        grapeshot.run(main, threads=2)


@pytest.mark.parametrize(
    ("main", "threads", "error"),
    [
        (None, 2, TypeError),
        (asyncio.sleep, "2", TypeError),
        (asyncio.sleep, True, TypeError),
        (asyncio.sleep, 0, ValueError),
    ],
)
def test_wrong_arguments(main, threads, error):
    with pytest.raises(error):
        grapeshot.run(main, threads=threads)


def test_restart_needs_threads():
    main = asyncio.sleep(0)
    with pytest.raises(TypeError, match="threads"):
        grapeshot.run(main, restart=True)
    main.close()


def test_a_warning_where_the_threads_gain_nothing(caplog):
    async def main():
        pass

    grapeshot.run(main, threads=2)
    assert ("because of the GIL" in caplog.text) == gil_is_enabled()
    caplog.clear()
    grapeshot.run(main, threads=1)
    assert not caplog.text


PROGRAM = """
import asyncio, os, signal, sys, threading
import grapeshot

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
started = threading.Semaphore(0)

async def main():
    name = threading.current_thread().name
    started.release()
    try:
        if name == "MainThread":
            for _ in range(3):
                await asyncio.to_thread(started.acquire)
            os.kill(os.getpid(), signal.{name})
        await asyncio.sleep(100)
    finally:
        await asyncio.sleep(0.01)
        os.write(1, f"{{name}} ended\\n".encode())

try:
    grapeshot.run(main, threads=3)
except BaseException as exc:
    print(type(exc).__name__, exc, flush=True)
"""


@pytest.mark.parametrize(("name", "last"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit 3")])
def test_a_signal_ends_all_threads(name, last):
    lines = run_script(None, PROGRAM.format(name=name)).splitlines()
    assert sorted(lines[:3]) == ["MainThread ended", "grapeshot-2 ended", "grapeshot-3 ended"]
    assert lines[3].strip() == last


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
class TestCoros:
    def test_each_thread_has_coros_of_its_own(self):
        from grapeshot import coro

        def main(step):
            def add():
                coro.yield_slice()
                return step

            workers = [coro.spawn(add) for _ in range(10)]
            return sum(worker.join() for worker in workers)

        assert coro.run(main, 2, threads=COUNT) == [20] * COUNT

    def test_a_failure_ends_all(self):
        from grapeshot import coro

        ended: list[str] = []

        def main():
            name = threading.current_thread().name
            if name == "grapeshot-2":
                raise LookupError
            try:
                coro.sleep_relative(100)
            finally:
                ended.append(name)

        with pytest.raises(LookupError):
            coro.run(main, threads=COUNT)
        assert "grapeshot-2" not in ended
        assert set(ended) <= {threading.current_thread().name, "grapeshot-3"}

    def test_restart(self):
        from grapeshot import coro

        tries: list[int] = []

        def main():
            tries.append(1)
            if len(tries) < 3:
                raise LookupError
            return 5

        assert coro.run(main, threads=1, restart=True) == [5]
