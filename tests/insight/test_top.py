"""`python -m grapeshot top`: its output on terminals of two widths, its keys, and the sampler in the process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from insight.callers import call
from insight.terminals import Terminal
from support import CAP_S, HOST, PROCESS_CAP_S, address_of, gil_is_enabled, until, wait_until

import grapeshot
from grapeshot.insight import _tree, backdoor
from grapeshot.insight.backdoor import _sampling

PROGRAM = """
    import asyncio, sys, time
    import grapeshot
    from grapeshot.insight import backdoor

    def reindex():
        end = time.monotonic() + 0.06
        while time.monotonic() < end: pass

    async def report():
        while True:
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_soon(reindex)

    async def main():
        task = asyncio.create_task(report(), name="nightly \\x1b[31mreport\\nx")
        sleepers = [asyncio.create_task(asyncio.sleep(3600), name=f"sleeper {{index}}") for index in range(20)]
        with backdoor.serve(sys.argv[1]):
            await task

    {run}
"""
ON_GRAPESHOT = "grapeshot.run(main())"
ON_ASYNCIO = "asyncio.Runner(loop_factory=asyncio.SelectorEventLoop).run(main())"


@pytest.fixture
def program(path, request):
    """A process with a back door at the path."""
    code = textwrap.dedent(PROGRAM).format(run=getattr(request, "param", ON_GRAPESHOT))
    file = path.with_name("program.py")  # Python 3.11 needs a file to show source lines in stacks
    file.write_text(code)
    process = subprocess.Popen([sys.executable, file, path], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the program to begin", PROCESS_CAP_S)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def start():
    """A function that starts a `Top`, which ends after the test."""
    made = []

    def start(path, columns):
        made.append(Top(path, columns))
        return made[-1]

    yield start
    for top in made:
        top.terminal.__exit__()


class Top:
    """`grapeshot top` on a terminal whose screen a test can read."""

    def __init__(self, path, columns, lines=30):
        pytest.importorskip("rich")
        pyte = pytest.importorskip("pyte")
        size = {"COLUMNS": str(columns), "LINES": str(lines)}
        self.terminal = Terminal("-m", "grapeshot", "top", "--interval", "0.1", path, **size)
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.fed = 0

    def draw(self):
        self.terminal._take()
        self.stream.feed(self.terminal._raw[self.fed :])
        self.fed = len(self.terminal._raw)
        return "\n".join(self.screen.display)

    def shows(self, *texts):
        """Wait until all of these texts are on the screen at once, and return the screen."""
        give_up = time.monotonic() + 3 * CAP_S
        while not all(text in self.draw() for text in texts):
            assert time.monotonic() < give_up, f"waited for {texts}, but top shows\n{self.draw()}"
        return self.draw()


@pytest.mark.parametrize("columns", [80, 160])
def test_views_and_keys(path, program, start, columns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    top = start(path, columns)
    shown = top.shows(f"pid {program.pid}", "CPU", "RSS", "busy", "callback reindex", "q quit")
    # The first screen shows what an operator looks for: what is slow, where most tasks wait, what is open.
    shown = top.shows("x  0.", "task sleeper * (sleep)", "0 connections", f"unix server at {path.parent}"[:60])
    assert re.search(r"^ +20 +task sleeper \* \(sleep\)", shown, re.MULTILINE)
    assert re.search(r"^ +1 +task nightly .*, .*program.py:\d+ in report", shown, re.MULTILINE)
    top.terminal.type("n")
    shown = top.shows("iterations", "bytes_written", "callback_durations", "q quit")
    assert "a second" in shown
    top.terminal.type("s")
    # Without the GIL there are no stacks of slow callbacks.
    stack = ["in reindex", "while time.monotonic() < end"] if gil_is_enabled() else []
    shown = top.shows("callback reindex", "times, ", *stack)
    assert ("bytes_written" in shown) == (columns == 160)  # a wide terminal has room for the numbers beside the stacks
    if columns == 160:
        assert re.search(r"^callback_durations +p50 .* max [\d.]+ [mun]?s( |$)", shown, re.MULTILINE), (
            "nothing is cut off"
        )
    assert "o worst" in shown
    assert "q quit" in shown
    top.terminal.type("o")
    top.shows("o latest")
    top.terminal.type("t")
    shown = top.shows("task sleeper * (sleep)", "task nightly", "in report", "await asyncio.sleep(0.1)")
    assert "sleeper 7" not in shown
    top.terminal.type("e")
    top.shows("tasks of", "task 'nightly", "in report")
    assert b"\x1b[31mreport" not in top.terminal._raw  # a name from the program does not reach the terminal unescaped
    top.terminal.type("\x1b[B")
    wait_until(lambda: "tasks of" not in top.draw(), "the tree to scroll")
    top.terminal.type("\x1b[A")
    top.shows("tasks of")
    top.terminal.type("d")
    top.shows("unix listens on", "o number")
    top.terminal.type("e")
    top.shows("unix server at", "o most")
    top.terminal.type("w")
    top.shows("written to grapeshot-top-")
    [file] = tmp_path.glob("grapeshot-top-*.json")
    dumped = json.loads(file.read_text())
    assert dumped["pid"] == program.pid
    assert dumped["statistics"]["iterations"] > 0
    assert any("nightly" in line for line in dumped["tree"])
    assert {each["fd"] for each in dumped["each descriptor"]} >= {0, 1, 2}
    assert sum(each["count"] for each in dumped["descriptors"]) == len(dumped["each descriptor"])
    assert dumped["slow"][0]["name"] == "reindex"
    top.terminal.type(" ")
    top.shows("space run")
    top.terminal.type(" \t")
    top.shows("space hold", "busy")  # Tab on the last view shows the first one again
    top.terminal.type("q")
    assert top.terminal.finish() == 0

    async def listeners():
        with await call(path) as caller:
            return await caller.ask("loop._measuring.listeners")

    wait_until(lambda: asyncio.run(listeners()) == "[]\n", "the process to stop measuring")


@pytest.mark.parametrize("program", [ON_ASYNCIO], indirect=True)
def test_a_loop_without_numbers(path, program, start):
    top = start(path, 80)
    top.shows("is not grapeshot's", f"pid {program.pid}", "task sleeper *")
    top.terminal.type("t")
    top.shows("task nightly", "in report")
    top.terminal.type("e")
    top.shows("task 'nightly")
    top.terminal.type("q")
    assert top.terminal.finish() == 0


def test_a_process_that_blocks_and_ends(path, program, start):
    top = start(path, 80)
    top.shows("busy")
    program.send_signal(signal.SIGSTOP)
    top.shows("something is blocking the loop")
    program.send_signal(signal.SIGCONT)
    top.shows("q quit")
    program.kill()
    assert top.terminal.finish() != 0
    assert "closed the connection" in top.terminal._text


def run_top(*arguments, code="import runpy; runpy.run_module('grapeshot', run_name='__main__')"):
    command = [sys.executable, "-c", f"import sys; sys.argv = ['grapeshot', 'top', *sys.argv[1:]]; {code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
    return done.returncode, done.stderr


def test_without_a_terminal(path):
    pytest.importorskip("rich")
    hint = "without one, use `await top()` in the back door, which prints once"
    assert run_top(str(path)) == (1, f"top needs a terminal; {hint}\n")


def test_without_rich(path):
    code = "sys.modules['rich'] = None; from grapeshot.insight import _top; sys.exit(_top.main(sys.argv[2:]))"
    status, errors = run_top(str(path), code=code)
    assert status == 1
    assert "pip install 'grapeshot[top]'" in errors


def test_a_path_where_no_process_listens(path):
    pytest.importorskip("rich")
    with Terminal("-m", "grapeshot", "top", path) as terminal:
        assert terminal.finish() != 0
        assert "No such file or directory" in terminal._text


def test_long_paths_lose_their_beginning():
    pytest.importorskip("rich")
    from grapeshot.insight._top import _views

    entry = {"kind": "task", "name": "x", "count": 1, "last_s": 0.0, "duration_s": 1.0}
    stack = [f'  File "{"/long" * 30}/app.py", line 8, in main', "    pass"]
    lines = [line.plain for line in _views.slow({"at_s": 5.0, "slow": [{**entry, "stack": stack}]}, 0, 60)]
    assert lines[0] == "    1.000 s  task x  5 s ago"
    assert len(lines[1]) == 60
    assert lines[1].endswith('ong/long/long/app.py", line 8, in main')
    assert lines[1].startswith('      File "…')


def test_wrong_arguments(path):
    for interval in ("0", "nan", "inf"):
        assert run_top("--interval", interval, str(path))[0] == 2


# ---------------------------------------------------------------- in the process


@pytest.fixture
def loop():
    loop = grapeshot.new_event_loop()
    yield loop
    loop.close()


async def test_a_sampler_measures_until_it_ends(loop):
    sampler = _sampling.Sampler(loop, slow_s=0.02)
    sampler.collect()

    def slow():
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass

    loop.call_soon(slow)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    found = sampler.collect("tree", "waits", "descriptors", "each descriptor")
    # On a slow machine the sample may contain other callbacks, too.
    assert ("slow", 1) in [(each["name"].rpartition(".")[2], each["count"]) for each in found["slow"]]
    assert found["statistics"]["callback_durations"]["max"] >= 0.02
    assert found["statistics"]["iterations"] == loop.statistics().iterations
    assert found["descriptor_count"] == len(found["each descriptor"])
    assert sum(each["count"] for each in found["descriptors"]) == len(found["each descriptor"])
    [mine] = found["waits"]
    assert (mine["what"], mine["place"]) == ("task test_a_sampler_measures_until_it_ends", "runs")
    assert found["tree"][0].endswith(f"of {loop!r}")
    assert json.loads(json.dumps(found)).keys() == found.keys()
    sampler.end()
    sampler.end()
    assert loop._measuring.listeners == []
    assert loop.statistics().timers == 0


async def test_the_descriptors_of_a_sample_agree(loop):
    """One sample counts the descriptors in three ways. The counts agree even while another thread opens and closes
    files. The thread that records the stacks of slow callbacks does so, because it reads source files.
    """
    has_ended = threading.Event()

    def open_and_close():
        while not has_ended.is_set():
            with open(os.devnull):
                pass

    sampler = _sampling.Sampler(loop)
    thread = threading.Thread(target=open_and_close)
    thread.start()
    try:
        for _ in range(200):
            found = sampler.collect("descriptors", "each descriptor")
            each = found["each descriptor"]
            assert found["descriptor_count"] == sum(row["count"] for row in found["descriptors"]) == len(each)
    finally:
        has_ended.set()
        thread.join()
        sampler.end()


async def test_a_sampler_whose_client_has_vanished(loop, monkeypatch):
    monkeypatch.setattr(_sampling, "_PATIENCE_S", 0.001)
    sampler = _sampling.Sampler(loop)
    sampler.collect()
    assert len(loop._measuring.listeners) == 1
    await until(lambda: not loop._measuring.listeners)
    assert sampler.collect()["statistics"]["iterations"] > 0  # another client asks
    sampler.end()


async def test_a_sampler_ends_with_its_client(loop, path, tasks):
    """The sampler ends when its client has gone, even if the client has not told it to end."""
    with backdoor.serve(path), await call(path) as caller:
        await caller.ask(
            "from grapeshot.insight.backdoor._sampling import Sampler; sampler = Sampler(loop); sampler.sample()"
        )
        assert len(loop._measuring.listeners) == 1
        caller.close()
        await until(lambda: not loop._measuring.listeners)
    await until(lambda: len(asyncio.all_tasks()) == 1, "the session to end")
    assert loop.statistics().timers == 0


async def test_a_sampler_keeps_the_slowest(loop, monkeypatch):
    monkeypatch.setattr(_sampling, "_MAX_SLOW", 2)
    sampler = _sampling.Sampler(loop)
    sampler.collect()
    for function, duration_ns in ((print, 30_000_000), (len, 90_000_000), (repr, 60_000_000), (len, 20_000_000)):
        loop._on_slow(function, 1, duration_ns)
    found = {each["name"]: (each["count"], each["duration_s"], each["total_s"]) for each in sampler.collect()["slow"]}
    assert found == {"len": (2, 0.09, pytest.approx(0.11)), "repr": (1, 0.06, 0.06)}
    sampler.end()


async def test_slow_tasks_are_one_row_for_a_function(loop):
    """Tasks with default names such as ``Task-1014`` share a row. Tasks with other names share a row only if the names
    differ in nothing but numbers.
    """
    sampler = _sampling.Sampler(loop)
    sampler.collect()

    async def handle():
        pass

    names = [None, None, "worker 1", "worker 2", "nightly"]
    made = [loop.create_task(handle(), name=name) for name in names]
    for task in made:
        loop._on_slow(task, 1, 20_000_000)
    await asyncio.gather(*made)
    handle_name = handle.__qualname__
    found = {each["name"]: (each["kind"], each["count"], each["place"]) for each in sampler.collect()["slow"]}
    place = f"{__file__}:{handle.__code__.co_firstlineno}"
    assert found == {
        handle_name: ("task", 2, place),
        f"worker * ({handle_name})": ("task", 2, place),
        f"nightly ({handle_name})": ("task", 1, place),
    }
    sampler.end()


async def test_unread_output_is_shown(loop, serve):
    """The first screen shows how much memory unread output takes. No coro or task waits for such output to be read, so
    the list of waits does not show it.
    """

    class Talker(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(bytes(20_000_000))

    server = await serve(Talker, HOST, 0)
    with socket.create_connection(address_of(server), 10):
        await until(lambda: loop._open_connections == 1, "the connection")
        assert _sampling.Sampler(loop).collect("memory")["memory"]["write_buffers"] > 1_000_000
    for transport in list(_tree._transports(loop)):
        transport.abort()
    await until(lambda: loop._open_connections == 0, "its end")


async def test_a_tree_of_many_lines_is_cut(loop, monkeypatch):
    whole = _sampling.Sampler(loop).collect("tree")["tree"]
    count = len(whole) - 1  # the first line is the heading
    monkeypatch.setattr(_sampling, "_MAX_LINES", count)
    lines = _sampling.Sampler(loop).collect("tree")["tree"]
    assert (len(lines), lines[0]) == (count + 1, whole[0])
    assert not lines[-1].startswith("only the first")
    monkeypatch.setattr(_sampling, "_MAX_LINES", count - 1)
    lines = _sampling.Sampler(loop).collect("tree")["tree"]
    assert (len(lines), lines[0], lines[-1]) == (count + 1, whole[0], f"only the first {count - 1} lines are shown")


async def test_helpers(loop, path, tasks):
    with backdoor.serve(path), await call(path) as caller:
        lines = (await caller.ask("statistics()")).splitlines()
        assert [line.split()[0] for line in lines[:3]] == ["iterations", "polls", "events"]
        answer = await caller.ask("await top(0.05)")
        assert "a second" in answer
        assert "callback_durations" in answer
        rows = [line.split() for line in answer.splitlines()]
        assert [len(row) for row in rows if row and row[0] in ("iterations", "ready", "most_ready")] == [3, 2, 2], (
            "gauges have no rate"
        )
        assert loop._measuring.listeners == []
    await until(lambda: len(asyncio.all_tasks()) == 1, "the session to end")


def test_a_listener_that_is_not_a_back_door(path, start):
    pytest.importorskip("rich")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        top = start(path, 80)
        accepted, _ = listener.accept()
        accepted.sendall(b"hello\n\0")
        accepted.close()
        assert top.terminal.finish() != 0
