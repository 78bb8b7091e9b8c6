"""Programs that the application tests need. A missing program skips the test, or fails it.

A test that lacks a program is skipped with the reason, and the summary of the run repeats the reason (see
conftest.py). With `REQUIRE_SERVERS=1` in the environment, as in the project's CI, the test fails instead.
"""

from __future__ import annotations

import glob
import os
import shutil
from typing import NoReturn

import pytest

REQUIRE = "REQUIRE_SERVERS"
ABSENT: dict[str, str] = {}  # what was looked for in vain in this run, and where it comes from


def absent(what: str, where_from: str) -> NoReturn:
    """Skips the test, or fails it where everything is required."""
    ABSENT[what] = where_from
    reason = f"{what} is not installed ({where_from})"
    if os.environ.get(REQUIRE, "0") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(reason)


def program(name: str, where_from: str, *beside: str) -> str:
    """Returns the path of a program on the search path, or in a directory that one of the patterns `beside` matches."""
    found = shutil.which(name)
    if found is not None:
        return found
    for pattern in beside:
        for folder in sorted(glob.glob(pattern), reverse=True):
            if found := shutil.which(name, path=folder):
                return found
    absent(name, where_from)
