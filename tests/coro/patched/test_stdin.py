"""`input()` and `sys.stdin` in a program of coros. Scripts also run with plain threads, as the control.

Each thread waits for something that happens only after the main thread has continued. A call that blocks the loop
therefore never returns, and the script hits its time limit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from support import CAP_S, coro_is_available, gil_is_enabled

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

WAYS = pytest.mark.parametrize("arguments", [(), ("-m", "grapeshot.coro")], ids=["threads", "coros"])

READ = """
import os, sys, threading

def ask():
    begun.set()
    answers.append(input("first? "))
    answers.append(sys.stdin.readline())
    answers.append(input())
    try:
        input()
    except EOFError:
        answers.append("end")

answers, begun = [], threading.Event()
thread = threading.Thread(target=ask)
thread.start()
begun.wait()
os.write(1, b"ready\\n")  # print() makes two writes, and the prompt could come between them
thread.join()
print(answers)
"""


@contextlib.contextmanager
def start(arguments, script, stdin):
    command = [sys.executable, *arguments, "-c", script]
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(CAP_S, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def read_until_ready(process):
    text = ""
    while "ready\n" not in text:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    return text


@WAYS
def test_input_from_a_pipe(arguments):
    with start(arguments, READ, subprocess.PIPE) as process:
        text = read_until_ready(process)
        text += "".join(process.communicate("one\ntwo\nthree\n"))
    assert text.replace("first? ", "") == "ready\n['one', 'two\\n', 'three', 'end']\n"


@WAYS
def test_input_from_a_terminal(arguments):
    master, slave = os.openpty()
    try:
        with start(arguments, READ, slave) as process:
            os.close(slave)
            text = read_until_ready(process)
            os.write(master, b"one\ntwo\nthree\n\x04")
            text += "".join(process.communicate())
    finally:
        os.close(master)
    assert text.replace("first? ", "") == "ready\n['one', 'two\\n', 'three', 'end']\n"


READERS = """
import os, sys, threading

first = [sys.stdin.buffer.readline(), sys.stdin.buffer.readline()]
PATCH
def read():
    while line := sys.stdin.buffer.readline():
        lines.append(line)

def main():
    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    os.write(1, b"ready\\n")
    for thread in threads:
        thread.join()
    print(first, sorted(lines))

lines = []
CALL
"""
LATE = "from grapeshot import coro; coro.patch()"


@pytest.mark.parametrize(
    ("patch", "call"),
    [
        pytest.param(
            "",
            "main()",
            id="threads",
            marks=pytest.mark.skipif(
                not gil_is_enabled(), reason="without the GIL, threads that share a BufferedReader can lose a line"
            ),
        ),
        pytest.param(LATE, "coro.run(main)", id="coros"),
    ],
)
def test_readers_after_earlier_reads(patch, call):
    script = READERS.replace("PATCH", patch).replace("CALL", call)
    with start((), script, subprocess.PIPE) as process:
        process.stdin.write("a\nb\nc\n")
        process.stdin.flush()
        assert read_until_ready(process) == "ready\n"
        output, errors = process.communicate("d\ne\n")
    assert (output, errors) == ("[b'a\\n', b'b\\n'] [b'c\\n', b'd\\n', b'e\\n']\n", "")
