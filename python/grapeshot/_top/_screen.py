"""The terminal of ``top``: what it shows, and its keys. A thread asks the process, so that keys always work."""

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

from . import _views
from ._probe import LostError, Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WIDE = 120  # columns from which on the numbers stay beside the other views
_VIEWS = {"n": "numbers", "s": "slow", "t": "tree", "d": "descriptors"}
_SCROLL = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10, "\x1b[H": -(1 << 30)}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
# The looks at the tree and the descriptors may take this share of the loop's time.
_SHARE = 0.05


class Screen:
    """One run of ``top``."""

    def __init__(self, probe: Probe, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._view = "numbers"
        self._sorts = dict.fromkeys(_VIEWS.values(), 0)
        self._offset = 0
        self._is_paused = False
        self._message = ""
        # Of the thread that asks: the last two samples, and what they had of tree and descriptors.
        self._now: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._asked_s = time.monotonic()
        self._lost: str | None = None
        self._wanted = threading.Event()

    def run(self) -> int:
        """Show and obey until the user leaves or the process does; return the exit status."""
        asking = threading.Thread(target=self._ask, name="top", daemon=True)
        asking.start()
        before = termios.tcgetattr(0)
        console = Console()
        try:
            tty.setcbreak(0)
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while self._lost is None:
                    live.update(self._draw(console), refresh=True)
                    if select.select([0], [], [], 0.2)[0]:
                        # Keys that are typed fast come together, and an arrow is several bytes.
                        keys = _KEY.findall(os.read(0, 64).decode(errors="replace"))
                        if not all(self._obey(key) for key in keys):
                            self._probe.end()
                            return 0
        except KeyboardInterrupt:
            self._probe.end()
            return 0
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
        sys.stderr.write(f"{_views.clean(self._lost)}\n")
        return 1

    # ------------------------------------------------------------------ asking

    def _ask(self) -> None:
        cost_s: dict[str, float] = {}
        looked_s: dict[str, float] = {}
        try:
            while True:
                now = time.monotonic()
                wanted = [self._view] if self._view in ("tree", "descriptors") else []
                parts = [part for part in wanted if now - looked_s.get(part, 0) >= cost_s.get(part, 0) / _SHARE]
                self._asked_s = now
                found = self._probe.sample(*parts)
                for part in parts:
                    looked_s[part], cost_s[part] = time.monotonic(), found["took_s"]
                    self._parts[part] = found.pop(part, None)
                if not self._is_paused:
                    self._before, self._now = self._now, found
                self._asked_s = 0.0
                self._wanted.wait(self._interval_s)
                self._wanted.clear()
        except LostError as exc:
            self._lost = str(exc)

    # ------------------------------------------------------------------ keys

    def _obey(self, key: str) -> bool:
        """Do what a key says. False: leave."""
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
            self._sorts[self._view] = (self._sorts[self._view] + 1) % len(_views.ORDERS[self._view])
            self._offset = 0
        elif key == " ":
            self._is_paused = not self._is_paused
        elif key == "w":
            self._dump()
        elif key in _SCROLL:
            self._offset = max(0, self._offset + _SCROLL[key])
        return True

    def _dump(self) -> None:
        """Write all that is known into a file of the directory in which ``top`` was started."""
        name = f"grapeshot-top-{self._now.get('pid', 0)}-{time.strftime('%H%M%S')}.json"
        try:
            with open(name, "x", encoding="utf-8") as file:
                json.dump({**self._now, **self._parts}, file, indent=1)
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
        rows = height - len(head) - 1
        if width >= _WIDE and self._view != "numbers":
            grid = Table.grid(padding=(0, 2))
            left = 58  # the percentiles need so many
            grid.add_column(width=left)
            grid.add_column(width=width - left - 2)
            numbers = _views.numbers(self._now, self._before, self._sorts["numbers"], left, rows)
            grid.add_row(Group(*numbers[:rows]), Group(*self._lines(width - left - 2, rows)))
            return Group(*head, grid)
        return Group(*head, *self._lines(width, rows))

    def _lines(self, width: int, rows: int) -> list[Text]:
        order = self._sorts[self._view]
        if self._view == "numbers":
            lines = _views.numbers(self._now, self._before, order, width, rows)
        elif self._view == "slow":
            lines = _views.slow(self._now, order, width)
        elif self._view == "tree":
            lines = _views.tree(self._parts.get("tree"), width)
        else:
            lines = _views.descriptors(self._parts.get("descriptors"), order, width)
        self._offset = min(self._offset, max(0, len(lines) - rows))
        return lines[self._offset : self._offset + rows]

    def _status(self, width: int) -> Text:
        silent_s = time.monotonic() - self._asked_s if self._asked_s else 0.0
        if silent_s > self._interval_s + 1:
            return Text(f"no answer for {silent_s:.0f} s: something blocks the loop".ljust(width), "bold white on red")
        if self._message:
            return Text(_views.clean(self._message).ljust(width)[:width], "reverse")
        line = Text(style="reverse")
        for key, view in _VIEWS.items():
            line.append(f"{key} {view}  ", "bold" if view == self._view else "")
        order = _views.ORDERS[self._view][self._sorts[self._view]]
        line.append(f"| o {order}  w dump  space {'run' if self._is_paused else 'hold'}  q quit")
        line.truncate(width, pad=True)
        return line
