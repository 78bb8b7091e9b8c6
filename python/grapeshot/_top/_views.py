"""The lines of each view of ``top``, from what the process has sent. Its texts are shown without control characters."""

from __future__ import annotations

import re

from rich.text import Text

from grapeshot._statistics import Statistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Sample = dict[str, Any]

ORDERS = {
    "numbers": ("kind", "rate", "name"),
    "slow": ("worst", "latest", "name"),
    "tree": ("waits",),
    "descriptors": ("number", "owner", "what"),
}
_PLACE = re.compile(r'( *File ")(.*)(", line \d+, in .*)')
_HALF = 39  # columns of one number with its rate


def clean(text: object) -> str:
    """Return a text on one line in which nothing moves the cursor."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def heading(now: Sample, before: Sample, width: int) -> list[Text]:
    """Return the line about the process."""
    rss = "?" if now["rss"] is None else f"{now['rss'] / (1 << 20):.1f} MiB"
    cpu = "" if not before else f"  CPU {100 * _rate(now, before, now['cpu_s'] - before['cpu_s']):.0f} %"
    facts = (
        f"pid {now['pid']}  Python {now['python']}{cpu}  RSS {rss}  "
        f"descriptors {now['descriptor_count']}/{now['descriptor_limit']}  threads {now['threads']}"
    )
    return [_line(facts, width, "bold"), _line(now["process"], width, "dim")]


def numbers(now: Sample, before: Sample, order: int, width: int, rows: int) -> list[Text]:
    """Return the numbers with their rates, in as many columns as fit."""
    found = now["statistics"]
    if found is None:
        return [_line("The loop of this process is not grapeshot's: it has no numbers.", width)]
    old = before.get("statistics") or {}
    entries: list[tuple[str, float, float | None]] = []
    lines = []
    for name, value in found.items():
        if name in Statistics.HISTOGRAMS:
            lines += [] if value is None else [_line(_percentiles(name, value, width), width)]
            continue
        is_gauge = name in Statistics.GAUGES
        rate = None if is_gauge or name not in old else _rate(now, before, value - old[name])
        entries.append((name, value, rate))
    if order == 1:
        entries.sort(key=lambda entry: -(entry[2] or 0.0))
    elif order == 2:
        entries.sort()
    count = max(1, width // (_HALF + 1))
    depth = -(-len(entries) // count)
    title = f"{'':20}{'total':>10}{'a second':>9}"
    lines.append(_line(" ".join([title] * count), width, "underline"))
    for row in range(depth):
        cells = [_number(*entries[at]) for at in range(row, len(entries), depth)]
        lines.append(_line(" ".join(cells), width))
    return lines


def slow(now: Sample, order: int, width: int) -> list[Text]:
    """Return the slowest callbacks, each above its stack."""
    entries = list(now["slow"])
    if not entries:
        return [_line("No callback was slow since top began to look.", width)]
    if order == 0:
        entries.sort(key=lambda entry: -entry["duration_s"])
    elif order == 1:
        entries.sort(key=lambda entry: -entry["started_s"])
    else:
        entries.sort(key=lambda entry: (entry["name"], -entry["duration_s"]))
    lines = []
    for entry in entries:
        ago = now["at_s"] - entry["started_s"]
        what = f"{entry['duration_s']:9.3f} s  {entry['kind']} {clean(entry['name'])}  {ago:.0f} s ago"
        lines.append(_line(what, width, "bold"))
        lines += [_line(f"    {line}", width) for line in entry["stack"]]
    return lines


def tree(found: list[str] | None, width: int) -> list[Text]:
    """Return the coros and tasks, each above what it waits for."""
    return [_line(line, width) for line in found or ["looking ..."]]


def descriptors(found: list[dict[str, Any]] | None, order: int, width: int) -> list[Text]:
    """Return the open descriptors with their owners."""
    if found is None:
        return [_line("looking ...", width)]
    key = ("fd", "owner", "what")[order]
    entries = sorted(found, key=lambda entry: (entry[key] is None, entry[key], entry["fd"]))
    lines = [_line(f"{'fd':>5}  what and whose", width, "underline")]
    for entry in entries:
        owner = "" if entry["owner"] is None else f"  {entry['owner']}"
        opened = "" if entry["opened_at"] is None else f"  opened at {entry['opened_at']}"
        lines.append(_line(f"{entry['fd']:5}  {entry['what']}{owner}{opened}", width))
    return lines


def _line(text: str, width: int, style: str = "") -> Text:
    shown = clean(text)
    if len(shown) > width and (found := _PLACE.fullmatch(shown)):
        # Of a long path the end tells more.
        start, path, end = found.groups()
        shown = f"{start}…{path[len(shown) - width + 1 :]}{end}"
    line = Text(shown, style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def _rate(now: Sample, before: Sample, difference: float) -> float:
    return float(difference / max(now["at_s"] - before["at_s"], 1e-9))


def _number(name: str, value: float, rate: float | None) -> str:
    return f"{name:20.20}{_short(value):>10}{'' if rate is None else _short(rate):>9}"


def _short(value: float) -> str:
    """Return a number in at most seven characters."""
    if isinstance(value, int) and value < 1_000_000:
        return str(value)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}" if unit else f"{value:.2f}"
        value /= 1000
    return f"{value:.3g}P"


def _percentiles(name: str, found: dict[str, Any], width: int) -> str:
    shown = ("p50", "p99", "max") if width < 2 * _HALF else ("p50", "p90", "p99", "max")
    return f"{name:20} {'  '.join(f'{key} {_duration(found[key])}' for key in shown)}"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
