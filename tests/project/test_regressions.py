"""tests/regressions.toml lists known faults of event loops. Every entry names tests, and these tests exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

from project.test_ids import problems_with

FILE = Path(__file__).resolve().parents[1] / "regressions.toml"
REGRESSIONS = tomllib.loads(FILE.read_text(encoding="utf-8"))["regression"]


def test_every_regression_has_a_test() -> None:
    assert len(REGRESSIONS) > 30
    assert [regression["what"] for regression in REGRESSIONS if not regression["tests"]] == []


def test_the_tests_exist_and_grapeshot_is_not_excused() -> None:
    assert [
        problem for regression in REGRESSIONS for test in regression["tests"] for problem in problems_with(test)
    ] == []
