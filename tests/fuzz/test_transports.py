"""State machines: random steps drive a transport on asyncio's loop and one on grapeshot's. Both must log the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")
from fuzz.budget import QUICK, Budget  # noqa: E402
from fuzz.model import DATAGRAMS, PIPES, REACTIONS, STREAMS, Model  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule  # noqa: E402

# From Python 3.14 on, hypothesis may warn about its own random generator.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")

SLOW_S = 0.003
BYTES = st.sampled_from([b"", b"a", b"five!", bytes(range(100)), b"x" * 1500])
DATA = st.one_of(BYTES, BYTES.map(bytearray), BYTES.map(memoryview), st.sampled_from([None, "text", 5]))
LIMIT = st.sampled_from([None, 0, 1, 1000, 65_536, -1, 2**40])
RARELY = st.integers(0, 5)
EVENTS = st.sampled_from(["data", "eof", "pause", "resume", "lost", "error"])
# The steps that one callback of the loop may do together. None of them closes the peer: asyncio sends at once what a
# callback writes, but grapeshot sends it when the callback returns, and by then the peer would be gone.
STEPS = [
    ("write", b"abc"),
    ("write", b"d" * 3000),
    ("write_eof",),
    ("close",),
    ("abort",),
    ("pause_reading",),
    ("resume_reading",),
    ("set_protocol", False),
    ("limits", 0, 0),
    ("limits", None, None),
    ("peer_sends", b"hello"),
    ("peer_ends",),
    ("write_soon", b"soon"),
]


def first_difference(found: list[Any], expected: list[Any]) -> Any:
    for index in range(max(len(found), len(expected))):
        if found[index : index + 1] != expected[index : index + 1]:
            return {
                "before": found[max(0, index - 5) : index],
                "grapeshot": found[index : index + 4],
                "asyncio": expected[index : index + 4],
            }
    return None


class Rules(RuleBasedStateMachine):
    """The rules for all kinds of transport."""

    kinds: tuple[str, ...]
    models: tuple[Model, ...] = ()

    @initialize(choice=st.integers(0, 5), is_buffered=st.booleans())
    def begin(self, choice: int, is_buffered: bool) -> None:
        kind = self.kinds[choice % len(self.kinds)]
        self.start = (kind, is_buffered and kind not in DATAGRAMS)
        self.steps: list[tuple[Any, ...]] = []
        self.models = self.make(0.0)

    def make(self, pace_s: float) -> tuple[Model, ...]:
        models: list[Model] = []
        try:
            for loop_kind in ("grapeshot", "asyncio"):
                models.append(Model(loop_kind, *self.start, pace_s))
        except BaseException:
            for model in models:
                model.finish()
            raise
        return tuple(models)

    def both(self, *step: Any) -> None:
        self.steps.append(step)
        for model in self.models:
            model.step(*step)
        if self.difference() is not None:  # a busy machine delivers late; a true difference shows at a slower pace, too
            self.teardown()
            self.models = self.make(SLOW_S)
            for each in self.steps:
                for model in self.models:
                    model.step(*each)
        difference = self.difference()
        assert difference is None, difference

    def difference(self) -> Any:
        return first_difference(*(model.log for model in self.models))

    @property
    def kind(self) -> str:
        return self.start[0]

    def teardown(self) -> None:
        models, self.models = self.models, ()
        outcomes = [model.finish() for model in models]
        assert all(outcome == ("calls of connection_lost", 1) for outcome in outcomes), outcomes

    def is_open(self) -> bool:
        return bool(self.models) and all(model.lost == 0 for model in self.models)

    @rule()
    def nothing(self) -> None:
        self.both("nothing")

    @precondition(is_open)
    @rule(event=EVENTS, action=st.sampled_from(REACTIONS))
    def plan(self, event: str, action: str) -> None:
        self.both("plan", event, action)

    @precondition(is_open)
    @rule(name=st.sampled_from(["close", "abort"]), chance=RARELY)
    def end(self, name: str, chance: int) -> None:
        self.both(name if chance == 0 else "protocol_name")

    @precondition(is_open)
    @rule(is_buffered=st.booleans())
    def set_protocol(self, is_buffered: bool) -> None:
        self.both("set_protocol", is_buffered and self.kind not in DATAGRAMS)


class Writing(Rules):
    """The rules for transports that write."""

    @precondition(Rules.is_open)
    @rule(steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=4))
    def together(self, steps: list[tuple[Any, ...]]) -> None:
        if self.kind in DATAGRAMS:  # grapeshot may deliver several datagrams in one iteration, asyncio delivers one
            steps = [step for step in steps if not step[0].startswith("peer")]
        if any(name in {"peer_closes", "peer_resets"} for name, *_ in self.steps):
            steps = steps[:1]  # a second write to a closed peer fails, but grapeshot sends both as one
        self.both("together", steps)

    @precondition(Rules.is_open)
    @rule(data=DATA)
    def write(self, data: Any) -> None:
        self.both("write", data)

    @precondition(Rules.is_open)
    @rule(data=BYTES, name=st.sampled_from(["write_soon", "write_and_cancel"]))
    def write_later(self, data: bytes, name: str) -> None:
        self.both(name, data)

    @precondition(Rules.is_open)
    @rule(high=LIMIT, low=LIMIT)
    def limits(self, high: Any, low: Any) -> None:
        self.both("limits", high, low)


class Stalling(Writing):
    """The rules for transports that must wait for their peer."""

    @precondition(Rules.is_open)
    @rule(name=st.sampled_from(["stall", "peer_reads", "has_written_all"]))
    def flow(self, name: str) -> None:
        self.both(name)

    @precondition(Rules.is_open)
    @rule(chance=RARELY)
    def write_eof(self, chance: int) -> None:
        if chance == 0:
            self.both("write_eof")

    @precondition(Rules.is_open)
    @rule(pieces=st.lists(BYTES.filter(len), max_size=4))  # asyncio would keep a list of empty pieces forever
    def write_lines(self, pieces: Any) -> None:
        self.both("write_lines", pieces)


class Receiving(Rules):
    """The rules for transports that read a stream."""

    @precondition(Rules.is_open)
    @rule(data=BYTES)
    def peer_sends(self, data: bytes) -> None:
        self.both("peer_sends", data)

    @precondition(Rules.is_open)
    @rule(name=st.sampled_from(["pause_reading", "resume_reading"]))
    def reading(self, name: str) -> None:
        self.both(name)

    @precondition(Rules.is_open)
    @rule(name=st.sampled_from(["peer_closes"]), chance=RARELY)
    def peer_closes(self, name: str, chance: int) -> None:
        if chance == 0:
            self.both(name)


class StreamMachine(Stalling, Receiving):
    kinds = STREAMS

    @precondition(Rules.is_open)
    @rule(answer=st.booleans())
    def keep_open(self, answer: bool) -> None:
        self.both("keep_open", answer)

    @precondition(Rules.is_open)
    @rule(name=st.sampled_from(["peer_ends", "peer_resets"]), chance=RARELY)
    def peer(self, name: str, chance: int) -> None:
        if chance == 0:
            self.both(name)


class DatagramMachine(Writing):
    kinds = DATAGRAMS

    @precondition(Rules.is_open)
    @rule(data=BYTES)
    def peer_sends(self, data: bytes) -> None:
        self.both("peer_sends", data)

    @precondition(Rules.is_open)
    @rule()
    def too_much(self) -> None:
        self.both("write", bytes(300_000))

    @precondition(Rules.is_open)
    @rule(address=st.sampled_from([None, ("127.0.0.1", 9), ("127.0.0.1", -1), "path", 5, ("::1", 9)]))
    def send_elsewhere(self, address: Any) -> None:
        self.both("send_elsewhere", address)

    @precondition(Rules.is_open)
    @rule(chance=RARELY)
    def peer_closes(self, chance: int) -> None:
        if chance == 0:
            self.both("peer_closes")


class ReadPipeMachine(Receiving):
    kinds = PIPES[:1]


class WritePipeMachine(Stalling):
    kinds = PIPES[1:]

    @precondition(Rules.is_open)
    @rule(chance=RARELY)
    def peer_closes(self, chance: int) -> None:
        if chance == 0:
            self.both("peer_closes")


MACHINES = {
    "streams": StreamMachine,
    "datagrams": DatagramMachine,
    "read_pipes": ReadPipeMachine,
    "write_pipes": WritePipeMachine,
}


def check(machine: type[Rules], budget: Budget, examples: int) -> None:
    logger = logging.getLogger("asyncio")
    before, logger.disabled = logger.disabled, True  # asyncio warns of writes after the end
    try:
        chosen = budget.seeded(type(machine.__name__, (machine,), {}))
        hypothesis.stateful.run_state_machine_as_test(
            chosen, settings=budget.settings(examples, stateful_step_count=30)
        )
    finally:
        logger.disabled = before


def fuzz(budget: Budget, examples: int = 200) -> None:
    for machine in MACHINES.values():
        check(machine, budget, examples)


@pytest.mark.parametrize("name", MACHINES)
def test_the_same_as_asyncio(name):
    check(MACHINES[name], QUICK, 80)


def test_a_difference_is_noticed(monkeypatch):
    sending = Model.do_peer_sends

    def send_more(model: Model, data: bytes) -> None:
        sending(model, data + b"!" * (model.loop_kind == "grapeshot"))

    monkeypatch.setattr(Model, "do_peer_sends", send_more)
    machine = ReadPipeMachine()
    machine.begin(0, False)
    with pytest.raises(AssertionError, match="grapeshot"):
        machine.peer_sends(b"a")
    machine.teardown()
