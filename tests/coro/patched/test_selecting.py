"""Scripts with `select`, `poll` and selectors print the same with and without patching."""

from __future__ import annotations

import pytest
from support import coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SCRIPTS = {
    "select reads its arguments only once": """
        import os, select, sys, threading

        class File:
            def __init__(self, fd):
                self.fd, self.asked = fd, 0
            def fileno(self):
                self.asked += 1
                return self.fd

        def later(function, *args):
            def run():
                begun.wait()
                # Without patching, wait until the main thread sleeps in `select`. With patching, this thread is a coro,
                # which cannot run before the main thread waits.
                while "grapeshot.coro" not in sys.modules:
                    with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
                        if stat.read().rpartition(")")[2].split()[0] == "S":
                            break
                function(*args)
            begun = threading.Event()
            thread = threading.Thread(target=run)
            thread.start()
            return begun, thread

        reads, writes = os.pipe()
        file = File(reads)
        begun, thread = later(os.write, writes, b"x")
        begun.set()
        print(select.select((each for each in [file]), [], [], 20)[0] == [file], file.asked)
        thread.join()
        os.read(reads, 1)

        files = [file, reads, file]
        def change():
            files.clear()
            os.write(writes, b"x")
        begun, thread = later(change)
        begun.set()
        print(select.select(files, [], [], 20)[0] == [file, reads, file])
        thread.join()

        lists = [(1, [], []), ([object()], [], []), ([], ["x"], []), ([], [], [-1])]
        for wrong in *lists, ([2000000], [], []), ([1.5], [], []):
            try:
                select.select(*wrong, 0.01)
            except Exception as error:
                print(type(error), error)
        print([len(each) for each in select.select({reads}, {writes: 1}, (), 0.01)], select.select([], [], [], 0.01))
        # A file that is closed during the wait does not end the wait for the other file.
        os.read(reads, 1)
        first, second = os.pipe()
        def end():
            os.close(first)
            os.write(writes, b"x")
        begun, thread = later(end)
        begun.set()
        print(select.select([reads, first], [], [], 20)[0][0] == reads)
        thread.join()
    """,
    "a socket that was hung up": """
        import os, resource, select, socket, threading, time
        left, right = socket.socketpair()
        right.close()
        started = time.process_time()
        print(select.select([], [], [left], 1.0))
        # `select` really waits, instead of polling all the time.
        print(time.process_time() - started < 0.5)
        reads, writes = os.pipe()
        poll = select.poll()
        poll.register(reads, 0)
        print(poll.poll(50))
        os.close(writes)
        print(poll.poll(20000) == [(reads, select.POLLHUP)])
    """,
    "a poll object that is changed during the wait": """
        import os, select, sys, threading
        reads, writes = os.pipe()
        other, full = os.pipe()
        os.write(full, b"x")
        poll = select.poll()
        poll.register(reads, select.POLLIN)
        def change():
            go.wait()
            poll.register(other, select.POLLIN)
            os.write(writes, b"x")
        go = threading.Event()
        thread = threading.Thread(target=change)
        thread.start()
        go.set()
        found = poll.poll(20000)
        # Without patching, the thread may change the poll object before the wait begins.
        print(found == [(reads, select.POLLIN)] or "grapeshot.coro" not in sys.modules)
        thread.join()
        print(len(poll.poll(0)))
    """,
    "at the limit of descriptors": """
        import os, resource, select, selectors, socket, threading, time
        left, right = socket.socketpair()
        reads, writes = os.pipe()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        selector = selectors.PollSelector()
        selector.register(reads, selectors.EVENT_READ)
        poll = select.poll()
        poll.register(reads, select.POLLIN)
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError as error:
            print(error.strerror)
        ways = [
            lambda: len(select.select([reads], [], [], 20)[0]),
            lambda: len(poll.poll(20000)),
            lambda: len(selector.select(20)),
            lambda: len(select.select([reads], [left], [left], 0.01)[1]),
            lambda: len(select.select([], [], [left], 0.01)[2]),
            lambda: len(select.select([left], [], [], 0.01)[0]),
        ]
        for way in ways:
            go = threading.Event()
            def write():
                go.wait()
                os.write(writes, b"x")
            thread = threading.Thread(target=write)
            thread.start()
            go.set()
            print(way())
            thread.join()
            os.read(reads, 1)
        received = []
        readers = [threading.Thread(target=lambda: received.append(left.recv(1))) for _ in range(3)]
        for reader in readers: reader.start()
        right.sendall(b"abc")
        for reader in readers: reader.join()
        print(sorted(received))
    """,
    "a clock that stands still": """
        import os, queue, select, selectors, socket, sys, threading, time
        from unittest import mock
        left, right = socket.socketpair()
        left.settimeout(0.02)
        poll = select.poll()
        poll.register(left, select.POLLIN)
        epoll = select.epoll()
        epoll.register(left, select.EPOLLIN)
        selector = selectors.DefaultSelector()
        selector.register(left, selectors.EVENT_READ)
        with mock.patch("time.monotonic", return_value=1.0), mock.patch("time.time", return_value=1.0):
            print(select.select([left], [], [], 0.02), select.select([], [], [], 0.02))
            print(poll.poll(20), epoll.poll(0.02), selector.select(0.02))
            try:
                left.recv(1)
            except TimeoutError:
                print("timed out")
            try:
                while True:
                    left.sendall(b"x" * 100000)
            except TimeoutError:
                print("timed out")
            lock = threading.Lock()
            lock.acquire()
            print(lock.acquire(timeout=0.02), threading.Event().wait(0.02))
            def run():
                try:
                    left.recv(1)
                except TimeoutError:
                    timed_out.append(1)
            timed_out = []
            threads = [threading.Thread(target=run) for _ in range(3)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(timed_out)
            time.sleep(0.01)
        epoll.close()
        selector.close()
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_selecting(name, tmp_path):
    check_same_output(tmp_path / "script.py", SCRIPTS[name])
