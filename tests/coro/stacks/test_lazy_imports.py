"""`lazy import` (PEP 810): the first use of a name imports its module, on the stack of the coro that uses the name."""

from __future__ import annotations

import sys

import pytest
from support import coro_is_available, together

pytestmark = [
    pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter"),
    pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports came with 3.15"),
]

WAITS = "from grapeshot import coro\nfor _ in range(3):\n    coro.yield_slice()\n"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function `make(*bodies)`. It writes one module for each body, with `value = 5` after the body. For each
    module, it returns a function that imports the module lazily and returns the value.
    """
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def make(*bodies):
        functions = []
        for body in bodies:
            name = f"lazily_imported_{len(names)}"
            names.append(name)
            (tmp_path / f"{name}.py").write_text(body + "value = 5\n")
            space = {}
            exec(f"lazy import {name}\ndef use():\n    return {name}.value\n", space)
            assert name not in sys.modules
            functions.append(space["use"])
        return functions

    yield make
    for name in names:
        sys.modules.pop(name, None)


def test_coros_use_one_module(make):
    (use,) = make("")
    assert together(lambda _: use()) == [5] * 10


def test_modules_that_wait_while_they_are_imported(make):
    """Each coro imports a different module, and all of them wait in the middle of their import."""
    uses = make(*[WAITS] * 10)
    assert together(lambda number: uses[number]()) == [5] * 10


def test_a_module_that_another_coro_is_importing(make):
    """For CPython all coros are one thread. If a second coro imports the module, the module seems to import itself."""
    (use,) = make(WAITS)

    def work(_):
        try:
            return use()
        except ImportCycleError:  # noqa: F821
            return "cycle"

    assert together(work, 3) == [5, "cycle", "cycle"]
    assert together(work, 3) == [5, 5, 5]
