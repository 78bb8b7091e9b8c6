"""Counting what is alike: a row for a thousand connections of one server, and by how much it has grown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass
class Tally:
    """How many there are of what is alike."""

    what: str
    """Its kind and name; of several with different numbers in their names, ``*`` in the place of the numbers."""
    place: str | None
    """Where the program has opened it, or where it waits, as ``file:line in function``; None if that is not known."""
    count: int
    growth: int | None = None
    """By how much the number has changed since an earlier look; None if there was none."""
    alike: str = dataclasses.field(default="", repr=False)
    """What all of them have in common, with the place: the same in each look."""

    def __str__(self) -> str:
        at = "" if self.place is None else f", {self.place}"
        return printable(f"{self.count:6} {grown(self.growth):>7}  {self.what}{at}")


def printable(text: object) -> str:
    """Return a text on one line in which nothing moves the cursor: names of a program may come from anywhere."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def printable_lines(text: object) -> str:
    """Return a text of several lines in which nothing else moves the cursor."""
    return "\n".join(map(printable, str(text).split("\n")))


def grown(growth: float | None) -> str:
    """Return a growth as text, nothing if there is none."""
    return f"({growth:+})" if growth else ""


def tally(entries: Iterable[tuple[str, str, str | None]], before: Iterable[Tally] | None = None) -> list[Tally]:
    """Count entries (what all that are alike have in common, this one alone, its place), the most first.

    ``before`` are the rows of an earlier look. What was there then and is gone has a row without any.
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
