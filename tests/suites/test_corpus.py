"""Tests of the program that sends gunicorn's corpus of requests, with a small corpus."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import coro_is_available

from tests.suites import corpus

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")

GOOD = """
request = {"method": "POST", "uri": uri("/x?y"), "version": (1, 1), "body": %r}
"""
LIMITED = """
from gunicorn.config import Config
cfg = Config()
cfg.set("limit_request_fields", 1)
request = ValueError
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    post = r"POST /x?y HTTP/1.1\r\nContent-Length: 4\r\n\r\n" + "\n" + r"\x62ody"
    for name, data, expected in [
        ("valid/served", post, GOOD % b"body"),
        ("valid/other", post, GOOD % b"another"),
        ("valid/refused", r"GET / HTTP/3.0\r\n\r\n", GOOD % b""),
        ("invalid/refused", r"GET / HTTP/1.1\r\nHost : a\r\n\r\n", "request = ValueError"),
        ("invalid/limit", r"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n", LIMITED),
        ("invalid/served", r"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n", "request = ValueError"),
    ]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".http").write_text(data, encoding="ascii")
        path.with_suffix(".py").write_text(expected, encoding="ascii")
    return tmp_path


def test_problems_are_found(folder: Path) -> None:
    from grapeshot import coro

    assert coro.run(corpus.check, folder) == {
        "valid/other": "has the body b'body'",
        "valid/refused": "answered with ['505']",
        "invalid/served": "answered with 200",
    }


def test_differences_are_reported() -> None:
    assert corpus.compare({"a": "fails", "b": "fails"}, {"b": "known", "c": "known"}) == [
        "FAILED a: fails",
        "PASSES c, but is listed: known",
    ]


def test_hosts_are_added_where_they_are_missing() -> None:
    for before, after in [
        (b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nX: y\r\n\r\n" * 2, b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n" * 2),
        (b"GET / HTTP/1.1\r\nhost: b\r\n\r\n", b"GET / HTTP/1.1\r\nhost: b\r\n\r\n"),
        (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"),
    ]:
        assert corpus.with_host(before) == after
