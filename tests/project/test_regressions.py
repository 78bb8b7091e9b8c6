"""Every test that tests/regressions.toml names exists, and no mark of the test excuses grapeshot from passing it."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = "grapeshot"


@functools.cache
def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def problems_with(test: str) -> Iterator[str]:
    """Yield the problems of a test id: no such file, no such test, or a test that grapeshot may fail."""
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
    """Yield the marks with which a test is skipped or may fail on grapeshot."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call):
            mark = ast.unparse(decorator.func).removeprefix("pytest.mark.")
            names = {keyword.arg for keyword in decorator.keywords}
            if mark in {"xfail_on", "skip_on"} and names & {OURS, None}:
                yield f"{mark} for {OURS}"
            if mark == "only_on" and OURS not in {ast.literal_eval(argument) for argument in decorator.args}:
                yield f"{mark} without {OURS}"
            if mark in {"skip", "xfail"}:
                yield "never passes"
        elif ast.unparse(decorator) in {"pytest.mark.skip", "pytest.mark.xfail"}:
            yield "never passes"


FILE = Path(__file__).resolve().parents[1] / "regressions.toml"
REGRESSIONS = tomllib.loads(FILE.read_text(encoding="utf-8"))["regression"]


def test_every_regression_has_a_test() -> None:
    assert len(REGRESSIONS) > 30
    assert [regression["what"] for regression in REGRESSIONS if not regression["tests"]] == []


def test_the_tests_exist_and_grapeshot_is_not_excused() -> None:
    assert [
        problem for regression in REGRESSIONS for test in regression["tests"] for problem in problems_with(test)
    ] == []
