"""The native queue that `coro.patch()` installs, between coros and real threads. The tests do not patch anything."""

from __future__ import annotations

import _queue
import gc
import threading
import weakref

import pytest
from support import coro_is_available, spawn_blocked

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import _core, coro


def test_queue_interface():
    queue = _core.thread_queue()
    assert queue.empty()
    assert queue.qsize() == 0
    queue.put(1, False, 5)
    queue.put_nowait(item=2)
    assert queue.qsize() == 2
    assert (queue.get(), queue.get_nowait()) == (1, 2)
    for arguments in ({"block": False}, {"timeout": 0}, {"timeout": 0.01}):
        with pytest.raises(_queue.Empty):
            queue.get(**arguments)
    with pytest.raises(ValueError, match="non-negative"):
        queue.get(timeout=-1)
    with pytest.raises(TypeError):
        queue.get(timeout="1")
    assert _core.thread_queue[int]
    reference = weakref.ref(queue)
    queue.put(queue)
    del queue
    gc.collect()
    assert reference() is None


def test_queue_between_coros_and_threads():
    queue, back = _core.thread_queue(), _core.thread_queue()

    def serve():
        while (item := queue.get()) is not None:
            back.put(item * 2)

    def main():
        thread = threading.Thread(target=serve)
        thread.start()
        results = []
        for number in range(200):
            queue.put(number)
            results.append(back.get())
        queue.put(None)
        thread.join()
        return results

    assert coro.run(main) == [2 * number for number in range(200)]


def test_interrupted_get_loses_no_item():
    queue = _core.thread_queue()

    def main():
        first, second = spawn_blocked(queue.get), spawn_blocked(queue.get)
        queue.put("item")
        assert queue.empty()
        first.shutdown()
        first.join()
        return second.join()

    assert coro.run(main) == "item"


def test_storm_over_one_queue():
    """Coros and real threads produce and consume. Each item arrives exactly once."""
    queue = _core.thread_queue()
    got = []

    def produce(first):
        for number in range(first, first + 300):
            queue.put(number)

    def consume():
        while (item := queue.get()) is not None:
            got.append(item)

    def main():
        threads = [threading.Thread(target=consume) for _ in range(3)]
        threads += [threading.Thread(target=produce, args=(1000 * number,)) for number in range(1, 4)]
        for thread in threads:
            thread.start()
        consumers = [coro.spawn(consume) for _ in range(5)]
        for number in range(4, 8):
            coro.spawn(produce, 1000 * number)
        while len(got) < 7 * 300:
            coro.sleep_relative(0.001)
        for _ in range(8):
            queue.put(None)
        for consumer in consumers:
            consumer.join()
        for thread in threads:
            thread.join()

    coro.run(main)
    assert sorted(got) == [1000 * first + number for first in range(1, 8) for number in range(300)]
