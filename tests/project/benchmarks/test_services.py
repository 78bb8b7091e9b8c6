"""The cases of services: their programs run, the output of load tools is parsed, and a whole comparison is written.

These tests measure nothing, and need no load generator.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from project.benchmarks.samples import CAP_S, server
from support import coro_is_available

from benchmarks import compare, daemons, pyperf, scale, services, threads, tools
from benchmarks._load import MeasurementError, UnsupportedError, flags
from benchmarks._machine import ROOT
from benchmarks._screen import Screen
from benchmarks.cases import CASES
from benchmarks.coros.__main__ import SUITE as CORO_SUITE
from benchmarks.measure import Case, Settings, own_sample, sample_of

SETTINGS = Settings(seconds=0.01, warm_up_s=0.01, steady_s=0.01)


def own(module, kind, *options, loop="asyncio"):
    command = [sys.executable, "-m", f"benchmarks.{module}", kind, "--loop", loop, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------- the programs


def test_idle_timers_fire_once_a_second_each():
    sample = own("scale", "idle_timers", "--seconds", "0.2", "--warm-up", "0.01")
    # The timers are spread over a second, so only some of them fire in 0.2 s. A busy machine delays some of them.
    assert 0 < sample["fired"] <= scale.IDLE_TIMERS * (sample["seconds"] + 0.1)
    assert sample["cpu_ms_per_s"] > 0


def test_timers_are_set_while_others_are_pending():
    assert own("scale", "pending_timers", "--count", "3000")["pending"] == 3000


@pytest.mark.parametrize("ports", [(), ("--apart",)], ids=["one", "apart"])
@pytest.mark.parametrize("style", threads.STYLES)
def test_two_loops_serve_where_threads_run_side_by_side(style, ports):
    if style == "coros" and not coro_is_available():
        pytest.skip("no coros on this interpreter")
    sample = own("threads", "echo", "--style", style, "--seconds", "0.05", "--warm-up", "0.01", *ports)
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        assert sample == {"unsupported": "NotImplementedError: the GIL is enabled"}
    else:
        assert sample["rps"] > 0
        assert sample["speedup"] > 0
        assert sample["speedup_of_processes"] > 0


@pytest.mark.parametrize("loop", ["grapeshot", "asyncio"])
@pytest.mark.parametrize("kind", ["items", "answers"])
@pytest.mark.parametrize("style", ["protocols", "coros"])
def test_items_pass_between_two_loops(kind, style, loop):
    sample = own("threads", kind, "--style", style, "--count", "50", loop=loop)
    if style == "coros" and (loop != "grapeshot" or not coro_is_available()):
        assert "unsupported" in sample
    else:
        assert sample["rps"] > 0


QUICK = ("--seconds", "0.05", "--warm-up", "0.01")


def test_the_client_of_aiohttp_is_served():
    pytest.importorskip("aiohttp")
    with server("aiohttp") as running:
        sample = own("clients", "aiohttp", *QUICK, "--address", running.ready["address"])
    assert sample["requests"] > 0


@pytest.mark.parametrize("kind", daemons.SERVERS)
def test_the_client_of_a_database_is_served(kind):
    pytest.importorskip(kind)
    if not daemons.is_there(kind):
        pytest.skip(f"the server of {kind} is not installed")
    with daemons.SERVERS[kind]() as address:
        assert own("clients", kind, *QUICK, "--address", address)["requests"] > 0


def test_a_client_that_gets_a_wrong_answer_fails():
    pytest.importorskip("aiohttp")
    with server("aiohttp", "--body-len", "5") as running:
        options = [*QUICK, "--address", running.ready["address"]]
        command = [sys.executable, "-m", "benchmarks.clients", "aiohttp", "--loop", "asyncio", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert done.returncode != 0
    assert "wrong answer with status 200" in done.stderr


def test_the_websocket_server_echoes():
    client = pytest.importorskip("websockets.sync.client")
    with server("websockets") as running, client.connect(f"ws://{running.ready['address']}") as connection:
        connection.send(b"some bytes")
        assert connection.recv(timeout=CAP_S) == b"some bytes"


# ---------------------------------------------------------------- the rates


def test_the_rate_is_a_fraction_of_the_slowest_loops_rate(monkeypatch):
    asked = []

    def load(kind, mode, loop, settings, options):
        asked.append((loop, options.get("rate")))
        if loop == "broken":
            raise MeasurementError("it does not start")
        return {"rps": {"quick": 9000.0, "slow": 2000.0}[loop]}

    monkeypatch.setattr(services, "load_sample", load)
    services._capacity.cache_clear()
    case = next(case for case in CASES if case.name == "rate-echo-80%")
    kept, measure = case.prepare(["quick", "slow", "broken", "raw"], SETTINGS)
    assert kept == {"rate_rps": 1600, "slowest": "slow"}
    assert "raw" not in {loop for loop, _ in asked}
    measure("quick", SETTINGS)
    assert asked[-1] == ("quick", 1600)
    services._capacity.cache_clear()


REPORT = {
    "requests": 10,
    "seconds": 2.0,
    "rps": 5.0,
    "resent": 0,
    "unanswered": 1,
    "rate": 5.0,
    "curve_us": [[0.5, 1.0]],
}
REPORT |= {
    "latency_us": dict.fromkeys(("p50", "p90", "p99", "p999", "max"), 3.0),
    "load_cpu_s": 0.5,
    "server_cpu_s": 1.0,
}


def test_a_report_becomes_a_sample():
    sample = sample_of(REPORT)
    assert (sample["cpu_us"], sample["server_busy"], sample["load_busy"]) == (100_000.0, 0.5, 0.25)
    assert (sample["p999_us"], sample["unanswered"], sample["curve_us"]) == (3.0, 1, [[0.5, 1.0]])
    assert "curve_us" not in sample_of(REPORT | {"rate": None})
    with pytest.raises(MeasurementError, match="not a single reply"):
        sample_of(REPORT | {"requests": 0})


def test_a_row_that_cannot_be_measured_is_left_out():
    def prepare(loops, settings):
        raise UnsupportedError("no such tool")

    case = Case("row", "Group", "a row", "cpu_us", "us", (), services.no_measure, prepare=prepare)
    outcome = compare.run_case(case, ["grapeshot", "asyncio"], 3, SETTINGS, Screen("t", 1, 6, ["grapeshot"]))
    assert outcome["left_out"] == "no such tool"
    assert (outcome["samples"], outcome["failures"]) == ({}, {})


def test_options_become_flags():
    assert flags({"read_len": 5, "spin": True, "tls": False, "depth": None}) == ["--read-len", "5", "--spin"]


# ---------------------------------------------------------------- other tools

WRK = """Running 1s test @ http://127.0.0.1:8000/
  1 threads and 50 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     5.22ms    4.38ms  31.08ms   77.51%
    Req/Sec    10.46k     1.21k   12.43k    60.00%
  Latency Distribution
     50%    4.49ms
     75%    7.86ms
     90%   13.16ms
     99%   22.73ms
  10550 requests in 1.02s, 1.42MB read
Requests/sec:  10343.14
Transfer/sec:      1.39MB
"""
H2LOAD = """finished in 2.00s, 9884.00 req/s, 1.32MB/s
requests: 19818 total, 19818 started, 19768 done, 19768 succeeded, 50 failed, 50 errored, 0 timeout
status codes: 19768 2xx, 0 3xx, 0 4xx, 0 5xx
"""
OHA = {
    "summary": {"total": 2.0, "requestsPerSec": 500.0},
    "latencyPercentiles": {"p50": 0.001, "p90": 0.002, "p99": 0.004},
    "statusCodeDistribution": {"200": 1000},
    "errorDistribution": {"aborted due to deadline": 50},
}


def test_the_output_of_wrk_is_parsed():
    sample = tools.parse_wrk(WRK)
    assert sample == {"requests": 10550, "seconds": 1.02, "p50_us": 4490.0, "p90_us": 13160.0, "p99_us": 22730.0}
    with pytest.raises(MeasurementError, match="Non-2xx"):
        tools.parse_wrk(WRK + "  Non-2xx or 3xx responses: 10550\n")


def test_the_output_of_h2load_is_parsed():
    assert tools.parse_h2load(H2LOAD) == {"requests": 19768, "seconds": 2.0}
    with pytest.raises(MeasurementError, match="51 requests failed"):
        tools.parse_h2load(H2LOAD.replace("50 failed", "51 failed"))


def test_the_output_of_oha_is_parsed():
    sample = tools.parse_oha(json.dumps(OHA))
    assert sample == {"requests": 1000, "seconds": 2.0, "p50_us": 1000.0, "p90_us": 2000.0, "p99_us": 4000.0}
    with pytest.raises(MeasurementError, match="500"):
        tools.parse_oha(json.dumps(OHA | {"statusCodeDistribution": {"500": 3}}))


@pytest.mark.parametrize("name", tools.TOOLS)
def test_an_installed_tool_loads_a_server(name):
    if tools.version(name) is None:
        pytest.skip(f"{name} is not installed")
    assert any(character.isdigit() for character in tools.version(name))
    sample = tools.sample(name, "uvicorn", "asyncio", 1.0)
    assert sample["requests"] > 0
    assert sample["cpu_us"] > 0


@pytest.mark.parametrize(("text", "us"), [("12us", 12.0), ("1.5ms", 1500.0), ("2s", 2e6), ("1.5m", 90e6)])
def test_times_of_the_tools(text, us):
    assert tools.in_us(text) == us


def test_the_benchmarks_of_pyperformance_run_on_the_loop():
    if pyperf.importlib.util.find_spec("pyperformance") is None:
        pytest.skip("pyperformance is not installed")
    assert pyperf.run("async_tree_none", "asyncio", "--debug-single-value")["values"] == 1
    with pytest.raises(MeasurementError, match="no_such_loop"):
        pyperf.run("async_tree_none", "no_such_loop", "--debug-single-value")


# ---------------------------------------------------------------- from end to end


def test_a_comparison_is_written_from_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "coros.json"
    words = [
        "spawn",
        "--quick",
        "--runs",
        "1",
        "--seconds",
        "0.01",
        "--loops",
        "grapeshot",
        "tasks",
        "--json",
        str(path),
    ]
    assert compare.main(words, suites=(CORO_SUITE,)) == 0
    result = json.loads(path.read_text())
    assert result["schema"] == compare.SCHEMA
    (row,) = result["cases"]
    assert (row["peers"], [*row["numbers"]]) == (["tasks"], ["grapeshot", "tasks"])
    assert "spawn and finish" in path.with_name("report.html").read_text()
    (runs,) = json.loads(path.with_name("coros-runs.json").read_text())["cases"]
    assert [*runs["samples"]] == ["grapeshot", "tasks"]
    said = capsys.readouterr()
    assert "of tasks" in said.out
    # Measure once more, and compare the result with the first result. A verdict would need 15 runs.
    compare.main([*words, "--against", str(path)], suites=(CORO_SUITE,))
    assert "compared 0 rows" in capsys.readouterr().out


def test_all_suites_are_listed_together(capsys):
    assert compare.main(["--list", "spawn"], suites=(compare.LOOP_SUITE, CORO_SUITE)) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["spawn", "Calls"],
        ["spawn", "Coros"],
    ]


def test_a_process_that_hangs_is_ended():
    with pytest.raises(MeasurementError, match=r"did not end within 0\.5 s"):
        own_sample("scale", "idle_timers", "asyncio", "--loop", "asyncio", "--seconds", "60", within_s=0.5)
