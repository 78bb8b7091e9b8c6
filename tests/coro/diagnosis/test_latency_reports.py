"""Which long runs of coros and callbacks are reported (only those that delay something), the text of a report, and how
to switch reports off.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import subprocess
import sys
import time

import pytest
from support import coro_is_available, gil_is_enabled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(not gil_is_enabled(), reason="without a GIL there is no watchdog (test_free_threading.py)"),
]
if coro_is_available():
    import grapeshot
    from grapeshot import coro
    from grapeshot._core import _coro_latency_hint as HINT

CAP_S = 20
VARIABLE = "GRAPESHOT_LATENCY_WARNING"


class Records(logging.Handler):
    """The messages of the asyncio logger about one coro."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("coro 'in the way'"):
            self.texts.append(text)

    def spin_until_reported(self):
        """Keep busy until there is a record. The second record comes when the run ends."""
        end = time.monotonic() + CAP_S
        while not self.texts:
            assert time.monotonic() < end


@pytest.fixture
def records():
    before = coro.set_latency_warning(0.001)
    logger, handler = logging.getLogger("asyncio"), Records()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    coro.set_latency_warning(before, always=False, stack=False)


def spin(seconds=0.25):
    """Keep busy for longer than the watchdog needs for two checks."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def in_the_way(function, *args):
    return coro.spawn(function, *args, name="in the way").join()


class Pair:
    """Two ends of a connection, and a coro that reads from one of them."""

    def __init__(self):
        self.near, self.far = coro.socketpair()
        self.reader = coro.spawn(self.near.recv, 1)
        coro.yield_slice()

    def close(self):
        self.far.send(b"x")
        self.reader.join()
        self.near.close()
        self.far.close()


# ------------------------------------------------------------------ operations that a long run delays


async def come_to_end():
    await asyncio.sleep(0)


def waiting_coro(_):
    return coro.spawn(coro.yield_slice).join


def waiting_task(_):
    task = asyncio.ensure_future(come_to_end())
    return lambda: coro.await_(task)


def due_timer(_):
    asyncio.get_running_loop().call_later(0, int)
    return lambda: coro.sleep_relative(0.001)


def ready_descriptor(pair):
    pair.far.send(b"x")
    return lambda: None


def asyncio_reader(pair):
    loop = asyncio.get_running_loop()
    loop.add_writer(pair.far.fileno(), int)
    return lambda: loop.remove_writer(pair.far.fileno())


@pytest.mark.parametrize("start", [waiting_coro, waiting_task, due_timer, ready_descriptor, asyncio_reader])
def test_a_run_that_delays_others_is_reported(records, start):
    def work(pair):
        end = start(pair)
        records.spin_until_reported()
        return end

    def main():
        pair = Pair()
        in_the_way(work, pair)()
        pair.close()

    coro.run(main)
    first, last = records.texts
    assert "in the way' has run for" in first
    assert "in the way' ran for" in last


def test_a_run_that_delays_a_transport_is_reported(records):
    class Protocol(asyncio.Protocol):
        def data_received(self, data):
            self.has_data = True

    def main():
        near, far = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, protocol = coro.await_(loop.create_connection(Protocol, sock=near))
        coro.sleep_relative(0.001)
        in_the_way(lambda: far.send(b"x") and records.spin_until_reported())
        wait_in_coro(lambda: hasattr(protocol, "has_data"))
        transport.close()
        far.close()

    def wait_in_coro(condition):
        end = time.monotonic() + CAP_S
        while not condition():
            assert time.monotonic() < end
            coro.sleep_relative(0.001)

    coro.run(main)
    assert len(records.texts) == 2


def test_a_run_that_delays_nothing_is_not_reported(records):
    """Other coros wait for later timers and for descriptors without data. Data has arrived at one descriptor, but no
    coro waits for it.
    """

    def main():
        pair, unread = Pair(), Pair()
        unread.far.send(b"xy")
        unread.reader.join()
        sleeping = coro.spawn(coro.sleep_relative, 1000)
        cancelled = asyncio.get_running_loop().call_later(0, int)
        cancelled.cancel()
        coro.yield_slice()
        in_the_way(spin)
        sleeping.shutdown()
        pair.close()
        unread.reader = coro.spawn(unread.near.recv, 1)
        unread.close()

    coro.run(main)
    assert records.texts == []


def test_time_in_which_nothing_waits_does_not_count(records):
    def work():
        spin()
        assert records.texts == []
        other = coro.spawn(coro.yield_slice)
        records.spin_until_reported()
        other.join()

    coro.run(in_the_way, work)
    first, _ = records.texts
    # The message says how long the coro has run, not how long it has delayed others. (The time is rounded, and the
    # clocks differ a little.)
    assert float(first.split(" has run for ")[1].split()[0]) >= 0.2


def test_a_run_that_keeps_the_gil_is_judged_at_its_end(records):
    def work(is_in_the_way):
        other = coro.spawn(coro.yield_slice) if is_in_the_way else None
        sum(range(3_000_000))  # keeps the GIL
        # The run ends here and is judged. The timer of a shorter sleep might be due then, and would count as delayed.
        coro.sleep_relative(0.2)
        if other is not None:
            other.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(CAP_S)  # the watchdog waits for the GIL
    try:
        coro.run(in_the_way, work, False)
        assert records.texts == []
        coro.run(in_the_way, work, True)
    finally:
        sys.setswitchinterval(before)
    assert " ran for " in records.texts[0]


def test_always_reports_all(records):
    assert coro.set_latency_warning(0.001, always=True) == pytest.approx(0.001)
    coro.set_latency_warning(0.001)  # sets only the limit, so `always` stays
    coro.run(in_the_way, records.spin_until_reported)
    assert len(records.texts) == 2


def test_callbacks_of_a_loop_without_coros(records):
    """The thread has no coros. It is watched because it has set a limit."""

    class Texts(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    def step(is_in_the_way):
        if is_in_the_way:
            loop.call_soon(int)
            end = time.monotonic() + CAP_S
            while not [text for text in texts if "step" in text]:
                assert time.monotonic() < end
        else:
            spin()
        loop.call_later(0.2, loop.stop)  # an earlier timer might be due when `step` ends, and would count as delayed

    texts = []
    loop = grapeshot.new_event_loop()
    handler = Texts()
    logging.getLogger("asyncio").addHandler(handler)
    try:
        for is_in_the_way in (False, True):
            loop.call_soon(step, is_in_the_way)
            loop.run_forever()
            assert bool([text for text in texts if "step" in text]) == is_in_the_way
    finally:
        logging.getLogger("asyncio").removeHandler(handler)
        loop.close()


# ------------------------------------------------------------------ the text of a report


def test_a_report_is_one_line_that_tells_how_to_switch_it_off(records):
    coro.set_latency_warning(0.001, always=True)
    coro.run(in_the_way, records.spin_until_reported)
    for text in records.texts:
        assert "\n" not in text
        assert text.endswith(HINT)
    assert "coro.set_latency_warning(" in HINT
    assert VARIABLE in HINT


def test_a_stack_has_no_lines_of_the_import_system(records, tmp_path, monkeypatch):
    (tmp_path / "slow_module_of_a_test.py").write_text("import slow_part_of_a_test")
    (tmp_path / "slow_part_of_a_test.py").write_text("from builtins import spin_in_test\nspin_in_test()")
    monkeypatch.setattr("builtins.spin_in_test", records.spin_until_reported, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    coro.set_latency_warning(0.5, always=True, stack=True)  # longer than the import system needs to find the modules
    try:
        coro.run(in_the_way, importlib.import_module, "slow_module_of_a_test")
    finally:
        for name in ("slow_module_of_a_test", "slow_part_of_a_test"):
            sys.modules.pop(name, None)
    head, title, *stack = records.texts[0].split("\n")
    assert head.endswith(HINT)
    assert title == "Stack (most recent call last):"
    assert "<frozen importlib" not in head
    files = [line.split('"')[1] for line in stack if line.startswith('  File "')]
    own = [os.path.basename(file) for file in files if file.startswith(str(tmp_path))]
    assert own == ["slow_module_of_a_test.py", "slow_part_of_a_test.py"]
    assert not [file for file in files if file.startswith("<frozen importlib")]


# ------------------------------------------------------------------ programs


def run_program(tmp_path, code, *options, variable=None):
    path = tmp_path / "program.py"
    path.write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if variable is not None:
        environment[VARIABLE] = variable
    command = [sys.executable, "-m", "grapeshot.coro", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


SLOW_START = """
import time
end = time.monotonic() + 0.7
while time.monotonic() < end:
    pass
"""
# Keep busy until the first record, for at most 30 seconds. The second record comes when the run ends.
UNTIL_REPORTED = """
import logging, time

class Handler(logging.StreamHandler):
    has_one = False

    def emit(self, record):
        super().emit(record)
        Handler.has_one = True

logging.getLogger("asyncio").addHandler(Handler())
end = time.monotonic() + 30
while not Handler.has_one and time.monotonic() < end:
    pass
"""
# Starts a thread that wakes after 1 ms. In these programs it is a coro, so the main thread delays it by keeping busy.
BEFORE = "import threading, time; threading.Thread(target=time.sleep, args=(0.001,)).start()"


def test_a_slow_start_is_silent(tmp_path):
    done = run_program(tmp_path, SLOW_START)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "variable", "code", "lines"),
    [
        ((), None, BEFORE + UNTIL_REPORTED, 2),
        ((), "0", BEFORE + SLOW_START, 0),
        (("--latency-warning=0",), None, BEFORE + SLOW_START, 0),
        (("--latency-warning=0.1,always",), "0", UNTIL_REPORTED, 2),
        ((), "0.1, always", UNTIL_REPORTED, 2),
        (("--latency-warning=1000",), "0.1", BEFORE + SLOW_START, 0),
    ],
)
def test_option_and_variable(tmp_path, options, variable, code, lines):
    done = run_program(tmp_path, code, *options, variable=variable)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == lines
    assert done.stderr.count(HINT) == lines


def test_the_stack_on_request(tmp_path):
    done = run_program(tmp_path, UNTIL_REPORTED, "--latency-warning=0.1,stack,always")
    assert "Stack (most recent call last):\n" in done.stderr


@pytest.mark.parametrize("text", ["soon", "", "-1", "nan", "0.1,alway", "0.1 stack"])
def test_wrong_options(tmp_path, text):
    done = run_program(tmp_path, "print('ran')", f"--latency-warning={text}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"--latency-warning: expected SECONDS[,stack][,always], such as 0.5 or 0.5,stack (0: off), got {text!r}\n"
    )


def test_a_wrong_variable_is_a_warning(tmp_path):
    done = run_program(tmp_path, "print('ran')", variable="0.1,alway")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert f"RuntimeWarning: {VARIABLE}: expected SECONDS[,stack][,always]" in done.stderr
