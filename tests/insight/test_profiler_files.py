"""The file of a profile, and the output of `python -m grapeshot profile` for it."""

from __future__ import annotations

import json
import pstats
import re
import subprocess
import sys
import zlib

import pytest

from grapeshot.insight import profiler
from grapeshot.insight.profiler.__main__ import main as command


def inner():
    return sum(range(1000))


def outer(depth):
    inner()
    if depth:
        outer(depth - 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "app.profile"
    with profiler.profile(path):
        outer(3)
    return path


def row_of(profile, name):
    [row] = [row for row in profile.function_rows() if row.name == name]
    return row


def test_a_saved_profile_is_loaded_unchanged(saved, tmp_path):
    loaded = profiler.Profile.load(saved)
    loaded.save(tmp_path / "again")
    again = profiler.Profile.load(tmp_path / "again")
    assert again.table() == loaded.table()
    assert again.nodes == loaded.nodes
    assert again.owners == loaded.owners
    assert (row_of(again, "outer").calls, row_of(again, "outer").primitive_calls) == (4, 1)
    assert row_of(again, "inner").file == __file__


def test_the_file_is_compact(saved):
    profile = profiler.Profile.load(saved)
    assert saved.read_bytes().startswith(b"grapeshot profile 1\n")
    assert saved.stat().st_size < 40 * len(profile.nodes) + 1000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is not a profile that this version"),
        (b"grapeshot profile 2\n", "is not a profile that this version"),
        (b"grapeshot profile 1\nx", "is damaged"),
        (b"grapeshot profile 1\n" + zlib.compress(b"{}"), "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, data, why, capsys):
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(ValueError, match=why):
        profiler.Profile.load(tmp_path / "p")
    assert command(["show", str(tmp_path / "p")]) == 1
    assert why in capsys.readouterr().err


def test_show(saved):
    shown = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "grapeshot.insight.profiler",
            "show",
            str(saved),
            "--sort",
            "calls",
            "--limit",
            "3",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = shown.splitlines()
    assert re.match(r"\d+\.\d{3} s on Python \d", lines[0])
    assert re.match(r"the profiler itself took about \d+\.\d{3} s: \d+ events of \d+\.\d\d us each", lines[1])
    assert lines[3].split() == "calls CPU ms own CPU wall ms own wall wait ms function".split()
    assert {"outer", "inner", "sum"} == {line.split()[6] for line in lines[4:7]}
    assert shown.rstrip().endswith("thread 'MainThread'")


@pytest.mark.parametrize("sort", ["cpu", "own_cpu", "wall", "own_wall", "wait", "calls"])
def test_sorts(saved, sort):
    profile = profiler.Profile.load(saved)
    text = profile.table(sort, 1000)
    column = ("calls", "cpu", "own_cpu", "wall", "own_wall", "wait").index(sort)
    body = text.split("\n\n")[1].splitlines()[1:]
    values = [float(line.split()[column]) for line in body]
    assert values == sorted(values, reverse=True)
    with pytest.raises(ValueError, match="sort must be one of cpu"):
        profile.table("name")


def test_the_functions_of_one_owner(saved, capsys):
    assert command(["show", str(saved), "--owner", "MainThread"]) == 0
    assert "outer (" in capsys.readouterr().out
    assert command(["show", str(saved), "--owner", "nobody"]) == 1
    assert "this profile has no coro, task or thread with the name 'nobody'" in capsys.readouterr().err


def test_pstats(saved, tmp_path):
    assert command(["show", str(saved), "--pstats", str(tmp_path / "out")]) == 0
    stats = pstats.Stats(str(tmp_path / "out")).stats
    profile = profiler.Profile.load(saved)
    line = outer.__code__.co_firstlineno
    primitive, calls, own, total, callers = stats[__file__, line, "outer"]
    assert (primitive, calls) == (1, 4)
    assert own == pytest.approx(row_of(profile, "outer").own_cpu / 1e9)
    assert total == pytest.approx(row_of(profile, "outer").cpu / 1e9)
    # In `callers`, the number of all calls comes before the number of primitive calls, as in cProfile.
    assert callers[__file__, line, "outer"][:2] == (3, 1)
    assert stats["~", 0, "sum"][1] == 4


def test_speedscope(saved, tmp_path):
    assert command(["show", str(saved), "--speedscope", str(tmp_path / "out.json")]) == 0
    page = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert page["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = [frame["name"] for frame in page["shared"]["frames"]]
    profile = profiler.Profile.load(saved)
    for each, column in zip(page["profiles"], ("cpu", "wall"), strict=True):
        assert (each["type"], each["unit"]) == ("sampled", "nanoseconds")
        assert len(each["samples"]) == len(each["weights"])
        assert each["endValue"] == sum(each["weights"]) == sum(getattr(row, column) for row in profile.owners)
    stacks = [[frames[index] for index in sample] for sample in page["profiles"][0]["samples"]]
    assert any(stack[0] == "thread 'MainThread'" and stack[-3:] == ["outer", "inner", "sum"] for stack in stacks)


def test_html(saved, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command(["html", str(saved), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|@import|{{", text)  # one file, no network
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1))
    profile = profiler.Profile.load(saved)
    assert len(data["nodes"]) == len(profile.nodes)
    assert [row[0] for row in data["function_rows"]] == [str(row) for row in profile.function_rows()]


def test_names_do_not_end_the_data_of_the_page(tmp_path):
    scope = {}
    exec(compile("def f(): pass", "</script><script>alert(1)</script>", "exec"), scope)
    with profiler.profile(tmp_path / "p"):
        scope["f"]()
    assert command(["html", str(tmp_path / "p")]) == 0
    assert "<script>alert" not in (tmp_path / "p.html").read_text(encoding="utf-8")
