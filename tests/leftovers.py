"""Find what a test has left behind in the process: threads, child processes, descriptors, replaced modules, replaced
attributes of the standard library, and changed settings. These could affect later tests, whose results would then
depend on the order of the tests.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import logging
import os
import queue
import resource
import select
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from support import CAP_S

# The modules in which tests, and the patches of grapeshot.coro, replace attributes.
PATCHED = (
    _thread,
    asyncio,
    asyncio.base_events,
    asyncio.events,
    asyncio.tasks,
    os,
    queue,
    select,
    selectors,
    socket,
    ssl,
    subprocess,
    threading,
    time,
)
# Attributes that may differ after a test. Their own modules change some of them. `all_tasks` is wrapped permanently
# when a coro hides the running loop from asyncio for the first time (`grapeshot/coro/_hiding.py`).
CHANGING = {
    "all_tasks",
    "_shutdown_locks",
    "_event_loop_policy",  # asyncio makes the default one when it is asked for; see _policy()
}
LOGGERS = ("asyncio", "grapeshot", "concurrent.futures")
# The prefix of the names of threads that start child processes with a preexec_fn. Such a thread runs until this process
# ends, because a child that has set PR_SET_PDEATHSIG gets its signal as soon as the thread that started the child ends.
STAYING = "grapeshot-preexec"
# matplotlib keeps its files open. They do not count.
CACHES = "/site-packages/matplotlib/"
# hypothesis adds functions to gc.callbacks. They do not count.
FOLLOWERS = "hypothesis."
PLAIN = (int, float, str, bytes, tuple)
_ABSENT = object()
# The class of the default policy: DefaultEventLoopPolicy up to CPython 3.13, and _DefaultEventLoopPolicy from 3.14 on.
_DEFAULT_POLICIES = {vars(asyncio.unix_events).get(f"{prefix}DefaultEventLoopPolicy") for prefix in ("_", "")}


def open_descriptors() -> set[str]:
    fds = set()
    for fd in os.listdir("/dev/fd"):
        try:
            target = os.readlink(f"/dev/fd/{fd}")
        except OSError:
            continue  # listdir() has closed the descriptor with which it read the directory
        if CACHES not in target and int(fd) != _tracker()[1]:
            fds.add(f"{fd} -> {target}")
    return fds


def _tracker() -> tuple[int | None, int | None]:
    """Return the process id and the descriptor of multiprocessing's resource tracker. Once started, it runs until this
    process ends.
    """
    tracker = resource_tracker._resource_tracker
    return tracker._pid, tracker._fd


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(STAYING)}


def children() -> set[int]:
    """Return the child processes of this process, including ended ones that were not waited for (Linux only)."""
    found = set()
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found.update(int(pid) for pid in file.read().split())
        except OSError:
            continue  # the thread has ended
    return found - {_tracker()[0]}


def _policy() -> Any:
    """Return asyncio's policy, or None for the default policy, which asyncio may not have made yet."""
    policy = getattr(asyncio.events, "_event_loop_policy", None)
    return None if type(policy) in _DEFAULT_POLICIES else policy


def _wakeup_fd() -> int:
    """Return the descriptor that gets the numbers of signals, or -1. To read this setting, one has to replace it."""
    fd = signal.set_wakeup_fd(-1)
    try:
        signal.set_wakeup_fd(fd)
    except (OSError, ValueError):
        pass  # the descriptor has been closed
    return fd


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _loggers() -> dict[str, Any]:
    named = {name: logging.getLogger(name) for name in LOGGERS}
    return {
        name: (logger.level, logger.propagate, logger.disabled, list(logger.handlers)) for name, logger in named.items()
    }


def _collector_callbacks() -> list[Any]:
    return [callback for callback in gc.callbacks if not str(callback.__module__).startswith(FOLLOWERS)]


# The settings, and how to read them. Their values must be the same before and after a test.
SETTINGS: dict[str, Callable[[], Any]] = {
    "the current directory": os.getcwd,
    "the environment": _environment,
    "the handlers of signals": _signal_handlers,
    "the wake-up descriptor of signals": _wakeup_fd,
    "the event loop policy": _policy,
    "the loggers": _loggers,
    "the limit of descriptors": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    "the running loop": asyncio._get_running_loop,
    "the collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug(), _collector_callbacks()),
    "the trace function": sys.gettrace,
    "the profile function": sys.getprofile,
    "the switch interval": sys.getswitchinterval,
    "the recursion limit": sys.getrecursionlimit,
    "the hooks of async generators": sys.get_asyncgen_hooks,
    "sys.path": lambda: list(sys.path),
    "sys.excepthook": lambda: sys.excepthook,
    "sys.unraisablehook": lambda: sys.unraisablehook,
    "threading.excepthook": lambda: threading.excepthook,
    "socket.getdefaulttimeout()": socket.getdefaulttimeout,
}


def _replaced(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names that are gone or have other objects as values now. New names do not count, because imports add
    them. A new object that is a number, text or tuple and equals the old one does not count either: `time.tzset()`, for
    example, sets some names again.
    """

    def is_same(value: Any, other: Any) -> bool:
        return other is value or (isinstance(value, PLAIN) and other == value)

    return sorted(name for name, value in before.items() if not is_same(value, now.get(name, _ABSENT)))


class Leftovers:
    """The state of the process before a test, to compare it with the state after the test."""

    def __init__(self) -> None:
        self.threads = _threads()
        self.children = children()
        self.fds = open_descriptors()
        self.attributes = [dict(vars(module)) for module in PATCHED]
        self.modules = dict(sys.modules)
        self.settings = {name: read() for name, read in SETTINGS.items()}

    def _changed(self) -> dict[str, Any]:
        """Return replaced attributes and modules, and changed settings. They do not go away by themselves."""
        found: dict[str, Any] = {}
        for module, before in zip(PATCHED, self.attributes, strict=True):
            if names := [name for name in _replaced(before, vars(module)) if name not in CHANGING]:
                found[f"replaced in {module.__name__}"] = names
        if names := _replaced(self.modules, sys.modules):
            found["replaced in sys.modules"] = names
        for name, before in self.settings.items():
            now = SETTINGS[name]()
            if now != before:
                found[name] = _difference(before, now)
        return found

    def _unfinished(self) -> dict[str, Any]:
        """Return new threads, child processes and descriptors. They may still go away by themselves."""
        found = {
            "threads": sorted(thread.name for thread in _threads() - self.threads),
            "child processes": sorted(children() - self.children),
            "open descriptors": sorted(open_descriptors() - self.fds),
        }
        return {name: what for name, what in found.items() if what}

    def restore(self) -> None:
        """Restore the signal handlers, in case a failed test has not done so."""
        for number, handler in self.settings["the handlers of signals"].items():
            if signal.getsignal(number) is not handler and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, handler)

    def found(self) -> dict[str, Any]:
        """Return what the test has left behind, after a short wait for threads and processes that are still ending."""
        give_up = time.monotonic() + CAP_S
        while unfinished := self._unfinished():
            if time.monotonic() > give_up:
                break
            gc.collect()
            time.sleep(0.005)
        return unfinished | self._changed()


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict):
        names = [name for name in before.keys() | now.keys() if before.get(name, _ABSENT) != now.get(name, _ABSENT)]
        return ", ".join(f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names)
    return f"{before!r} -> {now!r}"
