"""Progress of a comparison: a live table with a progress bar in a terminal, and one line per row elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from benchmarks import tables
from benchmarks.standings import OURS, RAW, Outcome, best_peer, judge, ratio, standing, verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

COLOURS = {"ahead": "green", "equal": "yellow", "behind": "red"}
# Lines on the screen that are not rows of the table: its frame and header, the progress bar, and the prompt.
AROUND = 9
# The width of tables that are written to a file: wide enough for all loops.
FILE_WIDTH = 200


def say(*words: object, end: str = "\n") -> None:
    print(*words, end=end, file=sys.stderr, flush=True)


class Screen:
    """Plain output: a line per row, with a dot for each sample."""

    def __init__(self, title: str, cases: int, samples: int, loops: Sequence[str]) -> None:
        self.title, self.cases, self.samples, self.loops = title, cases, samples, loops
        self.number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, title: str) -> None:
        self.number += 1
        say(f"[{self.number}/{self.cases}] {title} ", end="")

    def take(self, loop: str) -> None:
        say(".", end="")

    def tell(self, text: str) -> None:
        say(f"\n!!! {text}")

    def end(self, outcome: Outcome) -> None:
        say(" " + tables.one_line(outcome))


def row(outcome: Outcome, loops: Sequence[str], has_bounds: bool) -> list[str]:
    """Return the cells of a row of the terminal's table."""
    best, word = best_peer(outcome), standing(outcome)
    low_high = tables.ratio_text(ratio(outcome, best), "")
    cells = [
        outcome["name"],
        *(tables.cell(outcome, loop) for loop in loops),
        f"{low_high} of {best}" if best else "-",
        f"[{COLOURS[word]}]{word}[/]" if word in COLOURS else word,
        tables.raw_cell(outcome),
    ]
    if has_bounds:
        cells.append("; ".join(f"{judge(outcome, bound)[0]}: {verdict(outcome, bound)}" for bound in outcome["bounds"]))
    return cells


def table(title: str, outcomes: Sequence[Outcome], loops: Sequence[str], has_bounds: bool = False) -> Table:
    from rich.table import Table

    made = Table(title=title, title_justify="left", header_style="bold", row_styles=["", "dim"] if has_bounds else [])
    made.add_column("row", no_wrap=True)
    for name in (*loops, f"{OURS} / best peer", "is", f"/ {RAW}"):
        made.add_column(name, justify="right", no_wrap=True)
    if has_bounds:
        made.add_column("bound")
    for outcome in outcomes:
        if not outcome.get("left_out"):
            made.add_row(*row(outcome, loops, has_bounds))
    return made


class LiveScreen(Screen):
    """The last rows as a growing table, and a bar that counts the samples taken."""

    def __init__(self, console: Console, title: str, cases: int, samples: int, loops: Sequence[str]) -> None:
        super().__init__(title, cases, samples, loops)
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = console
        self.outcomes: list[Outcome] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task(title, total=samples)
        # The table here is transient: the complete one is printed at the end.
        self.live: Live = Live(console=console, refresh_per_second=4, get_renderable=self.shown, transient=True)

    def shown(self) -> RenderableType:
        from rich.console import Group

        kept = self.outcomes[-max(1, self.console.height - AROUND) :]
        return Group(table(self.title, kept, self.loops), self.progress)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def begin(self, title: str) -> None:
        self.number += 1
        self.case = title
        self.progress.update(self.task, description=f"[{self.number}/{self.cases}] {title}")

    def take(self, loop: str) -> None:
        self.progress.update(self.task, advance=1, description=f"[{self.number}/{self.cases}] {self.case} on {loop}")

    def tell(self, text: str) -> None:
        self.live.console.print(f"[bold red]{text}[/]")

    def end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def console(*, for_errors: bool) -> Console | None:
    """Return where to print tables, or None if rich (listed in requirements/bench.in) is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    made = Console(stderr=for_errors, highlight=False)
    return made if made.is_terminal else Console(stderr=for_errors, highlight=False, width=FILE_WIDTH)


def open_screen(title: str, cases: int, samples: int, loops: Sequence[str]) -> Screen:
    found = console(for_errors=True)
    if found is None or not found.is_terminal:
        return Screen(title, cases, samples, loops)
    return LiveScreen(found, title, cases, samples, loops)


def show(result: dict[str, Any]) -> None:
    """Print the whole table, with the remarks below it."""
    found = console(for_errors=False)
    if found is None:
        print(tables.markdown(result))
        return
    has_bounds = any(outcome["bounds"] for outcome in result["cases"])
    title = result.get("heading", "# Comparison").strip("# ")
    found.print(table(title, result["cases"], result["loops"], has_bounds))
    found.print(tables.summary(result), soft_wrap=True)
    for text in tables.remarks(result):
        found.print(f"- {text}", markup=False, soft_wrap=True)
