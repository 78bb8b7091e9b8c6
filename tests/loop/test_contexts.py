"""A callback that is scheduled without a context runs in its own copy of the current context."""

from __future__ import annotations

import contextvars
import gc
import random
import sys
import threading
import weakref

import pytest
from support import loop_factory

variable: contextvars.ContextVar[object] = contextvars.ContextVar("variable", default="unset")


class Value:
    pass


def run_all(loop):
    """Run three iterations: the callbacks that are scheduled now, and two generations of callbacks after them."""

    def end():
        loop.call_soon(loop.call_soon, loop.stop)

    loop.call_soon(end)
    loop.run_forever()


@pytest.fixture
def fresh():
    """Set `variable` in the context of the test, and restore it afterwards."""
    token = variable.set("outer")
    yield
    variable.reset(token)


@pytest.mark.parametrize("way", ["soon", "threadsafe", "timer"])
def test_callbacks_scheduled_in_one_context_share_nothing(loop, fresh, way):
    schedule = {
        "soon": loop.call_soon,
        "threadsafe": loop.call_soon_threadsafe,
        "timer": lambda *call: loop.call_later(0, *call),
    }[way]
    seen = []

    def callback(number):
        seen.append(variable.get())
        if number % 2:
            variable.set(number)

    for number in range(6):
        schedule(callback, number)
    run_all(loop)
    assert seen == ["outer"] * 6


def test_a_token_belongs_to_one_callback(loop, fresh):
    tokens, errors = [], []

    def later():
        try:
            variable.reset(tokens[0])
        except ValueError as error:
            errors.append(str(error))

    loop.call_soon(lambda: tokens.append(variable.set("inner")))
    loop.call_soon(later)
    run_all(loop)
    assert "different Context" in errors[0]


def test_a_token_of_a_value_that_was_taken_back(loop, fresh):
    """A callback restores the old values. Its context must not be reused, because a token still refers to it."""
    tokens, errors = [], []

    def set_and_reset():
        variable.reset(variable.set(1))
        tokens.append(variable.set(2))
        variable.set("outer")

    def later():
        try:
            variable.reset(tokens[0])
        except ValueError as error:
            errors.append(str(error))

    loop.call_soon(set_and_reset)
    loop.call_soon(later)
    run_all(loop)
    assert "different Context" in errors[0]


@pytest.mark.skip_on(asyncio="get_context() is new in 3.12", when=sys.version_info < (3, 12))
@pytest.mark.xfail_on(uvloop="no get_context")
def test_each_handle_has_its_own_context(loop, fresh):
    seen = []
    one, other = (loop.call_soon(lambda: seen.append(variable.get())) for _ in range(2))
    context = one.get_context()
    assert context is one.get_context()
    assert context is not other.get_context()
    assert context[variable] == other.get_context()[variable] == "outer"
    context.run(variable.set, "changed")
    run_all(loop)
    assert seen == ["changed", "outer"]


@pytest.mark.skip_on(asyncio="get_context() is new in 3.12", when=sys.version_info < (3, 12))
@pytest.mark.xfail_on(uvloop="no get_context")
def test_the_context_of_a_cancelled_or_pending_timer(loop, fresh):
    timer = loop.call_later(1000, print)
    assert timer.get_context()[variable] == "outer"
    timer.cancel()
    loop.call_soon(print).cancel()


@pytest.mark.skip_on(uvloop="its handles have no _run that Python code can call")
def test_a_handle_that_is_run_inside_of_another(loop, fresh):
    seen = []

    def inner():
        seen.append(variable.get())
        variable.set("inner")

    def outer():
        handle._run()
        seen.append(variable.get())
        variable.set("changed")
        loop.call_soon(lambda: seen.append(variable.get()))

    loop.call_soon(outer)
    handle = loop.call_soon(inner)
    run_all(loop)
    assert seen == ["outer", "outer", "inner", "changed"]


def test_the_current_context_of_a_thread(loop, fresh):
    seen = []

    def schedule():
        variable.set("thread")
        loop.call_soon_threadsafe(lambda: seen.append(variable.get()))

    thread = threading.Thread(target=schedule)
    loop.call_soon_threadsafe(lambda: seen.append(variable.get()))
    thread.start()
    thread.join()
    loop.call_soon_threadsafe(lambda: seen.append(variable.get()))
    run_all(loop)
    assert seen == ["outer", "thread", "outer"]


@pytest.mark.skip_on(uvloop="it uses another context", asyncio="new in 3.12", when=sys.version_info < (3, 12))
def test_an_exception_handler_runs_in_the_callbacks_context(loop, fresh):
    seen = []
    loop.set_exception_handler(lambda _loop, _context: seen.append(variable.get()))

    def fail():
        variable.set("failed")
        raise ZeroDivisionError

    loop.call_soon(fail)
    loop.call_soon(lambda: seen.append(variable.get()))
    run_all(loop)
    assert seen == ["failed", "outer"]


@pytest.mark.skip_on(uvloop="due timers run before callbacks that were scheduled earlier")
def test_values_live_as_long_as_on_asyncio(loop):
    """The loop keeps no value of a context variable alive while it sleeps or after it has stopped."""
    value = Value()
    seen, known = [], weakref.ref(value)
    token = variable.set(value)
    for _ in range(3):
        loop.call_soon(lambda: seen.append(variable.get() is known()))
    variable.reset(token)
    del value, token
    loop.call_later(0.001, lambda: (gc.collect(), seen.append(known())))
    loop.call_later(0.002, loop.stop)
    loop.run_forever()
    assert seen == [True, True, True, None]
    value = Value()
    known = weakref.ref(value)
    token = variable.set(value)
    loop.call_soon(loop.stop)
    variable.reset(token)
    del value, token
    loop.run_forever()
    gc.collect()
    assert known() is None


def test_values_of_an_older_context_live_as_long_as_on_asyncio(loop):
    """A timer's context has a value. Before the timer runs, a callback is scheduled in a context without the value.
    Once the timer has run, the loop no longer keeps the value alive.
    """
    value = Value()
    seen, known = [], weakref.ref(value)

    def look():
        seen.append(known())
        loop.stop()

    def run():
        seen.append(variable.get() is known())
        loop.call_later(0.001, look, context=contextvars.Context())

    def schedule(value):
        variable.set(value)
        loop.call_later(0.001, run)

    contextvars.Context().run(schedule, value)
    del value
    contextvars.Context().run(loop.call_soon, lambda: None)
    loop.run_forever()
    assert seen == [True, None]


def test_a_loop_in_its_own_contexts_is_collected(loop_kind):
    loop = loop_factory(loop_kind)()
    known = weakref.ref(loop)
    token = variable.set([loop])
    loop.call_soon(print)
    variable.reset(token)
    del token
    loop.close()
    del loop
    gc.collect()
    assert known() is None


class Steps:
    """One seeded program: its callbacks set and reset variables, and schedule more callbacks."""

    VARIABLES = tuple(contextvars.ContextVar(name, default=0) for name in "ab")

    def __init__(self, loop, seed):
        self.loop, self.rng, self.log, self.left = loop, random.Random(seed), [], 200
        self.tokens, self.contexts = [], []

    def step(self, name):
        self.log.append((name, *(variable.get() for variable in self.VARIABLES)))
        for _ in range(self.rng.randrange(4)):
            variable = self.rng.choice(self.VARIABLES)
            what = self.rng.randrange(7)
            if what == 0:
                self.tokens.append((variable, variable.set(self.rng.randrange(3))))
            elif what == 1 and self.tokens:
                variable, token = self.tokens.pop(self.rng.randrange(len(self.tokens)))
                try:
                    variable.reset(token)
                except (ValueError, RuntimeError) as error:
                    self.log.append(type(error).__name__)
            elif what == 2:
                variable.reset(variable.set("for a moment"))
            elif what == 3:
                self.contexts.append(contextvars.copy_context())
            elif what == 4 and self.contexts:
                self.rng.choice(self.contexts).copy().run(self.schedule)
            elif what == 5 and self.contexts:
                self.schedule(context=self.rng.choice(self.contexts))
            else:
                self.schedule()
                self.schedule()

    def schedule(self, **options):
        if self.left:
            self.left -= 1
            way = self.rng.choice((self.loop.call_soon, self.loop.call_soon_threadsafe))
            way(self.step, self.left, **options)

    def run(self):
        for _ in range(5):
            self.schedule()
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        while self.left:
            self.schedule()
            run_all(self.loop)
        return self.log


@pytest.mark.skip_on(uvloop="it runs callbacks in another order")
@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(0, 100, 25)], ids=lambda seeds: seeds[0])
def test_random_callbacks_see_the_same_contexts_as_on_asyncio(loop, seeds):
    for seed in seeds:
        usual = loop_factory("asyncio")()
        try:
            expected = contextvars.copy_context().run(Steps(usual, seed).run)
        finally:
            usual.close()
        assert contextvars.copy_context().run(Steps(loop, seed).run) == expected
