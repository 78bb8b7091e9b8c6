"""`coro.install()` itself: parts, originals, what was imported before."""

from __future__ import annotations

import pytest
from support import coro_is_available, run_script

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")


def run(code):
    return run_script(None, code).splitlines()


def test_parts():
    assert run(
        """
        import threading, time, queue
        from grapeshot import coro
        before = time.sleep, threading.Lock, queue.SimpleQueue
        print([coro.is_patched(name) for name in ("time", "thread", "queue", "time.sleep", "threading.Lock")])
        coro.install("time")
        print(time.sleep is before[0], threading.Lock is before[1])
        print([coro.is_patched(name) for name in ("time", "thread", "queue", "time.sleep", "threading.Lock")])
        coro.install(queue=False)
        print(threading.Lock is before[1], queue.SimpleQueue is before[2], coro.is_patched("threading"))
        patched = time.sleep, threading.Lock
        coro.install()
        coro.install_thread_emulation()
        print(queue.SimpleQueue is before[2], patched == (time.sleep, threading.Lock))
        print((coro.get_original("time", "sleep"), coro.get_original("queue", "SimpleQueue")) == (before[0], before[2]))
        print(coro.get_original("time", "monotonic") is time.monotonic)
        for wrong in (lambda: coro.install("tme"), lambda: coro.install(tme=True)):
            try:
                wrong()
            except ValueError as exc:
                print(exc)
        """
    ) == [
        "[False, False, False, False, False]",
        "False True",
        "[True, False, False, True, False]",
        "False True True",
        "False True",
        "True",
        "True",
        *["install() has no part 'tme'; the parts are: thread, queue, time"] * 2,
    ]


def test_late_patching_names_and_repairs():
    assert run(
        """
        import sys, types, threading, time, warnings, logging, reprlib
        handler = logging.StreamHandler()
        early = types.ModuleType("early")
        exec('''
        from time import sleep
        from threading import Lock, local
        import threading
        free, held = threading.Lock(), threading.RLock()
        held.acquire()
        class Mine(local): pass
        '''.replace("        ", ""), vars(early))
        early.Mine.__module__ = "early"
        sys.modules["early"] = early
        fine = types.ModuleType("fine")
        fine.time = time
        sys.modules["fine"] = fine
        from grapeshot import coro
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coro.install()
            coro.install()
        [warning] = caught
        print(warning.category is coro.PatchWarning, issubclass(coro.PatchWarning, RuntimeWarning))
        print(warning.filename, str(warning.message))
        print(early.sleep is time.sleep, early.Lock is threading.Lock, type(early.free) is threading.Lock)
        print(type(logging._lock) is type(handler.lock) is type(threading.RLock()))
        print(reprlib.get_ident is threading.get_ident)
        """
    ) == [
        "True True",
        "<string> modules were imported before coro.install(), which belongs first in a program; these still use the "
        "originals: early (class Mine, lock held); these held originals, which were replaced: early (Lock, local, "
        "sleep)",
        "True True True",
        "True",
        "True",
    ]


def test_first_line_of_a_program_warns_of_nothing():
    assert run("from grapeshot import coro\ncoro.install()\nprint('ok')") == ["ok"]


def test_what_keeps_the_originals():
    assert run(
        """
        import threading, time, _thread, queue
        originals = threading.Lock, threading.get_ident, time.sleep, threading.local, queue.SimpleQueue
        from grapeshot import coro
        coro.install()
        import asyncio.base_events, concurrent.futures.thread, grapeshot._lifecycle, importlib._bootstrap
        import asyncio.runners, grapeshot.coro._ending
        for module in (asyncio.base_events, concurrent.futures.thread, grapeshot._lifecycle, grapeshot.coro._ending):
            view = module.threading
            assert (view.Lock, view.get_ident, view.local) == (originals[0], originals[1], originals[3]), module
            assert type(view.Condition(view.Lock())._lock) is type(originals[0]())
            assert type(view.Event()._cond._lock) is type(originals[0]())
            assert view.current_thread() is threading.main_thread()
        assert importlib._bootstrap._thread.get_ident is originals[1]
        assert concurrent.futures.thread.queue.SimpleQueue is originals[4]
        assert issubclass(asyncio.base_events.threading.Thread, threading.Thread)
        print(threading.Lock is originals[0], time.sleep is originals[2])
        """
    ) == ["False False"]
