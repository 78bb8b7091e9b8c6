"""What the application tests need from the machine: a program that is absent is said so, and may be an error.

A test that lacks a program is skipped with the reason, and the end of the run repeats it (see conftest.py). With
`REQUIRE_SERVERS=1` in the environment, as in the project's CI, it fails instead: nothing goes untested unnoticed there.
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
    """Skip the test, or fail it where everything is required."""
    ABSENT[what] = where_from
    reason = f"{what} is not installed ({where_from})"
    if os.environ.get(REQUIRE, "0") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRE} is set", pytrace=False)
    pytest.skip(reason)


def program(name: str, where_from: str, *beside: str) -> str:
    """The path of a program: on the search path, or in a directory that one of the patterns `beside` matches."""
    found = shutil.which(name)
    if found is not None:
        return found
    for pattern in beside:
        for folder in sorted(glob.glob(pattern), reverse=True):
            if found := shutil.which(name, path=folder):
                return found
    absent(name, where_from)
