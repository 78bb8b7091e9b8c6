"""Run the commands of the documentation pages. tests/project/markdown.py explains the comments `<!-- test: ... -->`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support import coro_is_available, free_port

from tests.apps.processes import Process
from tests.apps.requirements import absent, framework
from tests.project.markdown import Block, blocks

CAP_S = 60.0


def of_page(page: Path) -> list[Block]:
    found = list(blocks(page))
    assert found, f"{page} has no blocks"
    return found


def need(what: str) -> None:
    """Skip the test if coros, a program or a package is missing. requirements.py says when the test fails instead."""
    if what == "coro":
        if not coro_is_available():
            pytest.skip("no coros on this interpreter")
    elif what == "node":
        if shutil.which(what) is None:
            absent(what, "Debian: nodejs", "REQUIRE_NODE")
    else:
        framework(what)


class Command:
    """A command of a page: `VARIABLE=value program argument ...`. Port 8000 is replaced by a free port.

    `numbers` maps further numbers to their replacements. The command's folder contains the files that come before the
    command on the page. If the block has the word `run`, the folder contains all files of the page. The numbers in
    these files are replaced, too.
    """

    def __init__(
        self,
        block: Block,
        page: list[Block],
        python: Path,
        folder: Path,
        words: list[str] | None = None,
        numbers: dict[str, int] | None = None,
    ) -> None:
        for needed in filter(None, block.words.get("needs", "").split(",")):
            need(needed)
        if tuple(map(int, block.words.get("python", "3.11").split("."))) > sys.version_info:
            pytest.skip(f"the block is for Python {block.words['python']}")
        self.python, self.folder, self._block, self._page = python, folder, block, page
        self._words = words if words is not None else shlex.split(block.text)
        self.env = {"HOME": str(folder), "PATH": f"{python.parent}:{os.environ['PATH']}"}
        self._numbers = {"8000": free_port(), **(numbers or {})}

    @property
    def port(self) -> int:
        return self._numbers["8000"]

    def use_port_of(self, other: Command) -> None:
        self._numbers = other._numbers

    def _replaced(self, text: str) -> str:
        return re.sub(r"\b\d+\b", lambda match: str(self._numbers.get(match[0], match[0])), text)

    def _save(self) -> None:
        for saved in self._page:
            if "save" in saved.words and (saved.line < self._block.line or self._block.words.get("run")):
                path, text = self.folder / saved.words["save"], self._replaced(saved.text)
                # A command that was started before may be about to read the file, and must not find it truncated.
                if not path.exists() or path.read_text(encoding="utf-8") != text:
                    path.write_text(text, encoding="utf-8")

    def start(self, *arguments: str) -> Process:
        """Start the command. If there are `arguments`, start Python with them instead, in the same folder."""
        self._save()
        if arguments:
            return Process(*arguments, env=self.env, cwd=self.folder, python=self.python)
        if self._block.language == "js":
            (self.folder / "block.js").write_text(self._block.text, encoding="utf-8")
            return Process("block.js", env=self.env, cwd=self.folder, python="node")
        words = [self._replaced(word) for word in self._words]
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            self.env[name] = value
        program, *rest = words
        # Do not run the script `uvicorn`: it uses the Python of the environment that uvicorn is installed in.
        return self.start(*(rest if program == "python" else ["-m", program, *rest]))
