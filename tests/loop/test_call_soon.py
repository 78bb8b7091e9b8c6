"""call_soon: order, iterations, contexts, arguments."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import sys

import pytest
from support import iterations, run_iterations, until

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def test_callbacks_run_in_the_order_they_were_added(loop):
    seen = []
    for number in range(5000):
        loop.call_soon(seen.append, number)
    run_iterations(loop)
    assert seen == list(range(5000))


@pytest.mark.parametrize("count", range(9))
def test_all_arguments_arrive(loop, count):
    seen = []
    loop.call_soon(lambda *args: seen.append(args), *range(count))
    run_iterations(loop)
    assert seen == [tuple(range(count))]


@pytest.mark.xfail_on(uvloop="run_forever makes two iterations before it looks at stop()")
def test_callback_scheduled_in_an_iteration_runs_in_the_next(loop):
    seen = []

    def first():
        seen.append("first")
        loop.call_soon(seen.append, "scheduled by first")

    loop.call_soon(first)
    loop.call_soon(seen.append, "second")
    run_iterations(loop)
    assert seen == ["first", "second"]
    run_iterations(loop)
    assert seen == ["first", "second", "scheduled by first"]


def test_endless_chain_does_not_starve_timers_and_sockets(loop):
    import socket

    ours, theirs = socket.socketpair()
    seen = set()

    def again():
        if seen != {"timer", "socket"}:
            loop.call_soon(again)
        else:
            loop.stop()

    with ours, theirs:
        theirs.send(b"x")
        loop.add_reader(ours, seen.add, "socket")
        loop.call_later(0.001, seen.add, "timer")
        loop.call_soon(again)
        loop.run_forever()
        loop.remove_reader(ours)
    assert seen == {"timer", "socket"}


def test_a_cancelled_callback_does_not_run(loop):
    seen = []
    handle = loop.call_soon(seen.append, 1)
    loop.call_soon(seen.append, 2)
    handle.cancel()
    run_iterations(loop)
    assert seen == [2]


def test_cancel_of_a_later_callback_in_the_same_iteration(loop):
    seen = []
    loop.call_soon(lambda: victim.cancel())
    victim = loop.call_soon(seen.append, "victim")
    run_iterations(loop)
    assert seen == []


def test_the_current_context_is_captured(loop):
    seen = []
    variable.set("before")
    loop.call_soon(lambda: seen.append(variable.get()))
    variable.set("after")
    run_iterations(loop)
    assert seen == ["before"]


def test_changes_in_a_callback_stay_in_its_context(loop):
    variable.set("outside")
    loop.call_soon(variable.set, "inside")
    run_iterations(loop)
    assert variable.get() == "outside"


def test_explicit_context(loop):
    seen = []
    context = contextvars.Context()
    context.run(variable.set, "explicit")
    handle = loop.call_soon(lambda: seen.append(variable.get()), context=context)
    loop.call_later(0, lambda: seen.append(variable.get()), context=context)
    loop.call_soon_threadsafe(lambda: seen.append(variable.get()), context=context)
    assert asyncio.isfuture(handle) is False
    while len(seen) < 3:
        run_iterations(loop)
    assert seen == ["explicit"] * 3


def test_one_context_for_several_callbacks(loop):
    seen = []
    context = contextvars.copy_context()
    loop.call_soon(variable.set, "shared", context=context)
    loop.call_soon(lambda: seen.append(variable.get()), context=context)
    run_iterations(loop)
    assert seen == ["shared"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio uses this context from 3.12 on")
def test_context_of_an_exception_handler_is_that_of_the_callback(loop):
    seen = []
    loop.set_exception_handler(lambda _loop, context: seen.append(variable.get()))
    context = contextvars.copy_context()
    context.run(variable.set, "of the callback")
    loop.call_soon(lambda: 1 / 0, context=context)
    run_iterations(loop)
    assert seen == ["of the callback"]


def test_keyword_arguments_are_refused(loop):
    with pytest.raises(TypeError):
        loop.call_soon(print, end="")
    with pytest.raises(TypeError):
        loop.call_soon()


async def test_sleep_zero_yields_once(loop):
    seen = []

    async def worker(name):
        for number in range(3):
            seen.append((name, number))
            await asyncio.sleep(0)

    await asyncio.gather(worker("a"), worker("b"))
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


async def test_get_running_loop(loop):
    assert asyncio.get_running_loop() is loop
    assert asyncio.get_event_loop() is loop
    seen = []
    loop.call_soon(lambda: seen.append(asyncio.get_running_loop()))
    await iterations(2)
    assert seen == [loop]


def test_bound_methods_and_callable_objects(loop):
    seen = []

    class Callable:
        def __call__(self, value):
            seen.append(value)

        def method(self, value):
            seen.append(value)

    loop.call_soon(Callable(), 1)
    loop.call_soon(Callable().method, 2)
    loop.call_soon(int, "3")
    run_iterations(loop)
    assert seen == [1, 2]


def test_many_generations_from_one_burst(loop):
    seen = []

    def step(left):
        if left:
            loop.call_soon(step, left - 1)
        else:
            seen.append(left)

    for _ in range(100):
        loop.call_soon(step, 50)
    for _ in range(51):
        run_iterations(loop)
    assert seen == [0] * 100


@pytest.mark.xfail_on(uvloop="libuv calls the callbacks of an event as soon as a poll finds it")
def test_ready_callbacks_run_before_the_events_of_the_next_poll(loop):
    """Data arrives at a connection while callbacks are scheduled. The callbacks run before the data is delivered."""
    log = []

    class Logging(asyncio.Protocol):
        def data_received(self, data):
            log.append(data)

    async def run():
        here, there = socket.socketpair()
        with there:
            transport, _ = await loop.connect_accepted_socket(Logging, here)
            for number in range(50):
                ready = loop.create_future()
                for entry in range(40):  # all run in the next iteration
                    loop.call_soon(log.append, entry)
                there.send(b"%d" % number)
                loop.call_soon(loop.call_soon, ready.set_result, None)
                await ready
                await until(lambda: any(isinstance(entry, bytes) for entry in log))
                assert log == [*range(40), b"%d" % number]
                log.clear()
            transport.close()
            await asyncio.sleep(0)

    loop.run_until_complete(run())
