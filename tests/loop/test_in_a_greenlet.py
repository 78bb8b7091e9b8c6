"""A loop runs in a greenlet, and its callbacks switch to another greenlet in the middle of an iteration.

Playwright's sync API works like this (`sync_api/_context_manager.py` and `_impl/_sync_base.py` of playwright-python).
Each call of the API runs a task, whose done callback switches back to the caller's greenlet. The next call resumes the
suspended iteration.
"""

from __future__ import annotations

import importlib.util

import pytest
from support import run_script

PROGRAM = """
import asyncio
from greenlet import getcurrent, greenlet


class Browser:
    def start(self):
        self.loop = new_event_loop()
        main = getcurrent()
        self.fiber = greenlet(lambda: self.loop.run_until_complete(self.connection()))
        self.started = self.loop.create_future()
        self.started.add_done_callback(lambda _: main.switch())
        self.fiber.switch()
        asyncio._set_running_loop(self.loop)

    async def connection(self):
        self.stop = self.loop.create_future()
        self.loop.call_soon(self.started.set_result, None)
        await self.stop

    def call(self, coroutine):
        caller = getcurrent()
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda _: caller.switch())
        while not task.done():
            self.fiber.switch()
        asyncio._set_running_loop(self.loop)
        return task.result()

    def close(self):
        self.stop.set_result(None)
        self.fiber.switch()
        asyncio._set_running_loop(None)
        self.loop.close()


async def answer(reader, writer):
    while line := await reader.readline():
        writer.write(line.upper())
    writer.close()


async def ask(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"word %d\\n" % number)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


async def fail():
    await asyncio.sleep(0)
    raise LookupError("from the task")


async def tick(ticks):
    while True:
        await asyncio.sleep(0.001)
        ticks.append(None)


async def end(server, ticking):
    ticking.cancel()
    server.close()
    await server.wait_closed()


for _ in range(2):
    browser, ticks, seen = Browser(), [], []
    browser.start()
    server = browser.call(asyncio.start_server(answer, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    ticking = browser.loop.create_task(tick(ticks))
    for number in range(50):
        assert browser.call(ask(port, number)) == b"WORD %d\\n" % number
        browser.call(asyncio.sleep(0))
    try:
        browser.call(fail())
    except LookupError as error:
        print(error)
    # an event handler of the user, which runs in a greenlet of its own and makes calls, too
    browser.loop.call_soon(lambda: greenlet(lambda: seen.append(browser.call(ask(port, 99)))).switch())
    while not seen:
        browser.call(asyncio.sleep(0.001))
    print(seen, len(ticks) > 0, browser.call(asyncio.wait_for(asyncio.sleep(0.01, "slept"), 60)))
    browser.call(end(server, ticking))
    browser.close()
"""


@pytest.mark.skipif(importlib.util.find_spec("greenlet") is None, reason="greenlet is not installed")
def test_calls_from_greenlets(loop_kind):
    output = run_script(loop_kind, PROGRAM, flags=("-W", "error", "-X", "faulthandler"))
    assert output == "from the task\n[b'WORD 99\\n'] True slept\n" * 2
