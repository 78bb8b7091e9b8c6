"""Public names, native or not, in `help()`, completion, tracebacks and pickles.

`tests/project/test_stubs.py` checks that the signatures equal the ones in `_core.pyi`.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import pickle
import pydoc
import socket
import types

import pytest
from support import coro_is_available

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
PUBLIC, MEMBERS = [], []
# Shrapnel's names, and our names for the same objects.
ALIASES = {"install_thread_emulation": "patch", "make_socket": "sock"}
if coro_is_available():
    from grapeshot import _core, coro

    # signal_handler and threads are modules.
    PUBLIC = [name for name in coro.__all__ if name not in {"signal_handler", "threads", *ALIASES}]
    MEMBERS = [
        (kind, name)
        for kind in PUBLIC
        if isinstance(getattr(coro, kind), type) and not issubclass(getattr(coro, kind), BaseException)
        for name in dir(getattr(coro, kind))
        # Leave out what a sock or an executor inherits from Python's classes.
        if not name.startswith("_")
        and all(
            inspect.getattr_static(getattr(coro, kind), name) is not inspect.getattr_static(base, name, None)
            for base in (socket.socket, concurrent.futures.ThreadPoolExecutor)
        )
    ]

# The arguments of the most used functions, as their help shows them.
SIGNATURES = {
    "spawn": "(function, /, *args, name=None, context=None, stack='shared', **kwargs)",
    "new": "(function, /, *args, name=None, context=None, stack='shared', **kwargs)",
    "spawn_later": "(seconds, fn, /, *args, **kwargs)",
    "sleep_relative": "(delay, /)",
    "sleep_absolute": "(when, /)",
    "yield_slice": "()",
    "current": "()",
    "wait": "(coros=Ellipsis, timeout=None, count=None)",
    "set_latency_warning": (
        "(seconds: 'float | None', /, *, always: 'bool | None' = None, stack: 'bool | None' = None) -> 'float'"
    ),
    "set_exception_notifier": "(function, /)",
    "semaphore": "(value=1)",
    "fifo": "(maxsize=0)",
    "lock": "()",
    "fifo.pop": "(self, /, block=True, timeout=None)",
    "fifo.push": "(self, item, /, block=True, timeout=None)",
    "channel.send": "(self, value, /, block=True, timeout=None)",
    "semaphore.acquire": "(self, /, value=1, block=True, timeout=None)",
    "mutex.acquire": "(self, /, block=True, timeout=None)",
    "Coro.start": "(self, /)",
    "Coro.add_done_callback": "(self, /, fn, context=None)",
}


def find(path):
    value = coro
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_belongs_to_the_module(name):
    value = getattr(coro, name)
    module = "grapeshot.threads" if name == "ClosedError" else "grapeshot.coro"
    assert (value.__module__, value.__name__, value.__qualname__) == (module, name, name)
    assert pickle.loads(pickle.dumps(value)) is value
    assert value.__doc__.strip()
    assert name in pydoc.render_doc(value, renderer=pydoc.plaintext)
    if not (isinstance(value, type) and issubclass(value, BaseException)):
        # an exception takes the arguments of Exception, for which Python has no signature
        inspect.signature(value)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_same_object(alias):
    assert getattr(coro, alias) is getattr(coro, ALIASES[alias])


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_member_has_help_and_a_signature(kind, name):
    owner = getattr(coro, kind)
    value = inspect.getattr_static(owner, name)
    assert (value.__doc__ or "").strip(), f"{kind}.{name} has no help"
    if callable(value) and not isinstance(value, property):
        # If a method has a grapeshot name and a Shrapnel name (rw_lock has acquire_read and read_lock), `__name__` is
        # the grapeshot name.
        assert inspect.getattr_static(owner, value.__name__) is value
        inspect.signature(value)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    assert str(inspect.signature(find(path))) == SIGNATURES[path]


def test_native_functions_are_known_by_their_public_names():
    for name in dir(_core):
        value = getattr(_core, name)
        if name.startswith("_coro_") and isinstance(value, types.BuiltinFunctionType):
            public = name.removeprefix("_coro_")
            if getattr(coro, public, None) is value:
                assert (value.__module__, value.__name__) == ("grapeshot.coro", public)
            elif name == "_coro_get_ident":  # it replaces _thread.get_ident, and is pickled by that name
                assert (value.__module__, value.__name__) == ("_thread", "get_ident")
            else:
                assert (value.__module__, value.__name__) == ("grapeshot._core", name)
            assert value.__doc__


def test_help_of_spawn_explains_its_options():
    text = pydoc.render_doc(coro.spawn, renderer=pydoc.plaintext)
    for words in ("\n    name: ", "\n    context: ", "contextvars.Context", "\n    stack: 'shared', ", "'own': "):
        assert words in text
    assert "in module grapeshot.coro" in text


def test_completion_shows_the_public_names_only():
    # dir() also shows the modules with Shrapnel's names, which are imported on demand.
    assert dir(coro) == sorted([*coro.__all__, "backdoor", "profiler"])
    assert {"gc", "os", "sys", "asyncio", "annotations", "TYPE_CHECKING"}.isdisjoint(dir(coro))
    # All offered names exist, and help() of the module shows them.
    text = pydoc.render_doc(coro, renderer=pydoc.plaintext)
    for name in dir(coro):
        assert getattr(coro, name) is not None
        assert name in text
