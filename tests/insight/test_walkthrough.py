"""docs/insight.md: its program runs, and what the page shows is what a client of the back door sees."""

from __future__ import annotations

import asyncio
import doctest
import re
import subprocess
import sys

import pytest
from insight.callers import call
from project.markdown import ROOT, blocks
from support import coro_is_available, wait_until

PAGE = ROOT / "docs" / "insight.md"
pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def sessions():
    parser = doctest.DocTestParser()
    return [parser.get_examples(block.text) for block in blocks(PAGE) if block.language == "pycon"]


def is_like(wanted, got):
    """Whether the output is what the page shows. The marks below a line of a traceback differ between versions."""
    wanted, got = (" ".join(re.sub(r"\n +[~^]+(?=\n)", "", text).split()) for text in (wanted, got))
    parts = [re.escape(part.strip()) for part in wanted.split("...")]
    return re.fullmatch(" ?.* ?".join(parts), got) is not None


def test_the_page_has_sessions():
    assert len(sessions()) == 4
    assert sum(map(len, sessions())) > 8


def test_the_page_shows_what_a_client_sees(tmp_path):
    tmp_path.chmod(0o700)
    for block in blocks(PAGE):
        if "save" in block.words:
            (tmp_path / block.words["save"]).write_text(block.text, encoding="utf-8")
    path = tmp_path / "shop.bd"
    process = subprocess.Popen([sys.executable, "-W", "error", "shop.py"], cwd=tmp_path, stderr=subprocess.PIPE)

    async def talk():
        with await call(path) as caller:
            for example in [each for session in sessions() for each in session]:
                lines = example.source.rstrip("\n").split("\n")
                got = await caller.ask(*lines, *([""] if len(lines) > 1 else []))
                wanted = example.want or (
                    f"Traceback (most recent call last):\n{example.exc_msg}" if example.exc_msg else ""
                )
                assert is_like(wanted, got), f"the page shows\n{wanted}\nand a client sees\n{got}"

    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the program to begin")
        asyncio.run(talk())
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert errors == b""
