"""Coros that wait inside a generator, and generators that coros share."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import sys

import pytest
from support import coro_is_available, together

import grapeshot

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro

COUNT = 10


# ---------------------------------------------------------------- generators


def test_yield_from():
    def leaf(number):
        for step in range(3):
            coro.yield_slice()
            got = yield (number, step)
            coro.yield_slice()
            assert got == step
        return number

    def middle(number):
        coro.yield_slice()
        result = yield from leaf(number)
        coro.yield_slice()
        return -result

    def work(number):
        generator = middle(number)
        value = next(generator)
        seen = []
        with contextlib.suppress(StopIteration):
            while True:
                seen.append(value)
                coro.yield_slice()
                value = generator.send(value[1])
        with pytest.raises(StopIteration):
            next(generator)
        return seen

    assert together(work) == [[(number, step) for step in range(3)] for number in range(COUNT)]


def test_exceptions_thrown_into_generators():
    def generate():
        while True:
            try:
                coro.yield_slice()
                yield "value"
            except ValueError as exc:
                coro.yield_slice()
                yield exc.args
            finally:
                coro.yield_slice()

    def work(number):
        generator = generate()
        assert next(generator) == "value"
        coro.yield_slice()
        assert generator.throw(ValueError(number)) == (number,)
        coro.yield_slice()
        generator.close()
        with pytest.raises(KeyError):
            generate().throw(KeyError(number))
        return number

    assert together(work) == list(range(COUNT))


def test_a_handler_around_a_yield_of_a_generator():
    """While a generator handles an exception, `sys.exception()` in the generator returns that exception. Afterwards it
    returns the exception that the caller handles.
    """

    def generate():
        try:
            raise KeyError
        except KeyError as exc:
            coro.yield_slice()
            assert sys.exception() is exc
            yield
            coro.yield_slice()
            assert sys.exception() is exc
        yield sys.exception()

    def work(number):
        generator = generate()
        next(generator)
        assert sys.exception() is None
        try:
            raise ValueError(number)
        except ValueError as exc:
            coro.yield_slice()
            shown = next(generator)
            assert shown is exc
            assert sys.exception() is exc
        return number

    assert together(work) == list(range(COUNT))


def test_a_generator_that_runs_in_another_coro():
    """As with threads, a running generator cannot be resumed. After it has yielded, any coro can resume it."""

    def generate():
        for number in itertools.count():
            coro.yield_slice()
            yield number

    def take(generator, seen, refused):
        for _ in range(20):
            try:
                seen.append(next(generator))
            except ValueError as exc:
                assert str(exc) == "generator already executing"
                refused.append(coro.current())
                coro.yield_slice()

    def main():
        generator = generate()
        seen: list = []
        refused: list = []
        threads = [coro.spawn(take, generator, seen, refused) for _ in range(4)]
        coro.yield_slice()
        with pytest.raises(ValueError, match="already executing"):
            generator.close()
        for thread in threads:
            thread.join()
        assert seen == list(range(len(seen)))
        assert len(seen) + len(refused) == 80
        assert seen
        assert refused

    coro.run(main)


def test_a_generator_goes_from_coro_to_coro():
    def generate(log):
        try:
            for _ in range(COUNT):
                coro.yield_slice()
                log.append(coro.current().name)
                yield
        finally:
            log.append("closed by " + coro.current().name)

    def main():
        log: list = []
        generator = generate(log)
        for number in range(4):
            coro.spawn(next, generator, name=f"number {number}").join()
        coro.spawn(generator.close, name="last").join()
        return log

    assert coro.run(main) == [*(f"number {number}" for number in range(4)), "closed by last"]


def test_the_frames_of_a_running_generator():
    def generate():
        local = "inside"  # noqa: F841
        coro.wait()
        yield 1

    def consume(generator):
        return sum(generator)

    async def main():
        generators = [generate() for _ in range(COUNT)]
        threads = [coro.spawn(consume, generator) for generator in generators]
        await asyncio.sleep(0)
        for generator, thread in zip(generators, threads, strict=True):
            assert generator.gi_running
            assert generator.gi_frame is thread.get_frame()
            assert generator.gi_frame.f_locals["local"] == "inside"
            assert generator.gi_frame.f_back.f_code.co_name == "consume"
            coro.schedule(thread)
        assert [await thread for thread in threads] == [1] * COUNT
        assert not any(generator.gi_running for generator in generators)

    grapeshot.run(main())


def test_a_coro_may_wait_while_it_frees_a_suspended_generator():
    """When a generator is freed, its `finally` block runs. In this test, reference counting frees the generator, and
    the block lets other coros run. If the collector freed it, the block could wait only in a coro with its own stack.
    """

    def generate(log, number):
        try:
            yield number
        finally:
            coro.yield_slice()
            log.append(number)

    log: list = []

    def work(number):
        generator = generate(log, number)
        next(generator)
        del generator
        coro.yield_slice()

    together(work)
    assert sorted(log) == list(range(COUNT))


def test_generator_expressions_and_comprehensions():
    def slow(value):
        coro.yield_slice()
        return value

    def work(number):
        nested = [[slow(a * b) for a in range(3)] for b in (slow(c) for c in range(number))]
        mapping = {slow(key): {slow(value) for value in (key, key + 1)} for key in range(3)}
        return nested, mapping, sum(slow(x) for x in nested[0]) if nested else None

    for number, (nested, mapping, total) in enumerate(together(work, 5)):
        assert nested == [[a * b for a in range(3)] for b in range(number)]
        assert mapping == {key: {key, key + 1} for key in range(3)}
        assert total == (0 if number else None)


def test_context_managers_made_of_generators():
    @contextlib.contextmanager
    def block(log, number):
        coro.yield_slice()
        try:
            yield number
        finally:
            coro.yield_slice()
            log.append(number)

    def work(number):
        log: list = []
        with block(log, number) as first, block(log, -number) as second:
            coro.yield_slice()
            assert first == -second
        return log

    assert together(work) == [[-number, number] for number in range(COUNT)]


# ---------------------------------------------------------------- async generators


def test_async_generators_and_comprehensions():
    async def numbers(count):
        try:
            for number in range(count):
                coro.yield_slice()
                await asyncio.sleep(0)
                yield number
        finally:
            coro.yield_slice()
            await asyncio.sleep(0)

    async def delegate(count):
        async for number in numbers(count):
            yield number
            coro.yield_slice()

    async def body(count):
        squares = [number * number async for number in delegate(count) if number % 2 == 0]
        table = {number: [inner async for inner in numbers(number)] async for number in numbers(3)}
        async for number in delegate(count):
            if number == 2:
                break
        async with contextlib.aclosing(numbers(5)) as closing:
            assert await anext(closing) == 0
        return squares, table

    results = together(lambda number: coro.await_(body(number)))
    for count, (squares, table) in enumerate(results):
        assert squares == [number * number for number in range(0, count, 2)]
        assert table == {0: [], 1: [0], 2: [0, 1]}


def test_an_async_generator_that_runs_in_another_coro():
    async def generate():
        coro.yield_slice()
        yield 1
        yield 2

    async def first(generator):
        return await anext(generator)

    def main():
        generator = generate()
        thread = coro.spawn(coro.await_, first(generator))
        coro.yield_slice()
        with pytest.raises(RuntimeError, match="already running"):
            coro.await_(first(generator))
        assert thread.join() == 1
        assert coro.await_(first(generator)) == 2
        coro.await_(generator.aclose())

    coro.run(main)


def test_unfinished_async_generators_are_closed_with_the_loop():
    log = []

    async def generate():
        try:
            yield 1
        finally:
            coro_or_task = asyncio.current_task()
            await asyncio.sleep(0)
            log.append(coro_or_task is not None)

    def main():
        generators = [generate() for _ in range(3)]
        assert [coro.await_(anext(generator)) for generator in generators] == [1, 1, 1]
        main.kept = generators  # so that only the end of the loop closes them

    coro.run(main)
    assert log == [True] * 3
    del main.kept


def test_async_generators_that_are_freed_are_closed_by_the_loop():
    log = []

    async def generate(number):
        try:
            yield number
        finally:
            await asyncio.sleep(0)
            log.append(number)

    def main():
        for number in range(3):
            coro.await_(anext(generate(number)))
        gc.collect()
        for _ in range(100):
            coro.yield_slice()
        return sorted(log)

    assert coro.run(main) == [0, 1, 2]


def test_context_variables_in_generators():
    variable = contextvars.ContextVar("variable", default=None)

    def generate():
        while True:
            coro.yield_slice()
            yield variable.get()

    async def agenerate():
        while True:
            await asyncio.sleep(0)
            coro.yield_slice()
            yield variable.get()

    async def take(generator):
        return [await anext(generator) for _ in range(3)]

    def work(number):
        variable.set(number)
        generator, agenerator = generate(), agenerate()
        values = [*itertools.islice(generator, 3), *coro.await_(take(agenerator))]
        coro.await_(agenerator.aclose())
        # A generator has no context of its own: it runs in the context of the coro that resumes it.
        other = coro.spawn(next, generator, context=contextvars.Context()).join()
        return values, other

    assert together(work) == [([number] * 6, None) for number in range(COUNT)]


def test_a_context_is_entered_by_one_coro_at_a_time():
    variable = contextvars.ContextVar("variable")

    def work():
        variable.set(coro.current().id)
        coro.yield_slice()
        return variable.get()

    def main():
        shared = contextvars.copy_context()
        first = coro.spawn(work, context=shared)
        second = coro.spawn(work, context=shared)
        with pytest.raises(RuntimeError, match="already entered"):
            second.join()
        assert first.join() == first.id == shared[variable]
        inside = coro.spawn(shared.run, work)
        assert inside.join() == inside.id == shared[variable]

    coro.run(main)
