"""CPython's own test modules, patched and inside of a coro. What passes plain passes patched.

The exceptions have a reason each and are not run. There is no other way for a test to fail: one that fails patched is
run plain as well, and counts if it passes there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import coro_is_available

pytest.importorskip("test.support")
pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

SUBJECT = Path(__file__).with_name("cpython_subject.py")
LIMIT_S = 280

NONBLOCKING = "the descriptor of a patched socket is always nonblocking, and the test looks at its flag"

# module -> tests that are left out, and why
MODULES: dict[str, dict[str, str]] = {
    "test_select": {},
    "test_selectors": {},
    "test_poll": {},
    "test_epoll": {},
    "test_timeout": {},
    "test_threading_local": {},
    "test_socketserver": {},
    "test_httplib": {},
    "test_urllib2_localnet": {},
    "test_ftplib": {},
    "test_smtplib": {},
    "test_poplib": {},
    "test_imaplib": {},
    "test_xmlrpc": {},
    "test_wsgiref": {},
    "test_ssl": {},
    "test_subprocess": {},
    "test_time": {},
    "test_socket": {
        "GeneralModuleTests.testRefCountGetNameInfo": "a Python function keeps its arguments while its error lives",
        "NonBlockingTCPTests.testSetBlocking": NONBLOCKING,
        "NonblockConstantTest.test_SOCK_NONBLOCK": NONBLOCKING,
    },
}

# Its tests wait for minutes. It runs where the other long tests do.
LONG = {"test_socket"}


def run(way, module, directory, skipped):
    path = directory / f"{module}.json"
    done = subprocess.run(
        [sys.executable, *way, str(SUBJECT), module, str(path), *skipped],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("module", MODULES)
def test_module(module, tmp_path):
    if module in LONG and os.environ.get("TEST_EVICTION") != "both":
        pytest.skip("only .ci/matrix has the time")
    patched = run(("-m", "grapeshot.coro"), module, tmp_path, MODULES[module])
    assert patched["ran"] > patched["skipped"]
    if patched["bad"]:
        plain = run((), module, tmp_path, MODULES[module])
        for name in plain["bad"]:
            patched["bad"].pop(name, None)
    assert not patched["bad"], "\n".join(f"{name}\n{text}" for name, text in patched["bad"].items())
