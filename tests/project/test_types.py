"""A user's type checker: mypy --strict and pyright report each wrong line of typed_program.py, and no other line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grapeshot

PROGRAM = Path(__file__).parent / "typed_program.py"
WRONG = {
    number
    for number, line in enumerate(PROGRAM.read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# error")
}
SOURCES = str(Path(grapeshot.__file__).parents[1])


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


def differences(found: dict[int, str]) -> list[str]:
    missed = [f"{number}: no error" for number in sorted(WRONG - found.keys())]
    return missed + [f"{number}: {found[number]}" for number in sorted(found.keys() - WRONG)]


def test_the_program_has_both_kinds_of_lines():
    assert len(WRONG) >= 30
    compile(PROGRAM.read_text(encoding="utf-8"), str(PROGRAM), "exec")


def test_mypy(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n", encoding="utf-8")
    done = run(
        "mypy",
        "--config-file",
        str(config),
        "--no-error-summary",
        str(PROGRAM),
        cwd=tmp_path,
        MYPYPATH=SOURCES,
        MYPY_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.stderr == ""
    found = {
        int(match[1]): match[2]
        for match in re.finditer(r"^[^\n]*typed_program\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    }
    assert differences(found) == []


def test_pyright(tmp_path):
    """At its first call, the Python package `pyright` downloads the checker from npm, so this test needs a network."""
    version = run("pyright", "--version", cwd=tmp_path)
    if version.returncode != 0:
        why = (version.stderr or version.stdout).strip().splitlines()[-1:]
        message = f"PYRIGHT COULD NOT BE INSTALLED, so it has not checked the types: {why}"
        if os.environ.get("REQUIRE_SERVERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    (tmp_path / PROGRAM.name).write_bytes(PROGRAM.read_bytes())
    config = {"include": [PROGRAM.name], "extraPaths": [SOURCES], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    done = run("pyright", "--outputjson", "--project", str(tmp_path), "--pythonpath", sys.executable, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    found = {
        entry["range"]["start"]["line"] + 1: entry["message"]
        for entry in report["generalDiagnostics"]
        if entry["severity"] == "error"
    }
    assert differences(found) == []
