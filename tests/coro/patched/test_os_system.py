"""`os.system` and `os.popen` in a program of coros, and in one with plain threads as the control.

Each command waits for something that happens only after the main thread has continued. A call that blocks the loop
therefore never returns, and the script hits its time limit.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SYSTEM = """
import os, sys, threading

def work():
    begun.set()
    results.append(os.waitstatus_to_exitcode(os.system("read line < 'one'; exit 3")))
    with os.popen("read line < 'two'; echo $line") as file:
        results.append(file.read())

results, begun = [], threading.Event()
os.mkfifo("one")
os.mkfifo("two")
thread = threading.Thread(target=work)
thread.start()
begun.wait()
# Opening a FIFO for both directions does not wait for the other end.
pipes = [os.open(name, os.O_RDWR) for name in ("one", "two")]
for fd in pipes:
    os.write(fd, b"line\\n")
thread.join()
print(results)
"""


@pytest.mark.parametrize("arguments", [(), ("-m", "grapeshot.coro")], ids=["threads", "coros"])
def test_system(arguments, tmp_path):
    command = [sys.executable, *arguments, "-c", SYSTEM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path, check=False)
    assert (done.stdout, done.stderr) == ("[3, 'line\\n']\n", "")
