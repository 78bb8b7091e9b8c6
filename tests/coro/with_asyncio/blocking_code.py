"""The two places where tests run code that was written for a thread: a real thread, and a coro that hides the loop.

In a coro that hides the loop, asyncio's functions see no running loop.
"""

from __future__ import annotations

import asyncio
import threading

from support import coro_is_available

import grapeshot

if coro_is_available():
    from grapeshot import coro


def in_thread(fn, *args):
    """Run a function in a thread; return its result or raise its exception."""
    outcome = []

    def work():
        try:
            outcome.append((True, fn(*args)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    is_result, value = outcome[0]
    if is_result:
        return value
    raise value


def in_coro(fn, *args):
    """Run a function in a coro that hides the loop, beside an asyncio task that runs all the time."""

    async def tick():
        while True:
            await asyncio.sleep(0.001)

    async def main():
        ticking = asyncio.create_task(tick())
        names = [task.get_name() for task in asyncio.all_tasks()]
        try:
            return await coro.run_blocking(fn, *args)
        finally:
            assert not ticking.done()
            assert sorted(task.get_name() for task in asyncio.all_tasks()) == sorted(names)
            loop = asyncio.get_running_loop()
            assert "stop" not in vars(loop)
            assert loop._ledger is None
            assert not loop.get_debug()
            ticking.cancel()

    return grapeshot.run(main())
