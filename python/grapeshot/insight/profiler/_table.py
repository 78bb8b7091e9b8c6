"""Formats rows as a table of text for a terminal."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# The title of each column, and whether it is a time, which is recorded in nanoseconds and shown in milliseconds.
_HEADS = {
    "calls": ("calls", False),
    "cpu": ("CPU ms", True),
    "own_cpu": ("own CPU", True),
    "wall": ("wall ms", True),
    "own_wall": ("own wall", True),
    "wait": ("wait ms", True),
    "minor_faults": ("faults", False),
    "major_faults": ("major", False),
    "voluntary_switches": ("waited", False),
    "involuntary_switches": ("preempted", False),
}


def lines(what: str, columns: Sequence[str], rows: Sequence[Any], limit: int) -> list[str]:
    """Return a heading and a line for each of the first ``limit`` rows. The last column is ``str()`` of the row."""
    heads = [_HEADS[column][0] for column in columns]
    texts = [heads, *([_cell(row, column) for column in columns] for row in rows[:limit])]
    widths = [max(len(text[index]) for text in texts) for index in range(len(columns))]
    names = [what, *map(str, rows[:limit])]
    found = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(text, widths, strict=True)), name])
        for text, name in zip(texts, names, strict=True)
    ]
    if len(rows) > limit:
        found.append(f"and {len(rows) - limit} more")
    return found


def _cell(row: Any, column: str) -> str:
    value = getattr(row, column)
    return f"{value / 1e6:.3f}" if _HEADS[column][1] else str(value)
