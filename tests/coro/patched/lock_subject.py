"""Run CPython's own `test.lock_tests` on patched threading, in the main thread or in a coro.

    python lock_subject.py thread|coro [PART/PARTS]

Runs all tests, or every PARTS-th test beginning with number PART (counted from 0). Prints how many ran, and each
failure.
"""

from __future__ import annotations

import sys
import traceback
import unittest
import warnings

from grapeshot import coro

coro.patch()

import _thread  # noqa: E402
import threading  # noqa: E402

from test import lock_tests  # noqa: E402

# Inherited tests that do not apply to the class that inherits them.
LEFT_OUT = {
    # A Condition on a plain lock cannot be acquired twice.
    "PlainConditionTests.test_acquire",
}


class LockTests(lock_tests.LockTests):
    locktype = staticmethod(_thread.allocate_lock)


class ClassLockTests(lock_tests.LockTests):
    locktype = staticmethod(threading.Lock)


class RLockTests(lock_tests.RLockTests):
    locktype = staticmethod(threading.RLock)


class PyRLockTests(lock_tests.RLockTests):
    locktype = staticmethod(threading._PyRLock)


class EventTests(lock_tests.EventTests):
    eventtype = staticmethod(threading.Event)


class ConditionTests(lock_tests.ConditionTests):
    condtype = staticmethod(threading.Condition)


class PlainConditionTests(lock_tests.ConditionTests):
    def condtype(self, lock=None):
        return threading.Condition(lock or threading.Lock())


class SemaphoreTests(lock_tests.SemaphoreTests):
    semtype = staticmethod(threading.Semaphore)


class BoundedSemaphoreTests(lock_tests.BoundedSemaphoreTests):
    semtype = staticmethod(threading.BoundedSemaphore)


class BarrierTests(lock_tests.BarrierTests):
    barriertype = staticmethod(threading.Barrier)


def run() -> unittest.TestResult:
    tests = []
    for name, value in list(globals().items()):
        if name.endswith("Tests") and isinstance(value, type):
            tests += [
                test
                for test in unittest.defaultTestLoader.loadTestsFromTestCase(value)
                if ".".join(test.id().split(".")[-2:]) not in LEFT_OUT
            ]
    part, _, parts = (sys.argv[2] if len(sys.argv) > 2 else "0/1").partition("/")
    result = unittest.TestResult()
    unittest.TestSuite(tests[int(part) :: int(parts)]).run(result)
    return result


warnings.simplefilter("ignore", DeprecationWarning)
outcome = coro.run(run) if sys.argv[1] == "coro" else run()
print("ran", outcome.testsRun)
for test, text in outcome.failures + outcome.errors:
    print(test.id(), text)
if not outcome.wasSuccessful():
    traceback.print_stack()
    sys.exit(1)
