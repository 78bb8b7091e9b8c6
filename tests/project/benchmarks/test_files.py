"""The harness that compares libraries for files: every library does each kind of work.

CPU time and wall time have separate rows in the tables.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from project.benchmarks.samples import comparison

from benchmarks import compare, digest, tables
from benchmarks._screen import Screen
from benchmarks.compare import RESULTS
from benchmarks.files import cases, libraries, programs
from benchmarks.files.__main__ import SUITE, facts
from benchmarks.measure import Bound, Case, Wall

COMMITTED = RESULTS / "files.json"
SMALL = {"files": 20, "mib": 1, "lines": 50}


@pytest.mark.parametrize("library", [libraries.OURS, libraries.THREADS, "aiofiles+asyncio", libraries.RAW])
@pytest.mark.parametrize("kind", programs.KINDS)
def test_a_library_does_the_work(kind, library, tmp_path, monkeypatch):
    if library.startswith("aiofiles") and importlib.util.find_spec("aiofiles") is None:
        pytest.skip("aiofiles is not installed")
    # `libraries.choose` sets this variable directly. These calls of monkeypatch restore it after the test.
    monkeypatch.delenv("GRAPESHOT_FILE_THREADS", raising=False)
    if library == libraries.THREADS:
        monkeypatch.setenv("GRAPESHOT_FILE_THREADS", "")
    sample = programs.measure(kind, library, programs.Place(tmp_path, **SMALL), 0)
    assert sample["rounds"] == (3 if kind.startswith("large_write") else 1)
    assert min(sample["cpu_us"], sample["wall_us"]) > 0
    assert (os.environ.get("GRAPESHOT_FILE_THREADS") == "1") is (library == libraries.THREADS)


def test_a_library_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(libraries, "why_missing", lambda name: "no module")
    assert libraries.available(["aiofiles+uvloop"]) == ([], {"aiofiles+uvloop": "no module"})
    assert "aiofiles+uvloop IS LEFT OUT" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no library is called 'files\\+asyncio'"):
        libraries.choose("files+asyncio")


def test_files_in_memory_are_refused(monkeypatch):
    if not Path("/dev/shm").is_dir() or cases.file_system(Path("/dev/shm")) not in cases.IN_MEMORY:
        pytest.skip("this system has no /dev/shm in memory")
    monkeypatch.setenv(cases.FOLDER, "/dev/shm")
    cases._folder.cache_clear()
    with pytest.raises(SystemExit, match="/dev/shm is on tmpfs, which is in memory"):
        cases.folder()


def test_the_file_system_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "IN_MEMORY", ())
    monkeypatch.setenv(cases.FOLDER, str(tmp_path))
    cases._folder.cache_clear()
    assert set(facts()) == {"file system", "io_uring"}
    assert cases.folder().parent == tmp_path
    cases._folder().cleanup()
    cases._folder.cache_clear()


def test_every_case_has_all_libraries():
    assert {case.only for case in SUITE.cases} == {libraries.ALL}
    assert {case.name.replace("-", "_") for case in SUITE.cases} == set(programs.KINDS)


def test_wall_time_has_a_row_of_its_own():
    wall = Wall("Wall", "wall_us", "us/file", (Bound(0.5),))
    case = Case(
        "write-each",
        "CPU",
        "files written",
        "cpu_us",
        "us CPU/file",
        (Bound(0.35),),
        lambda loop, _: {"cpu_us": 10.0, "wall_us": 40.0} if loop == "grapeshot" else {"cpu_us": 20.0, "wall_us": 50.0},
        wall=wall,
    )
    screen = Screen("", 1, 30, ("grapeshot", "uvloop"))
    outcome = compare.run_case(case, ("grapeshot", "uvloop"), 15, None, screen) | {"peers": ["uvloop"]}
    made = digest.digest(comparison(outcome))
    cpu, second = made["cases"]
    assert (cpu["name"], second["name"]) == ("write-each", "write-each-wall")
    assert (cpu["ratios"]["uvloop"]["interval"][1], second["ratios"]["uvloop"]["interval"][1]) == (0.5, 0.8)
    assert "wall" not in cpu | second
    assert second["numbers"]["grapeshot"] == {"wall_us": [40.0, 40.0, 40.0]}
    assert [bound["at_most"] for bound in (*cpu["bounds"], *second["bounds"])] == [0.35, 0.5]
    page = tables.markdown(made)
    assert "| files written, us CPU/file |" in page
    assert "| files written, us/file |" in page
    assert "grapeshot is ahead of every peer in 2." in page
    assert [row["name"] for row in compare.merge(made, made, (case,))["cases"]] == ["write-each", "write-each-wall"]


def test_the_committed_table_shows_the_committed_numbers():
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert tables.markdown(committed) + "\n" == COMMITTED.with_suffix(".md").read_text(encoding="utf-8")
    names = [name for case in SUITE.cases for name in (case.name, digest.wall_name(case.name))]
    assert [case["name"] for case in committed["cases"]] == names
