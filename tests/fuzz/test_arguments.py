"""Arbitrary arguments for every native function lead to an exception or a result, never to a crash, a hang or a leak.

hypothesis generates the text of calls, and another process evaluates them (native.py). Each example runs in a child of
that process, so that a crash is just a failure, which hypothesis reduces to the shortest calls that cause it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")
from fuzz.budget import QUICK, Budget  # noqa: E402
from fuzz.native import Function  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

# From Python 3.14 on, hypothesis may warn about its own random generator.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")

LEFT = ("left behind", "descriptors left", "references left")
TESTS = str(Path(__file__).resolve().parents[1])
PLAIN = (
    "None True False 0 1 -1 2 5 4096 -5 0.0 -0.5 0.001 1e-320 1e308 nan inf -inf huge -huge 2**31 2**31-1 2**32 2**62 "
    "2**63 2**63-1 -2**63 2**64 0.25 text surrogate nul '' 'a' data b'' much array view strided [] () {} [data,array] "
    "[huge] (data,) recursive() {'a':1} thing object error ValueError KeyboardInterrupt function nothing nothing() "
    "context() address ('127.0.0.1',2**20) ('\\ud800',1) ('::1',1,2,3) 'localhost' '127.0.0.1' socket "
    "client_context server_context protocol"
).split()
OBJECTS = (
    "loop handle timer future task sock other_sock fd file stream datagram read_pipe write_pipe listener tls reader "
    "reader_protocol writer coroutine raw_loop"
).split()
COROS = (
    "a_coro a_semaphore a_lock a_mutex a_condition a_fifo a_channel a_thread_lock a_thread_rlock a_thread_queue "
    "coro_sock"
).split()
NAMES = "context timeout data callback name nbytes family item self".split()
FITTING = {
    "sock": "sock",
    "fd": "fd sock other_sock",
    "callback": "function Evil('end') Evil('close')",
    "fn": "function",
    "function": "function",
    "context": "context() None",
    "protocol": "protocol EvilProtocol('raise') EvilProtocol('close') EvilBuffers('wrong')",
    "pipe": "file sock",
    "data": "data much view",
    "buf": "array strided",
    "waiter": "future None",
    "future": "future",
    "sslcontext": "client_context server_context",
    "transport": "stream tls",
    "coro": "nothing() a_coro",
    "timeout": "0 0.001",
}
DEEDS = st.sampled_from("raise close stop collect forget wrong end abort none".split())


class Native:
    """The process that evaluates the calls."""

    def __init__(self) -> None:
        path = os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.native"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.functions = [Function(*each) for each in self.answer()]

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def problem_of(self, place: str, statements: list[str]) -> str | None:
        """Return what goes wrong. On a busy machine, the signal that ends a blocking call may arrive at any point and
        cause a leftover, so a leftover counts only if each of three attempts leaves something. Other problems count at
        once.
        """
        assert self.process.stdin is not None
        problem: str | None = None
        for _ in range(3):
            print(json.dumps([place, statements]), file=self.process.stdin, flush=True)
            problem = self.answer()
            if problem is None or not problem.startswith(LEFT):
                break
        return problem

    def close(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()


@contextlib.contextmanager
def native() -> Iterator[Native]:
    process = Native()
    try:
        yield process
    finally:
        process.close()


EVIL = st.one_of(
    DEEDS.map(lambda deed: f"Evil({deed!r})"),
    st.tuples(DEEDS, st.sampled_from(["-1", "2**62", "huge", "3"])).map(lambda each: f"Evil({each[0]!r}, {each[1]})"),
    DEEDS.map(lambda deed: f"EvilProtocol({deed!r})"),
    st.tuples(DEEDS, st.sampled_from(["0", "1", "300000"])).map(lambda each: f"EvilBuffers({each[0]!r}, {each[1]})"),
    DEEDS.map(lambda deed: f"EvilOwner({deed!r})"),
    st.just("EvilText('name')"),
)


def scripts(functions: list[Function]) -> Any:
    """Generate where the calls are made, and the text of each call."""
    has_coros = any(each.owner == "a_coro" for each in functions)
    objects = OBJECTS + COROS * has_coros
    single = st.one_of(st.sampled_from(PLAIN), st.sampled_from(objects), EVIL)
    pair = st.tuples(single, single)
    argument = st.one_of(
        single,
        single,
        single,
        single,
        pair.map(lambda items: f"[{items[0]}, {items[1]}]"),
        pair.map(lambda items: f"({items[0]}, {items[1]})"),
    )
    # For a parameter whose name is in FITTING, some arguments are taken from the valid ones there, so that the function
    # goes on to check its other arguments.
    fitting = {name: st.one_of(st.sampled_from(texts.split()), argument) for name, texts in FITTING.items()}

    @st.composite
    def calls(draw: Any) -> str:
        function = draw(st.sampled_from(functions))
        given = []
        if function.owner is not None:
            # In one of 20 cases an object of any type.
            given.append(function.owner if draw(st.integers(0, 19)) else draw(st.sampled_from(objects)))
        for index, name in enumerate(function.names):
            if name == "*":
                given += draw(st.lists(argument, max_size=3))
            elif index < function.needed:
                given.append(draw(fitting.get(name, argument)))
            elif draw(st.booleans()):
                given.append(f"{name}={draw(fitting.get(name, argument))}")
        match draw(st.integers(0, 20)):
            case 0:
                given.insert(0, draw(argument))
            case 1:
                given = given[:-1]
            case 2:
                given.append(f"{draw(st.sampled_from(NAMES))}={draw(argument)}")
            case 3:
                given.append(f"**{{{draw(argument)}: 1}}")
        given.sort(key=lambda each: (each[:2] == "**", each.partition("=")[0].isidentifier() and "=" in each))
        return f"{function.text}({', '.join(given)})"

    places = st.sampled_from(["outside", "callback", "coro"] if has_coros else ["outside", "callback"])
    return st.tuples(places, st.lists(calls(), min_size=1, max_size=6))


def fuzz(budget: Budget, examples: int = 200) -> None:
    with native() as process:

        @budget.settings(examples)
        @hypothesis.given(scripts(process.functions))
        def check(script: tuple[str, list[str]]) -> None:
            problem = process.problem_of(*script)
            assert problem is None, problem

        budget.seeded(check)()


def test_any_arguments():
    fuzz(QUICK)


def test_every_function_once():
    """Call each function three times, with different numbers of arguments. Random calls may miss functions."""
    with native() as process:
        assert len(process.functions) > 300
        statements = []
        for function in process.functions:
            given = [function.owner] if function.owner is not None else []
            for more in [], ["Evil('raise')"] * max(1, function.needed), ["huge", "nan", "data", "thing", "text"]:
                statements.append(f"{function.text}({', '.join(given + more)})")
        for start in range(0, len(statements), 20):
            problem = process.problem_of("callback", statements[start : start + 20])
            assert problem is None, "\n".join([*statements[start : start + 20], problem])


@pytest.fixture(scope="module")
def faulty() -> Iterator[Native]:
    """A process with functions that have faults."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FUZZ_FAULTS", "1")
        monkeypatch.setenv("FUZZ_HANG_S", "0.5")
        process = Native()
    yield process
    process.close()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("core._coro_panic(function)", "a panic"),
        ("kill()", "exit status -6"),
        ("keep_descriptor()", "descriptors left open"),
        ("keep_reference()", "references left"),
        ("keep_transport()", "left behind"),
        ("hang()", "Timeout"),
        ("set_error()", "SystemError"),
    ],
)
def test_a_fault_is_noticed(statement, expected, faulty):
    assert expected in str(faulty.problem_of("callback", [statement]))
