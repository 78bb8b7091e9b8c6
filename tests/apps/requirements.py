"""Programs and packages that the application tests need. A missing one skips the test, or fails it.

A test that lacks something is skipped with the reason, and the summary of the run repeats the reason (see conftest.py).
With `REQUIRE_SERVERS=1` in the environment, as in the project's CI, a test that lacks a program fails instead, and with
`REQUIRE_FRAMEWORKS=1`, as in .ci/matrix, a test that lacks a package of the extra `frameworks`.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
from typing import NoReturn

import pytest

REQUIRE = "REQUIRE_SERVERS"
ABSENT: dict[str, str] = {}  # what was looked for in vain in this run, and where it comes from


def absent(what: str, where_from: str, variable: str = REQUIRE) -> NoReturn:
    """Skips the test, or fails it where everything is required."""
    ABSENT[what] = where_from
    reason = f"{what} is not installed ({where_from})"
    if os.environ.get(variable, "0") not in ("", "0"):
        pytest.fail(f"{reason}, and {variable} is set", pytrace=False)
    pytest.skip(reason)


def framework(module: str) -> None:
    """Skips the test if a module that only the extra `frameworks` installs is not there."""
    if importlib.util.find_spec(module) is None:
        absent(module, "requirements/frameworks.txt", "REQUIRE_FRAMEWORKS")


def package(module: str) -> None:
    """Skips the test if a module that the extra `dev` installs is not there."""
    if importlib.util.find_spec(module) is None:
        absent(module, "pip install grapeshot[dev]")


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
