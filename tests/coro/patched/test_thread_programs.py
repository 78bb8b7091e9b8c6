"""Programs that import modules again, use the names of functions and types, or poll until another thread has run.

Each program prints the same with `python` and with `python -m grapeshot.coro`. A time limit ends a program that hangs.
"""

from __future__ import annotations

import pytest
from support import coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SCRIPTS = {
    "is_alive": """
        import threading

        done = []
        threads = [threading.Thread(target=done.append, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                pass
        print(sorted(done), [thread.is_alive() for thread in threads])

        first = threading.Thread(target=done.append, args=(3,))
        second = threading.Thread(target=first.start)
        second.start()
        while second.is_alive() or not first.ident or first.is_alive():
            pass
        print(sorted(done))
    """,
    "polling": """
        import queue, threading, time

        def get(function):
            def poll():
                try:
                    function()
                except queue.Empty:
                    return False
                return True
            return poll

        def put(function):
            def poll():
                try:
                    function("item", False)
                except queue.Full:
                    return False
                return True
            return poll

        def until(name, poll, release, prepare=lambda: None):
            go, ready = threading.Event(), threading.Event()
            def other():
                prepare()
                ready.set()
                go.wait()
                release()
            thread = threading.Thread(target=other)
            thread.start()
            ready.wait()
            go.set()
            # In the loop below, the main thread does not wait. With patching, the other thread is a coro, so it runs
            # only if polling lets it run.
            end = time.monotonic() + 10
            while not (is_there := poll()) and time.monotonic() < end:
                pass
            thread.join()
            print(name, is_there)

        lock, rlock = threading.Lock(), threading.RLock()
        until("lock", lambda: lock.acquire(False), lock.release, lock.acquire)
        until("with timeout 0", lambda: lock.acquire(timeout=0), lock.release, lambda: lock.acquire(False))
        until("rlock", lambda: rlock.acquire(blocking=False), rlock.release, rlock.acquire)
        event, condition = threading.Event(), threading.Condition()
        until("event", lambda: event.wait(0), event.set)
        def wait():
            with condition:
                return condition.wait(0) or told
        def tell():
            with condition:
                told.append(True)
                condition.notify()
        told = []
        until("condition", lambda: bool(wait()), tell)
        for kind in (threading.Semaphore, threading.BoundedSemaphore):
            semaphore = kind(1)
            semaphore.acquire()
            until("semaphore", lambda: semaphore.acquire(False), semaphore.release)
            until("with timeout 0", lambda: semaphore.acquire(timeout=0), semaphore.release)
        simple = queue.SimpleQueue()
        until("simple get", get(lambda: simple.get(False)), lambda: simple.put(1))
        until("simple get_nowait", get(simple.get_nowait), lambda: simple.put(1))
        for kind in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
            box = kind(1)
            until("get", get(lambda: box.get(False)), lambda: box.put("item"))
            until("get with timeout 0", get(lambda: box.get(timeout=0)), lambda: box.put("item"))
            box.put("item")
            until("put", put(box.put), box.get)
            until("empty", box.empty, box.get)
            until("full", box.full, lambda: box.put("item"))
            until("qsize", lambda: box.qsize() == 0, box.get)
    """,
    "imported again": """
        import importlib, queue, socket, sys, threading

        def meet(wait, wake):
            results = []
            thread = threading.Thread(target=lambda: results.append(wait()))
            thread.start()
            wake()
            thread.join()
            print(results)

        del sys.modules["queue"], sys.modules["_queue"]
        anew = importlib.import_module("queue")
        print(anew is queue)
        box = anew.SimpleQueue()
        meet(box.get, lambda: box.put(1))
        try:
            box.get(False)
        except anew.Empty:
            print("empty")
        importlib.reload(socket)
        near, far = socket.socketpair()
        meet(lambda: far.recv(10), lambda: near.send(b"x"))
        near.close(); far.close()
        print(importlib.reload(anew).__spec__.loader is anew.__loader__)
    """,
    "names": """
        import io, _thread, pickle, queue, select, sys, threading, time
        for kind in (type(threading.Lock()), type(threading.RLock()), queue.SimpleQueue, threading.local):
            print(kind.__module__, kind.__qualname__)
        print(repr(threading.Lock()).partition(" at ")[0])
        print(time.sleep.__module__, select.select.__module__, threading.get_ident.__module__)
        for function in (time.sleep, select.select, threading.get_ident, _thread.get_ident, threading.Lock):
            print(pickle.loads(pickle.dumps(function)) is function)
        # How errors of threads are reported.
        finished = threading.Lock()
        finished.acquire()
        def fail():
            raise ValueError("text")
        def show(unraisable):
            is_function = unraisable.object is fail
            print(str(unraisable.err_msg).partition(" at ")[0], is_function, repr(unraisable.exc_value))
            finished.release()
        sys.unraisablehook = show
        _thread.start_new_thread(fail, ())
        finished.acquire()
        sys.stderr, real = io.StringIO(), sys.stderr
        for hook in (threading.excepthook, threading.__excepthook__):
            hook(threading.ExceptHookArgs((ValueError, ValueError("text"), None, None)))
            print(f"Exception in thread {threading.get_ident()}:" in sys.stderr.getvalue())
        sys.stderr = real
        if sys.version_info >= (3, 13):
            try:
                _thread._ThreadHandle()._set_done()
            except RuntimeError as error:
                print(error)
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_output(name, tmp_path):
    check_same_output(tmp_path / "script.py", SCRIPTS[name])
