"""Builds the lines of each view of ``top`` from a sample. Control characters in the sample's texts are replaced."""

from __future__ import annotations

import os
import re

from rich.text import Text

from grapeshot.insight._statistics import Statistics
from grapeshot.insight._tally import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Sample = dict[str, Any]

ORDERS = {
    "overview": ("most",),
    "numbers": ("kind", "rate", "name"),
    "slow": ("worst", "latest", "most", "name"),
    "tree": ("most", "growth", "name"),
    "descriptors": ("most", "growth", "name"),
    # In these two views, each item has lines of its own. In the views "slow", "tree" and "descriptors", all items that
    # are alike share one row.
    "each tree": ("waits",),
    "each descriptors": ("number", "owner", "what"),
}
_PLACE = re.compile(r'( *File ")(.*)(", line \d+, in .*)')
_LINE = re.compile(r'", line (\d+), in (.*)')
_FOLDERS = re.compile(r"[^ ]*/(?=[^/ ]+:\d+)")
_NO_NUMBERS = "The event loop of this process is not grapeshot's, so there are no statistics."
_RATES = ("running_s", "polling_s", "callbacks", "connections_accepted", "bytes_written")
# The line about the loop is red if the loop is busy for at least this percentage of the time.
_BUSY_PERCENT = 90
# The line about the process is red if at least this share of the descriptors that it may open is in use.
_DESCRIPTOR_SHARE = 0.9
_MEDIUM_WIDTH = 90  # from this many columns on, less important numbers are shown, too
_NUMBER_WIDTH = 39  # the width of one number with its rate


def heading(now: Sample, before: Sample, width: int) -> list[Text]:
    """Return the two lines about the process."""
    rss = "?" if now["rss"] is None else f"{now['rss'] / (1 << 20):.1f} MiB"
    cpu = "" if not before else f"  CPU {100 * _rate(now, before, now['cpu_s'] - before['cpu_s']):.0f} %"
    facts = (
        f"pid {now['pid']}{cpu}  RSS {rss}  "
        f"descriptors {now['descriptor_count']}/{now['descriptor_limit']}  threads {now['threads']}"
    )
    is_short = now["descriptor_count"] >= _DESCRIPTOR_SHARE * now["descriptor_limit"]
    return [
        _line(facts, width, _warning(is_short) or "bold"),
        _line(f"{now['process']}  on Python {now['python']}", width, "dim"),
    ]


def numbers(now: Sample, before: Sample, order: int, width: int, rows: int) -> list[Text]:
    """Return the numbers with their rates, in as many columns as fit."""
    found = now["statistics"]
    if found is None:
        return [_line(_NO_NUMBERS, width)]
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
    count = max(1, width // (_NUMBER_WIDTH + 1))
    depth = -(-len(entries) // count)
    title = f"{'':20}{'total':>10}{'a second':>9}"
    lines.append(_line(" ".join([title] * count), width, "underline"))
    for row in range(depth):
        cells = [_number(*entries[at]) for at in range(row, len(entries), depth)]
        lines.append(_line(" ".join(cells), width))
    return lines


def slow(now: Sample, order: int, width: int) -> list[Text]:
    """Return the slow callbacks, with one row and one stack for all that are alike."""
    lines = []
    for entry in _sorted_slow(now, order):
        lines.append(_line(_slow_words(now, entry), width, "bold"))
        lines += [_line(f"    {line}", width) for line in entry["stack"]]
    return lines or [_line("No callback has been slow since top was started.", width)]


def tree(found: list[str] | None, width: int) -> list[Text]:
    """Return the coros and tasks, each above what it waits for."""
    return [_line(line, width) for line in found or ["looking ..."]]


def tallies(found: list[Sample] | None, history: History, order: int, width: int) -> list[Text]:
    """Return a table with a row for all items that are alike: their number, and by how much it has grown."""
    if found is None:
        return [_line("looking ...", width)]
    lines = [_line(f"{'number':>7}{'growth':>8}{'latest':>8}  what, and where", width, "underline")]
    for entry in history.sorted(found, order):
        growth, latest = history.growth(entry)
        counts = f"{entry['count']:7}{_signed(growth):>8}{_signed(latest):>8}"
        lines.append(_line(f"{counts}  {entry['what']}", width, "bold" if growth > 0 else ""))
        if entry["place"]:
            source = f": {entry['source']}" if entry.get("source") else ""
            lines.append(_line(f"{'':27}{_short_place(printable(entry['place']), width - 27)}{source}", width, "dim"))
    return lines


def overview(
    now: Sample, before: Sample, parts: Sample, histories: dict[str, History], size: tuple[int, int]
) -> list[Text]:
    """Return a summary: the loop, its connections, slow callbacks, and the most frequent coros, tasks, descriptors."""
    width, rows = size
    lines = _loop_lines(now, before, (parts.get("memory") or {}).get("write_buffers", 0), width)
    left = max(3, rows - len(lines) - 3)
    slow_rows = _sorted_slow(now, 0)[: max(1, left // 4)]
    lines.append(_line("slow callbacks since top began (s)", width, "underline"))
    lines += [_line(_slow_words(now, entry, is_short=True), width) for entry in slow_rows] or [
        _line("none", width, "dim")
    ]
    left -= max(1, len(slow_rows))
    for part, title in (("waits", "coros and tasks (t)"), ("descriptors", "descriptors (d)")):
        found = parts.get(part)
        shown = [] if found is None else histories[part].sorted(found, 0)
        total = sum(entry["count"] for entry in shown)
        grown = histories[part].total_growth(shown)
        lines.append(_line(f"{total} {title}{_in_brackets(grown)}", width, "underline"))
        most = left // 2 if part == "waits" else left
        lines += [_tally_line(entry, histories[part], width) for entry in shown[:most]]
        left -= min(most, len(shown))
    return lines


def _loop_lines(now: Sample, before: Sample, to_be_sent: int, width: int) -> list[Text]:
    found, old = now["statistics"], before.get("statistics")
    if found is None:
        return [_line(_NO_NUMBERS, width)]
    rates = {} if not old else {name: _rate(now, before, found[name] - old[name]) for name in _RATES}
    ran = rates.get("running_s", 0.0) + rates.get("polling_s", 0.0)
    busy = 100 * rates["running_s"] / ran if ran else 0.0
    waits, durations = found["scheduling_delays"], found["callback_durations"]
    loop = f"loop     busy {busy:3.0f} %  {_short(rates.get('callbacks', 0.0))} callbacks/s"
    if waits and durations:
        loop += f"  longest {_duration(durations['max'])}  delay p99 {_duration(waits['p99'])}"
        loop += f", max {_duration(waits['max'])}" if width >= _MEDIUM_WIDTH else ""
    accepted, sent = (_short(rates.get(name, 0.0)) for name in ("connections_accepted", "bytes_written"))
    streams = f"I/O      {now['connections']} connections  {accepted} accepted/s  {sent} B/s sent"
    if to_be_sent:
        streams += f"  {_short(to_be_sent)} B to be sent"
    errors = found["accept_errors"]
    if errors:
        streams += f"  {errors} accept errors"
    ready = f"{found['ready']} ready (most {found['most_ready']})"
    work = f"waiting  {found['timers']} timers  {ready}  {found['coros']} coros"
    return [
        _line(loop, width, _warning(busy >= _BUSY_PERCENT)),
        _line(streams, width, _warning(errors > 0)),
        _line(work, width),
    ]


def _sorted_slow(now: Sample, order: int) -> list[Sample]:
    keys = (
        lambda entry: -entry["duration_s"],
        lambda entry: -entry["last_s"],
        lambda entry: -entry["count"],
        lambda entry: (entry["name"], -entry["duration_s"]),
    )
    return sorted(now["slow"], key=keys[order])


def _slow_words(now: Sample, entry: Sample, is_short: bool = False) -> str:
    ago = f"{max(0.0, now['at_s'] - entry['last_s']):.0f} s ago"
    what = f"{entry['kind']} {printable(entry['name'])}"
    if is_short:
        return f"{entry['count']:7} x  {entry['duration_s']:.3f} s  {what}  {ago}{_innermost(entry['stack'])}"
    if entry["count"] == 1:
        return f"{entry['duration_s']:9.3f} s  {what}  {ago}"
    return f"{entry['duration_s']:9.3f} s  {what}  {entry['count']} times, {entry['total_s']:.3g} s in all, last {ago}"


def _innermost(stack: list[str]) -> str:
    places = [found for line in stack if (found := _PLACE.fullmatch(line))]
    if not places:
        return ""
    line = _LINE.sub(r":\1 in \2", places[-1][3])
    return f"  at {os.path.basename(places[-1][2])}{line}"


def _tally_line(entry: Sample, history: History, width: int) -> Text:
    growth = history.growth(entry)[0]
    words = f"{entry['count']:7}{_in_brackets(growth):>9}  {_tally_words(entry, width - 18)}"
    return _line(words, width, "bold" if growth > 0 else "")


def _tally_words(entry: Sample, width: int) -> str:
    what, place = printable(entry["what"]), printable(entry["place"] or "")
    return f"{what}, {_short_place(place, width - len(what) - 2)}" if place else what


def _short_place(place: str, width: int) -> str:
    """Return a place. If it is too long, its directories are left out."""
    return place if len(place) <= width else _FOLDERS.sub("", place)


def _signed(number: int) -> str:
    return f"{number:+}" if number else ""


def _in_brackets(number: int) -> str:
    return f" ({number:+})" if number else ""


def _warning(is_bad: bool) -> str:
    return "bold red" if is_bad else ""


class History:
    """The number of items in each row when top began, in the previous sample, and in the current one."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str | None], int] | None = None
        self._before: dict[tuple[str, str | None], int] = {}
        self._now: dict[tuple[str, str | None], int] = {}

    def note(self, found: list[Sample]) -> None:
        """Store the rows of a new sample."""
        self._before, self._now = self._now, {(each["alike"], each["place"]): each["count"] for each in found}
        if self._first is None:
            self._first = self._before = self._now

    def growth(self, entry: Sample) -> tuple[int, int]:
        """Return by how much a row has grown since top began, and since the previous sample."""
        key = (entry["alike"], entry["place"])
        return entry["count"] - (self._first or {}).get(key, 0), entry["count"] - self._before.get(key, 0)

    def total_growth(self, found: list[Sample]) -> int:
        """Return by how much all rows together have grown since top began."""
        total: int = sum(entry["count"] for entry in found)
        return total - sum((self._first or {}).values())

    def sorted(self, found: list[Sample], order: int) -> list[Sample]:
        """Return the rows in one of the orders of ``ORDERS``."""
        keys = (
            lambda entry: (-entry["count"], entry["what"]),
            lambda entry: (-self.growth(entry)[0], -entry["count"]),
            lambda entry: (entry["what"], -entry["count"]),
        )
        return sorted(found, key=keys[order])


def descriptors(found: list[dict[str, Any]] | None, order: int, width: int) -> list[Text]:
    """Return the open descriptors, each with its owner."""
    if found is None:
        return [_line("looking ...", width)]
    key = ("fd", "owner", "what")[order]
    entries = sorted(found, key=lambda entry: (entry[key] is None, entry[key], entry["fd"]))
    lines = [_line(f"{'fd':>5}  what and owner", width, "underline")]
    for entry in entries:
        owner = "" if entry["owner"] is None else f"  {entry['owner']}"
        opened = "" if entry["opened_at"] is None else f"  opened at {entry['opened_at']}"
        lines.append(_line(f"{entry['fd']:5}  {entry['what']}{owner}{opened}", width))
    return lines


def _line(text: str, width: int, style: str = "") -> Text:
    shown = printable(text)
    if len(shown) > width and (found := _PLACE.fullmatch(shown)):
        # Shorten a long path at its start, because its end says more.
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
        if abs(value) < 999.5:  # otherwise, the format .3g would give 1e+03
            return f"{value:.3g}{unit}" if unit else f"{value:.2f}"
        value /= 1000
    return f"{value:.3g}P"


def _percentiles(name: str, found: dict[str, Any], width: int) -> str:
    shown = ("p50", "p99", "max") if width < 2 * _NUMBER_WIDTH else ("p50", "p90", "p99", "max")
    return f"{name:20} {'  '.join(f'{key} {_duration(found[key])}' for key in shown)}"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995:  # a smaller value becomes at most 999 of the next unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
