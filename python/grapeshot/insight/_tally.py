"""Counts items that are alike: a thousand connections of one server become one row. Also shows how each row grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass
class Tally:
    """The number of items that are alike."""

    what: str
    """The kind and name of the items. If their names differ in their numbers, ``*`` replaces each number."""
    place: str | None
    """For coros and tasks, where they wait (``file:line in function``), or ``runs`` if they are running. For
    descriptors, where the program opened them (``opened at file:line ...``). None if not known."""
    count: int
    growth: int | None = None
    """By how much the number has changed since an earlier result. None if there is no earlier result."""
    alike: str = dataclasses.field(default="", repr=False)
    """The description that all the items share. Together with the place, it identifies the row in later results."""

    def __str__(self) -> str:
        at = "" if self.place is None else f", {self.place}"
        return printable(f"{self.count:6} {grown(self.growth):>7}  {self.what}{at}")


def printable(text: object) -> str:
    """Return a text as one line without control characters, which might move the terminal's cursor.

    Names in a program may come from anywhere, even from an attacker.
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def printable_lines(text: object) -> str:
    """Return a text of several lines without control characters other than the line breaks."""
    return "\n".join(map(printable, str(text).split("\n")))


def grown(growth: float | None) -> str:
    """Return a growth as text. The text is empty if there is no growth."""
    return f"({growth:+})" if growth else ""


def tally(entries: Iterable[tuple[str, str, str | None]], before: Iterable[Tally] | None = None) -> list[Tally]:
    """Count the entries that are alike, and return a row for each such group, the largest first.

    An entry consists of the description shared by all entries that are alike, its own description, and its place.
    ``before`` are the rows of an earlier result. A group that has disappeared since then has a row with the count 0.
    """
    rows: dict[tuple[str, str | None], Tally] = {}
    for alike, alone, place in entries:
        row = rows.get((alike, place))
        if row is None:
            row = rows[alike, place] = Tally(alone, place, 0, alike=alike)
        row.count += 1
        if row.what != alone:
            row.what = alike
    if before is not None:
        old = {(row.alike, row.place): row for row in before if row.count}
        for key, row in rows.items():
            row.growth = row.count - (old.pop(key).count if key in old else 0)
        for key, row in old.items():
            rows[key] = dataclasses.replace(row, count=0, growth=-row.count)
    return sorted(rows.values(), key=lambda row: (-row.count, row.what, row.place or ""))
