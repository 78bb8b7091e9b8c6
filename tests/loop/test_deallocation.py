"""In a chain, each object refers to the one before it. Freeing a long chain does not overflow even a small stack."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.slow

HEAD = """
import asyncio, functools, gc, threading, warnings

gc.disable()
warnings.simplefilter("ignore")

class Thing:
    def __init__(self, inner):
        self.inner = inner

class Last:
    def __del__(self):
        freed.append(None)

freed = []

def link(inner):
"""

WORK = """
def work(count):
    chain = Last()
    for _ in range(count):
        chain = link(chain)
    loop.close()
    assert not freed
    del chain
    assert len(freed) == 1
"""

THREAD = """
loop = new_event_loop()
threading.stack_size({stack_size})
thread = threading.Thread(target=work, args=({count},))
thread.start()
thread.join()
print(len(freed))
"""

# A closed loop no longer refers to its handles and timers. Then only the chain itself keeps its objects alive.
LINKS = {
    "handle": "return loop.call_soon(print, inner)",
    "timer": "return loop.call_later(1000, print, inner)",
    "many arguments": "return loop.call_soon(print, 1, 2, 3, 4, inner)",
    "tuple": "return loop.call_later(1000, print, (inner,))",
    "dict": "return loop.call_later(1000, print, {1: inner})",
    "partial": "return loop.call_later(1000, functools.partial(print, inner))",
    "object": "return loop.call_later(1000, print, Thing(inner))",
    "method": "return loop.call_later(1000, Thing(inner).__init__)",
}
NATIVE_LINKS = {
    "operation": "return loop.sock_sendall(None, inner)",
    "coro": "return coro.new(print, inner)",
    "await": "return coro.new(print, inner).__await__()",
    "fifo": "fifo = coro.fifo(); fifo.push(inner); return fifo",
}


def check(link, count, stack_size, more=""):
    code = f"{HEAD}    {link}\n{WORK}{more}{THREAD.format(count=count, stack_size=stack_size)}"
    assert run_script("grapeshot", code, flags=()) == "1\n"


@pytest.mark.parametrize("stack_size", [0, 256 * 1024])
@pytest.mark.parametrize("link", LINKS)
def test_handles(link, stack_size):
    check(LINKS[link], 120_000, stack_size)


def test_a_million_handles():
    check(LINKS["handle"], 1_000_000, 0)


@pytest.mark.parametrize("link", NATIVE_LINKS)
def test_others(link):
    is_coro = link != "operation"
    if is_coro and not coro_is_available():
        pytest.skip("no coros on this interpreter")
    check(NATIVE_LINKS[link], 120_000, 0, "from grapeshot import coro\n" if is_coro else "")


def test_finalizers_of_a_chain():
    """Finalizers see valid objects, may keep them, and may make and free other chains."""
    more = """
kept = []
class Busy:
    def __init__(self, inner):
        self.inner = inner
    def __del__(self):
        kept.append(self.inner)
        chain = None
        for _ in range(100):
            chain = other.call_later(1000, print, chain)
        chain.cancel()
        if len(kept) > 20:
            kept.clear()

def link(inner, previous=link, count=[0]):
    count[0] += 1
    return previous(Busy(inner) if count[0] % 100 == 0 else inner)

from grapeshot import new_event_loop as new
other = new()
def work(count):
    chain = Last()
    for _ in range(count):
        chain = link(chain)
    loop.close()
    del chain
    while kept:
        kept.pop()
    other.close()
    assert len(freed) == 1, freed
"""
    check(LINKS["timer"], 20_000, 0, more)


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
@pytest.mark.parametrize("stack", ["shared", "own"])
def test_coros_that_wait_in_the_middle_of_a_deallocation(stack):
    """Deallocations that nest too deep are put aside until outer ones have ended. Each stack has its own depth, so a
    coro that waits in a deallocation does not delay the deallocations on other stacks.
    """
    script = f"""
import grapeshot
from grapeshot import coro

class Waits:
    def __del__(self):
        begun.append(None)
        gate.pop()

class Last:
    def __del__(self):
        freed.append(None)

begun, freed = [], []
gate = coro.fifo()

async def main():
    global loop
    loop = grapeshot.new_event_loop()
    waiting = []
    for _ in range(10):
        chain = Waits()
        for _ in range(30):
            chain = loop.call_later(1000, print, chain)
        waiting.append([chain])
    ends = []
    for _ in range(10):
        chain = Last()
        for _ in range(1000):
            chain = loop.call_later(1000, print, chain)
        ends.append([chain])
    del chain
    loop.close()
    coros = [coro.spawn(holder.clear, stack={stack!r}) for holder in waiting]
    while len(begun) < 10:
        await asyncio.sleep(0)
    for number, holder in enumerate(ends, 1):
        holder.clear()
        assert len(freed) == number
    for _ in coros:
        gate.push(None)
    for co in coros:
        await co

import asyncio
grapeshot.run(main())
print(len(begun), len(freed))
"""
    assert run_script(None, script) == "10 10\n"
