"""The chain of frames of a suspended coro is complete, whatever lies between its Python functions."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    from grapeshot import coro


def names(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


class Walker:
    """A coro that waits at random depths, and notes before each wait which functions it is in."""

    def __init__(self, seed: int, turns: int) -> None:
        self.expected: list[str] = []
        self._random = random.Random(seed)
        self._turns = turns
        self._nested = 0
        self.coro = coro.spawn(self._walk)

    def _walk(self) -> None:
        while self._turns > 0:
            self._down(self._random.choice([0, 2, 8, 30]))

    def _down(self, left: int) -> None:
        if left:
            self._down(left - 1)
            return
        kinds = [self._sorting, self._generating, self._reducing, self._comparing]
        for _ in range(3):
            self._wait()
            if self._nested < 3:
                self._nested += 1
                self._random.choice(kinds)()
                self._nested -= 1

    def _wait(self) -> None:
        self._turns -= 1
        self.expected = names(sys._getframe())
        coro.yield_slice()
        assert names(sys._getframe()) == self.expected

    def _sorting(self) -> None:
        sorted([2, 1], key=self._key)

    def _key(self, value: int) -> int:
        self._down(self._random.choice([0, 6]))
        return value

    def _generating(self) -> None:
        next(self._values())

    def _values(self) -> Iterator[None]:
        self._wait()
        yield

    def _reducing(self) -> None:
        functools.reduce(lambda _, value: self._wait(), range(2))

    def _comparing(self) -> None:
        assert self == self

    def __eq__(self, other: object) -> bool:
        self._wait()
        return True

    __hash__ = None  # type: ignore[assignment]


def watched(walkers: list[Walker]) -> int:
    """Compare each coro's chain with the names that the coro noted, repeatedly until all coros have ended. Return the
    number of comparisons.
    """
    compared = 0
    coro.yield_slice()
    while left := [walker for walker in walkers if not walker.coro.done()]:
        for walker in left:
            assert names(walker.coro.get_frame()) == walker.expected
            compared += 1
        coro.yield_slice()
    for walker in walkers:
        walker.coro.result()
    return compared


def test_a_chain_is_whole_at_any_depth():
    assert coro.run(lambda: watched([Walker(seed, 300) for seed in range(8)])) > 1000


def test_a_chain_is_whole_in_functions_that_c_code_calls_one_after_the_other():
    """The coro's outermost function, `sorted`, is C code. Each Python function that it calls begins a new chain, of
    varying depth, with or without a generator.
    """

    def down(left: int) -> int:
        if left:
            return down(left - 1)
        expected.append(names(sys._getframe()))
        coro.yield_slice()
        return left

    def resumed(left: int) -> Iterator[int]:
        yield down(left)

    calls: list[Callable[[int], int]] = [down, lambda left: next(resumed(left))]
    expected: list[list[str]] = []

    def main() -> int:
        thread = coro.spawn(sorted, range(200), key=lambda number: calls[number % 2](number % 40))
        compared = 0
        coro.yield_slice()
        while not thread.done():
            assert names(thread.get_frame()) == expected[-1]
            compared += 1
            coro.yield_slice()
        thread.result()
        return compared

    assert coro.run(main) == 200
