"""The harness of the benchmarks: its servers answer, its calls run, and its tables show the right numbers.

These tests measure nothing. The load generator has its own tests (`make test-rust`).
"""

from __future__ import annotations

import copy
import json
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tomllib

import pytest
import trustme
from project.benchmarks.samples import CAP_S, GOOD, MESSAGE, comparison, connect, outcome, receive, server

from benchmarks import callgrind, compare, intervals, micro, servers, standings, tables
from benchmarks._load import Child, UnsupportedError
from benchmarks._machine import ROOT
from benchmarks._screen import show
from benchmarks.cases import CASES, ECHOES

# ---------------------------------------------------------------- servers and calls


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder


@pytest.mark.parametrize("kind", ["echo", "buffered", "unix", "sock", "streams", "native-streams"])
def test_an_echo_server_echoes(kind):
    with server(kind) as running, connect(running.ready["address"]) as sock:
        sock.sendall(MESSAGE)
        assert receive(sock, len(MESSAGE)) == MESSAGE


def test_the_udp_server_echoes():
    with server("udp") as running, connect(running.ready["address"], socket.SOCK_DGRAM) as sock:
        sock.send(MESSAGE)
        assert sock.recv(65536) == MESSAGE


def test_the_tls_server_echoes_over_tls_1_3(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        server("tls", "--certificate", str(certificate)) as running,
        connect(running.ready["address"]) as plain,
        context.wrap_socket(plain) as sock,
    ):
        assert sock.version() == "TLSv1.3"
        sock.sendall(MESSAGE)
        assert receive(sock, len(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("kind", ["split", "split-task"])
def test_the_split_server_replies_with_the_pattern(kind):
    with server(kind) as running, connect(running.ready["address"]) as sock:
        sock.sendall(bytes(servers.SPLIT_REQUEST_LEN))
        assert receive(sock, servers.SPLIT_REPLY_LEN) == servers.pattern(servers.SPLIT_REPLY_LEN)


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
def test_an_http_server_says_hello(kind):
    with server(kind) as running, connect(running.ready["address"]) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = receive(sock, 1 << 20)
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"Hello, world!")


LACKING = """
import asyncio, sys
from benchmarks import micro, servers

class Lacking(asyncio.SelectorEventLoop):
    async def create_unix_server(self, *args, **kwargs):
        raise NotImplementedError("no unix sockets")

    async def sock_sendall(self, *args):
        raise NotImplementedError("no sock_sendall")

{module}.loop_factory = lambda name: Lacking
sys.argv[1:] = [{kind!r}, "--loop", "lacking"]
{module}.main()
"""


@pytest.mark.parametrize(
    ("module", "kind", "reason"), [("servers", "unix", "no unix sockets"), ("micro", "sock_pair", "no sock_sendall")]
)
def test_a_loop_that_lacks_something_says_so(module, kind, reason):
    command = [sys.executable, "-c", LACKING.format(module=module, kind=kind)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=True, input="")
    assert json.loads(outcome.stdout) == {"unsupported": f"NotImplementedError: {reason}"}
    with pytest.raises(UnsupportedError, match=reason):
        Child(command, None)


# pending_million is left out: it makes the same calls as pending_thousand, and takes seconds.
@pytest.mark.parametrize("kind", sorted(micro.KINDS.keys() - {"pending_million"}))
def test_a_call_is_made(kind):
    command = [sys.executable, "-m", "benchmarks.micro", kind, "--loop", "asyncio", "--rounds", "1"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CAP_S, check=True)
    assert json.loads(outcome.stdout)["operations"] > 0


# ---------------------------------------------------------------- cases


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_every_echo_row_names_an_existing_server():
    assert ECHOES.keys() <= servers.KINDS.keys()


def test_cases_are_chosen_by_name_group_and_pattern():
    assert [case.name for case in compare.choose_cases(["spawn"])] == ["spawn"]
    assert {case.group for case in compare.choose_cases(["tls"])} == {"TLS"}
    assert len(compare.choose_cases(["tls-1*k-10"])) == 3
    assert compare.choose_cases([]) == list(CASES)
    assert len(compare.choose_cases(["tls-1*k-10"], without=["tls-1k-*"])) == 2
    with pytest.raises(SystemExit, match="--without tls leaves no case"):
        compare.choose_cases(["tls-1k-10"], without=["tls"])
    with pytest.raises(SystemExit, match="no-such-case"):
        compare.choose_cases(["spawn", "no-such-case"])


# ---------------------------------------------------------------- the rule


def noisy(factor, spread, count=15, seed=1):
    """Return pairs of numbers. The first is `factor` times the second, and both have random noise of size `spread`."""
    noise = random.Random(seed)
    return [
        (factor * 100 * noise.lognormvariate(0, spread), 100 * noise.lognormvariate(0, spread)) for _ in range(count)
    ]


# Measured pairs (grapeshot, uvloop). Three of grapeshot's runs and two of uvloop's runs were slow.
BIMODAL = [(30.53, 57.26), (36.56, 39.98), (75.29, 90.35), (70.23, 75.14), (76.36, 48.15)]


@pytest.mark.parametrize(
    ("pairs", "standing"),
    [
        (noisy(0.97, 0.01), "ahead"),
        (noisy(1.03, 0.01), "behind"),
        (noisy(1, 0.01), "equal"),
        (noisy(0.9, 0.4, seed=2), "equal"),
        (noisy(0.5, 0.01, count=14), "too few runs"),
        (BIMODAL, "too few runs"),
        # Four of five ratios are below 1, and so is the interval. But grapeshot's median, 70.2, is above uvloop's,
        # 57.3.
        (BIMODAL * 3, "equal"),
        # If the peer's number is below zero, the pair counts in the peer's favour.
        ([(1.0, 2.0)] * 10 + [(1.0, -0.1)] * 5, "equal"),
    ],
)
def test_the_interval_decides(pairs, standing):
    assert intervals.standing(pairs) == standing


def test_noise_alone_is_seldom_called_ahead_or_behind():
    """If two loops are equally fast, at most 5 % of the rows are called ahead or behind (with 15 pairs, 3.5 %)."""
    words = [intervals.standing(noisy(1, 0.3, seed=seed)) for seed in range(1000)]
    assert 950 <= words.count("equal") < 990


def test_swapping_the_sides_gives_the_opposite_standing():
    opposite = {"ahead": "behind", "behind": "ahead", "equal": "equal", "too few runs": "too few runs"}
    seen = set()
    for seed in range(300):
        pairs = noisy(random.Random(seed).choice([0.8, 1, 1.25]), 0.3, count=14 + seed % 8, seed=seed)
        word = intervals.standing(pairs)
        assert intervals.standing([(other, own) for own, other in pairs]) == opposite[word]
        seen.add(word)
    assert seen == opposite.keys()


@pytest.mark.parametrize("count", [5, 15, 16, 25])
def test_the_intervals_agree_with_resampling(count):
    """Compare the closed form with the usual method: medians of randomly drawn samples."""
    numbers = intervals.ratios(noisy(1, 0.3, count))
    found, draw = intervals.interval(numbers), random.Random(1)
    drawn = [statistics.median_low(draw.choices(numbers, k=count)) for _ in range(20_000)]
    below, within = (sum(median < found.low for median in drawn), sum(median <= found.low for median in drawn))
    # Of the medians of all possible samples, less than 2.5 % are below the lower limit, and at least 2.5 % are at or
    # below it. The test sees only 20,000 of the samples, so it allows for two standard errors of the share, 0.0022.
    assert below / 20_000 < 0.025 + 0.0022
    assert within / 20_000 > 0.025 - 0.0022
    mirrored = intervals.interval([1 / number for number in numbers])
    assert (mirrored.low, mirrored.high) == (1 / found.high, 1 / found.low)


# ---------------------------------------------------------------- tables


def test_ratios_are_taken_run_by_run_and_held_against_the_bound():
    held, missed = outcome("spawn", GOOD, 0.5), outcome("sock-pair", GOOD, 0.4)
    assert held["ratios"]["uvloop"]["interval"] == [0.4, 0.5, 0.6]
    assert standings.verdict(held, held["bounds"][0]) == "yes"
    assert standings.verdict(missed, missed["bounds"][0]) == "no (+25%)"
    few = outcome("old", {loop: taken[:5] for loop, taken in GOOD.items()})
    page = tables.markdown(comparison(held, missed, few))
    assert (
        "Of the 3 rows that have a peer, grapeshot is ahead of every peer in 2. The others (1) do not have enough runs"
        in page
    )
    assert "| **0.50** (0.40-0.60) of uvloop | ahead |" in page
    assert "| **0.50** (0.40-0.60) of uvloop | too few runs |" in page
    assert "No row with a peer has enough runs for a verdict" in tables.markdown(comparison(few))


@pytest.mark.parametrize(
    ("peers", "best", "standing"),
    [
        ({"uvloop": [100] * 15, "zuvloop": [110] * 15}, "uvloop", "ahead"),
        # This row is behind because it is behind one peer. The next one is equal because one peer's numbers vary a lot.
        ({"uvloop": [80] * 15, "zuvloop": [110] * 15}, "uvloop", "behind"),
        ({"uvloop": [100] * 15, "zuvloop": [60, 120, 160] * 5}, "zuvloop", "equal"),
        ({"uvloop": [100] * 15, "zuvloop": [200] * 5}, "zuvloop", "too few runs"),
        ({}, None, "-"),
    ],
)
def test_a_row_is_ahead_only_if_it_is_ahead_of_every_peer(peers, best, standing):
    row = outcome("spawn", {"grapeshot": [90] * 15, "raw": [70] * 15} | peers)
    assert (standings.best_peer(row), standings.standing(row)) == (best, standing)
    # A loop that is shown only for reference is not a peer.
    assert standings.standing(row | {"peers": []}) == "-"


def printed(result, capsys):
    show(result)
    return capsys.readouterr().out


def test_a_row_without_a_number_says_why(capsys):
    alone = {"uvloop": [100]}
    lacking = outcome("spawn", alone, 0.5, unsupported={"grapeshot": "NotImplementedError: no children"})
    failing = outcome("sock-pair", alone, 0.5, failures={"grapeshot": "it ended with 1"})
    for text in (tables.markdown(comparison(lacking, failing)), printed(comparison(lacking, failing), capsys)):
        assert "- grapeshot does not support spawn: NotImplementedError: no children." in text
        assert "failed" in text
    assert "Nothing was compared." in tables.markdown(comparison(lacking, failing))
    assert "it ended with 1" in tables.markdown(comparison(failing))


def test_datagrams_that_were_sent_again_are_named():
    restless = {"cpu_ns": 100, "resent": 3, "requests": 1000}
    row = outcome("udp-1k-10", GOOD | {"uvloop": [100, restless, 100]})
    assert "- title of udp-1k-10, on uvloop: 3 of 1,000 datagrams were sent again." in tables.markdown(comparison(row))


def test_the_terminal_shows_every_case_and_loop(capsys):
    pytest.importorskip("rich")
    text = printed(comparison(outcome("spawn", GOOD, 0.5), outcome("sock-pair", GOOD)), capsys)
    assert {"spawn", "sock-pair", "grapeshot", "uvloop", "ahead"} <= set(text.split())
    assert "0.50 of uvloop: yes" in text
    assert "*" not in text


# ---------------------------------------------------------------- comparisons that are measured in parts


def test_merged_rows_replace_their_own_and_keep_the_others():
    slower = {"grapeshot": [90], "uvloop": [100]}
    before = comparison(outcome("call-soon-bulk", GOOD), outcome("spawn", slower))
    after = comparison(outcome("spawn", GOOD, revision="r2"), outcome("tls-1k-10", GOOD, revision="r2"), taken="now")
    merged = compare.merge(copy.deepcopy(before), copy.deepcopy(after))
    assert [row["name"] for row in merged["cases"]] == ["tls-1k-10", "call-soon-bulk", "spawn"]
    assert merged["cases"][1] == before["cases"][0]
    assert merged["cases"][2] == after["cases"][0]
    assert (merged["taken"], merged["took_s"]) == ("now", 20)
    assert "from these revisions: 2 of r2, 1 of r1." in tables.markdown(merged)
    assert "revisions" not in tables.markdown(before)


def test_a_loop_that_was_missing_once_is_not_missing_any_more():
    before = comparison(outcome("spawn", GOOD), loops=["grapeshot"], missing={"uvloop": "no module", "raw": "no epoll"})
    merged = compare.merge(before, comparison(outcome("sock-pair", GOOD)))
    assert merged["loops"] == ["grapeshot", "uvloop"]
    assert merged["missing"] == {"raw": "no epoll"}


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("machine", "processor", "two"),
        ("machine", "python", "3.13.0"),
        ("settings", "runs", 5),
        ("versions", "uvloop", "3"),
    ],
)
def test_rows_that_must_not_be_in_one_table_are_refused(part, name, value):
    before, after = comparison(outcome("spawn", GOOD)), comparison(outcome("spawn", GOOD))
    after[part] = after[part] | {name: value}
    with pytest.raises(SystemExit, match=name):
        compare.merge(before, after)


def test_grapeshot_itself_may_change_between_parts():
    after = comparison(outcome("spawn", GOOD))
    after["versions"] = after["versions"] | {"grapeshot": "9"}
    merged = compare.merge(comparison(outcome("spawn", GOOD)), after)
    assert merged["versions"]["grapeshot"] == "9"


@pytest.mark.parametrize(
    ("found", "status", "verdict"), [(1021, 1, "ABOVE"), (1019, 0, "as it was"), (900, 0, "fewer")]
)
def test_bounds_of_instructions(tmp_path, monkeypatch, capsys, found, status, verdict):
    file = tmp_path / "instructions.toml"
    file.write_text(f'tolerance = 0.02\n[interpreter."{callgrind.interpreter()}"]\necho = 1000\n', encoding="utf-8")
    monkeypatch.setattr(callgrind, "per_operation", lambda *_: found)
    assert callgrind.check_bounds(file) == status
    assert verdict in capsys.readouterr().out


def test_bounds_of_another_interpreter_are_not_compared(tmp_path, capsys):
    file = tmp_path / "instructions.toml"
    file.write_text("tolerance = 0.02\n[interpreter]\n", encoding="utf-8")
    assert callgrind.check_bounds(file) == 0
    assert "NOT COMPARED" in capsys.readouterr().err


def test_the_cases_of_the_committed_bounds_exist():
    known = tomllib.loads(callgrind.BOUNDS.read_text(encoding="utf-8"))
    for bounds in known["interpreter"].values():
        assert set(bounds) <= set(callgrind.COUNTS)
