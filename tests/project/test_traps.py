"""tests/traps.toml, where other loops have failed their users: each trap has tests, and they are there."""

from __future__ import annotations

import tomllib
from pathlib import Path

from project.test_ids import problems_with

TRAPS = tomllib.loads((Path(__file__).resolve().parents[1] / "traps.toml").read_text(encoding="utf-8"))["trap"]


def test_every_trap_has_a_test() -> None:
    assert len(TRAPS) > 30
    assert [trap["what"] for trap in TRAPS if not trap["tests"]] == []


def test_the_tests_exist_and_grapeshot_is_not_let_off() -> None:
    assert [problem for trap in TRAPS for test in trap["tests"] for problem in problems_with(test)] == []
