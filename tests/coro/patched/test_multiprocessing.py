"""multiprocessing in a program of coros. Each script also runs with plain threads, as the control.

Nothing here depends on time: each thread waits for something that happens only after another thread has continued. A
call that blocks the loop therefore never returns, and the script hits its time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import coro_is_available

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
]

HEAD = """
import multiprocessing, sys, threading
from multiprocessing import util

context = multiprocessing.get_context(sys.argv[1])

def beside(function, *args):
    # Run a function in a thread; return a function that waits for the thread and returns its result.
    results = []
    def run():
        begun.set()
        results.append(function(*args))
    begun = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    def result():
        thread.join()
        return results[0]
    return result
"""

POOL = """
def prepare(event):
    global go_on
    go_on = event

def work(number):
    go_on.wait()
    return number * number

if __name__ == "__main__":
    event = context.Event()
    with context.Pool(2, prepare, (event,)) as pool:
        waiting = [beside(pool.map, work, range(10)), beside(pool.apply, work, (7,))]
        later = pool.apply_async(work, (8,))
        event.set()
        print([result() for result in waiting], later.get(), sorted(pool.imap_unordered(work, range(4))))
        pool.close()
        pool.join()
"""

QUEUES = """
def answer(questions, answers, connection):
    while (question := questions.get()) is not None:
        answers.put(question.upper())
    connection.send(connection.recv() * 2)
    connection.close()

if __name__ == "__main__":
    questions, answers = context.JoinableQueue(), context.Queue()
    near, far = context.Pipe()
    process = context.Process(target=answer, args=(questions, answers, far))
    process.start()
    waiting = beside(answers.get)
    questions.put("a" * 100_000)
    print(len(waiting()))
    questions.put(None)
    waiting = beside(near.recv)
    near.send(b"b" * 300_000)
    print(len(waiting()))
    process.join()
    print(process.exitcode)
"""

LOCKS = """
def hold(lock, held, release):
    with lock:
        held.set()
        release.wait()

def try_lock(lock, results):
    results.put(lock.acquire(False))

if __name__ == "__main__":
    for lock in (context.Lock(), context.RLock(), context.Semaphore(1), context.BoundedSemaphore(1)):
        held, release = context.Event(), context.Event()
        process = context.Process(target=hold, args=(lock, held, release))
        process.start()
        held.wait()
        print(lock.acquire(False), lock.acquire(timeout=0.01), end=" ")
        waiting = beside(lambda: lock.acquire() and lock.release())
        release.set()
        print(waiting())
        process.join()
    # A thread that holds an RLock blocks the other threads of its process, and the other processes.
    lock, results = context.RLock(), context.SimpleQueue()
    with lock, lock:
        print(beside(lock.acquire, False)(), beside(lock.acquire, True, 0.01)(), end=" ")
        process = context.Process(target=try_lock, args=(lock, results))
        process.start()
        print(results.get())
        process.join()
        waiting = beside(lambda: lock.acquire() and lock.release())
    print(waiting())
    condition = context.Condition()
    with condition:
        waiting = beside(lambda: notify(condition))
        print(condition.wait(), condition.wait(0.01))
"""
NOTIFY = """
def notify(condition):
    with condition:
        condition.notify()
"""

MANAGER = """
if __name__ == "__main__":
    with context.Manager() as manager:
        numbers, queue = manager.dict(), manager.Queue()
        waiting = beside(queue.get)
        numbers[1] = 2
        queue.put(dict(numbers))
        print(waiting())
"""

EXECUTOR = """
import concurrent.futures

if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        waiting = beside(lambda: list(pool.map(abs, range(-5, 0))))
        print(pool.submit(pow, 2, 10).result(), waiting())
"""

LATE = "import multiprocessing.pool, multiprocessing.synchronize\nfrom grapeshot import coro\ncoro.patch()\n"


def run(path, arguments, method):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", *arguments, str(path), method],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (POOL, f"[{[n * n for n in range(10)]}, 49] 64 [0, 1, 4, 9]\n"),
        (QUEUES, "100000\n600000\n0\n"),
        (NOTIFY + LOCKS, "False False None\n" * 4 + "False False False\nNone\nTrue False\n"),
        (MANAGER, "{1: 2}\n"),
        (EXECUTOR, "1024 [5, 4, 3, 2, 1]\n"),
    ],
    ids=["pool", "queues", "locks", "manager", "executor"],
)
@pytest.mark.parametrize("arguments", [(), ("-m", "grapeshot.coro")], ids=["threads", "coros"])
def test_multiprocessing(tmp_path, script, expected, arguments, method):
    path = tmp_path / "program.py"
    path.write_text(HEAD + script)
    assert run(path, arguments, method) == expected


def test_multiprocessing_was_imported_before(tmp_path):
    """The program patches after it has imported multiprocessing, and connections and locks still work."""
    path = tmp_path / "program.py"
    program = (HEAD + POOL).replace('if __name__ == "__main__":', "def main():")
    path.write_text(f"{LATE}{program}\nif __name__ == '__main__':\n    coro.run(coro.call_blocking, main)\n")
    assert run(path, (), "fork").startswith("[[0, 1, 4")
