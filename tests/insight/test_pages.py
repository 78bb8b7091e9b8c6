"""docs/insight.md and docs/troubleshooting.md: their programs run, a client of the back door sees what the pages show,
and the commands print the output on the pages.
"""

from __future__ import annotations

import asyncio
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from insight.callers import call
from project.markdown import ROOT, blocks
from support import PROCESS_CAP_S, coro_is_available, wait_until

INSIGHT = ROOT / "docs" / "insight.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
PAGES = {INSIGHT: "shop", TROUBLESHOOTING: "sick"}
CONSOLE = [block for page in PAGES for block in blocks(page) if block.language == "console"]
pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def sessions(page):
    parser = doctest.DocTestParser()
    return [parser.get_examples(block.text) for block in blocks(page) if block.language == "pycon"]


def is_like(wanted, got):
    """Whether the output matches the page. The marks below a line of a traceback differ between versions, and a number
    such as "0.25..." may be different on a slow machine.
    """
    wanted = re.sub(r"\d+\.\d+\.\.\.", "...", wanted)
    wanted, got = (" ".join(re.sub(r"\n +[~^]+(?=\n)", "", text).split()) for text in (wanted, got))
    parts = [re.escape(part.strip()) for part in wanted.split("...")]
    return re.fullmatch(" ?.* ?".join(parts), got) is not None


@pytest.mark.parametrize(("page", "count"), [(INSIGHT, 5), (TROUBLESHOOTING, 6)], ids=PAGES.values())
def test_a_page_has_sessions(page, count):
    assert len(sessions(page)) >= count
    assert sum(map(len, sessions(page))) > 8


@pytest.fixture
def start(tmp_path):
    """A function that starts the program of a page, and waits until its back door is open."""
    tmp_path.chmod(0o700)
    started = []

    def begin(page, command=(sys.executable, "-W", "error"), **options):
        for block in blocks(page):
            if "save" in block.words:
                (tmp_path / block.words["save"]).write_text(block.text, encoding="utf-8")
        name = PAGES[page]
        path = tmp_path / f"{name}.bd"
        process = subprocess.Popen([*command, f"{name}.py"], cwd=tmp_path, stderr=subprocess.PIPE, **options)
        started.append(process)
        wait_until(lambda: path.exists() or process.poll() is not None, "the program to begin", PROCESS_CAP_S)
        return process, path

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.parametrize("page", PAGES, ids=PAGES.values())
def test_a_page_shows_the_output_that_a_client_sees(page, start):
    process, path = start(page)

    async def talk():
        with await call(path) as caller:
            for example in [each for session in sessions(page) for each in session]:
                lines = example.source.rstrip("\n").split("\n")
                got = await caller.ask(*lines, *([""] if len(lines) > 1 else []))
                wanted = example.want or (
                    f"Traceback (most recent call last):\n{example.exc_msg}" if example.exc_msg else ""
                )
                assert is_like(wanted, got), f"the page shows\n{wanted}\nand a client sees\n{got}"

    asyncio.run(talk())
    process.terminate()
    _, errors = process.communicate(timeout=30)
    if page == INSIGHT:
        assert errors == b""


@pytest.mark.parametrize("block", CONSOLE, ids=[block.text.strip() for block in CONSOLE])
def test_a_command_prints_the_output_on_the_page(block, start):
    words = shlex.split(block.text)
    settings = dict(
        words.pop(0).split("=", 1) for _ in range(sum(re.match("[A-Z_]+=", word) is not None for word in words))
    )
    if "python" in block.words and sys.version_info < tuple(map(int, block.words["python"].split("."))):
        pytest.skip(f"the command needs Python {block.words['python']}")
    if "needs" in block.words and shutil.which(block.words["needs"]) is None:
        pytest.skip(f"NOT TESTED: {block.words['needs']} is not installed")
    wanted = block.words["prints"]
    environment = {**os.environ, **settings, "PYTHON_COLORS": "0"}
    if words[-1] == "PID":
        process, _ = start(block.page)
        command = [sys.executable if word == "python" else word for word in words[:-1]]
        done = subprocess.run(
            [*command, str(process.pid)], capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        if done.returncode:
            pytest.skip(f"NOT TESTED: this system does not let a process look into another: {done.stderr[-200:]}")
        assert wanted in done.stdout
        return
    assert words == ["python", f"{PAGES[block.page]}.py"]
    process, _ = start(block.page, (sys.executable,), env=environment)
    seen = b""
    while wanted.encode() not in seen:
        line = process.stderr.readline()
        assert line, f"the program has ended: {seen.decode()}"
        seen += line
