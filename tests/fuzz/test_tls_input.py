"""Arbitrary input for a TLS transport: records that are cut anywhere, corrupted, repeated, oversized or of an unknown
type; close_notify in any order; alerts, KeyUpdate, tickets and renegotiation. The protocol must see the same as on
asyncio.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")
from fuzz.budget import QUICK, Budget  # noqa: E402
from fuzz.tls_model import HAS_LIBRARY, TlsModel  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

# From Python 3.14 on, hypothesis may warn about its own random generator.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")

CUTS = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 21, 22, 23, 100, 1000, 16_384]), max_size=6)
WHERE = st.one_of(st.integers(0, 40), st.integers(0, 100_000))


def record(kind: int, version: int, length: int, body: bytes) -> bytes:
    return struct.pack(">BHH", kind, version, length) + body


ALERTS = st.builds(
    lambda level, what: record(21, 0x303, 2, bytes([level, what])), st.integers(0, 3), st.integers(0, 255)
)
RECORDS = st.one_of(
    st.builds(
        # These records are whole, because on asyncio OpenSSL checks the head of a record before the rest arrives, but
        # grapeshot lets OpenSSL read only whole records. A record that is longer than TLS allows may be incomplete,
        # because grapeshot, too, passes the bytes of such a record to OpenSSL at once.
        lambda kind, version, length, body: record(
            kind, version, len(body) if length is None else length, body.ljust(min(length or 0, 20_000), b"-")
        ),
        st.sampled_from([0, 20, 21, 22, 23, 24, 25, 128, 255]),
        st.sampled_from([0x303, 0x301, 0x304, 0x300, 0x200, 0]),
        st.sampled_from([None, None, 0, 1, 16_384, 16_385, 16_640, 18_433, 65_535]),
        st.one_of(st.binary(max_size=40), st.sampled_from([bytes(16_640), bytes(18_432)])),
    ),
    ALERTS,
    st.just(record(20, 0x303, 1, b"\1")),
    st.sampled_from([b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-any\r\n", b"\x80\x2e\x01\x03\x01"]),
    st.binary(max_size=60),
)
CHANGES = st.one_of(
    st.tuples(st.just("corrupt"), WHERE, st.integers(1, 255)),
    st.tuples(st.just("insert"), WHERE, RECORDS),
    st.tuples(st.just("drop"), WHERE, st.integers(1, 3000)),
    st.tuples(st.just("repeat"), WHERE),
    st.tuples(st.just("replace"), WHERE, RECORDS),
)
ACTIONS = st.sampled_from(["write", "close", "abort", "pause_reading", "resume_reading"])
STEPS = st.one_of(
    st.tuples(st.just("peer_writes"), st.sampled_from([1, 100, 16_384, 16_385, 70_000])),
    st.tuples(st.just("peer_writes"), st.sampled_from([1, 100, 16_384, 16_385, 70_000])),
    st.tuples(
        st.sampled_from(
            "nothing hold release peer_closes_tls peer_fails renegotiate new_ticket peer_ends peer_closes".split()
        )
    ),
    st.tuples(st.just("key_update"), st.booleans()),
    st.tuples(st.just("plan"), st.one_of(ACTIONS, st.just("raise"))),
    st.tuples(st.just("own"), st.one_of(ACTIONS, st.just("write much"))),
)
SPOILS = st.one_of(st.just(()), st.just(()), st.just(()), CHANGES)
HANDSHAKES = st.tuples(CUTS, st.integers(-20, 3), CHANGES)


def play(loop_kind: str, side: str, version: str, handshake: Any, steps: Any) -> TlsModel:
    model = TlsModel(loop_kind, side, version)
    try:
        model.shake_hands(*handshake)
        for step, spoil, cuts in steps:
            model.step(*step, spoil=spoil, cuts=cuts)
        model.step("release", cuts=[])
    finally:
        model.finish()
    return model


def failed_in(model: TlsModel) -> int | None:
    """Return the number of the step in which the connection has failed, or None."""
    number = 0
    for entry in model.log:
        number += entry[0] == "step"
        if entry[0] in {"lost", "not made"} and entry[1] not in {"NoneType", "cancelled"}:
            return number
    return None


def events(model: TlsModel) -> list[Any]:
    """Return the protocol's events. If the peer's bytes were changed, leave out details that depend on random bytes."""
    seen = [entry for entry in model.log if entry[0] not in {"step", "state", "handshake", "data"}]
    if not model.has_spoiled:
        return seen
    # A changed certificate may be invalid, or valid but not trusted. The latter raises a subclass of SSLError.
    return [tuple(str(part).replace("SSLCertVerificationError", "SSLError") for part in entry[:2]) for entry in seen]


def difference(ours: TlsModel, theirs: TlsModel) -> Any:
    """Return what the two protocols have seen if it differs, and None otherwise. If the connection has failed, one
    protocol may have received less of the data than the other.
    """
    logs = ours.log, theirs.log
    failures = failed_in(ours), failed_in(theirs)
    if theirs.has_paused and {("step", "peer_ends"), ("step", "peer_closes")} & set(theirs.log):
        # While reading is paused, grapeshot reports the end of the stream if no data comes before it; asyncio waits.
        ours.log, theirs.log = ([each for each in log if each[0] in {"made", "data"}] for log in logs)
    shorter, longer = sorted([bytes(ours.data), bytes(theirs.data)], key=len)
    if not longer.startswith(shorter) or ours.lost > 1 or (failures == (None, None) and shorter != longer):
        return "data", len(ours.data), len(theirs.data), *logs
    if failures[0] != failures[1]:
        if theirs.has_closed:
            # After close(), the connection may fail on one loop only: on asyncio because of data that the peer sends
            # before it gets the close_notify, and on grapeshot because of an alert that refuses a renegotiation.
            return None
        # On asyncio, OpenSSL may find a fault in the head of a record before the rest arrives; grapeshot waits for the
        # rest. If the stream ends while reading is paused, grapeshot immediately processes the data that came before
        # the end; asyncio waits until reading is resumed.
        later = failures[1] is not None and (failures[0] is None or failures[0] > failures[1])
        return None if theirs.has_spoiled and (later or theirs.has_paused) else logs
    if failures != (None, None):
        return None if events(ours) == events(theirs) else logs
    return None if ours.log == theirs.log else logs


def fuzz(budget: Budget, examples: int = 200) -> None:
    logger = logging.getLogger("asyncio")
    before, logger.disabled = logger.disabled, True

    @budget.settings(examples)
    @hypothesis.given(
        st.sampled_from(["client", "server"]),
        st.sampled_from(["1.3", "1.2"]),
        HANDSHAKES,
        st.lists(st.tuples(STEPS, SPOILS, CUTS), max_size=8),
    )
    def check(side: str, version: str, handshake: Any, steps: Any) -> None:
        for _ in range(10):  # the effect of a change depends on random bytes, so one try without a difference is enough
            ours, theirs = (play(kind, side, version, handshake, steps) for kind in ("grapeshot", "asyncio"))
            found = difference(ours, theirs)
            if found is None:
                break
        assert found is None, found

    try:
        budget.seeded(check)()
    finally:
        logger.disabled = before


def test_the_same_as_asyncio():
    fuzz(QUICK, 300)


WHOLE: Any = ([], -1, ())


def test_a_difference_is_noticed():
    few, more = ([(("peer_writes", length), (), [])] for length in (5, 6))
    assert (
        difference(play("grapeshot", "client", "1.3", WHOLE, few), play("asyncio", "client", "1.3", WHOLE, few)) is None
    )
    assert difference(play("grapeshot", "client", "1.3", WHOLE, few), play("asyncio", "client", "1.3", WHOLE, more))


@pytest.mark.skipif(not HAS_LIBRARY, reason="this Python does not load OpenSSL as a separate library")
@pytest.mark.parametrize("step", [("key_update", True), ("key_update", False), ("new_ticket",)])
def test_data_after_post_handshake_messages(loop_kind, step):
    model = play(
        loop_kind, "client", "1.3", WHOLE, [(("hold",), (), []), (step, (), []), (("peer_writes", 100), (), [])]
    )
    assert model.data == bytes(100) or model.data == b"t" + bytes(100)
    assert failed_in(model) is None
