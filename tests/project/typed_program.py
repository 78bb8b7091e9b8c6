"""A program for type checkers. Each line with `# error` must be an error, and no other line may be one.

This file is never run. tests/project/test_types.py gives it to the type checkers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Iterator

import grapeshot
from grapeshot import coro


def worker(number: int, *, factor: float = 1.0) -> str:
    return str(number * factor)


def nothing() -> None: ...


async def fetch(key: str) -> bytes:
    return key.encode()


def coros() -> None:
    co: coro.Coro[str] = coro.spawn(worker, 1)
    coro.spawn(worker, 1, factor=2.0)
    coro.spawn(worker, 1, name="worker", stack="own")
    coro.spawn(worker, 1, context=contextvars.copy_context())
    coro.new(worker, number=1).start()
    coro.spawn(worker)  # error
    coro.spawn(worker, "one")  # error
    coro.spawn(worker, 1, faktor=2.0)  # error
    coro.spawn(worker, 1, stack="large")  # error
    coro.spawn(5)  # error
    text: str = co.join()
    text = co.join(1.0)
    text = co.result()
    number: int = co.result()  # error
    number = coro.spawn(worker, 1, name="worker").join()  # error
    text = coro.spawn_later(1, worker, 1).join()
    coro.spawn_later(1, worker)  # error
    running: coro.Coro[int] = coro.current()
    ended: list[coro.Coro[str]] = coro.wait([co], timeout=1, count=1)
    coro.wait([co], amount=1)  # error
    print(text, number, running, ended)


def border() -> None:
    data: bytes = coro.await_(fetch("key"))
    text: str = coro.await_(fetch("key"))  # error
    coro.await_(5)  # error
    text = coro.with_timeout(1.0, worker, 1)
    coro.with_timeout(1.0, worker)  # error
    text = coro.threads.run(worker, 1)
    text = coro.threads.run(worker, 1, executor=concurrent.futures.ThreadPoolExecutor())
    coro.threads.run(worker)  # error
    coro.threads.run(worker, 1, executor=5)  # error
    print(data, text)


async def main() -> int:
    text: str = await coro.run_sync(worker, 1)
    text = await coro.spawn(worker, 1)
    await coro.run_sync(worker)  # error
    data: bytes = await coro.run_sync(worker, 1)  # error
    text = await coro.run_blocking(worker, 1, name="worker")
    await coro.run_blocking(worker)  # error
    print(text, data)
    return 1


asyncio.Runner(loop_factory=grapeshot.new_event_loop)
grapeshot.new_event_loop().call_soon(print)
grapeshot.new_event_loop().call_soon(1)  # error
grapeshot.missing()  # error
number: int = grapeshot.run(main())
text: str = grapeshot.run(main())  # error
text = coro.run(worker, 1)
text = coro.run(worker, 1, name="main")
text = coro.run(worker)  # error


def together() -> None:
    with coro.Group() as group:
        co: coro.Coro[str] = group.spawn(worker, 1)
        group.spawn(worker)  # error
    pool = coro.Pool(3)
    texts: list[str] = pool.map(worker, [1, 2])
    numbers: list[int] = pool.map(worker, [1, 2])  # error
    pool.map(worker, ["one"])  # error
    results: Iterator[float] = pool.imap(pow, [1.0], [2.0])
    results = pool.imap_unordered(worker, [1])  # error
    pool.spawn(worker)  # error
    texts = coro.in_parallel([(worker, (1,)), (worker, (2,))])
    print(co, texts, numbers, results)


def objects() -> None:
    numbers: coro.fifo[int] = coro.fifo(10)
    numbers.push(1, timeout=1.0)
    numbers.push("one")  # error
    number: int = numbers.pop(block=False)
    text: str = numbers.pop()  # error
    texts = coro.fifo[str]()
    texts.push("text")
    texts.push(1)  # error
    channel: coro.channel[str] = coro.channel()
    channel.send("text")
    channel.send(1)  # error
    text = channel.receive(timeout=1)
    number = channel.receive()  # error
    future: coro.future[int] = coro.future()
    future.set(1)
    future.set("one")  # error
    number = future.get(timeout=1)
    done: bool = future.wait(1)
    text = future.get()  # error
    coro.future[None]().set()
    taken: bool = coro.lock().acquire(timeout=1)
    coro.semaphore().acquire(timeout="1")  # error
    coro.event().wait(until=1)  # error
    print(number, text, done, taken)
