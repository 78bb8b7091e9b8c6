"""Descriptors that processes share, and calls of `os` with the descriptor of a patched socket. The scripts print the
same with and without patching.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import CAP_S, coro_is_available

from tests.coro.patched.same_output import check_same_output

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

# The parent and the child read from the same descriptor. The writing thread writes a byte, and waits until one of them
# has received it. With patching, the writing thread is a coro. The child may take a byte just before the parent reads.
# If the parent's read then blocked the loop, no further byte would be written, and the script would hang.
TWO_READERS = """
import os, pty, socket, subprocess, sys, threading, tty

def ends(kind):
    if kind == "pipe":
        return os.pipe()
    if kind == "fifo":
        os.mkfifo("fifo")
        both = os.open("fifo", os.O_RDWR)
        os.unlink("fifo")
        return both, both
    if kind == "socket":
        near, far = socket.socketpair()
        return near.detach(), far.detach()
    master, slave = pty.openpty()
    tty.setraw(slave)
    return (slave, master) if kind == "terminal" else (master, slave)

CHILD = '''
import os, sys
reader, told = map(int, sys.argv[1:])
while os.read(reader, 1) == b"x":
    os.write(told, b"x")
'''

def read():
    while os.read(reader, 1) == b"x":
        os.write(told, b"x")

def write():
    for _ in range(300):
        os.write(writer, b"x")
        os.read(tell, 1)
    os.write(writer, b"qq")

reader, writer = ends(sys.argv[1])
tell, told = os.pipe()
child = subprocess.Popen([sys.executable, "-c", CHILD, str(reader), str(told)], pass_fds=(reader, told))
threads = [threading.Thread(target=function) for function in (read, write)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(child.wait())
"""


@pytest.mark.parametrize("kind", ["pipe", "fifo", "socket", "terminal", "master"])
def test_two_processes_that_read(kind, tmp_path):
    check_same_output(tmp_path / "script.py", TWO_READERS, kind)


SCRIPTS = {
    "a full fifo and a full terminal": """
        import os, pty, threading, tty
        def transfer(reader, writer):
            parts = []
            def read():
                while sum(map(len, parts)) < 300_000:
                    parts.append(os.read(reader, 50_000))
            thread = threading.Thread(target=read)
            thread.start()
            print(os.write(writer, bytes(300_000)))
            thread.join()
            print(set(b"".join(parts)))
        os.mkfifo("fifo")
        both = os.open("fifo", os.O_RDWR)
        os.unlink("fifo")
        transfer(both, both)
        master, slave = pty.openpty()
        tty.setraw(slave)
        transfer(master, slave)
        transfer(slave, master)
    """,
    "accept on a listening socket in blocking mode": """
        import os, socket, subprocess, sys, threading
        CHILD = '''
        import socket, sys
        listener = socket.socket(fileno=int(sys.argv[1]))
        listener.setblocking(True)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            word = connection.recv(1)
            connection.sendall(b"child")
            connection.close()
            if word == b"q":
                break
        '''
        listener = socket.create_server(("127.0.0.1", 0))
        number = listener.fileno()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(number)], pass_fds=[number], stdout=subprocess.PIPE
        )
        child.stdout.readline()
        answers = []
        def serve():
            while True:
                connection, _ = listener.accept()
                with connection:
                    word = connection.recv(1)
                    connection.sendall(b"here")
                    if word == b"q":
                        break
        def ask(word):
            with socket.create_connection(listener.getsockname()) as connection:
                connection.sendall(word)
                answers.append(connection.recv(10))
        server = threading.Thread(target=serve)
        server.start()
        for _ in range(100):
            ask(b"x")
        print(len(answers), set(answers) <= {b"here", b"child"})
        ask(b"q")
        while server.is_alive() and child.poll() is None:
            pass
        ask(b"q")
        server.join()
        print(child.wait())
        child.stdout.close()
    """,
    "numbers of sockets": """
        import array, os, socket, tempfile, threading
        closed = socket.socket()
        os.close(closed.fileno())
        print(closed.detach() >= 0)
        near, far = socket.socketpair()
        def later(function, *args):
            begun = threading.Event()
            thread = threading.Thread(target=lambda: (begun.wait(), function(*args)))
            thread.start()
            begun.set()
            return thread
        for number in (near.fileno(), near):
            if number is near:
                number = near.detach()
            thread = later(far.send, b"word")
            print(os.read(number, 10))
            thread.join()
            buffers = [bytearray(2), bytearray(8)]
            thread = later(far.send, b"words")
            print(os.readv(number, buffers), buffers)
            thread.join()
            parts = []
            def drain(count):
                while count:
                    parts.append(len(far.recv(65536)))
                    count -= parts[-1]
            for call in (
                lambda: os.write(number, bytes(500_000)),
                lambda: os.writev(number, [bytes(250_000), bytearray(250_000)]),
            ):
                thread = later(drain, 500_000)
                print(call())
                thread.join()
            with tempfile.TemporaryFile() as file:
                file.write(bytes(2_000_000))
                file.flush()
                thread = later(drain, 2_000_000)
                at = 0
                while at < 2_000_000:
                    at += os.sendfile(number, file.fileno(), at, 2_000_000 - at)
                print(at)
                thread.join()
        os.close(number)
        # Any timeout puts a plain socket's descriptor into nonblocking mode.
        near, far = socket.socketpair()
        for timeout in (0, 5):
            near.settimeout(timeout)
            for call in (lambda: os.read(near.fileno(), 1), lambda: os.readv(near.fileno(), [bytearray(1)])):
                try:
                    print(call())
                except BlockingIOError as error:
                    print("would block")
        os.set_blocking(far.fileno(), False)
    """,
    "a child inherits a socket": """
        import socket, subprocess, sys
        CODE = "import sys; print(sys.stdin.readline().strip(), 'in the child')"
        near, far = socket.socketpair()
        child = subprocess.Popen([sys.executable, "-c", CODE], stdin=far, stdout=far)
        far.close()
        near.sendall(b"a line\\n")
        with near.makefile("rb") as file:
            print(file.read())
        print(child.wait())
        near.close()
        # The parent goes on using `far`, which this child inherits. With patching, Popen puts `far` into blocking mode.
        near, far = socket.socketpair()
        child = subprocess.Popen([sys.executable, "-c", CODE], stdin=far.fileno(), stdout=subprocess.PIPE)
        near.sendall(b"a line\\n")
        print(child.communicate(), child.wait())
        import threading
        for call in (
            lambda: far.recv(10), lambda: far.recvfrom(10), lambda: far.recvmsg(10),
            lambda: far.recv_into(bytearray(5)), lambda: far.recvfrom_into(bytearray(5)),
            lambda: far.recvmsg_into([bytearray(5)]),
        ):
            begun = threading.Event()
            thread = threading.Thread(target=lambda: (begun.wait(), near.send(b"word")))
            thread.start()
            begun.set()
            print(call())
            thread.join()
        def drain(count):
            while count:
                count -= len(near.recv(65536))
        thread = threading.Thread(target=drain, args=(2_000_000,))
        thread.start()
        data = bytes(1_000_000)
        far.sendall(data)
        sent = 0
        while sent < len(data):
            sent += far.sendmsg([data[sent:]])
        thread.join()
        # Here the child inherits the socket through pass_fds.
        CODE = "import os, sys; print(os.read(int(sys.argv[1]), 10))"
        child = subprocess.Popen([sys.executable, "-c", CODE, str(far.fileno())], pass_fds=[far.fileno()])
        near.sendall(b"word")
        print(child.wait())
        import tempfile
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1_000_000))
            file.flush()
            file.seek(0)
            thread = threading.Thread(target=drain, args=(1_000_000,))
            thread.start()
            print(far.sendfile(file))
            thread.join()
    """,
    "wrong arguments": """
        import os, pty, socket
        near, far = socket.socketpair()
        master, slave = pty.openpty()
        reader, writer = os.pipe()
        for ends in ((reader, writer), (near.fileno(), near.fileno()), (slave, master), (master, slave)):
            reader, writer = ends
            for call in (
                lambda: os.read(reader, -1), lambda: os.read(reader, "a"), lambda: os.read("a", 1),
                lambda: os.read(reader, 1.5), lambda: os.read(reader, 1 << 70), lambda: os.read(reader, 0),
                lambda: os.read(-1, 1), lambda: os.read(1 << 40, 1),
                lambda: os.readv(reader, []), lambda: os.readv(reader, [bytearray(0)]),
                lambda: os.readv(reader, [b"abc"]), lambda: os.readv(reader, 5), lambda: os.readv(reader, iter([])),
                lambda: os.readv(reader, ["a"]), lambda: os.readv("a", []),
                lambda: os.readv(reader, [bytearray(1)] * 5000),
                lambda: os.write(writer, "text"), lambda: os.write(writer, 5), lambda: os.write(writer, b""),
                lambda: os.write(writer, memoryview(b"abcd")[::2]), lambda: os.write("a", b"x"),
                lambda: os.writev(writer, 5), lambda: os.writev(writer, []), lambda: os.writev(writer, ["a"]),
                lambda: os.writev(writer, [b"x"] * 5000),
                lambda: os.sendfile(writer, "a", 0, 1), lambda: os.sendfile("a", 1, 0, 1),
                lambda: os.sendfile(writer, 1, "a", 1), lambda: os.sendfile(writer, 1, 0, "a"),
            ):
                try:
                    print(call())
                except Exception as error:
                    print(type(error).__name__, error)
    """,
}


STALE = """
import os, pty, tty
from grapeshot import coro
coro.patch()
coro.set_latency_warning(None)
from grapeshot.coro import _at_once

def terminal():
    master, slave = pty.openpty()
    tty.setraw(slave)
    return master, slave

def interrupted(master, slave):
    reader = coro.spawn(os.read, master, 100)
    coro.sleep_relative(0.01)
    os.write(slave, b"of the first")
    while not _at_once._pending_reads and not reader.done():
        coro.sleep_relative(0)
    if not reader.done():
        reader.shutdown()
        coro.sleep_relative(0.01)
    assert reader.done()
    return bool(_at_once._pending_reads)

def main():
    ends = terminal()
    # A real thread reads from the terminal for the coro. If this thread finishes before the coro waits for it, the coro
    # gets the data, and no read stays pending.
    while not interrupted(*ends):
        pass
    print(os.read(ends[0], 8), os.read(ends[0], 8))
    while not interrupted(*ends):
        pass
    for end in ends:
        os.close(end)
    others = terminal()
    assert others == ends
    os.write(others[1], b"of the second")
    print(os.read(others[0], 100))

coro.run(main)
"""


def test_a_terminal_gets_no_data_of_an_earlier_terminal_with_its_number():
    result = subprocess.run([sys.executable, "-c", STALE], capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (result.stdout, result.stderr) == ("b'of the f' b'irst'\nb'of the second'\n", "")


RACE = """
import socket, sys
from grapeshot import coro
coro.patch()
from grapeshot.coro._patching import _socket_numbers

NUMBER = 900  # not the number of `sock`, so `is_blocking` forgets what `note` has recorded

def use():
    try:
        for _ in range(20_000):
            _socket_numbers.note(sock, NUMBER)
            if _socket_numbers.is_blocking(NUMBER):
                print("the number belongs to another file")
    except BaseException as error:
        print(repr(error))

sys.setswitchinterval(1e-6)
with socket.socket() as sock:
    threads = [coro.threads.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_real_threads_that_forget_a_number():
    result = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_output(name, tmp_path):
    check_same_output(tmp_path / "script.py", SCRIPTS[name])
