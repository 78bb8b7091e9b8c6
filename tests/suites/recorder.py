"""A pytest plugin that records for run.py how each phase of each test ended, as JSON lines in a file.

`SUITE_LINES` names that file. A line also lists the loops that were built since the previous phase. A failed collection
gets a line, too. `SUITE_ONLY` names a JSON file with the ids of the tests to run, in order. (They are not on pytest's
command line, because pytest runs nothing if one of the ids there does not exist.)
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import sitecustomize  # the file in the directory `site` beside this file

_is_worker = False  # True in a worker of pytest-xdist. Workers write nothing: the main process gets their reports.


def pytest_configure(config: pytest.Config) -> None:
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "SUITE_ONLY" not in os.environ:
        return
    with open(os.environ["SUITE_ONLY"]) as file:
        places = {test: place for place, test in enumerate(json.load(file))}
    others = [item for item in items if item.nodeid not in places]
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])
    config.hook.pytest_deselected(items=others)


def write(report: pytest.TestReport | pytest.CollectReport, **line: Any) -> None:
    detail = "" if report.passed else report.longreprtext
    with open(os.environ["SUITE_LINES"], "a") as lines:
        lines.write(json.dumps({"test": report.nodeid, "when": report.when, "detail": detail, **line}) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> None:
    item.user_properties[:] = [entry for entry in item.user_properties if entry[0] != "loops"]
    item.user_properties.append(("loops", dict(sitecustomize.BUILT)))
    sitecustomize.BUILT.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker:
        return
    outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
    write(report, outcome=outcome, loops=dict(report.user_properties).get("loops", {}))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and not _is_worker:
        write(report, outcome="failed", loops={})
