"""The harness that compares name lookups: each installed style asks the DNS server and is measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from project.benchmarks.samples import CAP_S, comparison, outcome
from support import coro_is_available

from benchmarks import digest, tables
from benchmarks._load import MeasurementError
from benchmarks._machine import ROOT
from benchmarks.compare import RESULTS
from benchmarks.lookups import __main__ as lookups
from benchmarks.lookups import programs, server, styles

COMMITTED = RESULTS / "lookups.json"
LOOKUPS = 20
PACKAGES = {styles.GEVENT_THREADS: "gevent", styles.GEVENT_ARES: "gevent"}
STYLES = [styles.OURS, styles.CACHE, styles.COROS, "uvloop", "asyncio", *PACKAGES]

MEASURE = """
import json, sys
from benchmarks.lookups import programs, server, styles

with server.running():
    print(json.dumps(programs.measure(sys.argv[1], styles.STYLES[sys.argv[2]](), 0, int(sys.argv[3]))))
"""


@pytest.fixture(scope="module")
def _can_serve():
    if reason := server.why_impossible():
        pytest.skip(reason)


@pytest.mark.usefixtures("_can_serve")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", programs.KINDS)
def test_names_are_looked_up(kind, style):
    if style == styles.COROS and not coro_is_available():
        pytest.skip("no coros on this interpreter")
    if importlib.util.find_spec(PACKAGES.get(style, "uvloop" if style == "uvloop" else "json")) is None:
        pytest.skip(f"the package of {style} is not installed")
    code = "import sys; from benchmarks.lookups import server; sys.exit(server.run_inside(sys.argv[1:]))"
    inner = [sys.executable, "-c", MEASURE, kind, style, str(LOOKUPS)]
    command = [sys.executable, "-c", code, *inner]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert done.returncode == 0, done.stderr
    sample = json.loads(done.stdout)
    assert min(sample["cpu_us"], sample["wall_us"]) > 0
    # A lookup that asks the server makes two queries, for IPv4 and IPv6. With the kind "ten_names", a style that has a
    # cache makes no queries, because the warm-up has looked up the same ten names.
    if kind == "different_names":
        assert sample["queries"] == 2 * LOOKUPS
    elif style in (styles.CACHE, styles.GEVENT_ARES):
        assert sample["queries"] == 0
    elif style in ("asyncio", "uvloop", styles.GEVENT_THREADS):
        assert sample["queries"] == 2 * LOOKUPS
    else:
        assert 2 * programs.NAMES <= sample["queries"] <= 2 * LOOKUPS


def test_a_missing_dns_server_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(server, "program", lambda: None)
    assert lookups.run() == 1
    assert "NO LOOKUPS ARE MEASURED: " in capsys.readouterr().err
    with pytest.raises(MeasurementError, match="only in namespaces of its own"), server.running():
        pass


def test_the_queries_are_in_the_notes():
    runs = {"grapeshot": {"cpu_ns": 1, "queries": 20}, "uvloop": {"cpu_ns": 2, "queries": 2000}}
    row = outcome("ten-names", {loop: [sample] * 15 for loop, sample in runs.items()})
    assert "queries that reached the DNS server: 20 (grapeshot), 2,000 (uvloop)." in tables.markdown(comparison(row))


def test_the_committed_table_shows_the_committed_numbers():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert tables.markdown(committed) + "\n" == COMMITTED.with_suffix(".md").read_text(encoding="utf-8")
    names = [name for case in lookups.SUITE.cases for name in (case.name, digest.wall_name(case.name))]
    assert [case["name"] for case in committed["cases"]] == names
