"""Event loops by name, and which of them this interpreter has."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable

from benchmarks._machine import ROOT

LOOPS = ("grapeshot", "uvloop", "zuvloop", "rloop", "asyncio")
# Not an event loop: the epoll server of the load generator's crate. It takes part where it can serve (plain echo).
RAW = "raw"

# What is compared, and what it is compared with.
PACKAGES = (
    "grapeshot",
    "uvloop",
    "aiohttp",
    "uvicorn",
    "httptools",
    "starlette",
    "websockets",
    "redis",
    "asyncpg",
    "zuvloop",
    "rloop",
)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def loop_factory(name: str) -> LoopFactory:
    """Return the factory of the loop with this name; `module:attribute` names any other one.

    Raises ImportError when it is not installed.
    """
    if name == "asyncio":
        return asyncio.SelectorEventLoop
    module_name, _, attribute = name.partition(":")
    factory: LoopFactory = getattr(importlib.import_module(module_name), attribute or "new_event_loop")
    return factory


def why_missing(name: str) -> str | None:
    """Return why no loop of this name can be made here, or None.

    This tries it in a new process, since a broken extension may crash the process.
    """
    if name == RAW:
        return None if sys.platform == "linux" else "the raw server is made for epoll"
    code = "import sys; from benchmarks._loops import loop_factory; loop_factory(sys.argv[1])().close()"
    return why_it_fails(code, name)


def why_it_fails(code: str, *arguments: str) -> str | None:
    """Return the last line of what the code says in a new process, or None if it succeeds."""
    outcome = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if outcome.returncode == 0:
        return None
    lines = outcome.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {outcome.returncode}"


def available(
    names: Iterable[str], why_missing: Callable[[str], str | None] = why_missing
) -> tuple[list[str], dict[str, str]]:
    """Return the names that can be used, and the reasons for the others, which are also printed."""
    usable: list[str] = []
    missing: dict[str, str] = {}
    for name in names:
        reason = why_missing(name)
        if reason is None:
            usable.append(name)
        else:
            missing[name] = reason
            print(f"!!! {name} IS LEFT OUT: {reason}", file=sys.stderr, flush=True)
    return usable, missing


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of those that are installed, and of OpenSSL."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["OpenSSL"] = ssl.OPENSSL_VERSION.split()[1]
    return found
