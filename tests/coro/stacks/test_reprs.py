"""While a coro waits inside `__repr__`, another coro that prints the same container sees all of it, as a thread would.

CPython records for each thread which containers it is printing, so that a container inside itself prints as `[...]`.
"""

from __future__ import annotations

import collections
import gc
import random
import sys
import threading
import types

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


class Item:
    """An object whose first `repr` calls a function, which may wait."""

    def __init__(self, wait=None):
        self.wait = wait

    def __repr__(self):
        wait, self.wait = self.wait, None
        if wait is not None:
            wait()
        return "item"


KINDS = {
    "list": lambda item: [item],
    "tuple": lambda item: (item,),
    "dict": lambda item: {1: item},
    "values": lambda item: {1: item}.values(),
    "set": lambda item: {item},
    "deque": lambda item: collections.deque([item]),
    "OrderedDict": lambda item: collections.OrderedDict(a=item),
    "mappingproxy": lambda item: types.MappingProxyType({1: item}),
    "SimpleNamespace": lambda item: types.SimpleNamespace(a=item),
    "nested": lambda item: [{1: (item,)}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_coro_sees_all(kind):
    def main():
        gate = coro.event()
        shared = KINDS[kind](Item(gate.wait))
        first = coro.spawn(repr, shared)
        coro.yield_slice()
        second = coro.spawn(repr, shared).join()
        assert not first.done()
        gate.set()
        return first.join(), second

    expected = repr(KINDS[kind](Item()))
    assert coro.run(main) == (expected, expected)


def test_real_threads_see_the_same():
    """The control: a real thread prints a container while another thread waits inside it."""
    inside, gate = threading.Event(), threading.Event()
    shared = [Item(lambda: inside.set() or gate.wait(20))]
    texts = []
    thread = threading.Thread(target=lambda: texts.append(repr(shared)))
    thread.start()
    assert inside.wait(20)
    texts.append(repr(shared))
    gate.set()
    thread.join()
    assert texts == ["[item]", "[item]"]


def test_the_repr_of_a_container_inside_itself_ends_in_each_coro():
    def main():
        gate = coro.event()
        shared = [Item(gate.wait), 5]
        shared.append(shared)
        first = coro.spawn(repr, shared)
        coro.yield_slice()
        second = coro.spawn(repr, shared).join()
        gate.set()
        return first.join(), second, repr(shared)

    assert coro.run(main) == ("[item, 5, [...]]",) * 3


def test_the_thread_and_its_coros():
    """The `__repr__` of an item runs a loop on the thread's own stack, and coros in it print the same container."""
    seen = []

    def wait():
        seen.append(coro.run(lambda: [coro.spawn(repr, shared).join(), repr(shared)]))

    shared = [Item(wait)]
    shared.append(shared)
    assert repr(shared) == "[item, [...]]"
    assert seen == [["[item, [...]]"] * 2]
    assert repr(shared) == "[item, [...]]"


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_in_any_order(seed):
    """Coros print nested containers, and wait at each level."""
    chance = random.Random(seed)

    class Waiting:
        def __repr__(self):
            for _ in range(chance.randrange(4)):
                coro.yield_slice()
            return "w"

    def main():
        shared = [Waiting(), {1: Waiting()}, (Waiting(), [Waiting()])]
        shared.append(shared)
        shared[1][2] = shared
        coros = [coro.spawn(repr, chance.choice([shared, shared[1], shared[2]])) for _ in range(50)]
        return {co.join() for co in coros}

    texts = coro.run(main)
    assert texts == {"[w, {1: w, 2: [...]}, (w, [w]), [...]]", "{1: w, 2: [w, {...}, (w, [w]), [...]]}", "(w, [w])"}


def test_a_coro_that_is_ended_inside_a_repr_leaves_no_record_behind():
    def main():
        shared = [Item(coro.wait)]
        first = coro.spawn(repr, shared)
        coro.yield_slice()
        first.shutdown()
        with pytest.raises(coro.CoroCancelled):
            first.result() if first.done() else coro.wait([first]) and first.result()
        return [repr(shared), coro.spawn(repr, shared).join()]

    assert coro.run(main) == ["[item]"] * 2


def test_nothing_is_leaked():
    def main():
        shared = [Item()]
        before = sys.getrefcount(shared)
        for _ in range(100):
            gate = coro.event()
            shared[0].wait = gate.wait
            first = coro.spawn(repr, shared)
            coro.yield_slice()
            assert coro.spawn(repr, shared).join() == "[item]"
            gc.collect()
            gate.set()
            first.join()
        del first
        return sys.getrefcount(shared) - before

    assert coro.run(main) == 0


def test_in_several_threads():
    def program():
        try:
            test_a_second_coro_sees_all("list")
            test_the_repr_of_a_container_inside_itself_ends_in_each_coro()
        except BaseException as error:
            errors.append(error)

    errors = []
    threads = [threading.Thread(target=program) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
