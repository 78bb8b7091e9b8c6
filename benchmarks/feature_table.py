"""Write docs/features.md from the committed results of the probes: `python -m benchmarks.feature_table`."""

from __future__ import annotations

import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from benchmarks._machine import ROOT
from benchmarks.features import FREE_THREADED, LOOPS

ROWS = ROOT / "benchmarks" / "features.toml"
RESULTS = ROOT / "benchmarks" / "results" / "features.json"
PAGE = ROOT / "docs" / "features.md"

INTRODUCTION = """\
# Features

This table shows which features of asyncio's loop, and which further ones, each event loop has. Below the table, each
feature has a section with the details.

Most features are tested by probes, small programs in [benchmarks/probes](../benchmarks/probes). Each probe ran up to
three times on each loop, each time in a new process. A loop has a feature if no run of the probe failed. Each section
lists grapeshot's tests of its feature, and the error of each loop that lacks the feature. The features at the end of
the table have no probe, so their sections name a source for each loop.

To run the probes again, install all of these loops, and run
`python -m benchmarks.features --json benchmarks/results/features.json --free-threaded python3.14t`. Then `make tables`
writes this page.

grapeshot is tested on Linux on x86-64. [versions.md](versions.md#what-is-experimental) lists what is experimental.
"""


def load() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows, and the outcomes of their probes."""
    return tomllib.loads(ROWS.read_text(encoding="utf-8")), json.loads(RESULTS.read_text(encoding="utf-8"))


def compact(rows: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the table of all rows."""
    versions = result["versions"]
    heads = [f"{loop} {versions.get(loop, '')}".strip() for loop in LOOPS]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(LOOPS)]
    pythons = {"asyncio": "all"} | result["requires_python"]
    table = {"CPython": [pythons[loop].replace(">=", "from ") for loop in LOOPS]}
    for row in rows["row"]:
        outcomes = result["outcomes"][row["probe"]]
        table[row["title"]] = ["yes" if outcomes[loop] is None else "no" for loop in LOOPS]
    table |= {row["title"]: [row[loop][0] for loop in LOOPS] for row in rows["known"]}
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in table.items()]
    machine = result["machine"]
    note = (
        f"Tested on {result['taken'][:10]} on {machine['system'].split()[0]}, with CPython {machine['python']}. "
        "The row about free-threaded CPython was tested with such a build."
    )
    return "\n".join([*lines, "", *textwrap.wrap(note, 118)]) + "\n"


def page(rows: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the text of docs/features.md."""
    lines = [INTRODUCTION, compact(rows, result)]
    for row in rows["row"]:
        outcomes = result["outcomes"][row["probe"]]
        lines += [f"## {row['title']}", ""]
        lines += [f"- grapeshot: {', '.join(f'`{test}`' for test in row['tests'])}"]
        lines += [f"- {loop}: {outcome(outcomes[loop])}" for loop in LOOPS if loop != "grapeshot"]
        interpreter = ", on a free-threaded interpreter" if row["probe"] == FREE_THREADED else ""
        lines += [f"- probe: `{row['probe']}`{interpreter}", ""]
    for row in rows["known"]:
        lines += [f"## {row['title']}", ""]
        lines += [f"- {loop}: {row[loop][0]}, {row[loop][1]}" for loop in LOOPS]
        lines += [""]
    return "\n".join(lines)


def outcome(why: str | None) -> str:
    return "yes" if why is None else f"no (`{why}`)"


def expected() -> dict[Path, str]:
    """Return `{page: the text that it must have}`."""
    return {PAGE: page(*load())}


if __name__ == "__main__":
    for path, text in expected().items():
        path.write_text(text, encoding="utf-8")
