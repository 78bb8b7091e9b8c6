"""Runs one of CPython's own test modules.

    python [-m grapeshot.coro] cpython_subject.py MODULE FILE [TEST TO SKIP]...

Writes a JSON object to FILE: {"ran": number, "skipped": number, "bad": {test: traceback}}. A test is named
``Class.method``. Tests that are skipped here are not run.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import sys
import tempfile
import traceback
import unittest
from typing import Any

from test import support

LIMIT_S = 240


def name_of(test: Any) -> str:
    name = ".".join(test.id().split(".")[-2:])
    # setUpClass (test.test_x.Class)
    return f"{name.split('.')[-1].rstrip(')')}.*" if name.endswith(")") else name


class Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[str, str] = {}

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        if os.environ.get("VERBOSE"):
            print(test.id(), file=sys.stderr, flush=True)

    def _note(self, test: Any, error: Any) -> None:
        self.bad[name_of(test)] = "".join(traceback.format_exception(*error))

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, err)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.bad[name_of(test)] = "unexpected success"


def all_of(suite: Any) -> Any:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from all_of(test)
        else:
            yield test


def run(module_name: str, skipped: set[str]) -> Result:
    # Nothing that costs minutes. The network is that of this machine for nearly all tests.
    support.use_resources = ["network"]
    module = importlib.import_module(f"test.{module_name}")
    tests = list(all_of(unittest.defaultTestLoader.loadTestsFromModule(module)))
    suite = unittest.TestSuite(test for test in tests if name_of(test) not in skipped)
    missing = skipped - {name_of(test) for test in tests}
    result = Result()
    suite.run(result)
    for name in missing:
        result.bad[name] = "there is no test of that name"
    return result


def main() -> None:
    module_name, path, *skipped = sys.argv[1:]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.chdir(tempfile.mkdtemp(prefix="cpython-"))
    # The thread of the resolver is there from now on. Tests count threads.
    socket.gethostbyname("localhost")
    result = run(module_name, set(skipped))
    with open(path, "w") as file:
        json.dump({"ran": result.testsRun, "skipped": len(result.skipped), "bad": result.bad}, file)


if __name__ == "__main__":
    main()
