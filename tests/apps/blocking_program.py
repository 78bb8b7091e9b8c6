"""The program that test_blocking_libraries.py runs: `blocking_program.py PLACE JOBS`.

It is a blocking program with threads. PLACE chooses real threads (`threads`) or threads that `coro.patch()` has turned
into coros (`coros`). With coros, an asyncio task runs on the same loop. JOBS is a JSON list; its jobs are done one
after the other. The program prints a JSON object that maps the name of each job to what the job saw.
"""

from __future__ import annotations

import json
import sys

if sys.argv[1] == "coros":
    from grapeshot import coro

    coro.patch()

import asyncio
import functools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.apps.blocking_libraries import COUNT, LIBRARIES, Library

Seen = dict[str, Any]


def describe(error: BaseException | None) -> list[str]:
    """Return the types of an error and of the errors that led to it."""
    types: list[str] = []
    while error is not None:
        types.append(f"{type(error).__module__}.{type(error).__qualname__}")
        error = error.__cause__ or error.__context__
    return types


def overlap(library: Library) -> Seen:
    """Make COUNT calls at once, and note how many of them were under way at the same time."""
    answers: dict[int, Any] = {}
    running: set[int] = set()
    most = 0

    def work(number: int) -> None:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        try:
            answers[number] = library.ask(number)
        except Exception:
            answers[number] = traceback.format_exc()
        finally:
            running.discard(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [f"{number}: {answers.get(number)}" for number in range(COUNT) if answers.get(number) != number]
    return {"wrong": wrong, "most": most}


def troubles(library: Library, ports: dict[str, int]) -> Seen:
    """Return what a call raises for each of the servers that misbehave."""
    raised: Seen = {}
    for name, port in ports.items():
        try:
            library.attempt(port, 0.2)
        except Exception as error:
            raised[name] = describe(error)
    return raised


def do(library: Library, task: dict[str, Any]) -> Seen:
    if "troubles" in task:
        return troubles(library, task["troubles"])
    library.open()
    try:
        return overlap(library)
    finally:
        library.close()


async def beside_asyncio(job: Callable[[], Seen]) -> Seen:
    """Do a job in a coro, while an asyncio task counts the loop's iterations and measures the longest one."""
    ticks, longest_s = 0, 0.0

    async def tick() -> None:
        nonlocal ticks, longest_s
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now_s = time.monotonic()
            ticks, longest_s, last_s = ticks + 1, max(longest_s, now_s - last_s), now_s

    ticking = asyncio.create_task(tick())
    seen = await coro.run_blocking(job)
    ticking.cancel()
    return {**seen, "ticks": ticks, "longest_s": longest_s}


def main() -> None:
    all_seen: dict[str, Seen] = {}
    for task in json.loads(sys.argv[2]):
        job = functools.partial(do, LIBRARIES[task["library"]](task.get("arguments", {})), task)
        if sys.argv[1] == "coros":
            import grapeshot

            all_seen[task["name"]] = grapeshot.run(beside_asyncio(job))
        else:
            all_seen[task["name"]] = job()
    print(json.dumps(all_seen))


if sys.argv[1] == "coros":
    coro.set_latency_warning(0)  # no warnings: making a client may take long, and the machine may be busy
main()
