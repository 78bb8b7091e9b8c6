"""Reads the project's Markdown: fenced code blocks with the test comment before each block, and links.

Every block is run by a test, or says why it is not. (`text` blocks are not code.) Python blocks run as scripts
(tests/project/test_code_blocks.py), bash and js blocks as commands (tests/apps/test_frameworks.py), pycon blocks in a
back door, and console blocks beside a program that has a back door (tests/insight). A comment before a block,
`<!-- test: word="value" word=value -->` in one line, may have these words:

    prints="text"     the block's output contains this text
    serves="text"     the command serves HTTP at port 8000, and `GET /` answers with this text
    save=app.py       the block is a file of that name, which later blocks or tests use; it is not run by itself
    run=name          a test in tests/apps/test_scaling.py asks for blocks of that name, and runs them
    not_run="why"     the block is not run, for this reason
    needs=coro,node   what the block needs: an interpreter that has coros (coro), a program (node), or packages by name
    python=3.12       the block needs that Python or a later one
    end=kill          the test sends SIGKILL, because the server may miss a SIGTERM soon after its start (on any loop)

In commands, and in the files that they use, 8000 is replaced by a free port.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WORDS = {"end", "needs", "not_run", "prints", "python", "run", "save", "serves"}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_DIRECTIVE = re.compile(r"^\s*<!-- test: (?P<words>.*) -->$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    words: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The Markdown pages of the project, except those in benchmarks/results and .github."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/**/*.md")]
    return sorted(found)


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    index, words = 0, dict[str, str]()
    while index < len(lines):
        if match := _DIRECTIVE.match(lines[index]):
            words = dict(word.split("=", 1) for word in shlex.split(match["words"]))
            assert words.keys() <= _WORDS, f"{page}:{index + 1}: unknown words {words.keys() - _WORDS}"
        elif match := _FENCE.match(lines[index]):
            start = index + 1
            end = next((i for i in range(start, len(lines)) if lines[i].strip() == "```"), None)
            assert end is not None, f"{page}:{start}: a code block without an end"
            text = "\n".join(line[len(match["indent"]) :] for line in lines[start:end]) + "\n"
            yield Block(page, start, match["language"], text, words)
            index, words = end, {}
        elif lines[index].strip():
            assert not words, f"{page}:{index + 1}: a test comment must be followed by a code block"
        index += 1


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, target) of every link outside code blocks."""
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield from ((number, match["target"]) for match in _LINK.finditer(re.sub(r"`[^`]*`", "", line)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
