"""Event loops by name, and which of them are installed for this interpreter."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

from benchmarks._machine import ROOT

LOOPS = ("grapeshot", "uvloop", "zuvloop", "rloop", "asyncio")
# aiofastnet is not a loop: it replaces the transports of the loop whose name follows the `+`. These combinations take
# part in the cases in which the transports matter most.
AIOFASTNET = ("aiofastnet+asyncio", "aiofastnet+uvloop", "aiofastnet+grapeshot")
# The epoll server of the load generator's crate, which is not a loop. It takes part in the cases that it can serve.
RAW = "raw"

# The packages whose versions are recorded: the compared ones, and the packages that the servers and clients use.
PACKAGES = (
    "grapeshot",
    "uvloop",
    "aiofastnet",
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
    """Return the factory of the loop with this name. `module:attribute` names a factory that is not listed here, and
    `aiofastnet+loop` means that loop with aiofastnet's transports.

    Raises ImportError when the module is not installed.
    """
    if name in AIOFASTNET:
        patched: LoopFactory = importlib.import_module("aiofastnet").loop_factory(loop_factory(name.partition("+")[2]))
        return patched
    if name == "asyncio":
        return asyncio.SelectorEventLoop
    module_name, _, attribute = name.partition(":")
    factory: LoopFactory = getattr(importlib.import_module(module_name), attribute or "new_event_loop")
    return factory


def why_missing(name: str) -> str | None:
    """Return why a loop of this name cannot be created here, or None if it can.

    The attempt runs in a new process, because a broken extension may crash the process.
    """
    if name == RAW:
        return None if sys.platform == "linux" else "the raw server is made for epoll"
    code = "import sys; from benchmarks._loops import loop_factory; loop_factory(sys.argv[1])().close()"
    return why_it_fails(code, name)


def why_it_fails(code: str, *arguments: str) -> str | None:
    """Run the code in a new process. Return the last line of its stderr if it fails, or None if it succeeds."""
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
    """Return the usable names, and the reason why each of the others is not usable. The reasons are also printed."""
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


def print_outcome(measure: Callable[[], Mapping[str, object]]) -> None:
    """Call `measure` and print its result as JSON, or `{"unsupported": why}` if it raises NotImplementedError."""
    try:
        outcome = measure()
    except NotImplementedError as error:
        outcome = {"unsupported": f"{type(error).__name__}: {error}"}
    print(json.dumps(outcome))


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the packages (if they are installed) and of OpenSSL."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["OpenSSL"] = ssl.OPENSSL_VERSION.split()[1]
    return found
