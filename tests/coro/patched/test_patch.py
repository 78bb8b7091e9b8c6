"""`coro.patch()` itself: its parts, the original functions, and names that were imported before the call."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

PARTS = ", ".join(
    (
        *("thread", "queue", "time", "socket", "dns", "select", "ssl", "os", "open"),
        *("subprocess", "multiprocessing", "stdin", "stdout", "signal", "sqlite3", "futures", "to_thread"),
    )
)


def run(code):
    return run_script(None, code).splitlines()


def test_parts():
    assert run(
        """
        import threading, time, queue
        from grapeshot import coro
        before = time.sleep, threading.Lock, queue.SimpleQueue
        print([coro.is_patched(name) for name in ("time", "thread", "queue", "time.sleep", "threading.Lock")])
        coro.patch("time")
        print(time.sleep is before[0], threading.Lock is before[1])
        print([coro.is_patched(name) for name in ("time", "thread", "queue", "time.sleep", "threading.Lock")])
        coro.patch(queue=False)
        print(threading.Lock is before[1], queue.SimpleQueue is before[2], coro.is_patched("threading"))
        patched = time.sleep, threading.Lock
        coro.patch()
        coro.install_thread_emulation()
        print(queue.SimpleQueue is before[2], patched == (time.sleep, threading.Lock))
        print((coro.get_original("time", "sleep"), coro.get_original("queue", "SimpleQueue")) == (before[0], before[2]))
        print(coro.get_original("time", "monotonic") is time.monotonic)
        for wrong in (lambda: coro.patch("tme"), lambda: coro.patch(tme=True)):
            try:
                wrong()
            except ValueError as exc:
                print(exc)
        """
    ) == [
        "[False, False, False, False, False]",
        "False True",
        "[True, False, False, True, False]",
        "False True True",
        "False True",
        "True",
        "True",
        *[f"patch() has no part 'tme'; the parts are: {PARTS}"] * 2,
    ]


def test_late_patching_repairs_names_and_warns():
    assert run(
        """
        import sys, types, threading, time, warnings, logging, reprlib
        handler = logging.StreamHandler()
        early = types.ModuleType("early")
        exec('''
        from time import sleep
        from threading import Lock, local
        import threading
        free, held = threading.Lock(), threading.RLock()
        held.acquire()
        class Mine(local): pass
        '''.replace("        ", ""), vars(early))
        early.Mine.__module__ = "early"
        sys.modules["early"] = early
        fine = types.ModuleType("fine")
        fine.time = time
        sys.modules["fine"] = fine
        from grapeshot import coro
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coro.patch()
            coro.patch()
        [warning] = caught
        print(warning.category is coro.PatchWarning, issubclass(coro.PatchWarning, RuntimeWarning))
        print(warning.filename, str(warning.message))
        print(early.sleep is time.sleep, early.Lock is threading.Lock, type(early.free) is type(threading.Lock()))
        print(type(logging._lock) is type(handler.lock) is type(threading.RLock()))
        print(reprlib.get_ident is threading.get_ident)
        """
    ) == [
        "True True",
        "<string> modules were imported before coro.patch(), which should be called first; these still use the "
        "originals: early (class Mine, lock held); these held originals, which were replaced: early (Lock, local, "
        "sleep)",
        "True True True",
        "True",
        "True",
    ]


def test_late_patching_leaves_a_lock_alone_that_two_modules_share():
    assert run(
        """
        import sys, threading, types, warnings
        first, second = types.ModuleType("first"), types.ModuleType("second")
        first.shared = second.shared = threading.Lock()
        first.own = threading.Lock()
        sys.modules.update(first=first, second=second)
        from grapeshot import coro
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coro.patch()
        [warning] = caught
        print(first.shared is second.shared, type(first.own) is type(threading.Lock()))
        print(str(warning.message).partition("originals: ")[2])
        """
    ) == ["True True", "first (lock shared), second (lock shared)"]


def test_late_patching_repairs_the_program_itself_once():
    """``coro.patch()`` imports multiprocessing, which puts ``__main__`` into ``sys.modules`` under a second name.

    The warning names the module once.
    """
    assert run(
        """
        import threading, warnings
        from socket import socket
        lock, rlock = threading.Lock(), threading.RLock()
        class Mine(socket): pass
        from grapeshot import coro
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coro.patch()
        print(type(lock) is type(threading.Lock()), type(rlock) is type(threading.RLock()))
        [warning] = caught
        print(str(warning.message).partition("; ")[2])
        """
    ) == [
        "True True",
        "these still use the originals: __main__ (class Mine); these held originals, which were replaced: "
        "__main__ (socket)",
    ]


def test_first_line_of_a_program_warns_of_nothing():
    assert run("from grapeshot import coro\ncoro.patch()\nprint('ok')") == ["ok"]


def test_modules_that_keep_the_original_functions():
    assert run(
        """
        import threading, time, _thread, queue
        originals = threading.Lock, threading.get_ident, time.sleep, threading.local, queue.SimpleQueue
        from grapeshot import coro
        coro.patch()
        import asyncio.base_events, concurrent.futures.thread, importlib._bootstrap
        import asyncio.runners
        from grapeshot._loop import lifecycle
        from grapeshot.coro import _ending
        for module in (asyncio.base_events, concurrent.futures.thread, lifecycle, _ending):
            view = module.threading
            assert (view.Lock, view.get_ident, view.local) == (originals[0], originals[1], originals[3]), module
            assert type(view.Condition(view.Lock())._lock) is type(originals[0]())
            assert type(view.Event()._cond._lock) is type(originals[0]())
            assert view.current_thread() is threading.main_thread()
        assert importlib._bootstrap._thread.get_ident is originals[1]
        assert concurrent.futures.thread.queue.SimpleQueue is originals[4]
        assert issubclass(asyncio.base_events.threading.Thread, threading.Thread)
        print(threading.Lock is originals[0], time.sleep is originals[2])
        """
    ) == ["False False"]


def test_parts_that_need_other_parts_and_an_optional_part():
    assert run(
        """
        import concurrent.futures, socket, select, os
        from grapeshot import coro
        # The class is kept in a list, because a global name for it would be replaced, too.
        kept = [concurrent.futures.ThreadPoolExecutor]
        coro.patch("subprocess")
        print([name for name in ("thread", "time", "select", "os", "socket", "subprocess") if coro.is_patched(name)])
        coro.patch()
        print(concurrent.futures.ThreadPoolExecutor is kept[0], coro.is_patched("futures"))
        coro.patch(futures=True)
        pool = [concurrent.futures.ThreadPoolExecutor]
        print(pool[0] is kept[0], issubclass(pool[0], kept[0]))
        print(issubclass(socket.socket, coro.get_original("socket", "socket")))
        """
    ) == ["['time', 'select', 'os', 'subprocess']", "True False", "False True", "True"]


def test_threads_of_a_pool_are_real_or_coros():
    assert run(
        """
        from grapeshot import coro
        coro.patch(futures=True)
        import concurrent.futures, threading, time
        real_ident = coro.get_original("_thread", "get_ident")
        real_pool = concurrent.futures.ThreadPoolExecutor.__mro__[1]
        def work(number):
            time.sleep(0.01)
            return real_ident()
        def main():
            for kind in (concurrent.futures.ThreadPoolExecutor, real_pool):
                with kind(4) as executor:
                    idents = set(executor.map(work, range(8)))
                    print(idents == {real_ident()}, real_ident() in idents)
            executor = concurrent.futures.ThreadPoolExecutor(2)
            print(executor.submit(divmod, 7, 2).result(), type(executor.submit(divmod, 7, 0).exception()).__name__)
            # The executor's threads wait for work when the loop ends.
        coro.run(main)
        """
    ) == ["True True", "False False", "(3, 1) ZeroDivisionError"]


def test_a_task_of_the_loop_serves_the_blocking_code():
    """Except for the first read from the pipe, each call can end only if the loop runs while the call waits."""
    assert run(
        """
        from grapeshot import coro
        coro.patch()
        import asyncio, grapeshot, os, select, socket, subprocess, sys, threading, urllib.request
        async def answer(reader, writer):
            await reader.readuntil(b"\\r\\n\\r\\n")
            await asyncio.sleep(0.01)
            writer.write(b"HTTP/1.0 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nhi")
            writer.close()
        def fetch(port):
            return urllib.request.urlopen(f"http://localhost:{port}/").read()
        def read_pipe(read):
            return os.read(read, 10)
        def wait_selecting(read):
            return bool(select.select([read], [], [])[0])
        async def write(fd, data):
            await asyncio.sleep(0.01)
            os.write(fd, data)
        async def main():
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            print(await asyncio.gather(*[coro.run_sync(fetch, port) for _ in range(3)]))
            read, end = os.pipe()
            print(await asyncio.gather(coro.run_sync(wait_selecting, read), write(end, b"data")))
            print(await coro.run_sync(read_pipe, read))
            print(await asyncio.gather(coro.run_sync(read_pipe, read), write(end, b"more")))
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            async def tell():
                await asyncio.sleep(0.01)
                child.stdin.write(b"go\\n")
                child.stdin.close()
            print(await asyncio.gather(coro.run_sync(child.wait), tell()))
            server.close()
            await server.wait_closed()
        grapeshot.run(main())
        """
    ) == ["[b'hi', b'hi', b'hi']", "[True, None]", "b'data'", "[b'more', None]", "[0, None]"]
