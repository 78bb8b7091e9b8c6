"""Charts of a comparison as SVG, drawn by matplotlib: without scripts, fonts or other external parts.

In a page, text and grid take their colours from the page's CSS. A chart in a file of its own has a fixed theme.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.intervals import Interval
from benchmarks.standings import OURS, RAW, Outcome, best_peer, median, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    text: str
    grid: str


LIGHT = Theme(text="#1f2328", grid="#d1d9e0")
DARK = Theme(text="#e6edf3", grid="#3d444d")
# The theme of charts in a page: these placeholder colours are replaced with the page's CSS variables.
PAGE = Theme(text="#010203", grid="#040506")
CSS = {PAGE.text: "var(--text)", PAGE.grid: "var(--grid)"}

# Colour and marker of the usual participants; all others except the raw server have the look OTHER. If two of the usual
# participants appear in one chart, they differ in colour and in marker, for readers who cannot tell the colours apart.
# (The curves of latencies have no markers.)
LOOKS = {
    OURS: ("#8b5cf6", "o"),
    "uvloop": ("#0ea5e9", "s"),
    "zuvloop": ("#f59e0b", "D"),
    "rloop": ("#22a35a", "^"),
    "asyncio": ("#8a94a3", "v"),
    "gevent": ("#22a35a", "^"),
    "greenlet": ("#0ea5e9", "s"),
    "runloom": ("#f59e0b", "D"),
    "greenback": ("#ec4899", "P"),
    "tasks": ("#8a94a3", "v"),
    "protocol": ("#64748b", "X"),
}
OTHER = ("#b45309", "*")

ROW_INCHES = 0.29
WIDTH_INCHES = 9.6
# Ratios beyond these are drawn at the edge.
LOWEST, HIGHEST = 0.1, 8.0
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 8)


def look(loop: str) -> tuple[str, str]:
    return LOOKS.get(loop, OTHER)


def new_figure(height: float, theme: Theme, name: str, width: float = WIDTH_INCHES) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Keep text as text, and produce the same file from the same numbers.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": theme.text})
    mpl.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def style(axes: Axes, theme: Theme) -> None:
    axes.patch.set_alpha(0)
    axes.tick_params(colors=theme.text, which="both", length=0)
    axes.xaxis.label.set_color(theme.text)
    axes.yaxis.label.set_color(theme.text)
    axes.title.set_color(theme.text)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def svg(figure: Figure, tips: Sequence[str] = (), colours: dict[str, str] | None = None) -> str:
    """Return the figure as an element. `tips` become the titles of the artists named `tip0`, `tip1`, ..."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for index, tip in enumerate(tips):
        text = text.replace(f'<g id="tip{index}">', f"<g><title>{html.escape(tip)}</title>", 1)
    for colour, replacement in (colours or {}).items():
        text = text.replace(colour, replacement)
    return text


def relative(outcome: Outcome, loop: str, peer: str) -> Interval | None:
    """Return the ratio to the peer. Only grapeshot's ratio is computed run by run, so only this ratio has an interval.
    For the other loops, all three numbers of the result are equal.
    """
    if loop == OURS:
        return ratio(outcome, peer)
    own, other = median(outcome, loop), median(outcome, peer)
    if own is None or not other or other < 0:
        return None
    return Interval(own / other, own / other, own / other)


def ratio_label(value: float) -> str:
    return f"{value:g}"


def draw_ratios(axes: Axes, rows: Sequence[tuple[str, Outcome, str]], loops: Sequence[str], theme: Theme) -> list[str]:
    """Draw the rows (title, outcome, the peer whose value is 1) below each other. A row has a mark for each loop, and
    a bar for the interval of grapeshot. Return the tooltips of the marks.
    """
    tips: list[str] = []

    def tip(artist: Any, text: str) -> None:
        artist.set_gid(f"tip{len(tips)}")
        tips.append(text)

    def inside(value: float) -> float:
        return min(max(value, LOWEST), HIGHEST)

    axes.set_xscale("log")
    axes.axvline(1, color=theme.text, linewidth=1)
    for at, (title, outcome, peer) in enumerate(rows):
        for loop in [*(loop for loop in loops if loop != OURS), OURS]:
            found = relative(outcome, loop, peer)
            if found is None:
                continue
            colour, marker = (theme.text, "|") if loop == RAW else look(loop)
            size = {OURS: 8, RAW: 11}.get(loop, 6)
            if loop == OURS:
                axes.plot([inside(found.low), inside(found.high)], [at, at], color=colour, linewidth=3, alpha=0.35)
            (mark,) = axes.plot([inside(found.middle)], [at], marker, color=colour, markersize=size, linestyle="none")
            limits = f" ({found.low:.2f} to {found.high:.2f})" if loop == OURS else ""
            tip(mark, f"{title}: {loop} needs {found.middle:.2f}{limits} times as much as {peer}")
    axes.set_yticks(range(len(rows)), [title for title, _, _ in rows])
    said = [f"{found.middle:.2f} of {peer}" for _, outcome, peer in rows if (found := ratio(outcome, peer))]
    numbers = axes.secondary_yaxis("right")
    numbers.set_yticks(range(len(rows)), said)
    style(numbers, theme)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.04)
    low, high = axes.get_xlim()
    shown = [tick for tick in TICKS if low <= tick <= high] or [1]
    axes.set_xticks(shown, [ratio_label(tick) for tick in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    return tips


def legend(figure: Figure, loops: Sequence[str], theme: Theme) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for loop in loops:
        colour, marker = (theme.text, "|") if loop == RAW else look(loop)
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=7, label=loop))
    found = figure.legend(handles=handles, loc="outside upper left", ncols=len(loops), frameon=False)
    for text in found.get_texts():
        text.set_color(theme.text)


def ratio_chart(
    name: str, rows: Sequence[tuple[str, Outcome, str]], loops: Sequence[str], theme: Theme, label: str
) -> tuple[Figure, list[str]]:
    figure = new_figure(ROW_INCHES * len(rows) + 0.95, theme, name)
    axes = figure.subplots()
    tips = draw_ratios(axes, rows, loops, theme)
    axes.set_xlabel(label)
    style(axes, theme)
    axes.grid(visible=False, axis="y", which="both")
    axes.hlines(range(len(rows)), *axes.get_xlim(), color=theme.grid, linewidth=0.4, zorder=0)
    legend(figure, loops, theme)
    return figure, tips


def group_chart(name: str, outcomes: Sequence[Outcome], loops: Sequence[str]) -> str | None:
    """Return an element for a page: a group's rows relative to their best peers, or None if no row has a peer."""
    rows = [(outcome["title"], outcome, best) for outcome in outcomes if (best := best_peer(outcome))]
    if not rows:
        return None
    label = "as a multiple of the best peer; less is better; the line is the best peer"
    figure, tips = ratio_chart(name, rows, loops, PAGE, label)
    return svg(figure, tips, CSS)


def summary_chart(name: str, chosen: dict[str, str], result: dict[str, Any], theme: Theme) -> str:
    """Return an SVG file of the chosen rows (name and title), each relative to its best peer."""
    outcomes = {outcome["name"]: outcome for outcome in result["cases"]}
    rows = []
    for row, title in chosen.items():
        outcome = outcomes.get(row)
        if outcome is not None and (best := best_peer(outcome)):
            rows.append((title, outcome, best))
    loops = [loop for loop in result["loops"] if loop != RAW]
    label = "CPU time as a multiple of the best peer's; less is better"
    figure, tips = ratio_chart(name, rows, loops, theme, label)
    return svg(figure, tips) + "\n"


def nines(quantile: float) -> float:
    """Return the position of a quantile on the axis: 0.9 is at 1, 0.99 at 2, and so on."""
    return -math.log10(max(1 - quantile, 1e-4))


def curve(outcome: Outcome, loop: str) -> list[tuple[float, float]]:
    """Return pairs of a quantile and a latency in us; empty if the comparison has no curve for this loop."""
    return [(quantile, us) for quantile, us in outcome.get("curves", {}).get(loop, [])]


def time_label(us: float) -> str:
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"


def latency_chart(name: str, outcomes: Sequence[Outcome], loops: Sequence[str]) -> str | None:
    """Return an element for a page: latency by quantile, a panel per row. None if no row has such a curve."""
    shown = [outcome for outcome in outcomes if any(curve(outcome, loop) for loop in loops)]
    if not shown:
        return None
    columns = 2
    lines = math.ceil(len(shown) / columns)
    figure = new_figure(2.5 * lines + 0.5, PAGE, name)
    panels = figure.subplots(lines, columns, squeeze=False)
    for index in range(lines * columns):
        axes = panels[index // columns][index % columns]
        if index >= len(shown):
            axes.set_visible(False)
            continue
        for loop in loops:
            points = [(nines(q), us) for q, us in curve(shown[index], loop) if q < 1]
            if points:
                colour = PAGE.text if loop == RAW else look(loop)[0]
                width, dashes = (2.2, "-") if loop == OURS else (1.2, ":" if loop == RAW else "-")
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, linestyle=dashes)
        rate = shown[index].get("kept", {}).get("rate_rps")
        suffix = f" ({rate:,}/s)" if rate else ""
        axes.set_title(f"{shown[index]['name']}{suffix}", fontsize=9, loc="left")
        axes.set_yscale("log")
        axes.set_xticks([nines(q) for q in (0, 0.5, 0.9, 0.99, 0.999)], ["min", "50 %", "90 %", "99 %", "99.9 %"])
        axes.set_xlim(0, nines(0.9995))
        axes.yaxis.set_major_formatter(lambda us, _: time_label(us))
        style(axes, PAGE)
        axes.grid(visible=False, which="minor")
    legend(figure, loops, PAGE)
    return svg(figure, (), CSS)
