"""At exit, a program does not wait for patched daemon threads, and it names the coros that delay its end."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

HEAD = """
import _thread, asyncio, sys, threading, time, warnings
from grapeshot import coro
import grapeshot
coro.patch()
caught = []

def swallow():  # like the service thread of python-engineio
    while True:
        try:
            time.sleep(0.01)
        except:
            caught.append(sys.exc_info()[0].__name__)

def start():
    threading.Thread(target=swallow, daemon=True).start()
    time.sleep(0)
"""

WAYS = {
    "run": "coro.run(start)",
    "event_loop": """
def main():
    start()
    coro.set_exit()
coro.spawn(main)
coro.event_loop()
""",
    "asyncio.run": """
async def main():
    await coro.run_sync(start)
grapeshot.install()
asyncio.run(main())
""",
    "grapeshot.run": """
async def main():
    await coro.run_sync(start)
grapeshot.run(main())
""",
    "real thread": """
def main():
    coro.run(start)
thread = coro.threads.Thread(target=main)
thread.start()
thread.join()
""",
    "exit with an open loop": """
async def main():
    await coro.run_sync(start)
loop = grapeshot.new_event_loop()
loop.run_until_complete(main())
""",
    "start_new_thread": """
def main():
    _thread.start_new_thread(swallow, ())
    time.sleep(0)
coro.run(main)
""",
}


def run_together(*scripts):
    """Run the scripts and return their outputs. The scripts mostly wait, so they run in parallel."""
    with ThreadPoolExecutor(len(scripts)) as pool:
        return list(pool.map(lambda code: run_script(None, code), scripts))


def test_a_daemon_that_swallows_exceptions_does_not_keep_the_program_alive():
    """The daemon might log each exception that it swallows, so grapeshot interrupts it only a few times. No warning
    mentions the daemon.
    """
    check = "import atexit; atexit.register(lambda: print(len(caught) < 10, sorted(set(caught))))"
    outputs = run_together(*(check + HEAD + code for code in WAYS.values()))
    assert dict(zip(WAYS, outputs, strict=True)) == dict.fromkeys(WAYS, "True ['Shutdown']\n")


def test_a_program_in_a_coro_ends_as_in_plain_python(tmp_path):
    program = tmp_path / "program.py"
    lines = [line for line in HEAD.splitlines() if "coro" not in line]
    program.write_text("\n".join([*lines, "start()", "print(threading.active_count())"]))
    for way in ((), ("-m", "grapeshot.coro")):
        command = [sys.executable, *way, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_daemon_may_wait_in_its_cleanup():
    run = """
def work():
    try:
        time.sleep(1000)
    finally:
        time.sleep(0.01)
        print("clean")

def main():
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0)

coro.run(main)
"""
    assert run_script(None, HEAD + run) == "clean\n"


def test_other_threads_are_awaited_before_daemons_are_ended():
    """Daemons serve the other threads until these end, as in plain Python. asyncio.all_tasks() omits daemons."""
    run = """
import queue
jobs, answers = queue.Queue(), queue.Queue()

def serve():
    while True:
        answers.put(jobs.get() + 1)

def ask():
    try:
        coro.sleep_relative(1000)
    finally:
        jobs.put(1)
        print("answer", answers.get())

def main():
    threading.Thread(target=serve, daemon=True).start()
    other = threading.Thread(target=ask, daemon=False, name="asks")
    other.start()
    time.sleep(0)
    print([task.get_name() for task in asyncio.all_tasks(coro.current().get_loop()) if task.get_name() == "asks"])
    print(len(asyncio.all_tasks(coro.current().get_loop())), len(coro.get_live_coros()))

coro.run(main)
"""
    # The first 3 counts the tasks: main, the task that waits for main, and the thread that asks. The second 3 counts
    # the coros: main, the daemon, and the thread that asks.
    assert run_script(None, HEAD + run) == "['asks']\n3 3\nanswer 2\n"


def test_a_coro_that_holds_up_the_end_is_named():
    run = """
warnings.resetwarnings()
warnings.showwarning = lambda message, category, *_: seen.append((category.__name__, str(message)))
seen = []

def refuse():
    while not seen:
        try:
            time.sleep(0.01)  # the place
        except BaseException:
            pass

def main():
    coro.spawn(refuse, name="stubborn")
    start()
"""
    show = "\n[(category, text)] = seen\nprint(category, text)"
    outputs = run_together(
        *(HEAD + run + way + show for way in ("coro.run(main)", "grapeshot.run(coro.run_sync(main))"))
    )
    text = "RuntimeWarning the program cannot end yet: these coros were cancelled but go on: 'stubborn' ("
    line = (HEAD + run).split("\n").index("            time.sleep(0.01)  # the place") + 1
    for output in outputs:
        assert output.startswith(text)
        assert f"(<string>:{line} in refuse). A coro ends when it lets CancelledError pass." in output
