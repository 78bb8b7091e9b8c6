"""Put the loop under test where programs look for asyncio's own. The directory of this file is first on the path
of every suite process, so Python imports the file when the process starts.

`SUITE_LOOP` names the loop. If `SUITE_PATCH` is set, `coro.patch()` is called before the program's own imports. The
call patches the default parts and the part that `SUITE_PATCH` names. Child processes of a test get the loop and the
patch, too. `BUILT` counts the loops of this process by the package of their class, so that a run can prove which loop
it tested. `BUILT["coros"]` counts the blocking functions that ran in coros.
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


def count(kind: Any, method: str, name: str) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def counting(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        BUILT[name] += 1
        return original(self, *args, **kwargs)

    setattr(kind, method, counting)


def patch(part: str) -> None:
    coro = importlib.import_module("grapeshot.coro")
    coro.patch(**{part: True})
    count(coro.CoroPoolExecutor, "_submit_to_coro", "coros")


def install(subject: str) -> None:
    """Put the subject's class in the place of asyncio's loop classes, also in the policies of asyncio and uvloop."""
    module, _, name = CLASSES[subject].partition(":")
    loop_class: Any = getattr(importlib.import_module(module), name)
    count(selector_events.BaseSelectorEventLoop, "__init__", "asyncio")
    if subject != "asyncio":
        count(loop_class, "__init__", subject)
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
    patch(os.environ["SUITE_PATCH"])
if "SUITE_LOOP" in os.environ:
    install(os.environ["SUITE_LOOP"])
