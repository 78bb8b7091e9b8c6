"""Storms: many threads call the thread-safe functions of loops, while the loops run, end and close.

Storms matter most without the GIL, where the threads run at the same time. Each storm is a program: if it crashes, only
its test fails, and if it does not end, it prints the stacks of its threads. `STORM_SCALE=20 TEST_CAP_S=100` makes the
storms 20 times as long.
"""

from __future__ import annotations

import os

import pytest
from support import PROCESS_CAP_S, run_script

# uvloop's stop() may be called by the loop's thread only.
pytestmark = [pytest.mark.only_on("asyncio", "grapeshot"), pytest.mark.watchdog(2 * PROCESS_CAP_S)]

ROUNDS = 5 * int(os.environ.get("STORM_SCALE", "1"))

HEAD = f"""
import asyncio, faulthandler, random, sys, threading

sys.setswitchinterval(1e-4)  # makes the threads alternate often if there is a GIL
faulthandler.dump_traceback_later({PROCESS_CAP_S * 0.8}, exit=True)
CAP_S = {PROCESS_CAP_S / 2}
ROUNDS = {ROUNDS}
wrong = []

async def answer(number):
    await asyncio.sleep(0)
    return number

def in_thread(function, *args):
    def run():
        try:
            function(*args)
        except BaseException as error:
            wrong.append(error)
            raise
    thread = threading.Thread(target=run)
    thread.start()
    return thread

def ask(loop):
    "Call the functions that any thread may call, except those that schedule calls or stop the loop."
    states = (loop.is_running(), loop.is_closed(), loop.get_debug(), loop.time() > 0, bool(repr(loop)))
    assert all(type(each) is bool for each in states) and states[3:] == (True, True), states

def is_closed(error):
    return str(error) == "Event loop is closed"
"""


def test_one_loop_that_is_stopped_and_closed(loop_kind):
    """Threads schedule calls and coroutines, read the loop's state, and stop the loop. After each stop, the main thread
    runs the loop again. In the end, the main thread closes the loop while the threads still call it.
    """
    code = """
THREADS, CALLS = 6, 300

def work(loop, number, calls, finished, together):
    chance = random.Random(number)
    for index in range(CALLS):
        loop.call_soon_threadsafe(calls.append, (number, index))
        action = chance.randrange(8)
        if action == 0:
            loop.stop()
        elif action == 1:
            loop.call_soon_threadsafe(loop.stop)
        elif action == 2:
            assert asyncio.run_coroutine_threadsafe(answer(index), loop).result(CAP_S) == index
        elif action == 3:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(1000), loop).cancel()
        elif action == 4:
            loop.call_soon_threadsafe(calls.append, None).cancel()
        else:
            ask(loop)
    loop.call_soon_threadsafe(finished.append, number)
    loop.call_soon_threadsafe(loop.stop)
    together.wait(CAP_S)
    try:
        while True:
            loop.call_soon_threadsafe(int)
            loop.stop()
            ask(loop)
    except RuntimeError as error:
        assert is_closed(error), error
    ask(loop)

def run_once(loop):
    loop.call_soon(loop.stop)
    loop.run_forever()

def storm():
    loop, calls, finished = new_event_loop(), [], []
    together = threading.Barrier(THREADS + 1)
    threads = [in_thread(work, loop, number, calls, finished, together) for number in range(THREADS)]
    runs = 0
    while len(finished) < THREADS and not wrong:
        loop.run_forever()
        runs += 1
    while asyncio.all_tasks(loop):  # they are being cancelled
        run_once(loop)
    together.wait(CAP_S)
    for _ in range(3):
        run_once(loop)
    loop.close()
    for thread in threads:
        thread.join()
    for number in range(THREADS):
        assert [call for call in calls if call and call[0] == number] == [(number, index) for index in range(CALLS)]
    assert runs > 1 and sorted(finished) == list(range(THREADS))

for _ in range(ROUNDS):
    storm()
print(wrong)
"""
    assert run_script(loop_kind, HEAD + code) == "[]\n"


def test_loops_that_come_and_go(loop_kind):
    """Each of several threads makes a loop, runs it and closes it, many times. While its loop runs, the thread also
    calls the other threads' loops, which may end at any time. One more thread only reads the loops' states.
    """
    code = """
THREADS, LOOPS = 4, 10 * ROUNDS
loops = [None] * THREADS
given, over = [], threading.Event()

async def main(number, chance):
    loops[number] = loop = asyncio.get_running_loop()
    calls = []
    thread = in_thread(lambda: [loop.call_soon_threadsafe(calls.append, index) for index in range(20)])
    for index in range(20):
        other = loops[chance.randrange(THREADS)]
        if other is not None:
            coroutine = answer(index)
            given.append(coroutine)
            try:
                other.call_soon_threadsafe(int)
                future = asyncio.run_coroutine_threadsafe(coroutine, other)
                if other is loop:
                    assert await asyncio.wrap_future(future) == index
            except RuntimeError as error:
                assert is_closed(error), error
        await asyncio.sleep(0)
    while len(calls) < 20:
        await asyncio.sleep(0)
    thread.join()
    return calls

def work(number):
    chance = random.Random(number)
    for _ in range(LOOPS):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            assert runner.run(main(number, chance)) == list(range(20))

def watch():
    while not over.is_set():
        for loop in filter(None, loops):
            ask(loop)

watcher = in_thread(watch)
for thread in [in_thread(work, number) for number in range(THREADS)]:
    thread.join()
over.set()
watcher.join()
for coroutine in given:
    coroutine.close()  # a loop may have ended before it began this coroutine
print(wrong)
"""
    assert run_script(loop_kind, HEAD + code) == "[]\n"
