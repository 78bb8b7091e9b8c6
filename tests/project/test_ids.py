"""Test ids that other files name (`tests/tcp/test_write.py::test_abort`): the tests exist, and grapeshot must pass
them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "grapeshot"


@functools.cache
def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def problems_with(test: str) -> Iterator[str]:
    """Yields the problems of a test id: no such file, no such function, or a test that excuses grapeshot."""
    name, _, function = test.partition("::")
    path = ROOT / name
    if not path.is_file():
        yield f"{test}: no such file"
    elif path.suffix == ".rs":
        if not re.search(rf"#\[test\]\s*(\#\[[^\]]*\]\s*)*fn {function}\(", path.read_text(encoding="utf-8")):
            yield f"{test}: no such test"
    elif function not in functions(path):
        yield f"{test}: no such test"
    else:
        yield from (f"{test}: {why}" for why in excuses(functions(path)[function]))


def excuses(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yields the marks that excuse grapeshot from a test."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            mark = ast.unparse(decorator.func).removeprefix("pytest.mark.")
            names = {keyword.arg for keyword in decorator.keywords}
            if mark in {"xfail_on", "skip_on"} and names & {OURS, None}:
                yield f"{mark} for {OURS}"
        elif ast.unparse(decorator) in {"pytest.mark.skip", "pytest.mark.xfail"}:
            yield "never passes"


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("tests/project/test_ids.py::test_a_wrong_id_is_caught", None),
        ("tests/project/test_ids.py::test_gone", "no such test"),
        ("tests/project/test_gone.py::test_gone", "no such file"),
        ("core/src/queue/fd_table.rs::gone", "no such test"),
    ],
)
def test_a_wrong_id_is_caught(test, problem):
    assert list(problems_with(test)) == ([f"{test}: {problem}"] if problem else [])


@pytest.mark.parametrize(
    ("mark", "count"),
    [
        ("xfail_on(uvloop='why')", 0),
        ("xfail_on(grapeshot='why')", 1),
        ("skip_on(**reasons)", 1),
        ("skip", 1),
        ("parametrize('a', [1])", 0),
    ],
)
def test_a_test_that_excuses_grapeshot_is_caught(mark, count):
    [function] = ast.parse(f"@pytest.mark.{mark}\ndef test():\n    pass\n").body
    assert isinstance(function, ast.FunctionDef)
    assert len(list(excuses(function))) == count
