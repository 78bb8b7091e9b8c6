"""Write the speed chart of README.md and the tables of docs/speed.md, from the committed JSON only: `make tables`."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "comparison.json"
COROS = RESULTS.with_name("coros.json")
BLOCKING = RESULTS.with_name("blocking.json")
CALLGRIND = RESULTS.with_name("callgrind.json")
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "speed.md"
LIGHT, DARK = (ROOT / "docs" / f"speed-{theme}.svg" for theme in ("light", "dark"))
ALT = "CPU time of grapeshot and other loops in eight kinds of work, as multiples of the best other loop"
BEGIN, END = "<!-- speed table: begin -->\n", "<!-- speed table: end -->\n"
INSTRUCTIONS = (
    "Instructions in user space on CPython {python}, counted by callgrind (`make callgrind`). Their number does not "
    "depend on how busy the machine is."
)
COUNTED = {
    "echo": "echo of 960 B",
    "call-soon-bulk": "`call_soon`, bulk",
    "call-soon-args": "`call_soon`, two arguments",
    "call-soon-chain": "`call_soon`, chain",
    "call-later-cancel": "`call_later` and cancel",
}


# The rows of the README's chart: common applications, and calls that most programs make.
CHOSEN = {
    "echo-1k-100": "TCP echo, 1 KiB",
    "echo-100k-10": "TCP echo, 100 KiB",
    "tls-1k-100": "TLS echo, 1 KiB",
    "streams-1k-100": "asyncio streams echo, 1 KiB",
    "aiohttp": "aiohttp",
    "uvicorn": "uvicorn",
    "call-soon-chain": "call_soon",
    "call-later-cancel": "call_later, then cancel",
}


def summary(result: dict[str, Any]) -> str:
    """Return the README's chart with the text that explains it."""
    from benchmarks.tables import summary

    machine, versions = result["machine"], result["versions"]
    named = [f"{name} {versions[name]}" for name in result["loops"] if name != "grapeshot" and name in versions]
    peers = ", ".join(["asyncio", *named[:-1]]) + f" and {named[-1]}"
    note = (
        "The chart shows CPU time: the server's time per request or, in rows without a server, the process's time per "
        f"call. It compares grapeshot with {peers}, on CPython {machine['python']} and Linux. Each number "
        f"is the median of {result['settings']['runs']} alternating runs, and the bands are 95 % intervals. "
        "[docs/speed.md](docs/speed.md) explains the comparison and has all rows, including latency and aiofastnet's "
        f"transports. {summary(result)}"
    )
    picture = [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{DARK.relative_to(ROOT).as_posix()}">',
        f'  <img alt="{ALT}" src="{LIGHT.relative_to(ROOT).as_posix()}">',
        "</picture>",
    ]
    return "\n".join([*picture, "", *textwrap.wrap(note, 118, break_on_hyphens=False)]) + "\n"


def charts(result: dict[str, Any]) -> dict[Path, str]:
    """Return the two files of the README's chart."""
    from benchmarks import charts

    return {
        LIGHT: charts.summary_chart("readme", CHOSEN, result, charts.LIGHT),
        DARK: charts.summary_chart("readme", CHOSEN, result, charts.DARK),
    }


def instructions() -> str:
    """Return the section on instructions per operation."""
    found = json.loads(CALLGRIND.read_text(encoding="utf-8"))
    counted = found["instructions_per_operation"]
    loops = ["grapeshot", "uvloop", "asyncio"]
    lines = [
        "## Instructions",
        "",
        INSTRUCTIONS.format(python=found["machine"]["python"]),
        "",
        f"| per operation | {' | '.join(loops)} |",
        "|---|---:|---:|---:|",
    ]
    for name, title in COUNTED.items():
        lines.append(f"| {title} | {' | '.join(f'{counted[name][loop]:,.0f}' for loop in loops)} |")
    return "\n".join(lines) + "\n"


def coros() -> str:
    """Return the sections that compare coros and blocking-style servers with other libraries."""
    from benchmarks.tables import markdown

    parts = []
    for path, heading in ((COROS, "## Coros"), (BLOCKING, "## Blocking-style servers")):
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            parts.append(markdown(result | {"heading": heading}, has_rule=False))
    return "".join(f"\n{part}\n" for part in parts)


def put(page: Path, table: str) -> str:
    """Return the whole page, with `table` between the two markers."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert all((begin, end)), f"{page.name} has no place for the table"
    return before + begin + table + end + after


def expected() -> dict[Path, str]:
    """Return the expected text of the two pages."""
    from benchmarks.tables import markdown

    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = markdown(result | {"heading": "## The loop"}, has_rule=False) + "\n\n" + instructions() + coros()
    return {README: put(README, summary(result)), PAGE: put(PAGE, page)}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, text in (expected() | charts(json.loads(RESULTS.read_text(encoding="utf-8")))).items():
        path.write_text(text, encoding="utf-8")
