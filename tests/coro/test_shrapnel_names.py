"""`coro.backdoor` and `coro.profiler`, Shrapnel's names for parts of grapeshot."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import coro_is_available, until_waiting

pytestmark = pytest.mark.skipif(not coro_is_available(), reason="no coros on this interpreter")
if coro_is_available():
    import grapeshot.insight.backdoor
    import grapeshot.insight.profiler
    from grapeshot import coro


def test_unused_modules_are_not_imported():
    code = """
import sys
from grapeshot import coro
names = ("grapeshot.insight.backdoor", "grapeshot.insight.profiler")
print([name in sys.modules for name in names], {"backdoor", "profiler"} <= set(dir(coro)))
from grapeshot.coro import backdoor
print(backdoor.serve.__module__, [name in sys.modules for name in names])
print(coro.backdoor is sys.modules["grapeshot.coro.backdoor"])
print(coro.profiler.Profile is sys.modules["grapeshot.insight.profiler"].Profile)
try:
    coro.other
except AttributeError as error:
    print(error)
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert printed.splitlines() == [
        "[False, False] True",
        "grapeshot.coro.backdoor [True, False]",
        "True",
        "True",
        "module 'grapeshot.coro' has no attribute 'other'",
    ]


def ask(path):
    """Connect to a back door, and wait for its greeting."""
    with coro.unix_sock() as client:
        client.settimeout(30)
        client.connect(str(path))
        return client.recv(1)


def test_serve_as_in_shrapnel(tmp_path):
    """The coro stays inside `serve`, and the back door is closed when the coro ends."""
    path = tmp_path / "door"

    def main():
        door = coro.spawn(coro.backdoor.serve, unix_path=path, global_dict={"answer": 42})
        until_waiting(door)
        assert ask(path)
        door.shutdown()
        door.join()
        assert not path.exists()

    coro.run(main)


def test_serve_as_in_grapeshot(tmp_path):
    path = tmp_path / "door"

    def main():
        with coro.backdoor.serve(path, namespace={}) as server:
            assert isinstance(server, grapeshot.insight.backdoor.Server)
            assert ask(path)
        assert not path.exists()

    coro.run(main)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "no TCP port"),
        ({"port": 8023}, "port=8023"),
        ({"unix_path": "x", "welcome_message": "hello"}, "no welcome_message"),
        ({"unix_path": "x", "client_class": object}, "no client_class"),
    ],
)
def test_arguments_that_a_back_door_does_not_have(arguments, text):
    with pytest.raises(ValueError, match=text):
        coro.backdoor.serve(**arguments)


def test_profile_as_in_shrapnel(tmp_path, capsys):
    def work(count, *, factor):
        return sum(range(count)) * factor

    path = tmp_path / "profile"
    assert coro.profiler.go(work, 1000, factor=2, profile_filename=path) == 999_000
    assert path.exists()
    assert capsys.readouterr().out == ""
    assert coro.profiler.go(work, 10, factor=1) == 45
    assert "work" in capsys.readouterr().out
    coro.profiler.start()
    with pytest.raises(RuntimeError, match="already"):
        coro.profiler.start()
    assert isinstance(coro.profiler.stop(path), grapeshot.insight.profiler.Profile)
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        coro.profiler.stop()
