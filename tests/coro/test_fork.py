"""A coro forks: in the child only that coro continues, just as only the forking thread continues in any program."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
import asyncio, atexit, os, socket, sys, threading
from grapeshot import coro

PARENT = os.getpid()

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def where():
    return "parent" if os.getpid() == PARENT else "child"

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

atexit.register(lambda: say("atexit", where()))
"""

# Coros in each state, and also a task and an async generator. Each of them adds its name to `gone` when it ends. If it
# ends in the child, it prints a line, too.
CROWD = """
class Crowd:
    def __init__(self):
        self.lock, self.items = coro.mutex(), coro.fifo()
        self.left, self.right = coro.socketpair()
        self.gone = []
        self.lock.acquire()
        waits = {
            "lock": self.lock.acquire, "fifo": self.items.pop, "ready": coro.yield_slice,
            "sleep": lambda: coro.sleep_relative(60), "read": lambda: self.left.recv(1),
            "own": lambda: coro.sleep_relative(60), "await": lambda: coro.await_(asyncio.sleep(60)),
        }
        self.coros = [
            coro.spawn(self.wait, name, wait, name=name, stack="own" if name == "own" else "shared")
            for name, wait in waits.items()
        ]
        coro.await_(self.begin_tasks())

    async def begin_tasks(self):
        self.task = asyncio.create_task(self.work())
        await asyncio.sleep(0.001)

    async def work(self):
        async def numbers():
            try:
                yield 1
            finally:
                self.note("generator")
        try:
            async for number in numbers():
                await asyncio.sleep(60)
        finally:
            self.note("task")

    def note(self, name):
        self.gone.append(name)
        if where() == "child":
            say("ended in the child:", name)

    def wait(self, name, wait):
        try:
            while True:
                wait()
        finally:
            self.note(name)
"""


def run(code, *, flags=("-W", "error", "-X", "faulthandler")):
    """Return the lines that the script prints."""
    return run_script(None, HEAD + code, flags=flags).split("\n")[:-1]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("return 'returned'", ["returned child", "atexit child", "0"]),
        ("sys.exit(3)", ["atexit child", "3"]),
        ("raise LookupError('mine')", ["LookupError child", "atexit child", "0"]),
        ("os._exit(5)", ["5"]),
    ],
)
def test_the_first_coro_ends_in_the_child(ending, expected):
    """`coro.run()` returns or raises in the child; no code of the other coros runs there."""
    lines = run(
        CROWD
        + f"""
def main():
    crowd = Crowd()
    try:
        pid = os.fork()
        if not pid:
            crowd.items.push("for nobody")
            crowd.lock.release()
            assert all(co.done() and co.join() is None for co in crowd.coros), crowd.coros
            {ending}
        say(status(pid))
    finally:
        say("main ends", where())
    crowd.right.send(b"x")
    return crowd

try:
    result = coro.run(main)
except LookupError:
    result = "LookupError"
if where() == "parent":
    say(sorted(result.gone))
else:
    say(result, where())
    assert coro.run(lambda: coro.spawn(lambda: coro.sleep_relative(0.001)).join() or 7) == 7
"""
    )
    ends = ["main ends child"] if "_exit" not in ending else []
    everyone = ["await", "fifo", "generator", "lock", "own", "read", "ready", "sleep", "task"]
    assert lines == [*ends, *expected, "main ends parent", str(everyone), "atexit parent"]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("return", ["0"]), ("sys.exit(3)", ["atexit child", "3"]), ("raise LookupError('mine')", ["0"])],
)
def test_another_coro_ends_in_the_child(ending, expected):
    """When the coro that forked ends, the child exits with status 0, as after a fork in a thread.

    But if the coro raises SystemExit, the exception leaves the child's loop.
    """
    lines = run(
        CROWD
        + f"""
class Member:
    def __del__(self):
        if where() == "child":
            say("freed in the child")

async def main():
    try:
        member = Member()
        return await coro.run_sync(work)
    finally:
        say("main ends", where())

def fork():
    pid = os.fork()
    if not pid:
        print("printed")
        {ending}
    say(status(pid))

def work():
    crowd = Crowd()
    try:
        coro.spawn(fork).join()
    finally:
        say("work ends", where())
    return sorted(crowd.gone)

import grapeshot
say(grapeshot.run(main()))
""",
        flags=("-u", "-X", "faulthandler"),
    )
    assert lines == ["printed", *expected, "work ends parent", "main ends parent", "[]", "atexit parent"]


def test_the_loop_of_the_parent_goes_on():
    """When the child closes its copies of the loop and the sockets, the parent's waits must stay registered."""
    lines = run(
        """
def echo(sock):
    while data := sock.recv(100):
        sock.sendall(data)

def exchange(sock, data):
    sock.sendall(data)
    return sock.recv_exact(len(data))

def main():
    pairs = [coro.socketpair() for _ in range(5)]
    echoes = [coro.spawn(echo, left) for left, _ in pairs]
    assert all(exchange(right, b"before") == b"before" for _, right in pairs)
    asyncio_pair = socket.socketpair()
    reader, writer = coro.await_(asyncio.open_connection(sock=asyncio_pair[0]))
    pid = os.fork()
    if not pid:
        writer.close()
        for sock in sum(pairs, ()):
            sock.close()
        sys.exit(3)
    say(status(pid))
    with coro.timeout(30):
        assert all(exchange(right, b"after") == b"after" for _, right in pairs)
        asyncio_pair[1].sendall(b"line\\n")
        say(coro.await_(reader.readline()))
        for _, right in pairs:
            right.close()
        for co in echoes:
            co.join()
    writer.close()
    asyncio_pair[1].close()

coro.run(main)
""",
        flags=("-X", "faulthandler"),  # no -W error, because the child ends without closing all sockets
    )
    assert lines == ["atexit child", "3", "b'line\\n'", "atexit parent"]


def test_threading_forgets_the_threads_of_the_parent():
    """The coro that forks was not started as a Thread, and no code has asked for its Thread object."""
    lines = run(
        """
coro.patch()

def fork(released):
    pid = os.fork()
    if not pid:
        say([thread.name for thread in threading.enumerate()], threading.current_thread() is threading.main_thread())
        os._exit(0)
    say(status(pid))

def main():
    released = threading.Event()
    others = [threading.Thread(target=released.wait) for _ in range(2)]
    for thread in others:
        thread.start()
    coro.spawn(fork, released).join()
    released.set()
    for thread in others:
        thread.join()

coro.run(main)
""",
        # no -W error: if threading's fork hook fails, Python only prints the exception, which is not a warning
        flags=("-X", "faulthandler"),
    )
    assert lines == ["['MainThread'] True", "0", "atexit parent"]


PROGRAM = """
import os, sys, threading, time

PARENT = os.getpid()
released = threading.Event()

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def wait():
    try:
        released.wait()
    finally:
        say("wait ends", os.getpid() == PARENT)

def fork(ending):
    pid = os.fork()
    if not pid:
        print("printed", ending, [thread.name for thread in threading.enumerate()])
        if ending == "exit":
            sys.exit(3)
        return ending
    say(ending, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

others = [threading.Thread(target=wait) for _ in range(2)]
for thread in others:
    thread.start()
for ending in ("return", "exit"):
    forker = threading.Thread(target=fork, args=(ending,), name="forker")
    forker.start()
    forker.join()
try:
    if fork("exit of the main thread") or not os.getpid() == PARENT:
        sys.exit(4)
finally:
    say("main ends", os.getpid() == PARENT)
released.set()
"""


@pytest.mark.parametrize("arguments", [(), ("-m", "grapeshot.coro")], ids=["threads", "coros"])
def test_a_program_with_threads(arguments):
    flags = ("-u", "-W", "ignore", "-X", "faulthandler", *arguments)  # Python warns about a fork beside threads
    lines = run_script(None, PROGRAM, flags=flags).split("\n")[:-1]
    assert sorted(lines) == [
        "exit 0",
        "exit of the main thread 4",
        "main ends False",
        "main ends True",
        "printed exit ['forker']",
        "printed exit of the main thread ['MainThread']",
        "printed return ['forker']",
        "return 0",
        "wait ends True",
        "wait ends True",
    ]


@pytest.mark.parametrize("pid", ["another pid", "the same pid"])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_lookups_and_files_in_the_child(engine, pid):
    """The child goes on with the loop, but shares neither lookups nor calls on files with the parent.

    Parent and child can have the same pid if each is the first process of its own pid namespace.
    """
    code = f"""
import signal
if {engine!r} == "threads":
    os.environ["GRAPESHOT_FILE_THREADS"] = "1"
import grapeshot
from grapeshot._loop import aio

loop = grapeshot.new_event_loop()
reader, writer = os.pipe()
file = os.open(sys.executable, os.O_RDONLY)
content = os.pread(file, 3, 1)
queue = aio.queue_of(loop)

async def ask(count):
    for number in range(count):
        assert await loop.getaddrinfo("localhost", number)
        assert await queue.start("read", file, 3, 1) == content

loop.run_until_complete(ask(3))
waiting = queue.start("read", reader, 1, -1)
if loop.run_until_complete(coro.run_sync(os.fork)):
    say(status(-1))
    assert not waiting.done()
    loop.run_until_complete(ask(3))
    os.write(writer, b"x")
    say(loop.run_until_complete(waiting))
    loop.close()
else:
    signal.alarm(20)
    if {pid!r} == "the same pid":
        os.getpid = lambda: PARENT
    # Lookups and calls on files are numbered. The child's numbers are the same as some of the parent's.
    loop.run_until_complete(ask(5))
    loop.close()
    os._exit(7)
"""
    # With the engine "threads", a thread reads the pipe during the fork. Python warns of a fork beside a thread.
    lines = run(code, flags=("-W", "error", "-W", "ignore:This process:DeprecationWarning", "-X", "faulthandler"))
    assert lines == ["7", "b'x'", "atexit parent"]


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_child_closes_the_loop_of_a_program(engine):
    """After a fork outside of coros, the child may only close the loop. The parent's read of the pipe goes on."""
    code = f"""
import signal
if {engine!r} == "threads":
    os.environ["GRAPESHOT_FILE_THREADS"] = "1"
import grapeshot
from grapeshot._loop import aio

loop = grapeshot.new_event_loop()
reader, writer = os.pipe()
queue = aio.queue_of(loop)
loop.run_until_complete(loop.getaddrinfo("localhost", 80))
waiting = queue.start("read", reader, 1, -1)
if os.fork():
    say(status(-1))
    os.write(writer, b"x")
    say(loop.run_until_complete(waiting))
    loop.close()
else:
    signal.alarm(20)
    os.getpid = lambda: PARENT
    waiting.cancel()
    loop.close()
    os._exit(7)
"""
    lines = run(code, flags=("-W", "error", "-W", "ignore:This process:DeprecationWarning", "-X", "faulthandler"))
    assert lines == ["7", "b'x'", "atexit parent"]
