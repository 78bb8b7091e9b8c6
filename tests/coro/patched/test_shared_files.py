"""Coros that use one file object at the same time: pipes of Popen, files of sockets, open(fd), the standard streams.

The scripts print the same with coros and with plain threads. Some tests check that no data is lost when an exception
interrupts a read or write. They run with coros only, because a thread cannot be interrupted.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support import CAP_S, coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SOURCE = r"""
import sys
for number in range(6000):
    sys.stdout.write("%05d%s\n" % (number, "x" * (number % 70)))
"""
USERS = """
import io, os, pickle, pty, select, socket, subprocess, sys, threading

def in_threads(function, arguments):
    errors = []
    def run(argument):
        try:
            function(argument)
        except BaseException as error:
            errors.append(repr(error))
    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return errors

def read_all(file, ways=3):
    lines = []
    def read(iterates):
        for line in (file if iterates else iter(file.readline, file.read(0))):
            lines.append(line)
    errors = in_threads(read, [number % 2 for number in range(ways)])
    return errors, len(lines), len(set(lines)), sum(map(len, lines))

def write_all(file, text):
    # 3 x 400 lines of up to 9 kB
    def write(letter):
        for number in range(400):
            line = letter * (number * 23) + chr(10)
            file.write(line if text else line.encode())
            if number % 7 == 0:
                file.flush()
    return in_threads(write, "abc")

def describe(data):
    lines = data.split(b"\\n")
    return len(data), len(lines), len(set(lines)), sorted({len(set(line)) for line in lines})
"""
SCRIPTS = {
    "readers of Popen.stdout": """
        # If several plain threads read, a line may be split, because a BufferedReader begins a read without its lock.
        # So this script has one reader when it runs with plain threads, and three when it runs with coros.
        for text in (False, True):
            with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=text) as process:
                print(text, read_all(process.stdout, 3 if "grapeshot.coro" in sys.modules else 1))
    """,
    "readers of blocks": """
        with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE) as process:
            sizes = []
            def read(kind):
                file = process.stdout
                buffer = bytearray(777)
                while size := (len(file.read(1000)), len(file.read1(50)), file.readinto(buffer), len(file.peek()))[:3]:
                    if not any(size):
                        break
                    sizes.extend(size)
            # Plain threads may lose some data, because a BufferedReader begins a read without its lock.
            print(in_threads(read, range(3)), sum(sizes) == 242500 or "grapeshot.coro" not in sys.modules)
    """,
    "writers of Popen.stdin": """
        for text in (False, True):
            command = [sys.executable, "-c", "import sys, time; time.sleep(0.1); sys.stdout.write(sys.stdin.read())"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=text) as process:
                data = []
                reader = threading.Thread(target=lambda: data.append(process.stdout.read()))
                reader.start()
                print(write_all(process.stdin, text))
                process.stdin.close()
                reader.join()
            print(describe(data[0].encode() if text else data[0]))
    """,
    "files of sockets": """
        ways = 3 if "grapeshot.coro" in sys.modules else 1
        for mode in ("rb", "r", "rwb", "rw"):
            left, right = socket.socketpair()
            def send(_):
                with right:
                    for number in range(6000):
                        right.sendall(b"%05d%s\\n" % (number, b"x" * (number % 70)))
            sender = threading.Thread(target=send, args=(0,))
            sender.start()
            with left, left.makefile(mode) as file:
                print(mode, read_all(file, ways), isinstance(file, io.TextIOWrapper))
            sender.join()
        for mode in ("wb", "w", "rwb", "rw"):
            left, right = socket.socketpair()
            parts = []
            def receive():
                with right:
                    while part := right.recv(5000):
                        parts.append(part)
            receiver = threading.Thread(target=receive)
            receiver.start()
            with left, left.makefile(mode) as file:
                print(mode, write_all(file, "b" not in mode))
            receiver.join()
            print(describe(b"".join(parts)))
    """,
    "one reads, one writes": """
        left, right = socket.socketpair()
        with left, right, left.makefile("rwb") as file, right.makefile("rwb") as other:
            def answer(_):
                for line in other:
                    other.write(line.upper()); other.flush()
            def ask(_):
                for number in range(100):
                    file.write(b"line %d\\n" % number); file.flush()
            lines = []
            def collect(_):
                while len(lines) < 100:
                    lines.append(file.readline())
                left.shutdown(socket.SHUT_WR)
            threads = [threading.Thread(target=each, args=(0,)) for each in (answer, collect, ask)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(lines == [b"LINE %d\\n" % number for number in range(100)])
    """,
    "open and fdopen": """
        for opens in (open, os.fdopen, io.open):
            for mode in ("r", "rb"):
                ours, theirs = os.pipe()
                def write(_):
                    with opens(theirs, "w" + mode[1:]) as file:
                        print(write_all(file, "b" not in mode))
                writer = threading.Thread(target=write, args=(0,))
                writer.start()
                with opens(ours, mode) as file:
                    print(mode, read_all(file, 1)[:3], file.name == ours, file.mode)
                writer.join()
        ours, theirs = pty.openpty()
        with open(theirs, "w") as out, open(ours, "rb", buffering=0) as screen:
            print(out.line_buffering, isinstance(screen, io.FileIO))
            lines = []
            thread = threading.Thread(target=lambda: lines.append(screen.read(100)))
            thread.start()
            print("to the terminal", file=out)
            thread.join()
        print(lines)
        with open(os.devnull, "w") as file, open(__file__) as script:
            print(type(script) is io.TextIOWrapper, open is io.open)
        for wrong in [("rw",), ("",), ("rbt",), ("r", 0), ("rb", -1, "utf-8"), ("r", -1, None, None, "x")]:
            fd = os.dup(0)
            try:
                open(fd, *wrong)
            except (OSError, ValueError, LookupError) as error:
                print(error)
            try:
                os.close(fd)
            except OSError:
                print("closed")
        for fd in (999, -1):
            try:
                open(fd)
            except (OSError, ValueError) as error:
                print(error)
        class Opener:
            open = open
        print(Opener().open(__file__).read(3), pickle.loads(pickle.dumps(open)) is open)
    """,
    "methods": """
        ours, theirs = os.pipe()
        out = open(theirs, "wb")
        out.write(b"one\\ntwo\\nthree\\nfour\\nfive\\n")
        out.flush()
        file = open(ours, "rb")
        buffer = bytearray(4)
        print(file.peek(1)[:4], file.readinto(buffer), buffer, file.readline(), next(file), file.readline(2))
        print(isinstance(file, io.BufferedReader), isinstance(out, io.BufferedWriter), file.readable(), file.seekable())
        for each in (file, out):
            kind = type(each)
            print(isinstance(each, getattr(sys.modules[kind.__module__], kind.__qualname__)))
            try:
                pickle.dumps(each)
            except TypeError:
                print("no pickle")
        out.writelines([b"six\\n", b"seven\\n"])
        raw = out.detach()
        print(isinstance(raw, io.FileIO), raw.write(b"eight"))
        raw.close()
        print(file.readlines(), file.read(), file.read1(), file.closed)
        file.close()
        try:
            file.readline()
        except ValueError as error:
            print(error, file.closed)
    """,
    "sizes of buffers": """
        def has_arrived(reader):
            return bool(select.select([reader], [], [], 0)[0])
        for mode, data in (("wb", b"x"), ("w", "x")):
            reader, writer = os.pipe()
            with open(writer, mode) as file:
                for _ in range(30):
                    file.write(data * 1000)
                    print(mode, has_arrived(reader))
            os.close(reader)
    """,
    "a read-only buffer is refused before anything is read": """
        for buffering in (0, -1):
            reader, writer = os.pipe()
            os.write(writer, b"data")
            os.close(writer)
            with open(reader, "rb", buffering) as file:
                try:
                    file.readinto(b"1234")
                except TypeError as error:
                    print(error)
                print(file.read())
    """,
    "a close waits": """
        ours, theirs = os.pipe()
        file = open(ours, "rb")
        lines, begun = [], threading.Event()
        def read():
            begun.set()
            lines.append(file.read())
        reader = threading.Thread(target=read)
        reader.start()
        begun.wait()
        closer = threading.Thread(target=file.close)
        closer.start()
        os.write(theirs, b"data")
        os.close(theirs)
        reader.join()
        closer.join()
        print(lines, file.closed)
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_shared_files(name, tmp_path):
    check_same_output(tmp_path / "script.py", USERS + textwrap.dedent(SCRIPTS[name]), SOURCE)


STREAMS = """
import os, sys, threading
reads, writes = os.pipe()
kept = os.dup(FD)
os.dup2(writes, FD)
os.close(writes)
parts = []

def collect():
    go_on.wait()
    while part := os.read(reads, 3000):
        parts.append(part)

def write(letter):
    for number in range(300):
        print(letter * 199, file=STREAM)
    done.append(letter)
    go_on.set()

go_on, done = threading.Event(), []
collector = threading.Thread(target=collect)
collector.start()
writers = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
for writer in writers: writer.start()
threading.Timer(0.05, go_on.set).start()
for writer in writers: writer.join()
STREAM.flush()
os.dup2(kept, FD)
os.close(kept)
collector.join()
data = b"".join(parts)
print(len(data), [data.count(letter) for letter in (b"a", b"b", b"c")], sorted(done), file=sys.__stdout__)
"""


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_slow_reader_of_a_standard_stream(stream, options):
    script = STREAMS.replace("STREAM", f"sys.{stream}").replace("FD", "1" if stream == "stdout" else "2")
    plain, patched = (
        subprocess.run(
            [sys.executable, *options, *way, "-c", script], capture_output=True, text=True, timeout=CAP_S, check=False
        )
        for way in ((), ("-m", "grapeshot.coro"))
    )
    expected = "180000 [59700, 59700, 59700] ['a', 'b', 'c']\n"
    if options or sys.version_info >= (3, 12, 4):  # in older versions, plain threads lose text (gh-119506)
        assert plain.stdout == expected
    assert (patched.stdout, patched.stderr, patched.returncode) == (expected, plain.stderr, plain.returncode)


INTERRUPTED = """
from grapeshot import coro
coro.patch()
coro.set_latency_warning(None)
import asyncio, io, os, socket, sys, threading

def interrupted(function, *args):
    try:
        coro.with_timeout(0.02, function, *args)
    except coro.TimeoutError:
        return
    raise AssertionError("the call did not wait")

def files():
    for mode in ("rb", "rwb"):
        left, right = socket.socketpair()
        yield left.makefile(mode), right.sendall, right.close
        left.close()
    reads, writes = os.pipe()
    yield open(reads, "rb"), lambda data: os.write(writes, data), lambda: os.close(writes)

def main():
BODY

coro.run(main)
"""
BODIES = {
    "reads": """
    for file, send, end in files():
        send(b"one")
        interrupted(file.read, 100)
        interrupted(file.readline)
        interrupted(file.readinto, bytearray(50))
        interrupted(file.read)
        send(b" two")
        interrupted(file.read, 8)
        assert file.read(2) == b"on"
        assert file.peek()[:1] == b"e"
        interrupted(file.readline)
        send(b"\\nthree\\nfo")
        assert file.readline() == b"e two\\n"
        assert next(file) == b"three\\n"
        interrupted(file.readline)
        # One thread waits for data, and the others for the file's lock. Each wait is interrupted after its time limit.
        def read():
            interrupted(file.readline)
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        send(b"ur")
        end()
        assert file.read() == b"four", "data lost"
        assert file.read() == b""
        file.close()
    print("ok")
""",
    "a reader that is killed lets the next one read": """
    for file, send, end in files():
        lines = []
        first = coro.spawn(file.readline)
        second = coro.spawn(lambda: lines.append(file.readline()))
        coro.sleep_relative(0.01)
        send(b"beg")
        coro.sleep_relative(0.01)
        first.shutdown()
        send(b"in\\n")
        second.join()
        assert lines == [b"begin\\n"], lines
        end()
        file.close()
    print("ok")
""",
    "writes": """
    reads, writes = os.pipe()
    file = open(writes, "wb")
    file.write(b"first")
    file.flush()
    while True:
        try:
            coro.with_timeout(0.02, file.write, b"x" * 1000)
        except coro.TimeoutError:
            break
    interrupted(file.flush)
    interrupted(file.flush)
    parts = []
    def collect():
        while part := os.read(reads, 10000):
            parts.append(part)
    collector = threading.Thread(target=collect)
    collector.start()
    file.write(b"last")
    file.close()
    collector.join()
    data = b"".join(parts)
    assert data.startswith(b"firstx") and data.endswith(b"xlast")
    assert (len(data) - 9) % 1000 == 0, len(data)
    print("ok")
""",
    "standard output": """
    reads, writes = os.pipe()
    kept = os.dup(1)
    os.dup2(writes, 1)
    os.close(writes)
    done = []
    def write(letter):
        for number in range(300):
            print(letter * 999)
            done.append(letter)
    writers = [coro.spawn(write, letter) for letter in "abc"]
    coro.sleep_relative(0.02)
    before = len(done)
    for writer in writers:
        writer.shutdown()
    coro.sleep_relative(0.02)
    assert len(done) == before
    parts = []
    def collect():
        while part := os.read(reads, 10000):
            parts.append(part)
    collector = threading.Thread(target=collect)
    collector.start()
    print("end")
    sys.stdout.flush()
    os.dup2(kept, 1)
    collector.join()
    data = b"".join(parts).decode()
    counts = {letter: data.count(letter * 999) for letter in "abc"}
    # An interrupted print() has written either nothing, or its text without the line end, or the whole line.
    assert all(0 <= counts[letter] - done.count(letter) <= 1 for letter in "abc"), (counts, before)
    assert data.endswith("end\\n"), data[-20:]
    print("ok")
""",
    "a callback prints while a coro waits": """
    reads, writes = os.pipe()
    kept = os.dup(1)
    os.dup2(writes, 1)
    os.close(writes)
    os.set_blocking(reads, False)
    parts = []
    def write():
        for number in range(200):
            print("x" * 999)
    writer = coro.spawn(write)
    coro.sleep_relative(0.02)
    assert not writer.done()
    def drain():
        try:
            while part := os.read(reads, 100000):
                parts.append(part)
        except BlockingIOError:
            pass
    def call():
        drain()
        print("from a callback")
        called.append(1)
    called = []
    asyncio.get_running_loop().call_soon(call)
    while not (called and writer.done()):
        drain()
        coro.sleep_relative(0.001)
    flusher = coro.spawn(sys.stdout.flush)  # from 3.14 on, stdout's buffer is larger than the pipe's
    while not flusher.done():
        drain()
        coro.sleep_relative(0.001)
    os.dup2(kept, 1)
    drain()
    data = b"".join(parts)
    assert data.count(b"x") == 200 * 999, data.count(b"x")
    assert data.count(b"from a callback") == 1
    print("ok")
""",
}


@pytest.mark.parametrize("name", BODIES)
def test_interruptions_lose_nothing(name):
    script = INTERRUPTED.replace("BODY", BODIES[name])
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", ""), result.stderr
