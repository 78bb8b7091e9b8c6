"""The screen of ``top`` and its keys. A separate thread queries the process, so that keys always work."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import termios
import threading
import time
import tty

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grapeshot.insight._tally import printable
from grapeshot.insight.backdoor._asking import LostError

from . import _views
from ._probe import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WIDE = 120  # from this many columns on, the numbers are shown beside the views slow, tree and descriptors
_VIEWS = {"v": "overview", "n": "numbers", "s": "slow", "t": "tree", "d": "descriptors"}
_SCROLL = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10, "\x1b[H": -(1 << 30)}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
# The parts of a sample that each view needs in addition to the numbers. The key e switches to the "each" views.
_PARTS = {
    "overview": ("waits", "descriptors", "memory"),
    "tree": ("waits",),
    "descriptors": ("descriptors",),
    "each tree": ("tree",),
    "each descriptors": ("each descriptor",),
}
_ALL_PARTS = tuple(dict.fromkeys(part for parts in _PARTS.values() for part in parts))
# The exceptions that unexpected values cause. Such values may come from another version of grapeshot, or from a process
# that only pretends to be a back door.
_INVALID_DATA = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
# Examining coros, tasks and descriptors may take at most this share of the loop's time.
_SHARE = 0.02
_MAX_WORDS = 500


class Screen:
    """One run of ``top``."""

    def __init__(self, probe: Probe, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._view = "overview"
        self._shows_each = False
        self._sorts = dict.fromkeys(_views.ORDERS, 0)
        self._offset = 0
        self._is_paused = False
        self._message = ""
        # Written by the querying thread: the last two samples, and the latest value of each further part.
        self._now: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._histories = {part: _views.History() for part in ("waits", "descriptors")}
        self._dump_is_wanted = False
        self._asked_s = time.monotonic()
        self._lost: str | None = None
        self._wanted = threading.Event()

    def run(self) -> int:
        """Update the screen and handle keys until the user quits or the process ends; return the exit status."""
        asking = threading.Thread(target=self._ask, name="top", daemon=True)
        asking.start()
        before = termios.tcgetattr(0)
        console = Console()
        try:
            tty.setcbreak(0)
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while self._lost is None:
                    try:
                        live.update(self._draw(console), refresh=True)
                    except _INVALID_DATA as exc:
                        self._lost = _describe_invalid_data(exc)
                        break
                    if select.select([0], [], [], 0.2)[0]:
                        # Keys typed in quick succession arrive together, and an arrow key is several bytes.
                        keys = _KEY.findall(os.read(0, 64).decode(errors="replace"))
                        if not all(self._handle_key(key) for key in keys):
                            self._probe.end()
                            return 0
        except KeyboardInterrupt:
            self._probe.end()
            return 0
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stderr.write(f"{printable(self._lost)}\n")
        return 1

    # ------------------------------------------------------------------ asking

    def _ask(self) -> None:
        cost_s: dict[str, float] = {}
        looked_s: dict[str, float] = {}
        try:
            while True:
                now = time.monotonic()
                has_dump = self._dump_is_wanted
                wanted = (
                    ["waits", "tree", "descriptors", "each descriptor"] if has_dump else _PARTS.get(self._shown, ())
                )
                parts = [
                    part for part in wanted if has_dump or now - looked_s.get(part, 0) >= cost_s.get(part, 0) / _SHARE
                ]
                self._asked_s = now
                found = self._probe.sample(*parts)
                dumped = dict(found)
                for part in parts:
                    looked_s[part], cost_s[part] = time.monotonic(), found["took_s"]
                    self._take(part, found.pop(part))
                if not self._is_paused:
                    self._before, self._now = self._now, found
                self._asked_s = 0.0
                if has_dump:
                    self._dump_is_wanted = False
                    self._dump(dumped)
                self._wanted.wait(self._interval_s)
                self._wanted.clear()
        except LostError as exc:
            self._lost = str(exc)
        except _INVALID_DATA as exc:
            self._lost = _describe_invalid_data(exc)

    def _take(self, part: str, found: Any) -> None:
        if not self._is_paused or part not in self._parts:
            if part in self._histories:
                self._histories[part].note(found)
            self._parts[part] = found

    @property
    def _shown(self) -> str:
        """The name of the current view. It begins with "each" if the view shows every item on lines of its own."""
        each = f"each {self._view}"
        return each if self._shows_each and each in _views.ORDERS else self._view

    # ------------------------------------------------------------------ keys

    def _handle_key(self, key: str) -> bool:
        """Handle a key. Return False if the user wants to quit."""
        self._message = ""
        if key in ("q", "\x1b", "\x03"):
            return False
        if key in _VIEWS:
            self._view, self._offset = _VIEWS[key], 0
            self._wanted.set()
        elif key == "\t":
            views = list(_VIEWS.values())
            self._view, self._offset = views[(views.index(self._view) + 1) % len(views)], 0
            self._wanted.set()
        elif key == "o":
            self._sorts[self._shown] = (self._sorts[self._shown] + 1) % len(_views.ORDERS[self._shown])
            self._offset = 0
        elif key == "e":
            self._shows_each, self._offset = not self._shows_each, 0
            self._wanted.set()
        elif key == " ":
            self._is_paused = not self._is_paused
        elif key == "w":
            self._dump_is_wanted = True
            self._wanted.set()
        elif key in _SCROLL:
            self._offset = max(0, self._offset + _SCROLL[key])
        return True

    def _dump(self, found: dict[str, Any]) -> None:
        """Write the whole sample to a file in the current directory."""
        name = f"grapeshot-top-{found.get('pid', 0)}-{time.strftime('%H%M%S')}.json"
        try:
            with open(name, "x", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
        except OSError as exc:
            self._message = f"{name}: {exc.strerror}"
        else:
            self._message = f"written to {name}"

    # ------------------------------------------------------------------ drawing

    def _draw(self, console: Console) -> Group:
        width, height = console.size
        if not self._now:
            return Group(Text("waiting for an answer ..."))
        head = [*_views.heading(self._now, self._before, width), self._status(width)]
        rows = max(1, height - len(head) - 1)
        if width < _WIDE or self._view in ("overview", "numbers"):
            return Group(*head, *self._lines(width, rows), self._keys(width))
        grid = Table.grid(padding=(0, 2))
        left = 58  # columns, which the lines with percentiles need
        grid.add_column(width=left)
        grid.add_column(width=width - left - 2)
        numbers = _views.numbers(self._now, self._before, self._sorts["numbers"], left, rows)
        grid.add_row(Group(*numbers[:rows]), Group(*self._lines(width - left - 2, rows)))
        return Group(*head, grid, self._keys(width))

    def _lines(self, width: int, rows: int) -> list[Text]:
        """Return the visible lines of the view, padded to ``rows`` lines."""
        order, parts = self._sorts[self._shown], self._parts
        if self._shown == "overview":
            lines = _views.overview(self._now, self._before, parts, self._histories, (width, rows))
        elif self._shown == "numbers":
            lines = _views.numbers(self._now, self._before, order, width, rows)
        elif self._shown == "slow":
            lines = _views.slow(self._now, order, width)
        elif self._shown == "each tree":
            lines = _views.tree(parts.get("tree"), width)
        elif self._shown == "each descriptors":
            lines = _views.descriptors(parts.get("each descriptor"), order, width)
        else:
            part = _PARTS[self._view][0]
            lines = _views.tallies(parts.get(part), self._histories[part], order, width)
        self._offset = min(self._offset, max(0, len(lines) - rows))
        shown = lines[self._offset : self._offset + rows]
        return shown + [Text()] * (rows - len(shown))

    def _status(self, width: int) -> Text:
        silent_s = time.monotonic() - self._asked_s if self._asked_s else 0.0
        if silent_s > self._interval_s + 1:
            hint = f"`py-spy dump --pid {self._now['pid']}` shows what"
            line = Text(f"no answer for {silent_s:.0f} s: something is blocking the loop; {hint}", "bold white on red")
            line.truncate(width, pad=True)
            return line
        if self._message:
            return Text(printable(self._message).ljust(width)[:width], "reverse")
        line = Text(style="reverse")
        for key, view in _VIEWS.items():
            line.append(f"{key} {view}  ", "bold" if view == self._view else "")
        line.truncate(width, pad=True)
        return line

    def _keys(self, width: int) -> Text:
        orders = _views.ORDERS[self._shown]
        words = [f"o {orders[self._sorts[self._shown]]}"] if len(orders) > 1 else []
        if f"each {self._view}" in _views.ORDERS:
            words.append("e grouped" if self._shows_each else "e each")
        words += ["w dump", f"space {'run' if self._is_paused else 'hold'}", "arrows scroll", "q quit"]
        line = Text("  ".join(words), "reverse")
        line.truncate(width, pad=True)
        return line


def _describe_invalid_data(exc: Exception) -> str:
    return f"the process has sent data that top cannot show: {type(exc).__name__}: {exc}"[:_MAX_WORDS]
