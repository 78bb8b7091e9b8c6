"""The programs of docs/scaling.md: several workers, of which some end or are killed while the others work."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import HOST

from tests.apps.daemons import RedisAddress
from tests.apps.pages import CAP_S, Command, of_page
from tests.apps.processes import Process
from tests.project.markdown import ROOT, Block

BLOCKS = of_page(ROOT / "docs" / "scaling.md")
OURS = "grapeshot._loop"
# What asyncio's streams report on 3.11 if the handler of a connection is cancelled when the program ends.
CANCELLED_HANDLER = re.compile(
    r"^Exception in callback StreamReaderProtocol\.connection_made\..*\n"
    r"handle: .*\n"
    r"(?:Traceback .*\n(?:  .*\n|\n)+SystemExit\n\nDuring handling .*\n\n)?"
    r"Traceback .*\n"
    r"(?:  .*\n)+"
    r"asyncio\.exceptions\.CancelledError$",
    re.MULTILINE,
)
SQUARES = sum(number * number for number in range(60))


def commands(run: str) -> list[Block]:
    return [block for block in BLOCKS if block.words.get("run") == run]


def only(found: list[Block], text: str) -> Block:
    [block] = [block for block in found if text in block.text]
    return block


def ask(port: int) -> list[str]:
    """Return the answer to one new connection: the loop, the process, and perhaps the thread."""
    with socket.create_connection((HOST, port), CAP_S) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
    if not answer:
        raise ConnectionResetError
    return answer.decode().splitlines()[-1].split()


def ask_until(port: int, is_enough: Callable[[list[list[str]]], bool], servers: list[Process]) -> list[list[str]]:
    """Ask on new connections until the answers satisfy the condition. If a worker dies before it has answered, ask
    again.
    """
    give_up_s = time.monotonic() + CAP_S
    answers: list[list[str]] = []
    while not is_enough(answers):
        output = [line for server in servers for line in server.output]
        assert time.monotonic() < give_up_s, f"{answers[-5:]}\n{output}"
        try:
            answers.append(ask(port))
        except ConnectionError:
            time.sleep(0.01)
    return answers


def pids(answers: list[list[str]]) -> set[int]:
    return {int(pid) for _, pid, *_ in answers}


def two_workers(port: int, servers: list[Process]) -> set[int]:
    """Ask until two processes have answered, each on our loop."""
    answers = ask_until(port, lambda answers: len(pids(answers)) == 2, servers)
    assert {loop for loop, *_ in answers} == {OURS}
    return pids(answers)


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn"])
def test_a_worker_that_is_killed_is_replaced(server: str, python: Path, tmp_path: Path) -> None:
    command = Command(only(commands("workers"), server), BLOCKS, python, tmp_path)
    with command.start() as process:
        victim, survivor = sorted(two_workers(command.port, [process]))
        os.kill(victim, signal.SIGKILL)
        answers = ask_until(command.port, lambda answers: len(pids(answers[-50:]) - {victim, survivor}) == 1, [process])
        assert {loop for loop, *_ in answers} == {OURS}
        process.process.terminate()
        assert process.process.wait(CAP_S) in {0, -15}, process.output


def test_two_gunicorns_share_a_port(python: Path, tmp_path: Path) -> None:
    """The first gunicorn ends while the second one serves. After that, no connection is refused."""
    command = Command(only(commands("workers"), "gunicorn"), BLOCKS, python, tmp_path)
    with command.start() as first:
        old = two_workers(command.port, [first])
        with command.start() as second:
            ask_until(command.port, lambda answers: bool(pids(answers) - old), [first, second])
            first.process.terminate()
            assert first.process.wait(CAP_S) == 0, first.output
            answers = [ask(command.port) for _ in range(20)]
            assert pids(answers).isdisjoint(old)
            assert {loop for loop, *_ in answers} == {OURS}


def test_processes_with_a_socket_each(python: Path, tmp_path: Path) -> None:
    [block] = commands("reuse_port")
    [one, other] = filter(None, (part.strip() for part in block.text.split("&")))
    assert one == other
    command = Command(block, BLOCKS, python, tmp_path, shlex.split(one))
    with command.start() as first, command.start() as second:
        servers = [first, second]
        assert two_workers(command.port, servers) == {first.process.pid, second.process.pid}
        first.process.kill()
        first.process.wait()
        answers = [ask(command.port) for _ in range(20)]
        assert pids(answers) == {second.process.pid}
        second.process.terminate()
        assert second.process.wait(CAP_S) in {0, -15}, second.output


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_a_program_with_a_loop_in_each_process_or_thread(python: Path, tmp_path: Path, kind: str) -> None:
    command = Command(only(commands("many"), kind), BLOCKS, python, tmp_path)
    with command.start() as server:
        answers = ask_until(command.port, lambda answers: len({thread for *_, thread in answers}) == 2, [server])
        assert {loop for loop, *_ in answers} == {OURS}
        assert len(pids(answers)) == {"processes": 2, "threads": 1}[kind]
        server.process.terminate()
        assert server.process.wait(CAP_S) == 0, server.output
    output = "\n".join(server.output)
    if sys.version_info < (3, 12):
        output = CANCELLED_HANDLER.sub("", output)
    assert "Traceback" not in output, output


# ---------------------------------------------------------------- engines


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def results(program: Process) -> dict[str, str]:
    """Check that a program ended well. Return the results that it has printed as `name: value` lines."""
    assert program.process.wait(2 * CAP_S) == 0, program.output
    program.close()
    return dict(line.split(": ", 1) for line in program.output if re.match("(loops|sum|processes) of", line))


def test_dask(python: Path, tmp_path: Path, started: ExitStack) -> None:
    scheduler, workers = (Command(block, BLOCKS, python, tmp_path) for block in commands("dask"))
    workers.use_port_of(scheduler)
    started.enter_context(scheduler.start()).wait_line("Scheduler at")
    nannies = started.enter_context(workers.start())
    program = started.enter_context(scheduler.start("dask_squares.py"))
    found = results(program)
    assert found == {"loops of the workers": f"{OURS} {OURS}", "sum of the squares": str(SQUARES)}
    nannies.wait_line("Restarting worker")


def test_ray(python: Path, tmp_path: Path, started: ExitStack) -> None:
    [block] = commands("ray")
    command = Command(block, BLOCKS, python, tmp_path)
    command.env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    found = results(started.enter_context(command.start()))
    assert found.pop("processes of the workers") == "3"
    assert found == {"loops of the workers": f"{OURS} {OURS}", "sum of the squares": str(SQUARES)}


def test_arq(python: Path, tmp_path: Path, started: ExitStack, redis_server: RedisAddress) -> None:
    [block] = commands("arq")
    command = Command(block, BLOCKS, python, tmp_path, numbers={"6379": redis_server.port})
    for _ in range(2):
        started.enter_context(command.start()).wait_line("Starting worker")
    found = results(started.enter_context(command.start("arq_squares.py")))
    assert found == {
        "loops of the workers": OURS,
        "sum of the squares": f"{sum(number * number for number in range(20))} by 2 workers",
    }
