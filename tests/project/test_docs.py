"""The pages match the tree: links have targets, the table of methods matches the loop, and no file of the project
contains a path of a developer's machine.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import subprocess

import pytest
from project.benchmarks import speed_table
from project.markdown import ROOT, anchors, links, pages
from support import coro_is_available

import grapeshot


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for line, target in links(page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}:{line}: {target}"
        assert linked == ROOT or ROOT in linked.parents, f"{page.name}:{line}: {target} is outside the project"
        if anchor:
            assert anchor in anchors(linked), f"{page.name}:{line}: {target}"


def project_files():
    """The files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in files if path.is_file()]


MAINTAINERS_PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", *ROOT.glob("docs/internals/*.md")]
# `stream/reading.rs`, or `stream/reading.rs::on_readable` for a name that is defined there.
NAMED_FILE = re.compile(r"(?<=[`(])(?P<file>[\w./]*\w\.(?:rs|py|toml))(?:::(?P<name>\w+))?(?=[`)])")


def defines(path, name):
    """Whether a Rust or Python file defines a function, a type or a constant of that name."""
    definition = rf"\b(?:fn|struct|enum|trait|const|static|def|class|macro_rules!) {name}\b|^{name}\b *[:=]"
    return re.search(definition, path.read_text(encoding="utf-8"), re.MULTILINE) is not None


@pytest.mark.parametrize("page", sorted(MAINTAINERS_PAGES), ids=lambda page: page.name)
def test_the_files_and_functions_that_a_page_names_exist(page):
    files = {f"/{path.relative_to(ROOT)}": path for path in project_files()}
    missing = []
    for match in NAMED_FILE.finditer(page.read_text(encoding="utf-8")):
        found = [path for name, path in files.items() if name.endswith(f"/{match['file']}")]
        if not found or (match["name"] and not any(defines(path, match["name"]) for path in found)):
            missing.append(match[0])
    assert missing == []


def find(path):
    """Return the object with that dotted name, whose first parts are modules."""
    parts = path.split(".")
    if path.startswith("grapeshot.coro.celery"):  # importing it would patch the standard library
        assert importlib.util.find_spec("grapeshot.coro.celery") is not None
        return None
    found = grapeshot
    for count, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:count]))
        found = getattr(found, part)
    return found


NAME = re.compile(r"\b(?:grapeshot|coro)(?:\.[A-Za-z]\w*)+")


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.filterwarnings("ignore:The `uvicorn.workers` module is deprecated")
@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_names_that_a_page_shows_exist(page):
    missing = []
    for span in re.findall(r"`[^`\n]+`", page.read_text(encoding="utf-8")):
        for name in NAME.findall(span):
            try:
                find(name if name.startswith("grapeshot.") else f"grapeshot.{name}")
            except (AttributeError, ImportError) as error:
                if isinstance(error, AttributeError) or str(error.name).startswith(
                    "grapeshot"
                ):  # other modules belong to extras, which may be missing
                    missing.append(name)
    assert missing == []


MACHINE_PATH = re.compile(r"(?<![\w./*-])/(?:home/\w|Users/\w|(?:root|work|opt)/[\w.])")


def test_no_path_of_a_developers_machine():
    files = project_files()
    assert ROOT / "README.md" in files
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


# ---------------------------------------------------------------- docs/compatibility.md

ROW = re.compile(r"^\| `(?P<method>\w+)` \| (?P<status>yes|not yet|never) \|", re.MULTILINE)
TABLE = dict(ROW.findall((ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")))

METHODS = sorted(
    name
    for name, value in vars(asyncio.AbstractEventLoop).items()
    if inspect.isfunction(value) and not name.startswith("_")
)


def test_every_method_of_a_loop_has_a_row():
    assert set(METHODS) <= TABLE.keys()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_matches_its_row(name):
    """`yes` means that the loop has its own method. Any other entry means that the loop has asyncio's abstract method,
    which raises NotImplementedError.
    """
    own = getattr(grapeshot.Loop, name) is not vars(asyncio.AbstractEventLoop)[name]
    assert own == (TABLE[name] == "yes")


# ---------------------------------------------------------------- the speed table


def test_the_speed_tables_are_the_committed_numbers():
    """`make tables` writes the tables. It must be run after new measurements."""
    for path, text in speed_table.expected().items():
        assert path.exists(), f"{path.name} is not written yet"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not what the JSON says"
