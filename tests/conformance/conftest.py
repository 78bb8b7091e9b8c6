"""The summary of a test run says which loop the conformance tests ran on, or why they did not run."""

from __future__ import annotations

import sys

import pytest

SUMMARIES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMMARIES] = []


@pytest.fixture
def summaries(request: pytest.FixtureRequest) -> list[str]:
    """Lines to print at the end of the run."""
    return request.config.stash[SUMMARIES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[SUMMARIES]
    if lines:
        version = ".".join(map(str, sys.version_info[:3]))
        terminalreporter.section(f"CPython {version}'s own asyncio tests", sep="=")
        for line in lines:
            terminalreporter.write_line(line)
