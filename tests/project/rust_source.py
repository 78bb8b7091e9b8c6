"""Read Rust source, and find which modules of its crate it names.

A tokenizer separates code from comments, strings, characters and lifetimes. A walk over the tokens resolves every path
that starts with `crate`, `self` or `super`, in `use` trees, expressions, types and macros.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_TOKEN = re.compile(
    r"""
      (?P<space>\s+|//[^\n]*)
    | (?P<comment>/\*)
    | (?P<raw>(?:br|cr|r)(?P<hashes>\#*)".*?"(?P=hashes))
    | (?P<string>[bc]?"(?:\\.|[^"\\])*")
    | (?P<char>b?'(?:\\u\{[^}]*\}|\\x..|\\.|[^'\\])')
    | (?P<lifetime>'[A-Za-z_]\w*)
    | (?P<ident>(?:r\#)?[A-Za-z_]\w*)
    | (?P<number>\d\w*)
    | (?P<path>::)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")


@dataclass(frozen=True)
class Token:
    text: str
    line: int


@dataclass(frozen=True)
class Mention:
    """A path of this crate that a file names, in full, and the module that names it."""

    line: int
    target: tuple[str, ...]


@dataclass
class RustFile:
    """The content of one file: the crate paths and identifiers that it uses, and constructs that would hide an edge."""

    mentions: list[Mention] = field(default_factory=list)
    identifiers: dict[str, int] = field(default_factory=dict)  # name -> first line
    hidden: list[tuple[int, str]] = field(default_factory=list)


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # `other` matches any character
        end = match.end()
        if match["comment"]:
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(text, end)
                if edge is None:
                    raise SyntaxError(f"line {line}: a block comment without an end")
                depth += 1 if edge[0] == "/*" else -1
                end = edge.end()
        elif match["raw"] or match["string"] or match["char"]:
            tokens.append(Token(match[0], line))  # the token keeps its quotes, so it is never an identifier
        elif not match["space"]:
            tokens.append(Token(match[0].removeprefix("r#"), line))
        line += text.count("\n", position, end)
        position = end
    return tokens


def module_of(path: PurePosixPath) -> tuple[str, ...]:
    """Return the module of a file below src/: `sys/poller/mod.rs` is `sys::poller`, `lib.rs` is the crate's root."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] in {"mod", "lib", "main"} else parts


def read(text: str, module: tuple[str, ...]) -> RustFile:
    return _Walk(tokenize(text), module).file


class _Walk:
    def __init__(self, tokens: list[Token], module: tuple[str, ...]) -> None:
        self.tokens = tokens
        self.file = RustFile()
        inline: list[tuple[int, str]] = []  # modules written inside the file: the brace depth outside, the name
        depth, index = 0, 0
        while index < len(tokens):
            text, line = tokens[index].text, tokens[index].line
            here = (*module, *(name for _, name in inline))
            if text == "{":
                if self._at(index - 2) == "mod":
                    inline.append((depth, self._at(index - 1)))
                depth += 1
            elif text == "}":
                depth -= 1
                if inline and inline[-1][0] == depth:
                    inline.pop()
            elif text.isidentifier():
                self.file.identifiers.setdefault(text, line)
                self._note_hidden(index)
                if self._starts_path(index):
                    index = self._tree(index, here, ())
                    continue
            index += 1

    def _at(self, index: int) -> str:
        return self.tokens[index].text if 0 <= index < len(self.tokens) else ""

    def _note_hidden(self, index: int) -> None:
        line = self.tokens[index].line
        following = [self._at(index + step) for step in range(1, 3)]
        match self.tokens[index].text:
            case "include" if following[0] == "!":
                self.file.hidden.append((line, "include! pulls in another file's text"))
            case "path" if self._at(index - 1) == "[" and following[0] == "=" and "/" in following[1]:
                self.file.hidden.append((line, "#[path] takes a module from another folder"))
            case "extern" if following == ["crate", "self"]:
                self.file.hidden.append((line, "`extern crate self` gives the crate a second name"))

    def _starts_path(self, index: int) -> bool:
        text, before, after = self.tokens[index].text, self._at(index - 1), self._at(index + 1)
        if text not in {"crate", "self", "super"} or before == "::":
            return False
        if before == "in" and self._at(index - 2) == "(":  # pub(in crate::room) is a visibility, not an import
            return False
        return after == "::" or before == "use"

    def _tree(self, index: int, here: tuple[str, ...], base: tuple[str, ...] | None) -> int:
        """Read a path or a use tree from `index` and record its target. Return the index after it."""
        first, line = True, self.tokens[index].line
        target = base if base is not None else ()
        while True:
            text = self._at(index)
            if text == "{":
                index += 1
                while self._at(index) not in {"}", ""}:
                    index = index + 1 if self._at(index) == "," else self._tree(index, here, target)
                return index + 1
            if text == "crate" and first:
                target = ()
            elif text == "self":
                target = here if first and not target else target
            elif text == "super":
                target = (here if first and not target else target)[:-1]
            elif text.isidentifier():
                target = (*target, text)
                self.file.identifiers.setdefault(text, line)
            elif text != "*":
                break
            first, index = False, index + 1
            if self._at(index) != "::":
                break
            index += 1
        self.file.mentions.append(Mention(line, target))
        if self._at(index) == "as":
            index += 2
        return index if not first else index + 1
