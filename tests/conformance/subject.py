"""Put a chosen loop where CPython's own asyncio tests look for one.

The tests of `test.test_asyncio` make their loops in four ways: through the policy (`asyncio.new_event_loop`,
`asyncio.run`, `asyncio.Runner`), by naming a class (`asyncio.SelectorEventLoop`, `asyncio.EventLoop`), through
`TestCase.new_test_loop` (a loop with simulated time) and by building a bare `BaseEventLoop`. `Substitution.install`
redirects the first three before a test module is imported; `Substitution.adapt` handles the fourth in the imported
module.

The loops that the tests get are counted by their class, so that a run can prove which loop it tested. Selector loops of
asyncio's own that are built despite the substitution are counted, too.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import sys
from asyncio import base_events, events, selector_events, unix_events
from collections.abc import Callable
from typing import Any
from unittest import mock

NAMED = {
    "asyncio": "asyncio:SelectorEventLoop",
    "uvloop": "uvloop:new_event_loop",
    "grapeshot": "grapeshot:new_event_loop",
    "grapeshot-streams": "grapeshot:new_event_loop",
}
# This subject replaces not only the loop, but also asyncio's stream classes and stream functions.
STREAMS = "grapeshot-streams"


def class_name(loop: object) -> str:
    """Return `module.Class` of a loop, the key under which loops are counted."""
    return f"{type(loop).__module__}.{type(loop).__qualname__}"


def resolve(subject: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory that `subject` names: a key of NAMED or `module:callable`."""
    module_name, _, attribute = NAMED.get(subject, subject).partition(":")
    if not attribute:
        raise SystemExit(f"unknown subject {subject!r}: use one of {', '.join(NAMED)} or module:callable")
    factory: Callable[[], asyncio.AbstractEventLoop] = getattr(importlib.import_module(module_name), attribute)
    return factory


class Substitution:
    """Replaces asyncio's loops with the loops of one factory, and records which loops were built."""

    def __init__(self, subject: str) -> None:
        self._factory = resolve(subject)
        self._subject = subject
        self._package = self._factory.__module__.partition(".")[0]
        self._making = False
        self.ours: collections.Counter[str] = collections.Counter()
        self.foreign: collections.Counter[str] = collections.Counter()
        self.simulate = False  # whether the running test keeps its bare `BaseEventLoop` or its loop with simulated time

    def make_loop(self, selector: Any = None) -> asyncio.AbstractEventLoop:
        """Make a loop of the subject. A selector that a test passes is ignored and closed."""
        if selector is not None:
            selector.close()
        self._making = True
        try:
            loop = self._factory()
        finally:
            self._making = False
        self.ours[class_name(loop)] += 1
        return loop

    def install(self) -> None:
        """Redirect every public way to make a new loop. Call this before a test module is imported."""
        self._watch_asyncios_own()
        if self._subject == STREAMS:
            self._put_streams()
        substitution = self

        class Meta(type):
            """Calling the class makes a loop of the subject. For such a loop, `isinstance(loop, the_class)` is true."""

            def __call__(cls, selector: Any = None) -> asyncio.AbstractEventLoop:
                return substitution.make_loop(selector)

            def __instancecheck__(cls, instance: object) -> bool:
                return class_name(instance) in substitution.ours

        substitute = Meta("SelectorEventLoop", (), {})
        for namespace in (asyncio, unix_events):
            for name in ("SelectorEventLoop", "EventLoop"):
                if hasattr(namespace, name):
                    setattr(namespace, name, substitute)
        policy = getattr(unix_events, "_UnixDefaultEventLoopPolicy", None)
        if policy is not None:
            policy._loop_factory = staticmethod(self.make_loop)
        else:  # 3.16 has no policies: new_event_loop builds the loop itself
            for namespace in (asyncio, events):
                setattr(namespace, "new_event_loop", self.make_loop)  # noqa: B010
        self._replace_test_utilities()
        self._mirror_patches()

    def _put_streams(self) -> None:
        """Put the classes and functions of grapeshot.streams under asyncio's names."""
        ours = importlib.import_module("grapeshot.streams")
        for name in ours.__all__:
            for namespace in (asyncio, asyncio.streams):
                if hasattr(namespace, name):
                    setattr(namespace, name, getattr(ours, name))

    def adapt(self, module: Any) -> None:
        """Adapt a test module to the subject's loop: the classes that build a bare `BaseEventLoop`, and those that use
        private parts of their loop.
        """
        is_runners = module.__name__.endswith(".test_runners")
        for test_class in list(vars(module).values()):
            if not isinstance(test_class, type) or test_class.__module__ != module.__name__:
                continue
            if "setUp" in vars(test_class):
                self._adapt_set_up(test_class)
            if "new_loop" in vars(test_class) and is_runners:
                self._adapt_runners(test_class)
            if "_run_loop" in vars(test_class):
                self._adapt_run_loop(test_class)

    def _adapt_set_up(self, test_class: Any) -> None:
        original = test_class.setUp

        def set_up(test: Any) -> None:
            original(test)
            if type(getattr(test, "loop", None)) is base_events.BaseEventLoop and not self.simulate:
                test.loop.close()
                test.loop = self.make_loop()
                test.set_event_loop(test.loop)

        test_class.setUp = set_up

    def _adapt_run_loop(self, test_class: Any) -> None:
        """Make `_run_loop` run ten iterations. The original runs until the loop's private `_ready` is empty."""
        run_briefly = importlib.import_module("test.test_asyncio.utils").run_briefly

        def run_loop(_test: Any, loop: Any) -> None:
            for _ in range(10):
                run_briefly(loop)

        test_class._run_loop = run_loop

    def _adapt_runners(self, test_class: Any) -> None:
        def new_loop(_test: Any) -> Any:
            loop: Any = self.make_loop()
            loop.shutdown_ag_run = False
            original = loop.shutdown_asyncgens

            async def shutdown_asyncgens() -> None:
                loop.shutdown_ag_run = True  # the tests check this at the end
                await original()

            loop.shutdown_asyncgens = shutdown_asyncgens
            return loop

        test_class.new_loop = new_loop

    def _watch_asyncios_own(self) -> None:
        original = selector_events.BaseSelectorEventLoop.__init__

        def recording(loop: Any, *args: Any, **kwargs: Any) -> None:
            if not self._making:
                self.foreign[class_name(loop)] += 1
            original(loop, *args, **kwargs)

        selector_events.BaseSelectorEventLoop.__init__ = recording  # type: ignore[method-assign]

    def _replace_test_utilities(self) -> None:
        utils = importlib.import_module("test.test_asyncio.utils")
        simulated = utils.TestCase.new_test_loop

        def new_test_loop(test: Any, gen: Any = None) -> Any:
            if gen is not None or self.simulate:
                return simulated(test, gen)
            loop = self.make_loop()
            test.set_event_loop(loop)
            return loop

        def close_loop(loop: Any) -> None:
            # The standard library's version needs the private attribute `_default_executor`. A loop without this
            # attribute may still have an executor to shut down.
            if not loop.is_closed() and getattr(loop, "_default_executor", loop) is not None:
                loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

        def close_test_loop(loop: Any) -> None:
            if isinstance(loop, base_events.BaseEventLoop):
                original_close(loop)
            else:
                close_loop(loop)

        original_close = utils.TestCase.close_loop
        utils.TestCase.new_test_loop = new_test_loop
        utils.TestCase.close_loop = staticmethod(close_test_loop)

    def _mirror_patches(self) -> None:
        """When a test patches a name in an asyncio module, patch the same name in the subject's modules too.

        Many tests replace `asyncio.base_events.socket` or `.logger` with a mock. Each module of the subject that has
        imported the same socket module or logger under the same name gets the same mock. `asyncio.log` gets a mock of
        the logger, too, because code that is not Python looks up the logger there.
        """
        if self._package == "asyncio":
            return
        patcher_class: Any = getattr(mock, "_patch")  # noqa: B009
        enter, leave = patcher_class.__enter__, patcher_class.__exit__
        mirrored: dict[int, list[Any]] = {}

        def mirroring_enter(patcher: Any) -> Any:
            entered = enter(patcher)
            if getattr(patcher.target, "__name__", "").startswith("asyncio."):
                name, before = patcher.attribute, patcher.temp_original
                mirrored[id(patcher)] = [module for module in self._modules() if vars(module).get(name) is before]
                for module in mirrored[id(patcher)]:
                    setattr(module, name, getattr(patcher.target, name))
            return entered

        def mirroring_exit(patcher: Any, *error: Any) -> Any:
            for module in mirrored.pop(id(patcher), []):
                setattr(module, patcher.attribute, patcher.temp_original)
            return leave(patcher, *error)

        patcher_class.__enter__, patcher_class.__exit__ = mirroring_enter, mirroring_exit

    def _modules(self) -> list[Any]:
        prefix = self._package + "."
        names = [name for name in sys.modules if name == self._package or name.startswith(prefix)]
        return [sys.modules[name] for name in [*names, "asyncio.log"]]
