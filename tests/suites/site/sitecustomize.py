"""Put the loop under test where programs look for asyncio's own. The directory of this file is first on the path
of every suite process, so Python imports the file when the process starts.

`SUITE_LOOP` names the loop. The processes that a test starts use it, too. `BUILT` counts the loops of this process by
the package of their class, so that a run can prove which loop it tested.

`SUITE_PATCH` names a part of `coro.patch()`. All parts that `coro.patch()` patches by default are patched, too, in this
process and in those that a test starts, before they import any other package.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import importlib
import importlib.util
import os
from asyncio import selector_events, unix_events
from typing import Any

CLASSES = {"asyncio": "asyncio:SelectorEventLoop", "grapeshot": "grapeshot:Loop", "uvloop": "uvloop:Loop"}
BUILT: collections.Counter[str] = collections.Counter()


def count(loop_class: Any) -> None:
    initialize = loop_class.__init__

    @functools.wraps(initialize)
    def counting(loop: Any, *args: Any, **kwargs: Any) -> None:
        BUILT[loop_class.__module__.partition(".")[0]] += 1
        initialize(loop, *args, **kwargs)

    loop_class.__init__ = counting


def install(subject: str) -> None:
    """Make asyncio's names and its policy build loops of the subject's class."""
    module, _, name = CLASSES[subject].partition(":")
    loop_class: Any = getattr(importlib.import_module(module), name)
    count(selector_events.BaseSelectorEventLoop)
    if subject != "asyncio":
        count(loop_class)
    for namespace in (asyncio, unix_events):
        for name in ("SelectorEventLoop", "EventLoop"):
            if hasattr(namespace, name):
                setattr(namespace, name, loop_class)
    policy: Any = getattr(unix_events, "_UnixDefaultEventLoopPolicy")  # noqa: B009
    policy._loop_factory = loop_class
    if importlib.util.find_spec("uvloop"):  # only the environment of uvloop's own suite has it
        uvloop: Any = importlib.import_module("uvloop")
        uvloop.new_event_loop = uvloop.Loop = loop_class
        uvloop.EventLoopPolicy._loop_factory = lambda _policy: loop_class()


if "SUITE_PATCH" in os.environ:
    importlib.import_module("grapeshot.coro").patch(**{os.environ["SUITE_PATCH"]: True})
if "SUITE_LOOP" in os.environ:
    install(os.environ["SUITE_LOOP"])
