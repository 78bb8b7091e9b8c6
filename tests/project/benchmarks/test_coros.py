"""The harness that compares coros with other libraries. Its programs run on grapeshot, and on greenlet and gevent if
these are installed. Its tables name the libraries.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from project.benchmarks import speed_table
from project.benchmarks.samples import CAP_S, comparison, outcome

from benchmarks import compare, tables
from benchmarks._load import MeasurementError
from benchmarks._machine import ROOT
from benchmarks.coros import across, cases, hubs, memory, programs, rounds, styles
from benchmarks.coros.__main__ import SUITE

pytest.importorskip("grapeshot.coro", reason="no coros on this interpreter", exc_type=ImportError)

PEERS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing"))
    for name in (cases.GREENLET, cases.GEVENT)
]
STYLES = [cases.OURS, *PEERS]
HANDING_OVER = ("semaphore", "fifo", "channel")


def made(kind, style, *options):
    command = [sys.executable, "-m", "benchmarks.coros.programs", kind, "--style", style, *options]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=True)
    return json.loads(outcome.stdout)


@pytest.fixture
def _no_hub():
    """Destroy gevent's hub of this thread afterwards. Otherwise it would stay, with the descriptors of its loop."""
    yield
    if (gevent := sys.modules.get("gevent")) is not None:
        gevent.get_hub().destroy(destroy_loop=True)


@pytest.mark.usefixtures("_no_hub")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [*programs.KINDS.values()], ids=lambda kind: kind.__name__)
def test_a_program_runs_in_every_style(kind, style, monkeypatch):
    if style == cases.GREENLET and kind.__name__ in HANDING_OVER:
        pytest.skip("greenlet has no semaphores, queues or channels")
    monkeypatch.setattr(programs, "THREADS", 30)
    monkeypatch.setattr(programs, "ROUND_TRIPS", 50)
    monkeypatch.setattr(programs, "MANY", 100)
    monkeypatch.setattr(programs, "APART_S", 0.02)
    made_here = styles.STYLES[style]()
    taken = made_here.run(kind, made_here)
    assert taken.operations > 0
    assert taken.cpu_ns > 0
    if style == cases.OURS:
        assert taken.early == 0


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", memory.KINDS)
def test_memory_is_measured_while_all_are_suspended(kind, style):
    sample = made(kind, style, "--threads", "2000")
    assert sample["threads"] == 2000
    assert sample["kib"] > 0.5


ACROSS = [(kind, who) for kind, measures in across.KINDS.items() for who in measures]


@pytest.mark.parametrize(("kind", "who"), ACROSS)
def test_each_way_between_blocking_code_and_asyncio_is_measured(kind, who):
    if who == cases.GREENBACK:
        pytest.importorskip("greenback")
    assert across.KINDS[kind][who](0.001)["cpu_ns"] > 0


@pytest.mark.parametrize("kind", hubs.KINDS)
def test_two_hubs_are_measured_where_threads_run_side_by_side(kind):
    sample = made(kind, cases.OURS, "--seconds", "0.01")
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        assert sample == {"unsupported": "NotImplementedError: the GIL is enabled"}
    else:
        assert sample["cpu_ns"] > 0
        assert sample["wall_ns"] > 0


def test_every_case_has_a_program_for_each_of_its_participants():
    names = {*programs.KINDS, *memory.KINDS, *across.KINDS, *hubs.KINDS}
    for case in SUITE.cases:
        kind = case.name.replace("-", "_")
        assert kind in names
        assert case.only[0] == tables.OURS
        for who in case.only:
            known = hubs.STYLES if kind in hubs.KINDS else {*across.KINDS.get(kind, {}), *styles.STYLES}
            assert who in known, (case.name, who)
        assert {bound.peer for bound in case.bounds} <= {None, *case.only}


def test_a_peer_that_is_not_installed_is_left_out_loudly(capsys, monkeypatch):
    monkeypatch.setattr(styles, "why_missing", lambda name: "no module" if name == "gevent" else None)
    assert styles.available(["grapeshot", "gevent"]) == (["grapeshot"], {"gevent": "no module"})
    assert "gevent IS LEFT OUT: no module" in capsys.readouterr().err


def test_a_missing_module_is_named():
    assert styles.why_missing("grapeshot") is None
    assert "no_such_module" in styles.why_missing("no_such_module")


def test_early_sleeps_fail_a_run_of_ours_and_are_named_for_others(monkeypatch):
    sample = rounds.summary([rounds.Taken(1000, 10, early=2), rounds.Taken(3000, 10)])
    assert (sample["cpu_ns"], sample["early"], sample["sleeps"]) == (200, 2, 20)
    monkeypatch.setattr(cases, "own_sample", lambda *_: sample)
    case = next(case for case in SUITE.cases if case.name == "sleepers")
    assert case.measure("gevent", cases.QUICK) == sample
    with pytest.raises(MeasurementError, match="2 of 20 sleeps ended too early"):
        case.measure("grapeshot", cases.QUICK)
    row = outcome("sleepers", {"grapeshot": [1], "gevent": [sample]})
    assert "- title of sleepers, on gevent: 2 of 20 sleeps ended too early." in tables.markdown(comparison(row))


def test_several_peers_stand_side_by_side_and_the_best_one_counts():
    taken = {"grapeshot": [10] * 15, "greenlet": [100, 50, 100] * 5, "gevent": [200] * 15}
    row = outcome("spawn", taken, peers=["greenlet", "gevent"])
    row["bounds"] = [{"at_most": 0.1, "peer": "greenlet"}, {"at_most": 0.04, "peer": "gevent"}]
    result = comparison(row, loops=["grapeshot", "greenlet", "gevent"], heading="# Coros", how="As it was done.")
    page = tables.markdown(result)
    assert page.startswith("# Coros\n")
    assert "As it was done." in page
    assert "| Calls | grapeshot | greenlet | gevent |" in page
    assert "**0.10** (0.10-0.20) of greenlet | ahead |" in page
    assert (
        "0.10 (0.10-0.20) of greenlet: ahead, bound 0.10 of greenlet: yes, bound 0.04 of gevent: no (+25%)"
        in tables.one_line(row)
    )


def test_a_case_names_its_participants():
    case = next(case for case in SUITE.cases if case.name == "semaphore")
    assert compare.participants(case, SUITE.loops) == ["grapeshot", "gevent"]


def test_the_speed_page_has_the_coros_once_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_table, "COROS", tmp_path / "coros.json")
    monkeypatch.setattr(speed_table, "BLOCKING", tmp_path / "blocking.json")
    assert speed_table.coros() == ""
    taken = comparison(outcome("spawn", {"grapeshot": [10], "gevent": [100]}, peers=["gevent"]), heading="# Coros")
    speed_table.COROS.write_text(json.dumps(taken))
    text = speed_table.coros()
    assert text.startswith("\n## Coros\n")
    assert "**0.10** (0.10-0.10) of gevent" in text
