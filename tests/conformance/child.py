"""Run one module of `test.test_asyncio` in this process, on the loop under test, and report every test in JSON lines.

`run.py` starts this program and reads the lines. The program writes and flushes a line when a test starts, and another
when the test ends. So after a crash or a hang, `run.py` knows which test was running, and can continue with the next.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import fnmatch
import gc
import importlib
import json
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from subject import Substitution

HANG_AFTER_S = 40.0  # longer than the tests' own limits of 30 s
PREFIX = "test.test_asyncio."


def short_id(test: unittest.TestCase) -> str:
    return test.id().replace(PREFIX, "")


def flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flatten(test)
        else:
            yield test


class Reporter(unittest.TestResult):
    """Write a line at the start of each test, and one at its end: the outcome, how many loops of the subject and how
    many others were made, and the traceback of a failure.
    """

    def __init__(self, substitution: Substitution, simulated: list[str], lines: TextIO, hang: TextIO) -> None:
        super().__init__()
        self._substitution = substitution
        self._simulated = simulated
        self._lines = lines
        self._hang = hang
        self._outcome = "pass"
        self._detail = ""
        self._started_at_s = 0.0

    def _write(self, **line: Any) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        identity = short_id(test)
        self._write(event="start", test=identity)
        self._outcome, self._detail = "pass", ""
        self._started_at_s = time.monotonic()
        self._substitution.simulate = any(fnmatch.fnmatchcase(identity, pattern) for pattern in self._simulated)
        self._substitution.ours = collections.Counter()
        self._substitution.foreign = collections.Counter()
        faulthandler.dump_traceback_later(HANG_AFTER_S, exit=True, file=self._hang)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        faulthandler.cancel_dump_traceback_later()
        self._write(
            event="end",
            test=short_id(test),
            outcome=self._outcome,
            detail=self._detail,
            elapsed_s=round(time.monotonic() - self._started_at_s, 3),
            ours=self._substitution.ours,
            foreign=self._substitution.foreign,
        )
        if self._outcome == "fail":
            # Objects that a failed test left open must be collected now. Otherwise they would warn in a later test
            # that counts warnings.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()

    def _failed(self, test: unittest.TestCase, error: Any) -> None:
        detail = "".join(traceback.format_exception(*error))
        if not isinstance(test, unittest.TestCase) or type(test).__name__ == "_ErrorHolder":
            # An error in setUpModule, setUpClass or one of their counterparts comes without startTest and stopTest.
            holder = str(test).replace(PREFIX, "")
            self._write(event="end", test=holder, outcome="fail", detail=detail, elapsed_s=0.0, ours={}, foreign={})
            return
        self._outcome = "fail"
        self._detail += detail

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._outcome, self._detail = "fail", "unexpected success of a test that the stdlib expects to fail"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if self._outcome == "pass":
            self._outcome, self._detail = "skip", reason


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--subject", required=True)
    parser.add_argument("--module", required=True)
    parser.add_argument("--job", type=Path, required=True, help="JSON: skip, simulated, finished")
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--hang", type=Path, required=True)
    arguments = parser.parse_args()
    job = json.loads(arguments.job.read_text())

    substitution = Substitution(arguments.subject)
    substitution.install()
    substitution.adapt(importlib.import_module(PREFIX + arguments.module))
    suite = unittest.defaultTestLoader.loadTestsFromName(PREFIX + arguments.module)
    tests = list(flatten(suite))

    finished = set(job["finished"])
    with arguments.lines.open("a") as lines, arguments.hang.open("w") as hang:
        lines.write(json.dumps({"event": "loaded", "tests": [short_id(test) for test in tests]}) + "\n")
        wanted = [
            test
            for test in tests
            if short_id(test) not in finished
            and not any(fnmatch.fnmatchcase(short_id(test), pattern) for pattern in job["skip"])
        ]
        unittest.TestSuite(wanted).run(Reporter(substitution, job["simulated"], lines, hang))
        lines.write(json.dumps({"event": "done"}) + "\n")


if __name__ == "__main__":
    main()
