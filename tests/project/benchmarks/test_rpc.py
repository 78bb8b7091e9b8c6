"""The harness that compares calls between processes: every installed peer answers and is measured."""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks import tables
from benchmarks.compare import RESULTS
from benchmarks.rpc import cases, peers, programs
from benchmarks.rpc.__main__ import SUITE

PACKAGES = {peers.GRPC: "grpc", peers.RPYC: "rpyc", peers.RPYC_THREADS: "rpyc"}
COMMITTED = RESULTS / "rpc.json"


@pytest.mark.parametrize("peer", peers.PEERS)
def test_a_peer_is_measured(peer):
    for package in ("msgspec", PACKAGES.get(peer, "msgspec")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if peer == peers.COROS:
        pytest.importorskip("grapeshot.coro", exc_type=ImportError)
    sample = programs.call(peer, callers=3, size=100, cpu_s=0.01)
    assert sample["rounds"] == programs.ROUNDS
    assert sample["cpu_us"] > 0
    assert min(sample["client_us"], sample["server_us"]) > 0


def test_a_missing_peer_is_named(monkeypatch, capsys):
    monkeypatch.setitem(peers._NEEDS, peers.GRPC, "a_package_that_nobody_has")
    assert peers.available([peers.GRPC]) == ([], {peers.GRPC: peers.why_missing(peers.GRPC)})
    assert "grpc.aio IS LEFT OUT" in capsys.readouterr().err


def test_every_case_has_all_peers():
    assert {case.only for case in SUITE.cases} == {cases.ALL}
    assert set(cases.ALL) == set(peers.PEERS) == set(peers._NEEDS)


def test_the_committed_table_shows_the_committed_numbers():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert tables.markdown(committed) + "\n" == COMMITTED.with_suffix(".md").read_text(encoding="utf-8")
    assert [case["name"] for case in committed["cases"]] == [case.name for case in SUITE.cases]
