"""The lock files in requirements/: their options, and the packages that they lock."""

from __future__ import annotations

import re

import pytest
from project.markdown import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def wanted(path):
    """Return the names of the packages that an .in file asks for, in the spelling of lock files."""
    names = set()
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            names |= wanted(path.with_name(line[3:]))
        elif name := re.match(r"[\w.-]+", line):
            names.add(re.sub(r"[-_.]+", "-", name[0]).lower())
    return names


def test_requirements_lock_writes_each_lock_file():
    names = re.search(r"^for name in (.*?);", (ROOT / "requirements" / "lock").read_text(), re.MULTILINE)[1].split()
    assert sorted(names) == [path.stem for path in LOCKS]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_dependabot_finds_the_options_in_the_header(path):
    """Dependabot reads these options of uv's command in a lock file, and runs uv with the same options."""
    _, command, *_ = path.read_text().splitlines()
    assert command.startswith("#    uv pip compile ")
    for option in ("--universal", "--python-version 3.11", "--generate-hashes"):
        assert option in command
    assert command.endswith(f" --output-file {path.name} {path.stem}.in")


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_each_package_is_locked(path):
    locked = set(re.findall(r"^([\w.-]+)==", path.read_text(), re.MULTILINE))
    assert wanted(path.with_suffix(".in")) <= locked
