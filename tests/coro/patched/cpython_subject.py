"""Run one of CPython's own test modules.

    python [-m grapeshot.coro] cpython_subject.py MODULE FILE [--without REGEX] [--futures] [--skip TEST...]

Writes a JSON object to FILE:

    {"passed": [test...], "skipped": [test...], "left_out": [test...], "bad": {test: traceback}}

A test is named ``Class.method``. The tests given with --skip are not run, and "left_out" lists them. The tests whose
names match REGEX are not run either, and do not appear in the file.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import re
import socket
import sys
import tempfile
import traceback
import unittest
from collections.abc import Iterator
from typing import Any

from test import support

LIMIT_S = 340


def name_of(test: Any) -> str:
    name = ".".join(test.id().split(".")[-2:])
    # The id of a failed setUpClass: "setUpClass (test.test_x.Class)".
    return f"{name.split('.')[-1].rstrip(')')}.*" if name.endswith(")") else name


class Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.left_out: list[str] = []
        self.bad: dict[str, str] = {}

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        if os.environ.get("VERBOSE"):
            print(test.id(), file=sys.stderr, flush=True)

    def _note(self, test: Any, error: Any) -> None:
        self.bad[name_of(test)] = "".join(traceback.format_exception(*error))

    def addSuccess(self, test: Any) -> None:
        self.passed.append(name_of(test))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.passed.append(name_of(test))

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, err)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.bad[name_of(test)] = "unexpected success"


def all_of(suite: Any) -> Iterator[Any]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from all_of(test)
        else:
            yield test


def run(module_name: str, skipped: set[str], without: str | None) -> Result:
    # Enable only the resource "network": nearly all tests that ask for it use only this machine. Tests that take
    # minutes or load files from the internet ask for other resources, so they are skipped.
    support.use_resources = ["network"]
    module = importlib.import_module(f"test.{module_name}")
    tests = list(all_of(unittest.defaultTestLoader.loadTestsFromModule(module)))
    names = {name_of(test) for test in tests}
    chosen = [
        test
        for test in tests
        if name_of(test) not in skipped and not (without is not None and re.search(without, name_of(test)))
    ]
    result = Result()
    unittest.TestSuite(chosen).run(result)
    result.left_out = sorted(skipped & names)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("file")
    parser.add_argument("--without")
    parser.add_argument("--futures", action="store_true", help="the threads of executors are coros, too")
    parser.add_argument("--skip", nargs="*", default=[])
    options = parser.parse_args()
    if options.futures:
        from grapeshot import coro

        coro.patch("futures")
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.chdir(tempfile.mkdtemp(prefix="cpython-"))
    # Start the resolver's thread now, because tests count threads.
    socket.gethostbyname("localhost")
    result = run(options.module, set(options.skip), options.without)
    skipped = [name_of(test) for test, _ in result.skipped]
    with open(options.file, "w") as file:
        json.dump({"passed": result.passed, "skipped": skipped, "left_out": result.left_out, "bad": result.bad}, file)


if __name__ == "__main__":
    main()
