"""The code blocks of the pages work: each block is run by a test or says why not.

Python blocks run as scripts. If a block is not run, a test checks that its commands exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from project.markdown import ROOT, Block, blocks, pages
from support import coro_is_available

CAP_S = 30.0
BLOCKS = [block for page in pages() for block in blocks(page)]

SCRIPTS = [block for block in BLOCKS if block.language == "python" and "save" not in block.words]
NOT_RUN = [block for block in BLOCKS if "not_run" in block.words]
# For each language: a block that is not in SCRIPTS must have one of these words. Tests find the block by that word, and
# run it or use its file. If the word is not_run, a test only checks that the block's commands exist.
RUN_BY = {"bash": {"prints", "serves", "run", "not_run"}, "js": {"prints"}, "python": {"save"}, "json": {"save"}}
# The tests that type blocks into a back door, or run blocks beside a program that has a back door. Each test file names
# the pages whose blocks it uses.
WALKTHROUGHS = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/insight/test_*.py")]


def named(found: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def make_targets() -> set[str]:
    """The targets of the Makefile, as make itself lists them."""
    done = subprocess.run(["make", "-qpRr", "-f", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=False)
    phony = re.search(r"^\.PHONY:(.*)$", done.stdout, re.MULTILINE)
    assert phony, done.stderr
    return set(phony[1].split())


def installed_programs() -> set[str]:
    """The programs that `make venv` installs. Each has the name of its package."""
    locked = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+)==", locked, re.MULTILINE))


def is_too_new(block: Block) -> bool:
    needed = tuple(int(part) for part in block.words.get("python", "3.11").split("."))
    return sys.version_info < needed


@named([block for block in BLOCKS if block.language != "text"])
def test_every_block_is_run_or_says_why_not(block):
    if block.language in {"pycon", "console"}:
        assert any(f'"{block.page.name}"' in text for text in WALKTHROUGHS)
    elif block not in SCRIPTS:
        assert block.words.keys() & RUN_BY[block.language], f"no test runs it: {block.text}"
    assert len(block.words.get("not_run", "a reason")) >= len("a reason")


@named([block for block in BLOCKS if "save" in block.words])
def test_a_saved_file_is_used(block):
    """The file is used by a later block of the page, by pytest, or by a test that starts the page's programs."""
    name = block.words["save"]
    after = [other for other in blocks(block.page) if other.line > block.line]
    is_run = any(re.search(rf"\b{re.escape(Path(name).stem)}\b", other.text) for other in after)
    starting = [ROOT / "tests" / "insight" / "test_pages.py", *ROOT.glob("tests/apps/**/test_*.py")]
    assert is_run or name == "conftest.py" or any(f'"{name}"' in path.read_text(encoding="utf-8") for path in starting)


@named(SCRIPTS)
def test_python_block_runs(block, tmp_path):
    if is_too_new(block):
        pytest.skip(f"the block is for Python {block.words['python']}")
    for needed in filter(None, block.words.get("needs", "").split(",")):
        if needed == "coro" and not coro_is_available():
            pytest.skip("no coros on this interpreter")
        elif needed != "coro":
            pytest.importorskip(needed)
    script = tmp_path / "block.py"
    script.write_text(block.text, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CAP_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert block.words.get("prints", "") in " ".join(done.stdout.splitlines())


@named(NOT_RUN)
def test_bash_block_names_real_commands(block):
    """Every line names make targets, an executable file of the tree or an installed program, or sets up a venv."""
    for line in block.text.splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if not words:
            continue
        if words[0] == "make":
            assert set(words[1:]) <= make_targets(), line
        elif words[:2] == ["pip", "install"]:
            assert words[2] in {".", "git+$URL"}, line
        elif words[:3] == ["python3", "-m", "venv"] or words[0] in {".", "cd"}:
            continue
        elif words[0].startswith(("./", ".ci/")):
            assert (ROOT / words[0]).stat().st_mode & 0o111, line
        elif words[0].startswith(".venv/bin/"):
            assert Path(words[0]).name in installed_programs(), line
        else:
            pytest.fail(f"{block.name}: this test cannot check the line {line!r}")


def test_make_demo_and_make_test_are_in_the_readme():
    lines = {line for block in NOT_RUN if block.page.name == "README.md" for line in block.text.splitlines()}
    assert {"make demo", "make test"} <= lines


def test_every_make_target_has_a_line_in_help():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^\s+(?:\x1b\[1m)?([a-z-]+)", done.stdout, re.MULTILINE))
    assert listed == make_targets()


def test_the_pages_have_the_blocks_that_this_file_is_for():
    """If the parser were broken, no block would run, so no test would fail."""
    readme = [block for block in BLOCKS if block.page.name == "README.md"]
    scripts = "\n".join(block.text for block in readme if block.language == "python")
    for way_in in ("grapeshot.install()", "grapeshot.run(main())"):
        assert way_in in scripts
    assert any("--loop grapeshot:new_event_loop" in block.text for block in BLOCKS if "serves" in block.words)
