"""The private native functions, which Python code can reach, check their arguments."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

HEAD = """
from grapeshot import _core

def refused(function, *args):
    try:
        function(*args)
    except (TypeError, RuntimeError) as exc:
        return type(exc).__name__
    return "nothing"
"""


def output(code):
    return run_script(None, HEAD + code).split("\n")[:-1]


def test_before_grapeshot_coro_is_imported():
    assert (
        output("""
for name in "_coro_new", "_coro_spawn":
    print(refused(getattr(_core, name), print))
""")
        == ["RuntimeError"] * 2
    )


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_objects_that_are_not_coros():
    assert (
        output("""
from grapeshot import coro
class Other:
    pass
for wrong in None, 5, object(), Other(), coro.Coro, [], _core.fifo():
    print(refused(_core._coro_end_sleep, wrong))
""")
        == ["TypeError"] * 7
    )


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_objects_that_the_package_hands_over():
    assert output("""
from types import SimpleNamespace
from grapeshot import coro
from grapeshot.coro import _errors
for kind in None, 5, int, object, _core.fifo:
    print(refused(_core._coro_setup, _errors, kind))
names = {name: 5 for name in dir(_errors)}
print(refused(_core._coro_setup, SimpleNamespace(**names), coro.Coro))
_core._coro_set_hooks(lambda: 5, print, print, print, print, lambda: 5)
print(refused(coro.spawn, print))
""") == ["TypeError"] * 6 + ["RuntimeError"]


@pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
def test_a_late_timer_does_not_end_a_wait_in_a_queue():
    """A sleep's timer may fire when the coro already waits for something else. The timer must not end that wait."""
    assert output("""
from grapeshot import coro
values = _core.fifo()
seen = []
def main():
    waiting = coro.spawn(lambda: seen.append(values.pop()))
    coro.yield_slice()
    _core._coro_end_sleep(waiting)
    coro.yield_slice()
    print(seen)
    values.push(1)
    waiting.join()
    print(seen)
coro.run(main)
""") == ["[]", "[1]"]
