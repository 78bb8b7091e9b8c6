"""The README's speed table and docs/speed.md, from the committed JSON alone: `make tables` rewrites both."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "comparison.json"
COROS = RESULTS.with_name("coros.json")
UNCHANGED = RESULTS.with_name("coros-unchanged.json")
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- speed table: begin -->\n", "<!-- speed table: end -->\n"


def compact(result: dict[str, Any]) -> str:
    """One row per case that is measured against uvloop: the ratio, and what it must be at most."""
    from benchmarks.tables import OURS, PEER, ratios

    lines = [f"| case | {OURS} / {PEER} | at most |", "|---|---:|---:|"]
    for outcome in result["cases"]:
        taken = ratios(outcome, OURS, PEER)
        if not taken:
            continue
        bounds = [bound["at_most"] for bound in outcome["bounds"] if bound["peer"] == PEER]
        ratio, at_most = f"{statistics.median(taken):.2f}", min(bounds, default=None)
        if at_most is not None and statistics.median(taken) > at_most:
            ratio = f"**{ratio}** (missed)"
        lines.append(f"| {outcome['title']} | {ratio} | {'' if at_most is None else f'{at_most:.2f}'} |")
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines += [
        "",
        f"{machine['processor']}, {machine['cores']} cores; {machine['system']}; CPython {machine['python']};",
        f"{packages}.",
        f"Medians of {result['settings']['runs']} alternated runs, taken {result['taken']}. All numbers are in",
        "[docs/speed.md](docs/speed.md), those of the other loops and the absolute ones too.",
    ]
    return "\n".join(lines) + "\n"


def coros() -> str:
    """The section on coros: beside their peers, and what they cost those who do not use them; of what is committed."""
    from benchmarks.coros.unchanged import markdown as unchanged
    from benchmarks.tables import markdown

    parts = []
    if COROS.exists():
        parts.append(markdown(json.loads(COROS.read_text(encoding="utf-8")) | {"heading": "## Coros"}))
    if UNCHANGED.exists():
        parts.append(unchanged(json.loads(UNCHANGED.read_text(encoding="utf-8"))))
    return "".join(f"\n{part}\n" for part in parts)


def expected() -> dict[Path, str]:
    """What the two pages must say: the whole README with the table in its place, and docs/speed.md."""
    from benchmarks.tables import markdown

    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    readme = README.read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    page = markdown(result) + "\n" + coros()
    return {README: before + BEGIN + compact(result) + END + after, PAGE: page}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, text in expected().items():
        path.write_text(text, encoding="utf-8")
