"""Programs and packages that the application tests need. A missing one skips the test, or fails it.

A skipped test gives the reason, and the summary of the run repeats it (see conftest.py). These environment variables
make tests fail instead of being skipped. Each entry says which missing program or package fails a test:

- `REQUIRE_SERVERS=1`: a program that is not named below, or a package of requirements/dev.txt. .ci/run and .ci/matrix
  set this variable if they find or can install the servers.
- `REQUIRE_FRAMEWORKS=1`: a package of requirements/frameworks.txt. .ci/matrix sets this variable.
- `REQUIRE_RABBITMQ=1`: RabbitMQ. .ci/matrix sets this variable if it finds or can install RabbitMQ.
- `REQUIRE_NODE=1`: Node.js (see pages.py).
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
from typing import NoReturn

import pytest

REQUIRE = "REQUIRE_SERVERS"
ABSENT: dict[str, str] = {}  # what this run did not find, and where to get it


def absent(what: str, where_from: str, variable: str = REQUIRE) -> NoReturn:
    """Skip the test, or fail it if the environment variable `variable` is set."""
    ABSENT[what] = where_from
    reason = f"{what} is not installed ({where_from})"
    if os.environ.get(variable, "0") not in ("", "0"):
        pytest.fail(f"{reason}, and {variable} is set", pytrace=False)
    pytest.skip(reason)


def framework(module: str) -> None:
    """Skip the test if this module of requirements/frameworks.txt is missing."""
    if importlib.util.find_spec(module) is None:
        absent(module, "requirements/frameworks.txt", "REQUIRE_FRAMEWORKS")


def package(module: str) -> None:
    """Skip the test if this module of requirements/dev.txt is missing."""
    if importlib.util.find_spec(module) is None:
        absent(module, "requirements/dev.txt")


def program(name: str, where_from: str, *beside: str, variable: str = REQUIRE) -> str:
    """Return the path of a program on the search path, or in a directory that one of the patterns `beside` matches."""
    found = shutil.which(name)
    if found is not None:
        return found
    for pattern in beside:
        for folder in sorted(glob.glob(pattern), reverse=True):
            if found := shutil.which(name, path=folder):
                return found
    absent(name, where_from, variable)
